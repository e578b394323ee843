"""docs/data.md names every reason, warning and key of the report, and its example rows load."""

import json
import re
from pathlib import Path

from families import family
from forebay.data import report as module
from forebay.data.prepare import prepare
from tiny import R0, toy_tokenizer, write_jsonl

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "data.md").read_text(encoding="utf-8")


def test_every_reason_warning_and_key_of_the_report_is_documented(tmp_path):
    sources = "".join(path.read_text() for path in (ROOT / "src" / "forebay" / "data").glob("*.py"))
    reasons = set(re.findall(r'(?:Drop|Unreadable|_Unusable)\(\s*"(\w+)"', sources)) - {"no_user_turn_at_end"}
    report = prepare(
        [write_jsonl(tmp_path / "a.jsonl", [R0])], tmp_path / "s", tokenizer=toy_tokenizer(), heldout_share=0
    )
    keys = set(report) - {"files", "seconds", "dropped_first", "rows", "kept", "dropped"}
    assert len(reasons) > 12
    assert not [name for name in {*reasons, *module.FIXES, *module.WARNINGS, *keys} if f"`{name}`" not in TEXT]


def test_the_example_rows_are_all_kept(tmp_path):
    rows = [json.loads(line) for line in re.search(r"```json\n(.*?)```", TEXT, re.DOTALL)[1].splitlines()]
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    report = prepare([path], tmp_path / "s", tokenizer=family("qwen3"), heldout_share=0, text_separator="Answer:")
    assert report["kept"] == len(rows) == 15, report["dropped_first"]
