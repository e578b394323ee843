"""`regenerate`: each prompt answered once, on disk, resumable, and prepared exactly as the target wrote it."""

import json

import pytest

from forebay.data.prepare import prepare
from forebay.data.store import TokenStore
from forebay.errors import DataError, UsageError
from forebay.stages.regenerate import regenerate
from tiny import EOT, R0, tiny_target, toy_tokenizer, write_jsonl


@pytest.fixture(scope="module")
def target():
    return tiny_target()


@pytest.fixture(scope="module")
def tokenizer():
    return toy_tokenizer()


def questions(count: int) -> list[dict]:
    return [{"id": i, "messages": [{"role": "user", "content": f"what is {i} and {i * i}?"}]} for i in range(count)]


def answer(prompts, out, target, tokenizer, **options):
    options = {"max_new_tokens": 10, "batch_size": 4, "progress": False, **options}
    return regenerate(prompts, out, target=target, tokenizer=tokenizer, **options)


def read(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_each_prompt_is_answered_once_with_its_finish_reason_and_what_made_it(tmp_path, target, tokenizer):
    rows = [*questions(9), questions(1)[0], {"messages": "?"}, R0, {"prompt": "and this?", "output": "old"}]
    summary = answer(write_jsonl(tmp_path / "p.jsonl", rows), tmp_path / "o.jsonl", target, tokenizer)
    made = read(tmp_path / "o.jsonl")
    assert (summary.rows, summary.written, summary.duplicates, summary.skipped) == (13, 11, 1, {"no_messages": 1})
    assert len(made) == 11 and sum(summary.finish_reasons.values()) == 11
    assert {row["finish_reason"] for row in made} <= {"stop", "length"}
    assert all(row["regenerated"]["by"]["template_kwargs"] == {} for row in made)
    [r0] = [row for row in made if row.get("id") == "a"]
    assert r0["messages"][:-1] == R0["messages"][:-1]
    assert r0["messages"][-1] != R0["messages"][-1]


@pytest.mark.parametrize("cut", [0, 1, 40])
def test_a_killed_run_goes_on_and_mends_the_line_that_was_cut(tmp_path, target, tokenizer, cut):
    prompts = write_jsonl(tmp_path / "p.jsonl", questions(8))
    whole, part = tmp_path / "whole.jsonl", tmp_path / "part.jsonl"
    answer(prompts, whole, target, tokenizer)
    lines = whole.read_bytes().splitlines(keepends=True)
    part.write_bytes(b"".join(lines[:3]) + lines[3][: len(lines[3]) - cut if cut else 0])
    summary = answer(prompts, part, target, tokenizer)
    assert (summary.resumed, summary.written) == (3, 5)
    assert sorted(map(str, read(part))) == sorted(map(str, read(whole)))


def test_answers_made_with_other_settings_are_not_mixed_in(tmp_path, target, tokenizer):
    prompts = write_jsonl(tmp_path / "p.jsonl", questions(2))
    answer(prompts, tmp_path / "o.jsonl", target, tokenizer)
    with pytest.raises(UsageError, match="max_new_tokens: 10 there, 20 now"):
        answer(prompts, tmp_path / "o.jsonl", target, tokenizer, max_new_tokens=20)
    other = write_jsonl(tmp_path / "other.jsonl", [{"a": 1}])
    with pytest.raises(UsageError, match="line 1 was not written by"):
        answer(prompts, other, target, tokenizer)


def test_a_file_without_prompts_says_what_a_row_must_look_like(tmp_path, target, tokenizer):
    with pytest.raises(DataError, match=r"p.jsonl:1: .*messages"):
        answer(write_jsonl(tmp_path / "p.jsonl", [{"a": 1}]), tmp_path / "o.jsonl", target, tokenizer)


def test_a_prompt_longer_than_the_target_is_counted(tmp_path, target, tokenizer):
    long = {"messages": [{"role": "user", "content": "x" * 600}]}
    summary = answer(write_jsonl(tmp_path / "p.jsonl", [long, *questions(1)]), tmp_path / "o.jsonl", target, tokenizer)
    assert (summary.written, summary.skipped) == (1, {"prompt_too_long": 1})


def test_what_is_prepared_is_what_the_target_wrote_and_a_cut_answer_gets_no_end_of_turn(tmp_path, target, tokenizer):
    """The supervised tokens decode to the answer; the end of turn is supervised only where the target wrote it."""
    prompts = write_jsonl(tmp_path / "p.jsonl", questions(12))
    answer(prompts, tmp_path / "o.jsonl", target, tokenizer, max_new_tokens=16)
    report = prepare(
        [tmp_path / "o.jsonl"], tmp_path / "s", tokenizer=tokenizer, heldout_share=0, max_unsupervised=1, progress=False
    )
    store, made = TokenStore.open(tmp_path / "s" / "train"), read(tmp_path / "o.jsonl")
    assert report["finish_reasons"].get("length", 0) > 0
    answers = {row["messages"][-1]["content"]: row["finish_reason"] for row in made}
    for i in range(len(store)):
        ids = store.tokens(i)[store.mask(i).astype(bool)].tolist()
        ended = ids[-1] == EOT
        text = tokenizer.decode(ids[:-1] if ended else ids)
        assert answers[text] == ("stop" if ended else "length")
