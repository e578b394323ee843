"""What `prepare` found, as a table for people and a JSON object for programs, and when it must stop.

Guarantees: rows = kept + the sum of dropped, by reason, each with its first row numbers; a store in which nothing, or
everything, or too little is supervised is never finished. Called by `data.prepare`; printed by the command line.

docs/data.md explains the keys of report.json.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from forebay.data.encode import Encoded
from forebay.errors import DataError

FIRST = 3
BUCKETS = (128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)
UNSUPERVISED = ("no_assistant", "empty_assistant", "truncated_away", "no_span", "template_error", "decode_mismatch")
FEWEST_TO_STOP = 10  # a handful of odd rows in a small file is dropped, not a reason to stop

FIXES = {
    "no_assistant": "the rows hold no assistant turn: let the target answer them with `forebay regenerate`",
    "empty_assistant": "the answers are empty: let the target answer the prompts with `forebay regenerate`",
    "truncated_away": "the prompts fill max_length: raise --max-length",
    "no_span": "the chat template does not render the answers as they are: check the template and its arguments",
    "template_error": "the chat template refuses the rows (see the detail): check roles and their order",
    "decode_mismatch": "the tokens do not decode to the answer: the tokenizer does not fit this text",
    "parse_error": "lines are not JSON objects: look at the named lines",
    "unreadable_file": "look at the named files",
    "no_messages": "docs/data.md lists the layouts that are read; --field messages=NAME names a field otherwise",
    "no_request": "give the file of the batch's requests: --requests FILE",
    "request_failed": "the batch holds no answer there: send those requests again",
    "text_without_separator": "say where the answer begins in ready text: --text-separator",
}

WARNINGS = {
    "turns_after_the_last_answer_cut": "rows end with turns that nobody answered; those turns were cut",
    "turns_rewritten_by_the_template": "rows have earlier answers that the template rewrites in the history (thinking "
    "stripped): these are not supervised; --split-turns gives each a row of its own",
    "earlier_answers_not_by_the_target": "rows made by regenerate have earlier answers, not written by it: only the "
    "last one is supervised",
    "turns_that_cannot_be_used_cut": "rows end with turns of an odd role or content; those turns were cut",
    "answer_without_question": "rows begin with an assistant turn, which is context only",
    "developer_as_system": "rows have a `developer` role that the template does not know; it was rendered as `system`",
    "reasoning_dropped": "rows have reasoning that the template does not render: the drafter will not learn thinking",
    "tools_dropped": "rows have tools that the template does not render",
    "prompt_and_answer_share_a_token": "rows have a token across the border of prompt and answer; it is not supervised",
    "template_without_generation_prompt": "rows were rendered by a template that ignores add_generation_prompt",
}


class Report:
    """Counts while chunks come in. `state` and `Report(state)` carry it over an interruption."""

    def __init__(self, files: list[str], state: dict[str, Any] | None = None):
        state = state or {}
        self.files = files
        self.records: int = state.get("records", 0)
        self.kept: int = state.get("kept", 0)
        self.dropped: Counter[str] = Counter(state.get("dropped", {}))
        self.first: dict[str, list[dict[str, Any]]] = state.get("first", {})
        self.notes: dict[str, Counter[str]] = {k: Counter(v) for k, v in state.get("notes", {}).items()}
        self.lengths: list[int] = state.get("lengths", [0] * (len(BUCKETS) + 1))
        self.splits: dict[str, dict[str, int]] = state.get("splits", {})
        self.preview: list[list[list[Any]]] = state.get("preview", [])

    @classmethod
    def of_finished(cls, report: dict[str, Any]) -> Report:
        """What `reason_to_stop` needs, from a finished report.json."""
        names = {"records": "rows", "kept": "kept", "dropped": "dropped", "first": "dropped_first", "splits": "splits"}
        if report["stopped"] is not None:
            raise ValueError("the report is of a run that was stopped")
        return cls(report["files"], {ours: report[theirs] for ours, theirs in names.items()})

    def state(self) -> dict[str, Any]:
        names = ("records", "kept", "dropped", "first", "notes", "lengths", "splits", "preview")
        return {name: getattr(self, name) for name in names}

    def add(self, chunk: Encoded) -> None:
        """Count one chunk."""
        self.records += chunk.records
        self.kept += chunk.records - len(chunk.drops)
        for row, file, line, reason, detail in chunk.drops:
            self.dropped[reason] += 1
            first = self.first.setdefault(reason, [])
            if len(first) < FIRST:
                first.append({"row": row, "file": self.files[file], "line": line, "detail": detail})
        for group, counts in chunk.notes.items():
            self.notes.setdefault(group, Counter()).update(counts)
        places = np.searchsorted(BUCKETS, chunk.rows.index["length"])
        for place, count in enumerate(np.bincount(places, minlength=len(self.lengths)).tolist()):
            self.lengths[place] += count
        self.preview = (self.preview + chunk.preview)[:2]

    def add_split(self, name: str, index: np.ndarray) -> None:
        """Count rows that went to `train` or `heldout`."""
        counts = self.splits.setdefault(name, dict.fromkeys(("rows", "tokens", "supervised_tokens", "anchors"), 0))
        for key, value in (
            ("rows", len(index)),
            ("tokens", index["length"].sum()),
            ("supervised_tokens", index["supervised"].sum()),
            ("anchors", index["eligible"].sum()),
        ):
            counts[key] += int(value)

    def total(self, key: str) -> int:
        return sum(counts[key] for counts in self.splits.values())

    def reason_to_stop(self, *, max_unsupervised: float, strict: bool, final: bool) -> str | None:
        """Why the store must not be finished. Before the end of the input only what cannot mend itself stops."""
        if strict and self.dropped:
            return f"--strict: {self._dropped_text()}"
        without = sum(self.dropped[reason] for reason in UNSUPERVISED)
        worst = max(UNSUPERVISED, key=lambda reason: self.dropped[reason])
        enough = final or self.records >= 1000
        if enough and self.kept and without >= FEWEST_TO_STOP and without > max_unsupervised * self.records:
            return (
                f"{without} of {self.records} rows ({without / self.records:.0%}) have no supervised token, more than "
                f"the {max_unsupervised:.0%} allowed; most often {worst} ({self._example(worst)}): {FIXES[worst]}, "
                "or raise --max-unsupervised"
            )
        if enough and not self.kept:
            if not self.records:
                return "the input holds no row"
            worst = max(self.dropped, key=lambda reason: self.dropped[reason])
            return f"0 of {self.records} rows can be used: {self._dropped_text()}. First: {self._example(worst)}" + (
                f": {FIXES[worst]}" if worst in FIXES else ""
            )
        tokens, supervised = self.total("tokens"), self.total("supervised_tokens")
        if enough and tokens and tokens - supervised <= self.total("rows"):  # a prompt is more than one token
            return (
                f"{supervised} of {tokens} tokens are supervised, so prompts would be trained on as if the target had "
                "written them: check the chat template or the text separator"
            )
        if final and not self.splits.get("train", {}).get("rows"):
            return f"all {self.kept} rows fell to the held-out split: add rows, or lower --heldout-share"
        return None

    def _dropped_text(self) -> str:
        return ", ".join(f"{count} {reason}" for reason, count in self.dropped.most_common())

    def _example(self, reason: str) -> str:
        first = self.first[reason][0]
        return f"{first['file']}:{first['line']}: {first['detail']}"

    def as_dict(self, **more: Any) -> dict[str, Any]:
        """report.json."""
        counts = self.notes.get("counts", Counter())
        samples, tokens, supervised = self.total("rows"), self.total("tokens"), self.total("supervised_tokens")
        edges = [f"<={edge}" for edge in BUCKETS] + [f">{BUCKETS[-1]}"]
        return {
            "rows": self.records,
            "kept": self.kept,
            "dropped": dict(self.dropped.most_common()),
            "dropped_first": self.first,
            "samples": samples,
            "tokens": tokens,
            "supervised_tokens": supervised,
            "supervised_share": supervised / tokens if tokens else 0.0,
            "truncated": counts["truncated"],
            "layouts": dict(self.notes.get("layouts", Counter()).most_common()),
            "finish_reasons": dict(self.notes.get("finish_reasons", {})),
            "thinking_share": counts["thinking"] / samples if samples else 0.0,
            "lengths": {edge: count for edge, count in zip(edges, self.lengths, strict=True) if count},
            "warnings": dict(self.notes.get("warnings", {})),
            "splits": self.splits,
            "preview": self.preview,
            "files": self.files,
            **more,
        }


def expectations(report: dict[str, Any]) -> list[str]:
    """Plain sentences on what the data is good for."""
    said = []
    train = report["splits"].get("train", {"rows": 0, "supervised_tokens": 0})
    if train["rows"] < 50_000:
        said.append(
            f"{train['rows']:,} training rows are few: public runs reached an accept length of about 1.9 with 5,000 "
            "rows and 5 epochs; the paper used about 800,000 rows answered by the target"
        )
    copies = report["overlap"]["copies"]["rows"]
    if copies:
        said.append(
            f"{copies:,} training rows repeat a held-out prompt word for word: what is measured on those prompts is "
            "better than on new ones"
        )
    reasons = report["finish_reasons"]
    cut = reasons.get("length", 0)
    if cut > 0.1 * max(1, report["samples"]):
        said.append(
            f"{cut:,} answers ({cut / report['samples']:.0%}) were cut by max_new_tokens: raise it if you serve longer"
        )
    if reasons.get("unknown", 0) == report["samples"] and report["samples"]:
        said.append(
            "no row says how its answer ended: data not made by `forebay regenerate` may not be the target's own"
        )
    return said


def render(report: dict[str, Any]) -> Any:
    """A rich renderable: the table, what was dropped, the warnings, the first two rows with the answer marked."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold")
    table.add_column(justify="right")
    table.add_column()
    share = report["supervised_share"]
    table.add_row("rows", f"{report['rows']:,}", "")
    table.add_row("kept", f"{report['kept']:,}", "")
    for reason, count in report["dropped"].items():
        first = report["dropped_first"].get(reason, [])
        rows = ", ".join(str(entry["row"]) for entry in first)
        detail = f"{first[0]['file']}:{first[0]['line']}: {first[0]['detail']}" if first else ""
        table.add_row(f"  {reason}", f"{count:,}", Text(f"rows {rows}{' ...' if count > len(first) else ''}; {detail}"))
    layouts = report["layouts"]
    table.add_row("layouts", "", ", ".join(f"{name} {count:,}" for name, count in layouts.items()))
    table.add_row("tokens", f"{report['tokens']:,}", "")
    table.add_row("supervised", f"{report['supervised_tokens']:,}", f"{share:.1%}")
    table.add_row("cut at max_length", f"{report['truncated']:,}", f"of {report['max_length']:,} tokens")
    reasons = ", ".join(f"{name} {count:,}" for name, count in report["finish_reasons"].items())
    table.add_row("finish reasons", "", reasons)
    table.add_row("with thinking", f"{report['thinking_share']:.1%}", "")
    table.add_row("duplicates", f"{report['duplicates']:,}", "")
    overlap = report["overlap"]
    table.add_row("held-out prompts in train", f"{overlap['copies']['rows']:,}", "rows repeat one word for word")
    table.add_row(
        "  long passages", f"{overlap['passages']['rows']:,}", f"rows share {overlap['ngram']} tokens or more with one"
    )
    table.add_row("  stock phrases", f"{overlap['stock_phrases']['rows']:,}", "rows share only what many prompts have")
    for name, counts in report["splits"].items():
        table.add_row(
            name, f"{counts['rows']:,}", f"{counts['tokens']:,} tokens, {counts['supervised_tokens']:,} supervised"
        )
    table.add_row("lengths", "", ", ".join(f"{edge}: {count:,}" for edge, count in report["lengths"].items()))
    parts: list[Any] = [table]
    for name, count in report["warnings"].items():
        parts.append(Text(f"warning: {count:,} {WARNINGS.get(name, name)}", style="yellow"))
    for kind, name in (("copies", "copy"), ("passages", "passage"), ("stock_phrases", "stock phrase")):
        for example in overlap[kind]["examples"][:1]:
            rows = f"row {example['row']} and held-out row {example['heldout_row']}"
            parts.append(Text(f"{name}: {rows}: {example['text'][:160]!r}", style="dim"))
    parts += [Text(line, style="yellow") for line in report.get("expect", [])]
    if "on_policy" in report:
        parts.append(Text(report["on_policy"]["sentence"], style="yellow" if report["on_policy"]["suspect"] else ""))
    for number, segments in enumerate(report["preview"], 1):
        text = Text(f"\nrow {number} (what is trained on is between [[ and ]])\n", style="bold")
        for piece, supervised in segments:
            piece = piece if len(piece) < 700 else f"{piece[:400]} ... {piece[-250:]}"
            text.append(f"[[{piece}]]" if supervised else piece, style="green" if supervised else "dim")
        parts.append(text)
    return Group(*parts)


def stop(message: str | None) -> None:
    """Raise DataError for a reason to stop."""
    if message:
        raise DataError(message)
