"""`prepare`: every row kept or counted, stops before a useless store, resumes, reuses only what is the same."""

import errno
import json
import multiprocessing
import os
import signal
import sys

import numpy as np
import pytest

import forebay.data.prepare as module
from forebay.data import build, chunks
from forebay.data.build import Build
from forebay.data.overlap import KINDS
from forebay.data.prepare import prepare
from forebay.data.report import expectations, render
from forebay.data.store import StoreWriter, TokenStore
from forebay.errors import DataError, UsageError
from tiny import R0, toy_tokenizer, write_jsonl


@pytest.fixture(scope="module")
def tokenizer():
    return toy_tokenizer()


def talk(i: int, answer: str = "one two three", **more) -> dict:
    turns = [{"role": "user", "content": f"question number {i}"}, {"role": "assistant", "content": f"{answer} {i}"}]
    return {"id": i, "messages": turns, **more}


def run(data, out, tokenizer, **options):
    return prepare([data], out, tokenizer=tokenizer, **{"heldout_share": 0.0, "progress": False, **options})


def content(folder) -> dict[str, bytes]:
    return {
        str(p.relative_to(folder)): p.read_bytes() for part in ("train", "heldout") for p in (folder / part).iterdir()
    }


def test_rows_are_kept_or_counted_by_reason_with_their_rows_and_lines(tmp_path, tokenizer):
    """C54-C58: the report names each, and kept + dropped = rows."""
    odd = [
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": ""}]},
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": None}]},
        {"messages": [{"role": "user", "content": "a"}]},
        {"messages": [{"role": "user", "content": "word " * 600}, {"role": "assistant", "content": "reply " * 50}]},
        {"messages": [{"role": "narrator", "content": "a"}]},
    ]
    path = write_jsonl(tmp_path / "a.jsonl", [talk(0), *odd, talk(1)])
    path.write_bytes(path.read_bytes() + b"{broken\n")
    report = run(path, tmp_path / "s", tokenizer, max_length=512)
    assert (report["rows"], report["kept"]) == (8, 2)
    assert report["dropped"] == {
        "empty_assistant": 2,
        "no_assistant": 1,
        "truncated_away": 1,
        "bad_role": 1,
        "parse_error": 1,
    }
    assert [e["row"] for e in report["dropped_first"]["empty_assistant"]] == [2, 3]
    assert report["dropped_first"]["parse_error"][0]["line"] == 8
    assert json.loads((tmp_path / "s" / "report.json").read_text()) == report
    for folder in ("strict", "s"):  # a finished store is no way around it
        with pytest.raises(DataError, match="--strict: 2 empty_assistant, 1 no_assistant"):
            run(path, tmp_path / folder, tokenizer, max_length=512, strict=True)
    assert len(TokenStore.open(tmp_path / "s" / "train")) == 2


def test_rows_of_several_shapes_and_types_load_from_one_file(tmp_path, tokenizer):
    """C67: a column that is text in row 1 and a list in row 500 breaks no inference of types."""
    turns = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "one two"}]
    rows = [{"messages": json.dumps(R0["messages"]), "extra": "text"}, *[{"conversations": turns}] * 498]
    rows += [
        {"messages": R0["messages"], "extra": ["a", {"list": 1}]},
        {"prompt": "hi", "response": "one two", "extra": 3},
    ]
    report = run(write_jsonl(tmp_path / "a.jsonl", rows), tmp_path / "s", tokenizer)
    assert (report["kept"], report["dropped"], report["duplicates"]) == (501, {}, 499)


def test_a_row_without_room_for_a_block_is_too_short(tmp_path, tokenizer):
    """C58: three tokens in all."""
    path = write_jsonl(tmp_path / "a.jsonl", [talk(0), {"text": "a:b"}])
    report = run(path, tmp_path / "s", tokenizer, text_separator="a:")
    assert report["dropped"] == {"too_short": 1}


def test_a_long_answer_is_cut_at_max_length_and_counted(tmp_path, tokenizer):
    """C24 for data: no row is longer, and the report says how many were cut."""
    path = write_jsonl(tmp_path / "a.jsonl", [talk(0), talk(1, "more " * 200)])
    report = run(path, tmp_path / "s", tokenizer, max_length=100)
    store = TokenStore.open(tmp_path / "s" / "train")
    assert report["truncated"] == 1 and store.lengths.max() == 100 and store.manifest["max_length"] == 100


def test_the_store_gives_views_lengths_and_counts(tmp_path, tokenizer):
    path = write_jsonl(tmp_path / "a.jsonl", [talk(i, "word " * (i % 7 + 1)) for i in range(50)])
    report = run(path, tmp_path / "s", tokenizer, shard_tokens=300)
    store = TokenStore.open(tmp_path / "s" / "train", verify=True)
    assert len(store) == 50 == len(set(store.ids))
    assert report["splits"]["train"]["supervised_tokens"] == store.supervised.sum() == report["supervised_tokens"]
    for i in range(50):
        tokens, mask = store.tokens(i), store.mask(i)
        assert tokens.dtype == np.int32 and not tokens.flags.owndata and len(tokens) == len(mask) == store.lengths[i]
        assert mask.sum() == store.supervised[i]
        assert tokenizer.decode(tokens).startswith(f"<|im_start|>user\nquestion number {i}<|im_end|>")
        assert tokenizer.decode(store.prompt(i)).endswith("<|im_start|>assistant\n")


def test_nothing_usable_is_one_clear_error(tmp_path, tokenizer):
    """C62."""
    path = write_jsonl(tmp_path / "a.jsonl", [{"messages": [{"role": "user", "content": "a"}]}] * 40 + [{"x": 1}])
    with pytest.raises(
        DataError, match=r"0 of 41 rows can be used: 40 no_assistant, 1 no_messages. First: .*regenerate"
    ):
        run(path, tmp_path / "s", tokenizer)
    assert json.loads((tmp_path / "s" / "report.json").read_text())["stopped"]
    with pytest.raises(DataError, match=r"not complete|not a token store"):
        TokenStore.open(tmp_path / "s" / "train")


def test_more_than_five_percent_without_a_supervised_token_stops(tmp_path, tokenizer):
    user_only = {"messages": [{"role": "user", "content": "a"}]}
    path = write_jsonl(tmp_path / "a.jsonl", [talk(i) for i in range(180)] + [user_only] * 20)
    with pytest.raises(DataError, match=r"20 of 200 rows \(10%\) have no supervised token, more than the 5% allowed"):
        run(path, tmp_path / "s", tokenizer)
    assert run(path, tmp_path / "s", tokenizer, max_unsupervised=0.2)["kept"] == 180


def test_a_template_that_renders_no_answer_stops_with_what_it_renders(tmp_path, tokenizer):
    """C09."""
    path = write_jsonl(tmp_path / "a.jsonl", [talk(i) for i in range(100)])
    template = "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}\n{% endif %}{% endfor %}"
    with pytest.raises(DataError, match=r"0 of 100 rows can be used: 100 no_span"):
        run(path, tmp_path / "s", tokenizer, chat_template=template)


def test_a_store_in_which_everything_is_supervised_is_refused(tmp_path, tokenizer):
    """A separator of one token is no prompt; a short prompt before a very long answer is one."""
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": f"<eos>one two three four {i}"} for i in range(20)])
    with pytest.raises(DataError, match="tokens are supervised"):
        run(path, tmp_path / "s", tokenizer, text_separator="<eos>")
    path = write_jsonl(tmp_path / "b.jsonl", [talk(1, "one two three four " * 2000)])
    assert run(path, tmp_path / "t", tokenizer, max_length=100_000)["supervised_share"] > 0.99


def test_template_arguments_recorded_by_regenerate_are_used_and_checked(tmp_path, tokenizer):
    """C18."""
    made = {"regenerated": {"prompt": "x", "by": {"template_kwargs": {"enable_thinking": False}}}}
    path = write_jsonl(tmp_path / "a.jsonl", [talk(0, **made), talk(1)])
    report = run(path, tmp_path / "s", tokenizer)
    assert report["template_kwargs"] == {"enable_thinking": False}
    store = TokenStore.open(tmp_path / "s" / "train")
    assert store.manifest["template_kwargs"] == {"enable_thinking": False}
    with pytest.raises(DataError, match=r"'enable_thinking': False.*'enable_thinking': True"):
        run(path, tmp_path / "s", tokenizer, template_kwargs={"enable_thinking": True})
    assert len(TokenStore.open(tmp_path / "s" / "train")) == 2  # the older store is left alone


def test_of_a_regenerated_conversation_only_the_last_answer_is_the_targets(tmp_path, tokenizer):
    made = {"regenerated": {"prompt": "x", "by": {"template_kwargs": {}, "raw": True}}, "finish_reason": "stop"}
    turns = [{"role": r, "content": c} for r, c in zip(["user", "assistant"] * 2, "abcd", strict=True)]
    report = run(write_jsonl(tmp_path / "a.jsonl", [{"messages": turns, **made}]), tmp_path / "s", tokenizer)
    store = TokenStore.open(tmp_path / "s" / "train")
    assert tokenizer.decode(store.tokens(0)[store.mask(0).astype(bool)]) == "d<|im_end|>"
    assert report["warnings"] == {"earlier_answers_not_by_the_target": 1}


def test_finish_reasons_are_counted_and_many_cut_answers_are_said(tmp_path, tokenizer):
    """C104."""
    rows = [talk(i, finish_reason="length" if i < 35 else "stop") for i in range(100)]
    report = run(write_jsonl(tmp_path / "a.jsonl", rows), tmp_path / "s", tokenizer)
    assert report["finish_reasons"] == {"length": 35, "stop": 65}
    assert any("35 answers (35%) were cut" in line for line in report["expect"])
    assert any("public runs" in line for line in expectations(report))


def test_the_table_marks_what_is_trained_on(tmp_path, tokenizer):
    from rich.console import Console

    path = write_jsonl(tmp_path / "a.jsonl", [R0, talk(1), {"x": 1}])
    report = run(path, tmp_path / "s", tokenizer)
    console = Console(width=200, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(render(report))
    text = console.export_text()
    assert "[[one two three four five six<|im_end|>]]" in text
    assert "no_messages" in text and "rows 3" in text and "supervised" in text


def test_the_split_follows_the_content_and_no_row_moves_when_data_is_added(tmp_path, tokenizer):
    first, more = [talk(i) for i in range(300)], [talk(i) for i in range(1000, 1300)]
    a = run(write_jsonl(tmp_path / "a.jsonl", first), tmp_path / "a", tokenizer, heldout_share=0.1)
    run(write_jsonl(tmp_path / "b.jsonl", more + first), tmp_path / "b", tokenizer, heldout_share=0.1)
    held = [set(TokenStore.open(tmp_path / name / "heldout").ids) for name in "ab"]
    trained = [set(TokenStore.open(tmp_path / name / "train").ids) for name in "ab"]
    assert held[0] < held[1] and trained[0] < trained[1] and not held[1] & trained[1]
    assert 0.04 < a["splits"]["heldout"]["rows"] / 300 < 0.16


def test_held_out_rows_may_come_from_files_of_their_own(tmp_path, tokenizer):
    held = write_jsonl(tmp_path / "held.jsonl", [talk(i) for i in range(5)])
    path = write_jsonl(tmp_path / "a.jsonl", [talk(i) for i in range(100, 120)])
    report = run(path, tmp_path / "s", tokenizer, heldout=[held])
    assert [report["splits"][n]["rows"] for n in ("train", "heldout")] == [20, 5]
    with pytest.raises(UsageError, match="given both"):
        run(path, tmp_path / "t", tokenizer, heldout=[path])


def test_training_prompts_that_repeat_held_out_ones_are_counted(tmp_path, tokenizer):
    """13 consecutive tokens of the users' text; what the template or a system turn repeats is no overlap."""
    shared = "the very same long question about a forebay and its turbine"
    held = [{"prompt": shared, "response": "one two", "system": "you are a very helpful assistant indeed"}]
    train = [
        {
            "prompt": f"well, {shared}, tell me",
            "response": "a b c",
            "system": "you are a very helpful assistant indeed",
        },
        {"prompt": "nothing in common here", "response": "a b c", "system": "you are a very helpful assistant indeed"},
    ]
    report = run(
        write_jsonl(tmp_path / "a.jsonl", train),
        tmp_path / "s",
        tokenizer,
        heldout=[write_jsonl(tmp_path / "h.jsonl", held)],
    )
    overlap = report["overlap"]
    assert {kind: overlap[kind]["rows"] for kind in KINDS} == {"copies": 0, "passages": 1, "stock_phrases": 0}
    [example] = overlap["passages"]["examples"]
    assert (example["row"], example["heldout_row"]) == (1, 3) and "same long question about a forebay" in example[
        "text"
    ]


def test_copies_are_counted_apart_from_passages_and_what_many_prompts_have_is_a_stock_phrase(tmp_path, tokenizer):
    """50 rows: 10 repeat a held-out prompt, 18 share only a stock phrase with one, 2 a long passage, 20 nothing."""
    stock = "Write a short Python function with type hints and a docstring that"
    things = [
        f"{verb} the {noun}" for verb in ("sorts", "prints", "counts", "joins") for noun in ("words", "rows", "keys")
    ]
    tale = "once there was a miller who had a pond, and the pond had a gate that nobody could ever open"
    held = [f"{stock} {thing}" for thing in things[:10]] + [f"Go on: {tale}", "Hi"]
    others = [f"{stock} is called f{number}, number {number * 7919}" for number in range(18)]
    train = [*held[:9], "Hi", *others, f"What is the moral of this? {tale}", f"{tale}. Who is meant?"]
    train += [f"{number}: {number * 104729 % 1000003} and {number * 15485863 % 32452843}?" for number in range(20)]

    def rows(prompts, answer):
        return [{"prompt": prompt, "response": f"{answer} {prompt[:5]}"} for prompt in prompts]

    report = run(
        write_jsonl(tmp_path / "a.jsonl", rows(train, "one")),
        tmp_path / "s",
        tokenizer,
        heldout=[write_jsonl(tmp_path / "h.jsonl", rows(held, "two"))],
    )
    overlap = report["overlap"]
    assert {kind: overlap[kind]["rows"] for kind in KINDS} == {"copies": 10, "passages": 2, "stock_phrases": 18}
    first = {kind: overlap[kind]["examples"][0] for kind in KINDS}
    assert (first["copies"]["row"], first["copies"]["heldout_row"]) == (1, 51)
    assert held[0].startswith(first["copies"]["text"].strip()[:40])
    assert (first["passages"]["row"], first["passages"]["heldout_row"]) == (29, 61)
    assert "a miller who had a pond" in first["passages"]["text"]
    assert "function with type hints" in first["stock_phrases"]["text"]
    assert any("10 training rows repeat a held-out prompt" in line for line in report["expect"])


def test_a_short_prompt_is_a_copy_only_of_its_equal(tmp_path, tokenizer):
    held = write_jsonl(tmp_path / "h.jsonl", [{"prompt": "Hi you", "response": "one two"}])
    train = [{"prompt": text, "response": "a b c"} for text in ("Hi you", "Hi you!", "Hi")]
    report = run(write_jsonl(tmp_path / "a.jsonl", train), tmp_path / "s", tokenizer, heldout=[held])
    assert report["overlap"]["copies"]["rows"] == 1 and report["overlap"]["passages"]["rows"] == 0
    assert report["overlap"]["copies"]["examples"][0]["text"].endswith("Hi you<|im_end|>\n<|im_start|>assistant\n")


def test_a_small_share_of_few_rows_holds_out_one_prompt_and_says_so(tmp_path, tokenizer):
    """0.05 of 20 rows: no row's number is below it."""
    rows = [talk(i) for i in range(100, 120)]
    path, said = write_jsonl(tmp_path / "a.jsonl", [*rows, rows[0], {"x": 1}]), []
    report = run(path, tmp_path / "s", tokenizer, heldout_share=1e-6, notice=said.append)
    held, train = (TokenStore.open(tmp_path / "s" / name) for name in ("heldout", "train"))
    assert report["splits"]["heldout"]["rows"] == len(held) >= 1 and len(held) + len(train) == 21
    assert said == ["no row falls below --heldout-share 1e-06: the rows of one prompt are held out"]
    assert len({tokenizer.decode(held.prompt(i)) for i in range(len(held))}) == 1
    run(path, tmp_path / "again", tokenizer, heldout_share=1e-6)
    assert content(tmp_path / "s") == content(tmp_path / "again")


def test_one_prompt_cannot_be_both_held_out_and_trained_on(tmp_path, tokenizer):
    path = write_jsonl(tmp_path / "a.jsonl", [R0] * 3)
    with pytest.raises(DataError, match=r"the 3 rows have one prompt between them.*--heldout FILE.*--heldout-share 0"):
        run(path, tmp_path / "s", tokenizer, heldout_share=0.05)
    assert not (tmp_path / "s").exists()
    assert run(path, tmp_path / "s", tokenizer, heldout_share=0)["kept"] == 3


@pytest.mark.parametrize("at_once", [2**22, 7])
def test_duplicates_are_counted_however_many_passes_it_takes(tmp_path, tokenizer, monkeypatch, at_once):
    monkeypatch.setattr(build, "ROWS_AT_ONCE", at_once)
    rows = [R0] * 4 + [talk(i % 20) for i in range(30)]
    report = run(write_jsonl(tmp_path / "a.jsonl", rows), tmp_path / "s", tokenizer, heldout_share=0.3)
    assert (report["kept"], report["duplicates"]) == (34, 13)


def test_a_store_is_used_again_only_if_everything_is_the_same(tmp_path, tokenizer):
    """C98: the differing field is named."""
    path, out, said = write_jsonl(tmp_path / "a.jsonl", [talk(i) for i in range(20)]), tmp_path / "s", []
    first = run(path, out, tokenizer, notice=said.append)
    before = {p: p.stat().st_mtime_ns for p in (out / "train").iterdir()}
    assert run(path, out, tokenizer, notice=said.append) == first
    assert {p: p.stat().st_mtime_ns for p in (out / "train").iterdir()} == before
    assert "used as it is" in said.pop() and not said
    fingerprints = {first["fingerprints"]["train"]}
    changes = [
        {"max_length": 100},
        {"chat_template": tokenizer.chat_template + " "},
        {"template_kwargs": {"enable_thinking": True}},
        {"last_turn_only": True},
    ]
    for change in changes:
        report = run(path, out, tokenizer, notice=said.append, **change)
        assert f"{next(iter(change))} (" in said.pop()
        fingerprints.add(report["fingerprints"]["train"])
    write_jsonl(path, [talk(i) for i in range(21)])
    run(path, out, tokenizer, notice=said.append)
    assert "differs in data (" in said.pop() and len(fingerprints) == 5
    (out / "train" / "00000.mask").write_bytes(b"\x00" * TokenStore.open(out / "train").manifest["tokens"])
    run(path, out, tokenizer, notice=said.append)
    assert TokenStore.open(out / "train", verify=True).supervised.sum() > 0 and not said


def test_damage_is_named_by_file(tmp_path, tokenizer):
    path, out = write_jsonl(tmp_path / "a.jsonl", [talk(i) for i in range(20)]), tmp_path / "s"
    run(path, out, tokenizer)
    with open(out / "train" / "00000.tokens", "r+b") as file:
        file.write(b"\x99")
    TokenStore.open(out / "train")
    with pytest.raises(DataError, match=r"00000.tokens do not have the checksum"):
        TokenStore.open(out / "train", verify=True)
    os.truncate(out / "train" / "00000.tokens", 8)
    with pytest.raises(DataError, match=r"00000.tokens has 8 bytes"):
        TokenStore.open(out / "train")
    with pytest.raises(DataError, match="did you mean its train/"):
        TokenStore.open(out)


@pytest.mark.parametrize("fail_at", [1, 5])
def test_a_full_disk_stops_cleanly_and_the_next_run_goes_on(tmp_path, tokenizer, monkeypatch, fail_at):
    """C97."""
    monkeypatch.setattr(chunks, "CHUNK_ROWS", 10)
    path, out = write_jsonl(tmp_path / "a.jsonl", [talk(i) for i in range(100)]), tmp_path / "s"
    run(path, tmp_path / "whole", tokenizer, shard_tokens=500, heldout_share=0.1)
    real, closed = StoreWriter.close_shard, []

    def full(self):
        closed.append(self)
        if len(closed) == fail_at:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(self)

    monkeypatch.setattr(StoreWriter, "close_shard", full)
    with pytest.raises(DataError, match=f"disk full at {out}"):
        run(path, out, tokenizer, shard_tokens=500, heldout_share=0.1)
    monkeypatch.setattr(StoreWriter, "close_shard", real)
    said = []
    report = run(path, out, tokenizer, shard_tokens=500, heldout_share=0.1, notice=said.append)
    assert bool(said) == (fail_at > 2) and all("going on after row" in line for line in said)
    assert content(out) == content(tmp_path / "whole")
    assert report["kept"] == 100 and not (out / "progress.json").exists()


@pytest.mark.parametrize("stop_after", [1, 6, 9])
def test_an_interrupted_run_goes_on_to_the_same_bytes_and_the_same_report(tmp_path, tokenizer, monkeypatch, stop_after):
    monkeypatch.setattr(chunks, "CHUNK_ROWS", 10)
    rows = [talk(i) if i % 9 else {"x": i} for i in range(100)]
    path, out = write_jsonl(tmp_path / "a.jsonl", rows), tmp_path / "s"
    whole = run(path, tmp_path / "whole", tokenizer, shard_tokens=400, heldout_share=0.1)
    real, added = Build.add, []

    def killed(self, *args):
        added.append(1)
        if len(added) > stop_after:
            raise KeyboardInterrupt
        real(self, *args)

    monkeypatch.setattr(Build, "add", killed)
    with pytest.raises(KeyboardInterrupt):
        run(path, out, tokenizer, shard_tokens=400, heldout_share=0.1)
    monkeypatch.setattr(Build, "add", real)
    report = run(path, out, tokenizer, shard_tokens=400, heldout_share=0.1)
    assert content(out) == content(tmp_path / "whole")
    assert {**report, "seconds": 0} == {**whole, "seconds": 0}


def test_the_estimate_is_near_and_too_little_space_is_refused_with_both_numbers(tmp_path, tokenizer, monkeypatch):
    """C96."""
    path, out = write_jsonl(tmp_path / "a.jsonl", [talk(i, "word " * (i % 50)) for i in range(1000)]), tmp_path / "s"
    said = {}
    monkeypatch.setattr(
        module, "estimate_bytes", lambda *args, real=module.estimate_bytes: said.setdefault("n", real(*args))
    )
    run(path, out, tokenizer)
    on_disk = sum(p.stat().st_size for p in out.rglob("*") if p.is_file())
    assert abs(said["n"] - on_disk) < 0.05 * on_disk
    monkeypatch.setattr(module.shutil, "disk_usage", lambda path: type("Usage", (), {"free": said["n"] // 2}))
    with pytest.raises(DataError, match=rf"needs about {said['n']:,} bytes and its disk has {said['n'] // 2:,} free"):
        run(path, tmp_path / "t", tokenizer)


def test_a_folder_with_other_things_is_left_alone(tmp_path, tokenizer):
    path = write_jsonl(tmp_path / "a.jsonl", [R0])
    with pytest.raises(UsageError, match="holds other things"):
        run(path, tmp_path, tokenizer)
    with pytest.raises(UsageError, match="is a file"):
        run(path, path, tokenizer)
    with pytest.raises(UsageError, match="no target folder"):
        run(path, tmp_path / "s", tmp_path / "none")


def test_workers_give_the_same_bytes_and_too_many_are_capped_with_a_notice(tmp_path, tokenizer, monkeypatch):
    """C70, C76: spawned workers after torch was imported and used; C71's ground: order does not depend on them."""
    import torch

    torch.ones(64, 64) @ torch.ones(64, 64)
    monkeypatch.setattr(chunks, "CHUNK_ROWS", 16)
    monkeypatch.setattr(chunks.os, "cpu_count", lambda: 2)
    rows = [talk(i) if i % 9 else {"x": i} for i in range(200)]
    path, said = write_jsonl(tmp_path / "a.jsonl", rows), []
    one = run(path, tmp_path / "one", tokenizer, workers=1, heldout_share=0.1)
    two = run(path, tmp_path / "two", tokenizer, workers=9, heldout_share=0.1, notice=said.append)
    assert content(tmp_path / "one") == content(tmp_path / "two")
    assert {**one, "seconds": 0} == {**two, "seconds": 0}
    assert said == ["9 workers asked, 2 cores here: 2 are used"]


def test_a_killed_worker_is_named_and_the_run_ends(tmp_path, tokenizer, monkeypatch):
    """C71."""
    monkeypatch.setattr(chunks, "CHUNK_ROWS", 1)
    path = write_jsonl(tmp_path / "a.jsonl", [talk(i) for i in range(400)])
    real, others = chunks._chunks, {child.pid for child in multiprocessing.active_children()}

    def kill_one(*args):
        for number, chunk in enumerate(real(*args)):
            if number == 2:  # the pool has started its processes
                workers = {child.pid for child in multiprocessing.active_children()} - others
                os.kill(workers.pop(), signal.SIGKILL)
            yield chunk

    monkeypatch.setattr(chunks, "_chunks", kill_one)
    with pytest.raises(DataError, match=r"a data worker was killed \(out of memory\?\)"):
        run(path, tmp_path / "s", tokenizer, workers=2)


def test_progress_says_rows_rate_and_time_left_every_ten_seconds_without_a_terminal(capsys):
    """C77."""
    from forebay.data.progress import Progress

    now = [0.0]
    with Progress("prepare", 1000, clock=lambda: now[0]) as shown:
        for second in range(1, 41):
            now[0] = float(second)
            shown.update(second * 20, {"rows": second * 100})
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 4 and lines[0] == "prepare: 20%, 1,000 rows (100/s), 40 s left"


def test_the_data_package_reads_stores_without_torch():
    code = "import sys, forebay.data.store, forebay.data.prepare; sys.exit('torch' in sys.modules)"
    assert os.spawnv(os.P_WAIT, sys.executable, [sys.executable, "-c", code]) == 0
