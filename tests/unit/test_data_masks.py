"""Masks of six model families: exactly what the target would write is supervised, nothing else."""

import numpy as np
import pytest
from encoded import encode, talk, texts
from hypothesis import given, settings
from hypothesis import strategies as st

from families import FAMILIES, family
from forebay.data.encode import Encoder
from forebay.data.store import eligible_anchors
from tiny import R0, toy_tokenizer

THOUGHT = "<think>\nlet me see\n</think>\n\n"


def said(name: str, text: str, last: bool = True) -> str:
    facts = FAMILIES[name]
    return facts.get("header", "") + text.strip() + facts["end"] if last else text.strip()


@pytest.mark.parametrize("name", FAMILIES)
def test_one_answer_is_supervised_with_its_end_of_turn(name):
    """C08, for every family."""
    tokenizer = family(name)
    out = encode(tokenizer, R0, talk("what is 2?", "two\n\n* and a list\n* of Bäume 🙂", system="be brief"))
    assert not out.drops and not out.notes["warnings"]
    assert texts(tokenizer, out) == [
        [said(name, "one two three four five six")],
        [said(name, "two\n\n* and a list\n* of Bäume 🙂")],
    ]


def test_r0_in_the_toy_tokenizer_masks_the_answer_and_the_first_supervised_token_is_a_legal_anchor():
    """C08, C17: the first supervised token and its successor are both supervised."""
    tokenizer = toy_tokenizer()
    out = encode(tokenizer, R0)
    assert texts(tokenizer, out) == [["one two three four five six<|im_end|>"]]
    first = int(np.argmax(out.rows.mask))
    assert out.rows.mask[first] and out.rows.mask[first + 1]
    assert out.rows.index["eligible"][0] == eligible_anchors(out.rows.mask) == out.rows.mask.sum() - 1


@pytest.mark.parametrize("name", FAMILIES)
def test_every_answer_of_a_conversation_is_supervised_where_the_target_would_write_it(name):
    tokenizer = family(name)
    out = encode(tokenizer, talk("hi", "one two", "and?", "three four", "so?", "five six"))
    [row] = texts(tokenizer, out)
    if name == "qwen3":  # earlier answers lost their empty thinking block: not what the target would write
        assert row == [said(name, "five six")]
        assert out.notes["warnings"] == {"turns_rewritten_by_the_template": 1}
    elif name == "harmony":  # earlier answers end with <|end|>, which the target does not write there
        assert row == [f"{FAMILIES[name]['header']}{t}" for t in ("one two", "three four")] + [said(name, "five six")]
    else:
        assert row == [said(name, t) for t in ("one two", "three four", "five six")]


@pytest.mark.parametrize("name", FAMILIES)
def test_last_turn_only_gives_one_span(name):
    """C19."""
    tokenizer = family(name)
    out = encode(tokenizer, talk("hi", "one two", "and?", "three four", "so?", "five six"), last_turn_only=True)
    assert texts(tokenizer, out) == [[said(name, "five six")]]


SAMPLES = st.text(st.sampled_from("ab e\n\tÜ你🙂<|>/[]{}'\"_▁ INST"), min_size=1, max_size=40)


@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=40, deadline=None, database=None, derandomize=True)
@given(user=SAMPLES, answer=SAMPLES)
def test_any_text_is_supervised_whole_or_dropped_by_name(name, user, answer):
    tokenizer = family(name)
    out = encode(tokenizer, talk(user, answer))
    if out.drops:
        assert out.drops[0][3] in ("empty_assistant", "too_short", "no_span", "decode_mismatch")
        return
    [row] = texts(tokenizer, out)
    squeeze = "".join("".join(row).replace("▁", " ").split())
    expected = "".join(said(name, answer).replace("▁", " ").split())
    shared = out.notes["warnings"]["prompt_and_answer_share_a_token"]
    assert squeeze == expected or (shared and expected.endswith(squeeze))


@pytest.mark.parametrize("tail", [True, False])
def test_history_thinking_is_stripped_as_the_template_does_and_the_final_answer_keeps_it(tail):
    """C11."""
    tokenizer = family("qwen3")
    row = talk(*(x for i in range(3) for x in (f"q{i}", f"{THOUGHT}a{i} is it")))
    out = encode(tokenizer, row, split_turns=not tail)
    rows = texts(tokenizer, out)
    assert rows[0] == [f"{THOUGHT}a2 is it<|im_end|>"]
    whole = tokenizer.decode(out.rows.tokens[: out.rows.index["length"][0]])
    assert whole.count("let me see") == 1 and "a0 is it" in whole
    # With --split-turns the earlier answers are trained on in rows of their own, thinking included.
    assert rows[1:] == ([] if tail else [[f"{THOUGHT}a0 is it<|im_end|>"], [f"{THOUGHT}a1 is it<|im_end|>"]])
    assert out.notes["counts"]["thinking"] == len(rows)


def test_the_empty_thinking_block_that_the_prompt_supplies_is_not_supervised():
    """C12."""
    tokenizer = family("qwen3")
    for arguments, expected in (
        ({"enable_thinking": False}, "plain answer"),
        ({}, "<think>\n\n</think>\n\nplain answer"),
    ):
        out = encode(tokenizer, talk("hi", "plain answer"), template_kwargs=arguments)
        assert texts(tokenizer, out) == [[f"{expected}<|im_end|>"]]
        assert tokenizer.decode(out.rows.tokens).count("<think>") == 1


def test_a_prompt_block_that_the_conversation_drops_is_put_where_serving_has_it():
    """C12: some templates render the empty block in the generation prompt only."""
    tokenizer = toy_tokenizer()
    template = tokenizer.chat_template.replace("assistant\n{% endif %}", "assistant\n<think></think>\n{% endif %}")
    out = encode(tokenizer, R0, template=template)
    assert texts(tokenizer, out) == [["one two three four five six<|im_end|>"]]
    assert "assistant\n<think></think>\none two" in tokenizer.decode(out.rows.tokens)


def test_an_opened_thinking_block_without_thinking_in_the_row_is_refused():
    tokenizer = toy_tokenizer()
    template = tokenizer.chat_template.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
    out = encode(tokenizer, R0, template=template)
    assert out.drops[0][3] == "no_span" and "the row has no thinking" in out.drops[0][4]


def test_reasoning_content_is_rendered_or_its_loss_is_counted():
    """C14."""
    row = talk("hi", "the answer")
    row["messages"][1]["reasoning_content"] = "let me see"
    out = encode(family("qwen3"), row)
    assert texts(family("qwen3"), out) == [[f"{THOUGHT}the answer<|im_end|>"]]
    assert not out.notes["warnings"] and out.notes["counts"]["thinking"] == 1
    out = encode(family("harmony"), row)
    assert "let me see" in texts(family("harmony"), out)[0][0]
    out = encode(family("chatml"), row)
    assert out.notes["warnings"] == {"reasoning_dropped": 1}


@pytest.mark.parametrize("name", ["qwen3", "llama3", "harmony"])
def test_calls_and_answers_around_a_tool_are_supervised_and_its_result_is_not(name):
    """C15: content null with tool_calls, arguments as text or as an object, tools at the top of the row."""
    tokenizer = family(name)
    call = {"id": "1", "type": "function", "function": {"name": "look_up", "arguments": '{"word": "fox"}'}}
    row = {
        "tools": [{"type": "function", "function": {"name": "look_up", "parameters": {}}}],
        "messages": [
            {"role": "user", "content": "what is a fox?"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": "an animal, says the book", "name": "look_up"},
            {"role": "assistant", "content": "It is an animal."},
        ],
    }
    out = encode(tokenizer, row)
    assert not out.drops
    [spans] = texts(tokenizer, out)
    whole = tokenizer.decode(out.rows.tokens)
    joined = "".join(spans)
    assert "It is an animal." in joined and "says the book" not in joined and "says the book" in whole
    if name == "harmony":  # its template knows no tools argument: that is counted
        assert out.notes["warnings"]["tools_dropped"] == 0 and "look_up" in joined
    if name != "qwen3":
        assert len(spans) == 2 and '{"word": "fox"}' in spans[0]
    else:
        assert len(spans) + out.notes["warnings"]["turns_rewritten_by_the_template"] == 2


def test_tools_that_a_template_drops_are_counted():
    row = talk("hi", "one two") | {"tools": [{"type": "function", "function": {"name": "look_up"}}]}
    assert encode(family("chatml"), row).notes["warnings"] == {"tools_dropped": 1}


def test_roles_in_odd_orders_are_handled_as_documented():
    """C68: two user turns in a row, an answer first, `developer`, a last turn nobody answered."""
    tokenizer = family("chatml")
    rows = [
        {"messages": [{"role": r, "content": c} for r, c in turns]}
        for turns in (
            [("user", "a"), ("user", "b"), ("assistant", "one two")],
            [("assistant", "hello there"), ("user", "b"), ("assistant", "one two")],
            [("developer", "be brief"), ("user", "b"), ("assistant", "one two")],
            [("user", "b"), ("assistant", "one two"), ("user", "and?")],
            [("assistant", "one two")],
        )
    ]
    out = encode(tokenizer, *rows)
    assert texts(tokenizer, out) == [["one two<|im_end|>"]] * 4
    assert out.notes["warnings"] == {"answer_without_question": 1, "turns_after_the_last_answer_cut": 1}
    assert [(d[0], d[3]) for d in out.drops] == [(5, "no_user")]
    # A template that insists on an order refuses the row by name; one without `developer` gets a system turn.
    out = encode(family("gemma"), *rows)
    assert [(d[0], d[3]) for d in out.drops] == [(1, "template_error"), (2, "template_error"), (5, "no_user")]
    assert "turns must go user, assistant" in out.drops[0][4]
    assert out.notes["warnings"]["developer_as_system"] == 1


def test_a_template_that_does_not_render_answers_leaves_no_row():
    """C09: nothing matches, so nothing is supervised, and the row says what the template rendered instead."""
    template = "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}\n{% endif %}{% endfor %}"
    out = encode(toy_tokenizer(), *[R0] * 3, template=template)
    assert len(out.rows) == 0 and {d[3] for d in out.drops} == {"no_span"}


def test_an_answer_cut_by_the_token_limit_has_no_end_of_turn_to_learn():
    tokenizer = family("chatml")
    out = encode(tokenizer, talk("hi", "one two thr") | {"finish_reason": "length"})
    assert texts(tokenizer, out) == [["one two thr"]]
    assert out.notes["finish_reasons"] == {"length": 1}


def test_ready_text_is_supervised_after_its_separator():
    tokenizer = family("chatml")
    row = {"text": "Question: hi\nAnswer: one two three"}
    assert encode(tokenizer, row).drops[0][3] == "text_without_separator"
    assert texts(tokenizer, encode(tokenizer, row, text_separator="Answer:")) == [["one two three"]]
    assert encode(tokenizer, {"text": "no mark"}, text_separator="Answer:").drops[0][3] == "no_assistant"


@pytest.mark.parametrize("shift", [(1, 1), (-1, -1), (1, 0), (0, -1), (-1, 0), (0, 1)])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_shifted_mask_is_found_by_decoding(name, shift, monkeypatch):
    """The planted fault: spans that begin or end one token too early or too late."""
    real = Encoder._token_range

    def shifted(self, *args):
        first, last, end = real(self, *args)
        return first + shift[0], last + shift[1], end

    monkeypatch.setattr(Encoder, "_token_range", shifted)
    out = encode(family(name), R0, talk("what?", "Überall grüßen Bäume 🙂", "and?", "1 + 1 = 2"))
    # Where the answer ends the text, nothing follows that a span could take too much of.
    harmless = shift == (0, 1) and name in ("llama3", "mistral", "harmony")
    assert len(out.rows) == harmless and {d[3] for d in out.drops} == {"decode_mismatch"}


def test_a_last_token_that_holds_the_line_break_after_the_answer_is_supervised():
    """A template without end marks: the target ends such an answer by the token that holds both."""
    tokenizer = family("chatml")
    template = "{% for m in messages %}{{ m.role }}:\n{{ m.content }}\n\n\n{% endfor %}"
    template += "{% if add_generation_prompt %}assistant:\n{% endif %}"
    out = encode(tokenizer, talk("hi", "one two"), talk("hi", "def add(a, b):"), template=template)
    assert not out.drops
    assert texts(tokenizer, out) == [["one two"], ["def add(a, b):"]]


def test_an_answer_that_would_share_a_token_with_its_prompt_is_tokenised_alone_as_in_serving():
    tokenizer = family("llama3")  # its header ends with line breaks, which merge with those of an answer
    row = talk("hi", "x", "and?", "y")
    row["messages"][-1]["content"] = "\n\n  two"
    template = tokenizer.chat_template.replace(" | trim", "")
    out = encode(tokenizer, row, template=template)
    prompt = tokenizer.apply_chat_template(
        row["messages"][:-1], tokenize=True, add_generation_prompt=True, chat_template=template, return_dict=False
    )
    ids, mask = out.rows.tokens.tolist(), out.rows.mask
    assert ids[: len(prompt)] == prompt and mask[len(prompt)] == 1 and mask[len(prompt) - 1] == 0
    assert tokenizer.decode(ids[len(prompt) :]) == "\n\n  two<|eot_id|>"
    assert not out.notes["warnings"]


def test_masks_need_no_offsets_of_the_tokenizer():
    """A slow tokenizer has no offsets: spans come from the lengths of tokenised prefixes."""

    class Slow:
        is_fast = False

        def __init__(self, fast):
            self._fast = fast

        def __getattr__(self, name):
            return getattr(self._fast, name)

        def __call__(self, *args, **kwargs):
            return self._fast(*args, **kwargs)

    tokenizer = family("chatml")
    rows = [R0, talk("hi", "one two", "and?", "three four")]
    fast, slow = encode(tokenizer, *rows), encode(Slow(tokenizer), *rows)
    assert np.array_equal(fast.rows.tokens, slow.rows.tokens) and np.array_equal(fast.rows.mask, slow.rows.mask)
