"""The layouts that people have: each read without a flag, with exactly the answers supervised."""

import gzip
import json

import pyarrow
import pyarrow.parquet
import pytest
from encoded import encode, talk, texts

from families import family
from forebay.cli import main
from forebay.data.layouts import FIELDS, LAYOUTS
from forebay.data.prepare import prepare
from forebay.data.store import TokenStore
from forebay.errors import DataError, UsageError
from tiny import R0, save_tiny_target, toy_tokenizer, write_jsonl

END = "<|im_end|>"
CALL = {"name": "look_up", "arguments": {"city": "Oslo"}}
TOOL = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}
CALLED = '<tool_call>\n{"name": "look_up", "arguments": {"city": "Oslo"}}\n</tool_call>' + END


def turns(*said, first="user"):
    roles = {"user": "assistant", "assistant": "user"}
    out = []
    for content in said:
        out.append({"role": first, "content": content})
        first = roles[first]
    return out


def rows_of(*files, tokenizer=None, **options):
    """(report, [(prompt, [answers])]) of some files."""
    folder = files[0].parent / "store"
    made = prepare(
        list(files), folder, tokenizer=tokenizer or toy_tokenizer(), heldout_share=0, progress=False, **options
    )
    store = TokenStore.open(folder / "train")
    decode = (tokenizer or toy_tokenizer()).decode
    return made, [decode(store.tokens(i)[store.mask(i).astype(bool)]) for i in range(len(store))]


LAYOUT_ROWS = {
    # layout: (row, prompt that is rendered, supervised answers)
    "instruction": [
        ({"instruction": "Add.", "input": "1 and 2", "output": "it is 3"}, "user\nAdd.\n\n1 and 2<", ["it is 3"]),
        ({"instruction": "Add 1.", "input": "", "output": "it is 3", "text": "### all"}, "user\nAdd 1.<", ["it is 3"]),
        ({"instruction": "Who?", "context": "Ann came.", "response": "Ann did"}, "Who?\n\nAnn came.<", ["Ann did"]),
        (
            {"instruction": "c", "output": "d e", "system": "be brief", "history": [["a", "b c"]]},
            "system\nbe brief<|im_end|>\n<|im_start|>user\na<",
            ["b c", "d e"],
        ),
    ],
    "question and answer": [
        ({"query": "c", "response": "d e", "history": [["a", "b c"]]}, "user\na<", ["b c", "d e"]),
        ({"query": "c", "response": "d e", "history": turns("a", "b c")}, "user\na<", ["b c", "d e"]),
        ({"query": "c", "response": "d e", "history": []}, "user\nc<", ["d e"]),
        ({"system_prompt": "be brief", "question": "a", "response": "b c"}, "system\nbe brief<", ["b c"]),
        ({"question": "a", "answer": "b c"}, "user\na<", ["b c"]),
        ({"input": turns("a"), "output": "b c"}, "user\na<", ["b c"]),
    ],
    "preference": [
        ({"chosen": turns("a", "b c"), "rejected": turns("a", "d")}, "user\na<", ["b c"]),
        ({"prompt": "a", "chosen": "b c", "rejected": "d"}, "user\na<", ["b c"]),
        ({"system": "s", "question": "a", "chosen": "b c", "rejected": "d"}, "system\ns<", ["b c"]),
        ({"prompt": "a", "chosen": turns("a", "b c"), "rejected": turns("a", "d")}, "user\na<", ["b c"]),
        ({"prompt": turns("a"), "chosen": turns("b c", first="assistant"), "rejected": []}, "user\na<", ["b c"]),
        (
            {
                "conversations": [{"from": "human", "value": "a"}],
                "chosen": {"from": "gpt", "value": "b c"},
                "rejected": {"from": "gpt", "value": "d"},
            },
            "user\na<",
            ["b c"],
        ),
        (
            {"chosen": "\n\nHuman: a\n\nAssistant: b c\n\nHuman: so?\n\nAssistant: d e", "rejected": "\n\nHuman: a"},
            "user\na<",
            ["b c", "d e"],
        ),
        ({"messages": turns("a", "x"), "chosen": turns("a", "b c"), "rejected": turns("a", "x")}, "a<", ["b c"]),
    ],
    "tree": [
        (
            {
                "message_tree_id": "1",
                "prompt": {
                    "text": "a",
                    "role": "prompter",
                    "replies": [
                        {"text": "worse", "role": "assistant", "rank": 1, "replies": []},
                        {
                            "text": "b c",
                            "role": "assistant",
                            "rank": 0,
                            "replies": [
                                {"text": "unranked", "role": "prompter", "rank": None, "replies": []},
                                {"text": "gone", "role": "prompter", "rank": 0, "deleted": True, "replies": []},
                                {
                                    "text": "so?",
                                    "role": "prompter",
                                    "rank": 0,
                                    "replies": [{"text": "d e", "role": "assistant", "replies": []}],
                                },
                            ],
                        },
                    ],
                },
            },
            "user\na<",
            ["b c", "d e"],
        ),
    ],
    "messages": [
        (
            {"conversation": [{"human": "a", "assistant": "b c"}, {"human": "so?", "assistant": "d e"}]},
            "a<",
            ["b c", "d e"],
        ),
        ({"conversations": {"from": ["human", "gpt"], "value": ["a", "b c"]}}, "user\na<", ["b c"]),
        ({"system": "be brief", "conversations": turns("a", "b c")}, "system\nbe brief<", ["b c"]),
        ({"row_idx": 3, "row": {"messages": turns("a", "b c")}, "truncated_cells": []}, "user\na<", ["b c"]),
        ({"conversation": {"id": 3, "messages": turns("a", "b c")}}, "user\na<", ["b c"]),
        ({"json": {"messages": turns("a", "b c")}}, "user\na<", ["b c"]),
    ],
}


@pytest.mark.parametrize(
    ("layout", "row", "prompt", "answers"),
    [(layout, *case) for layout, cases in LAYOUT_ROWS.items() for case in cases],
    ids=[f"{layout} {number}" for layout, cases in LAYOUT_ROWS.items() for number in range(len(cases))],
)
def test_a_row_of_every_layout_is_read_without_a_flag_and_its_answers_are_supervised(layout, row, prompt, answers):
    tokenizer = family("chatml")
    out = encode(tokenizer, row)
    assert not out.drops and texts(tokenizer, out) == [[f"{answer}{END}" for answer in answers]]
    assert prompt in tokenizer.decode(out.rows.tokens) and dict(out.notes["layouts"]) == {layout: 1}


def test_a_preference_without_its_prompt_is_dropped_by_name_and_what_was_rejected_is_never_trained_on():
    tokenizer = family("chatml")
    out = encode(tokenizer, {"chosen": "b c", "rejected": "d"}, {"rejected": turns("a", "d")})
    assert [(d[3], "chosen" in d[4]) for d in out.drops] == [("no_messages", True), ("no_messages", False)]


@pytest.mark.parametrize(
    ("tail", "name"),
    [
        ([{"role": "narrator", "content": "the end"}], "an odd role"),
        ([{"role": "narrator", "content": "so"}, *turns("and?", "d e")], "an odd role with turns behind it"),
        ([{"role": "user", "content": [{"type": "image"}]}, *turns("d", first="assistant")], "a picture"),
        (["text"], "no object"),
    ],
)
def test_a_conversation_is_cut_before_a_turn_that_cannot_be_used_and_counted(tail, name):
    tokenizer = family("chatml")
    out = encode(tokenizer, {"messages": [*turns("a", "b c"), *tail], "finish_reason": "length"})
    assert texts(tokenizer, out) == [[f"b c{END}"]], name  # the finish reason was that of another answer
    assert out.notes["warnings"] == {"turns_that_cannot_be_used_cut": 1} and not out.drops
    assert out.notes["finish_reasons"] == {"unknown": 1}
    # Without an answer before it there is nothing to train on, and the row says which turn it was.
    out = encode(tokenizer, {"messages": [*turns("a"), *tail]})
    assert out.drops[0][3] in ("bad_role", "bad_content", "bad_message") and out.drops[0][4].startswith("turn 2 ")


TRACES = {
    "calls with arguments as text": [
        {"role": "user", "content": "weather?"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "1", "type": "function", "function": {**CALL, "arguments": '{"city": "Oslo"}'}}],
        },
        {"role": "tool", "tool_call_id": "1", "content": "rain"},
        {"role": "assistant", "content": "it rains"},
    ],
    "one call in the field of old": [
        {"role": "user", "content": "weather?"},
        {"role": "assistant", "content": "", "function_call": {**CALL, "arguments": '{"city": "Oslo"}'}},
        {"role": "function", "name": "look_up", "content": "rain"},
        {"role": "assistant", "content": "it rains"},
    ],
    "calls as turns": [
        {"from": "human", "value": "weather?"},
        {"from": "function_call", "value": json.dumps(CALL)},
        {"from": "observation", "value": "rain"},
        {"from": "gpt", "value": "it rains"},
    ],
    "calls as parts": [
        {"role": "user", "content": "weather?"},
        {
            "role": "assistant",
            "content": [{"type": "tool_use", "id": "1", "name": "look_up", "input": {"city": "Oslo"}}],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "rain"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "it rains"}]},
    ],
}


@pytest.mark.parametrize("name", TRACES)
@pytest.mark.parametrize("tools", [[TOOL], json.dumps([TOOL]), None])
def test_traces_of_tools_in_every_dialect_give_the_same_row(name, tools):
    tokenizer = family("qwen3")
    row = {"messages": TRACES[name], "tools": tools} if tools else {"messages": TRACES[name], "functions": [TOOL]}
    out = encode(tokenizer, row, template_kwargs={"enable_thinking": False})
    first = {"messages": TRACES["calls with arguments as text"], "tools": [TOOL]}
    same = encode(tokenizer, first, template_kwargs={"enable_thinking": False})
    assert not out.drops and out.rows.tokens.tolist() == same.rows.tokens.tolist()
    [row] = texts(tokenizer, out)
    assert row[-1] == f"it rains{END}" and "rain" not in "".join(row[:-1])
    calls = texts(
        tokenizer, encode(tokenizer, {"messages": TRACES[name][:2]}, template_kwargs={"enable_thinking": False})
    )
    assert calls == [[CALLED]]


def test_what_a_tool_returned_may_be_an_object():
    tokenizer = family("qwen3")
    trace = [
        *TRACES["calls as turns"][:2],
        {"role": "tool", "content": {"sky": ["grey", 3]}},
        *turns("wet", first="assistant"),
    ]
    out = encode(tokenizer, {"messages": trace, "tools": [TOOL]})
    assert '{"sky": ["grey", 3]}' in tokenizer.decode(out.rows.tokens) and texts(tokenizer, out)[0][-1].endswith(
        f"wet{END}"
    )


@pytest.mark.parametrize(
    "answer",
    [
        {"content": "<think>\nlet me see\n</think>\n\nb c"},
        {"content": "b c", "reasoning_content": "let me see"},
        {"content": "b c", "reasoning": "let me see"},
        {"content": [{"type": "thinking", "thinking": "let me see"}, {"type": "text", "text": "b c"}]},
        {"content": [{"type": "reasoning", "text": "let me see"}, {"type": "text", "text": "b c"}]},
    ],
)
def test_reasoning_in_every_dialect_is_supervised_as_the_target_writes_it(answer):
    tokenizer = family("qwen3")
    out = encode(tokenizer, {"messages": [*turns("a"), {"role": "assistant", **answer}]})
    assert texts(tokenizer, out) == [[f"<think>\nlet me see\n</think>\n\nb c{END}"]]
    assert out.notes["counts"]["thinking"] == 1 and not out.notes["warnings"]


def test_a_field_of_reasoning_beside_question_and_answer_is_reasoning_unless_it_is_a_switch():
    tokenizer = family("qwen3")
    rows = [{"question": "a", "reasoning": said, "answer": "b c"} for said in ("let me see", "on")]
    out = encode(tokenizer, *rows)
    assert texts(tokenizer, out) == [
        [f"<think>\nlet me see\n</think>\n\nb c{END}"],
        [f"<think>\n\n</think>\n\nb c{END}"],
    ]


def batch(tmp_path):
    """Requests in one order, answers in another, one failed, one without a request, one cut."""

    def answered(name, text, reason="stop"):
        message = {"role": "assistant", "content": text, "refusal": None}
        choice = {"index": 0, "message": message, "finish_reason": reason}
        body = {"choices": [choice], "usage": {}}
        return {"id": "b", "custom_id": name, "response": {"status_code": 200, "body": body}, "error": None}

    asked = [
        {
            "custom_id": f"r{i}",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {"model": "m", "messages": turns(f"question {i}"), "max_tokens": 9},
        }
        for i in range(4)
    ]
    failed = {"id": "b", "custom_id": "r2", "response": {"status_code": 500, "body": {}}, "error": {"code": "x"}}
    rows = [
        answered("r1", "one"),
        answered("r0", "nought", "length"),
        failed,
        answered("r9", "lost"),
        answered("r3", "three"),
    ]
    return write_jsonl(tmp_path / "out.jsonl", rows), write_jsonl(tmp_path / "in.jsonl", asked)


def test_the_answers_of_a_batch_are_joined_to_their_requests(tmp_path, monkeypatch):
    answers, requests = batch(tmp_path)
    monkeypatch.setattr("forebay.data.chunks.CHUNK_ROWS", 2)
    report, rows = rows_of(answers, requests=[requests])
    assert rows == [f"one{END}", "nought", f"three{END}"]  # one was cut: there is no end to learn
    store = TokenStore.open(tmp_path / "store" / "train")
    assert "question 1" in toy_tokenizer().decode(store.prompt(0))
    assert report["dropped"] == {"request_failed": 1, "no_request": 1} and report["layouts"] == {"batch output": 3}
    assert report["finish_reasons"] == {"stop": 2, "length": 1}


def test_a_batch_without_its_requests_says_which_option_joins_them(tmp_path):
    answers, requests = batch(tmp_path)
    with pytest.raises(DataError, match=r"0 of 5 rows can be used: 4 no_request, 1 request_failed.*--requests FILE"):
        rows_of(answers)
    twice = write_jsonl(
        tmp_path / "twice.jsonl", [{"custom_id": "r0", "body": {"messages": turns(str(i))}} for i in (1, 2)]
    )
    with pytest.raises(DataError, match=r"twice.jsonl:2: custom_id 'r0' is in the requests twice"):
        rows_of(answers, requests=[twice])
    with pytest.raises(DataError, match=r"out.jsonl:1: no request: a line must be like"):
        rows_of(answers, requests=[answers])
    report, _ = rows_of(answers, requests=[requests, requests])  # the same requests again do no harm
    assert report["kept"] == 3


def test_the_requests_are_part_of_what_makes_a_store(tmp_path):
    answers, requests = batch(tmp_path)
    said = []
    rows_of(answers, requests=[requests])
    rows_of(answers, requests=[requests], notice=said.append)
    assert "used as it is" in said[-1]
    requests.write_text(requests.read_text().replace("question", "request"))
    rows_of(answers, requests=[requests], notice=said.append)
    assert "differs in requests" in "".join(said)


WRAPPED = {
    "data": lambda rows: {"data": rows},
    "data among plain values": lambda rows: {"version": "1.0", "count": 3, "data": rows, "license": "x"},
    "conversations": lambda rows: {"conversations": rows},
    "any name": lambda rows: {"my_rows": rows},
    "splits": lambda rows: {"train": rows[:2], "test": rows[2:]},
    "rows of a server": lambda rows: {"rows": [{"row_idx": 0, "row": row, "truncated_cells": []} for row in rows]},
    "lists of turns": lambda rows: {"data": [row["messages"] for row in rows]},
    "lists of turns alone": lambda rows: [row["messages"] for row in rows],
}


@pytest.mark.parametrize("indent", [None, 1])
@pytest.mark.parametrize("name", WRAPPED)
def test_rows_in_a_wrapper_are_rows(tmp_path, monkeypatch, name, indent):
    monkeypatch.setattr("forebay.data.values.BLOCK_BYTES", 512)
    rows = [talk(f"question {i}", f"answer {i} of 30") for i in range(30)]
    (tmp_path / "a.json").write_text(json.dumps(WRAPPED[name](rows), indent=indent))
    report, made = rows_of(tmp_path / "a.json")
    assert report["rows"] == report["kept"] == 30
    assert made == [f"answer {i} of 30{END}" for i in range(30)]


def test_an_object_over_several_lines_is_a_row_and_no_wrapper(tmp_path):
    row = {"id": 7, "tools": [TOOL], "documents": [{"text": "some"}], "messages": talk("hi", "one two")["messages"]}
    for number, value in enumerate(
        (row, {"messages": row["messages"]}, {"history": [["a", "b"]], "query": "c", "response": "d"})
    ):
        file = tmp_path / f"{number}.json"
        file.write_text(json.dumps(value, indent=1) + "\n" + json.dumps(value, indent=1))
        assert rows_of(file, tokenizer=family("chatml"))[0]["layouts"] in ({"messages": 2}, {"question and answer": 2})


@pytest.mark.parametrize(
    ("tail", "detail"),
    [(', {"a": ', "not JSON"), ("", "cut off"), ('], "x": {}}', "something other than rows"), (", tru]}", "not JSON")],
)
def test_a_broken_wrapper_gives_what_comes_before_the_break(tmp_path, tail, detail):
    (tmp_path / "a.json").write_text('{"data": [' + json.dumps(R0) + ",\n" + json.dumps(R0) + tail)
    report, made = rows_of(tmp_path / "a.json")
    assert len(made) == 2 and report["dropped"] == {"parse_error": 1}
    assert detail in report["dropped_first"]["parse_error"][0]["detail"]
    assert report["dropped_first"]["parse_error"][0]["line"] == 2


def test_tables_hold_messages_as_structs_and_what_a_row_lacks_is_not_there(tmp_path):
    """A table gives every struct the fields of all: arguments, properties and contents that are null in most rows."""
    other = {
        "type": "function",
        "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "int"}}}},
    }
    trace = TRACES["calls with arguments as text"]
    rows = [
        {"messages": trace, "tools": [TOOL]},
        {"messages": talk("hi", "one two")["messages"], "tools": [other]},
        {
            "messages": [
                *turns("add"),
                {
                    "role": "assistant",
                    "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}],
                },
            ],
            "tools": [other],
        },
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    columns = pyarrow.table({"conversations": [{"from": ["human", "gpt"], "value": ["a", "b c"]}]})
    pyarrow.parquet.write_table(columns, tmp_path / "b.parquet")
    tokenizer = family("qwen3")
    options = {"tokenizer": tokenizer, "template_kwargs": {"enable_thinking": False}}
    report, made = rows_of(tmp_path / "a.parquet", tmp_path / "b.parquet", **options)
    write_jsonl(tmp_path / "c" / "a.jsonl", [*rows, {"conversations": talk("a", "b c")["messages"]}])
    assert (report["kept"], made) == (4, rows_of(tmp_path / "c" / "a.jsonl", **options)[1])
    stores = [TokenStore.open(folder / "store" / "train") for folder in (tmp_path, tmp_path / "c")]
    assert [stores[0].tokens(i).tolist() for i in range(4)] == [stores[1].tokens(i).tolist() for i in range(4)]
    assert "null" not in tokenizer.decode(stores[0].tokens(1)) and "None" not in tokenizer.decode(stores[0].tokens(1))


def test_a_folder_of_mixed_kinds_is_read_whole_and_what_is_not_read_is_named(tmp_path):
    folder = tmp_path / "mixed"
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_list([talk("saved", "one two")]).save_to_disk(folder / "saved")
    write_jsonl(folder / "a.jsonl", [talk("a", "one two")])
    (folder / "b.json").write_text(json.dumps({"data": [{"instruction": "b", "output": "one two"}]}))
    (folder / "c.jsonl.gz").write_bytes(gzip.compress(json.dumps({"query": "c", "response": "one two"}).encode()))
    pyarrow.parquet.write_table(
        pyarrow.Table.from_pylist([{"prompt": "d", "chosen": "one two", "rejected": "x"}]), folder / "d.parquet"
    )
    for name in ("README.md", "table.csv", ".DS_Store", "dataset_infos.json"):
        (folder / name).write_text("{}")
    said = []
    report, made = rows_of(folder, notice=said.append)
    assert made == [f"one two{END}"] * 5 and report["dropped"] == {}
    assert report["layouts"] == {"messages": 2, "instruction": 1, "question and answer": 1, "preference": 1}
    [line] = said
    assert line.startswith("2 files are of no kind that is read") and "README.md" in line and "table.csv" in line


NEAR = [
    ({"dialogue": turns("a", "b c")}, "--field messages=dialogue"),
    ({"Question": "a", "Answer": "b c"}, "--field prompt=Question --field response=Answer"),
    ({"user_prompt": "a", "model_response": "b c"}, "--field prompt=user_prompt --field response=model_response"),
    ({"message_id": "1", "parent_id": "0", "role": "prompter", "text": "a"}, "give the file of whole trees"),
    ({"data": [talk("a", "b c")]}, "must be named .json"),
    ({"talk": [{"who": "Ann", "said": "a"}]}, "its `talk` looks like turns with who and said for role and content"),
    ({"text": "Q: a A: b"}, "--text-separator"),
]


@pytest.mark.parametrize(("row", "fix"), NEAR)
def test_where_no_row_can_be_used_the_only_line_names_the_layout_or_option(tmp_path, target, capsys, row, fix):
    path = write_jsonl(tmp_path / "a.jsonl", [row] * 12)
    assert main(["prepare", str(path), "--target", str(target), "--out", str(tmp_path / "s")]) == 1
    out, err = capsys.readouterr()
    lines = err.replace("\n", " ").strip()
    assert out == "" and lines.startswith("forebay prepare: 0 of 12 rows can be used: 12 ") and fix in lines
    assert len(err.splitlines()) == 1


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return save_tiny_target(tmp_path_factory.mktemp("target"))


def test_fields_of_other_names_are_read_when_they_are_named(tmp_path, target, capsys):
    rows = [{"dialogue": turns(f"a {i}", "b c")} for i in range(9)] + [{"user_prompt": "a", "model_response": "b c"}]
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    fields = [
        x for pair in ("messages=dialogue", "prompt=user_prompt", "response=model_response") for x in ("--field", pair)
    ]
    code = main(
        ["prepare", str(path), "--target", str(target), "--out", str(tmp_path / "s"), "--heldout-share", "0", *fields]
    )
    assert code == 0 and len(TokenStore.open(tmp_path / "s" / "train")) == 10
    assert "messages 9, question and answer 1" in capsys.readouterr().err
    with pytest.raises(UsageError, match=r"no layout has a field messagess \(nearest: 'messages'\)"):
        rows_of(path, fields={"messagess": "dialogue"})


def test_every_layout_is_tried_in_these_tests_and_regenerate_leaves_nothing_of_an_old_answer():
    assert {*LAYOUT_ROWS, "batch output", "batch request"} == set(LAYOUTS)
    for cases in LAYOUT_ROWS.values():
        for row, _, _ in cases:
            assert set(row) - FIELDS <= {"text", "message_tree_id", "row_idx", "row", "truncated_cells", "json"}
