"""Files of every kind, whole or broken: each row is read, or named with its file and line."""

import gzip
import json

import pyarrow
import pyarrow.parquet
import pytest

from forebay.data.conversation import Conversation, Drop, conversation_of
from forebay.data.readers import Unreadable, find_files, parse, read
from forebay.errors import UsageError
from tiny import R0, write_jsonl


def rows(*paths):
    """[(line, row or reason)] of some files."""
    found = [(r.line, parse(r.payload)) for r in read(find_files(paths))]
    return [(line, value.reason if isinstance(value, Unreadable) else value) for line, value in found]


def test_a_broken_line_is_named_and_the_others_load(tmp_path):
    """C66: not UTF-8, BOM, CRLF, blank lines, a list, a last line cut in the middle."""
    good = json.dumps(R0).encode()
    lines = [b"\xef\xbb\xbf" + good, b"", good + b"\r", b'{"a": "\xff"}', b"[1, 2]", b"  ", good, good[:30]]
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\n".join(lines))
    assert rows(path) == [
        (1, R0),
        (3, R0),
        (4, "parse_error"),
        (5, "parse_error"),
        (7, R0),
        (8, "parse_error"),
    ]
    details = [p.detail for p in (parse(r.payload) for r in read([path])) if isinstance(p, Unreadable)]
    assert details[0] == "not UTF-8: byte 0xff at column 8"
    assert details[1] == "a JSON list where an object {...} was expected"
    assert details[2].startswith("not JSON: ")


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("shape", ["array", "objects"])
def test_json_files_may_be_an_array_or_objects_over_several_lines(tmp_path, shape, indent):
    path = tmp_path / "a.json"
    values = [{**R0, "id": i, "pad": "x" * 50_000} for i in range(60)]  # more than one block
    text = (
        json.dumps(values, indent=indent)
        if shape == "array"
        else "\n".join(json.dumps(v, indent=indent) for v in values)
    )
    path.write_text(text)
    assert [row for _, row in rows(path)] == values
    assert rows(path)[0][0] == (1 if shape == "objects" or indent is None else 2)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('[{"a": 1}, {"a": 2}, {"a": ', [{"a": 1}, {"a": 2}, "parse_error"]),
        ('[\n{"a": 1},\n3,\n{"a": 2}]', [{"a": 1}, "parse_error", {"a": 2}]),
        ('[\n{"a": 1},\n{"a": tru},\n{"a": 2}]', [{"a": 1}, "parse_error"]),
        ("[]", []),
        ("[\n", ["parse_error"]),
        ('[{"a": 1}]\n[{"a": 2}]', [{"a": 1}, "parse_error"]),
    ],
)
def test_a_broken_json_array_gives_what_comes_before_the_break(tmp_path, text, expected):
    path = tmp_path / "a.json"
    path.write_text(text)
    assert [row for _, row in rows(path)] == expected


def test_empty_files_wrong_parquet_and_cut_gzip_are_named_and_the_next_file_loads(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b"")
    (tmp_path / "b.jsonl").write_bytes(b"\n\n")
    (tmp_path / "c.parquet").write_bytes(b"PAR1 is not enough")
    (tmp_path / "d.jsonl.gz").write_bytes(gzip.compress(json.dumps(R0).encode() * 99)[:-9])
    (tmp_path / "e.arrow").write_bytes(b"\x00" * 40)
    write_jsonl(tmp_path / "f.jsonl", [R0])
    found = rows(tmp_path)
    assert [value for _, value in found] == ["unreadable_file"] * 5 + [R0]


def test_tables_and_datasets_folders_are_read_as_streams_in_their_own_order(tmp_path):
    values = [{"id": str(i), "messages": R0["messages"]} for i in range(700)]
    table = pyarrow.Table.from_pylist(values)
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    assert [row for _, row in rows(tmp_path / "a.parquet")] == values
    with pyarrow.ipc.new_stream(tmp_path / "b.arrow", table.schema) as stream:
        stream.write_table(table)
    assert [row for _, row in rows(tmp_path / "b.arrow")] == values
    with pyarrow.ipc.new_file(tmp_path / "c.arrow", table.schema) as file:
        file.write_table(table)
    assert [row for _, row in rows(tmp_path / "c.arrow")] == values
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_list(values).save_to_disk(tmp_path / "saved", num_shards=3)
    assert [row for _, row in rows(tmp_path / "saved")] == values


def test_folders_and_globs_give_files_sorted_by_name_each_once(tmp_path):
    for name in ("b.jsonl", "a.jsonl.gz", "sub/c.json", "notes.txt", ".hidden/d.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"{}\n")
    names = [str(p.relative_to(tmp_path)) for p in find_files([tmp_path, tmp_path / "*.jsonl"])]
    assert names == ["a.jsonl.gz", "b.jsonl", "sub/c.json"]
    with pytest.raises(UsageError, match="names no file"):
        find_files([tmp_path / "no.jsonl"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match="folder holds no file"):
        find_files([tmp_path / "empty"])


def plain(conversation):
    return [(m["role"], m["content"]) for m in conversation.messages]


ASKED = [("user", "hi"), ("assistant", "one two")]


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "one two"}]},
        {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "one two"}]},
        {"prompt": "hi", "response": "one two"},
        {"prompt": [{"role": "user", "content": "hi"}], "completion": [{"role": "assistant", "content": "one two"}]},
        {"messages": json.dumps([{"role": "user", "content": "hi"}, {"role": "assistant", "content": "one two"}])},
        {
            "messages": [
                {"role": "User", "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]},
                {"role": "assistant", "content": ["one", " two"]},
            ]
        },
    ],
)
def test_rows_of_every_known_shape_give_the_same_conversation(row):
    """C67: messages, conversations, prompt and response, parts of text; also mixed in one file."""
    assert plain(conversation_of(row)) == ASKED


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": ""}]}, "empty_assistant"),
        ({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": None}]}, "empty_assistant"),
        ({"prompt": "a", "response": None}, "empty_assistant"),
        ({"messages": [{"role": "user", "content": "a"}]}, "no_assistant"),
        ({"messages": [{"role": "narrator", "content": "a"}]}, "bad_role"),
        ({"messages": [{"role": 3, "content": "a"}]}, "bad_role"),
        ({"messages": [{"content": "a"}]}, "bad_role"),
        ({"messages": [{"role": "user", "content": 3}]}, "bad_content"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "bad_content"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "bad_content"),
        ({"messages": ["a"]}, "bad_message"),
        ({"messages": []}, "no_messages"),
        ({"messages": "{"}, "no_messages"),
        ({}, "no_messages"),
        ({**R0, "tools": 3}, "bad_tools"),
        ({"messages": [{"role": "assistant", "content": None, "tool_calls": [3]}]}, "bad_tools"),
        ({"text": "a"}, "text_without_separator"),
    ],
)
def test_odd_rows_are_dropped_by_name(row, reason):
    """C54, C55, C56 and their kind."""
    found = conversation_of(row)
    assert isinstance(found, Drop) and found.reason == reason


def test_the_id_follows_the_content_and_the_split_the_first_prompt():
    one, same = conversation_of(R0), conversation_of({"conversations": R0["messages"], "id": "other"})
    answered = conversation_of({"prompt": "hi there", "response": "something else"})
    assert isinstance(one, Conversation) and one.id == same.id != answered.id
    assert one.split_key == same.split_key == answered.split_key
