"""Let the target answer prompts, so that a drafter is trained on what the target would say: `forebay regenerate`.

Guarantees: every usable prompt is answered once, by its content; an answer is on disk soon after it is finished,
with its finish reason and what made it; a killed run goes on where it stopped, a line cut by the kill is mended;
answers made with other settings are never mixed in. Prompts that cannot be used are counted by reason. Called by `api`
and `cli`.

    from forebay.stages.regenerate import load_target, regenerate
    model, tokenizer = load_target("path/to/target", dtype="bfloat16")
    regenerate("prompts.jsonl", "data.jsonl", target=model, tokenizer=tokenizer, max_new_tokens=256)
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from forebay.errors import DataError, UsageError

FLUSH_S = 2.0


@dataclass
class Summary:
    """What one call did. `skipped` counts rows without a usable prompt, by reason."""

    rows: int = 0
    written: int = 0
    resumed: int = 0
    duplicates: int = 0
    skipped: dict[str, int] = field(default_factory=dict)
    finish_reasons: dict[str, int] = field(default_factory=dict)
    new_tokens: int = 0
    seconds: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass
class Prompt:
    """One row to answer: its messages up to the last user turn, and its content hash."""

    row: dict[str, Any]
    messages: list[dict[str, Any]]
    key: str


def load_target(folder: str | os.PathLike[str], *, dtype: str = "bfloat16", device: str = "cpu") -> tuple[Any, Any]:
    """The model in evaluation mode, and its tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device).eval()
    return model, AutoTokenizer.from_pretrained(folder)


def prompt_key(messages: list[dict[str, Any]], tools: Any = None) -> str:
    """Content hash of a prompt; key order and white space outside the text do not matter."""
    text = json.dumps([messages, tools], sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def prompt_of(row: Any) -> Prompt | str:
    """The prompt of a row, or why there is none. Trailing assistant turns are dropped: they are what is to be made."""
    messages = row.get("messages") if isinstance(row, dict) else None
    if not isinstance(messages, list) or not all(isinstance(m, dict) and "role" in m for m in messages):
        return "no_messages"
    messages = list(messages)
    while messages and messages[-1]["role"] == "assistant":
        messages.pop()
    if not messages or messages[-1]["role"] not in ("user", "tool"):
        return "no_user_turn_at_end"
    return Prompt(row, messages, prompt_key(messages, row.get("tools")))


def _rows(path: Path) -> Iterator[Any]:
    with open(path, encoding="utf-8-sig", errors="replace") as file:
        for line in file:
            if line.strip():
                try:
                    yield json.loads(line)
                except ValueError:
                    yield None


def read_prompts(path: Path, summary: Summary) -> list[Prompt]:
    """Every distinct prompt of a file, in file order."""
    prompts: dict[str, Prompt] = {}
    skipped: Counter[str] = Counter()
    for row in _rows(path):
        summary.rows += 1
        prompt = prompt_of(row)
        if isinstance(prompt, str):
            skipped[prompt] += 1
        elif prompt.key in prompts:
            summary.duplicates += 1
        else:
            prompts[prompt.key] = prompt
    summary.skipped = dict(skipped)
    if not prompts:
        raise DataError(
            f"{path} has no row to answer ({summary.rows} rows; skipped: {summary.skipped or 'none'}): "
            'each line must be like {"messages": [{"role": "user", "content": "..."}]}'
        )
    return list(prompts.values())


class AnswerFile:
    """The output: one JSON line per answer, appended. Opening it mends a cut last line and reads what is there."""

    def __init__(self, path: Path, made_by: dict[str, Any]):
        self.path, self.made_by = path, made_by
        self.keys: set[str] = set()
        self.finish_reasons: Counter[str] = Counter()
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(path, "ab+")  # noqa: SIM115 - closed by __exit__
        self._mend()
        self._written = time.monotonic()

    def __enter__(self) -> AnswerFile:
        return self

    def __exit__(self, *exc: object) -> None:
        self._file.close()

    def _mend(self) -> None:
        """Cut what follows the last line break (the file may be huge), then read the keys."""
        size = self._file.seek(0, os.SEEK_END)
        end = size
        while end > 0:
            start = max(0, end - 65536)
            self._file.seek(start)
            found = self._file.read(end - start).rfind(b"\n")
            if found >= 0:
                end = start + found + 1
                break
            end = start
        if end < size:
            self._file.truncate(end)
        self._file.seek(0)
        for number, line in enumerate(self._file, 1):
            try:
                row = json.loads(line)
                key, made_by = row["regenerated"]["prompt"], row["regenerated"]["by"]
            except (ValueError, KeyError, TypeError):
                raise UsageError(
                    f"{self.path} line {number} was not written by `forebay regenerate`: give another --out"
                ) from None
            differs = [
                f"{k}: {made_by.get(k)!r} there, {v!r} now" for k, v in self.made_by.items() if made_by.get(k) != v
            ]
            if differs:
                raise UsageError(
                    f"{self.path} was made with other settings ({'; '.join(differs)}): "
                    "give another --out or the same settings"
                )
            self.keys.add(key)
            self.finish_reasons[row.get("finish_reason") or "unknown"] += 1

    def write(self, prompt: Prompt, message: dict[str, Any], finish_reason: str) -> None:
        """Append one answer."""
        row = {k: v for k, v in prompt.row.items() if k not in ("messages", "conversations", "finish_reason")}
        row["messages"] = [*prompt.messages, message]
        row["finish_reason"] = finish_reason
        row["regenerated"] = {"prompt": prompt.key, "by": self.made_by}
        self._file.write(json.dumps(row, ensure_ascii=False).encode("utf-8", "replace") + b"\n")
        self.keys.add(prompt.key)
        self.finish_reasons[finish_reason] += 1
        if time.monotonic() - self._written > FLUSH_S:
            self._file.flush()
            self._written = time.monotonic()


def template_ids(
    tokenizer: Any, messages: list[dict[str, Any]], tools: Any, template_kwargs: dict[str, Any]
) -> list[int]:
    """Token ids of a prompt, up to where the reply begins."""
    text = tokenizer.apply_chat_template(
        messages, tools=tools, tokenize=False, add_generation_prompt=True, **template_kwargs
    )
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def regenerate(
    prompts_file: str | os.PathLike[str],
    out_file: str | os.PathLike[str],
    *,
    target: Any,
    tokenizer: Any,
    max_new_tokens: int = 512,
    batch_size: int = 64,
    temperature: float = 0.0,
    seed: int = 0,
    template_kwargs: dict[str, Any] | None = None,
    progress: bool = True,
) -> Summary:
    """Answer the prompts of a JSONL file with a loaded target. See the module's guarantees.

    Raises DataError: no usable prompt. UsageError: `out_file` holds answers made with other settings.
    """
    from forebay.stages.generation import Generator, stop_tokens

    started = time.monotonic()
    kwargs = template_kwargs or {}
    summary = Summary()
    prompts = read_prompts(Path(prompts_file), summary)
    stops = stop_tokens(target, tokenizer)
    if not stops:
        raise UsageError("the target names no end token: set eos_token_id in its generation_config.json")
    limit = getattr(target.config.get_text_config(), "max_position_embeddings", None)
    made_by = {
        "model": Path(str(target.config._name_or_path)).name,
        "template_kwargs": kwargs,
        "temperature": temperature,
        "seed": seed if temperature > 0 else None,
        "max_new_tokens": max_new_tokens,
    }
    with AnswerFile(Path(out_file), made_by) as answers, Progress("regenerate", len(prompts), progress) as shown:
        todo = []
        for prompt in prompts:
            if prompt.key in answers.keys:
                summary.resumed += 1
                continue
            ids = template_ids(tokenizer, prompt.messages, prompt.row.get("tools"), kwargs)
            if limit and len(ids) >= limit:
                summary.skipped["prompt_too_long"] = summary.skipped.get("prompt_too_long", 0) + 1
            else:
                todo.append((prompt, ids))
        shown.advance(len(prompts) - len(todo))
        pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else next(iter(stops))
        generator = Generator(target, stops=stops, pad=pad, temperature=temperature, limit=limit)
        seeds = [int.from_bytes(hashlib.sha256(f"{seed}:{p.key}".encode()).digest()[:7], "big") for p, _ in todo]
        replies = generator.run(
            [ids for _, ids in todo], max_new_tokens=max_new_tokens, batch_size=batch_size, seeds=seeds
        )
        for reply in replies:
            text = tokenizer.decode(reply.tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)
            answers.write(todo[reply.index][0], {"role": "assistant", "content": text}, reply.finish_reason)
            summary.written += 1
            summary.new_tokens += len(reply.tokens)
            shown.advance(1, len(reply.tokens))
        summary.finish_reasons = dict(answers.finish_reasons)
    summary.seconds = time.monotonic() - started
    return summary


class Progress:
    """A bar with rows, tokens/s and the time left; a plain line every 10 s where there is no terminal."""

    def __init__(self, name: str, total: int, enabled: bool):
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar

        self.name, self.total, self.enabled = name, total, enabled
        self.done, self.tokens, self.new = 0, 0, 0
        self.started = self.said = time.monotonic()
        console = Console(stderr=True)
        columns = (
            TextColumn(name),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}"),
            TextColumn("left"),
            TimeRemainingColumn(elapsed_when_finished=True),
        )
        self._bar = Bar(*columns, console=console) if enabled and console.is_terminal else None
        self._console = console
        self._task = self._bar.add_task(name, total=total, rate="") if self._bar else None

    def __enter__(self) -> Progress:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._bar:
            self._bar.stop()

    def advance(self, rows: int, tokens: int = 0) -> None:
        """Count finished rows; those without tokens (found on disk) do not enter the rate."""
        now = time.monotonic()
        self.done += rows
        self.tokens += tokens
        self.new += rows if tokens else 0
        seconds = max(now - self.started, 1e-6)
        rate = f"{self.tokens / seconds:,.0f} tokens/s" if self.tokens else ""
        if self._bar and self._task is not None:
            self._bar.update(self._task, advance=rows, rate=rate)
        elif self.enabled and now - self.said >= 10.0:
            self.said = now
            left = (self.total - self.done) * seconds / self.new if self.new else 0.0
            self._console.print(
                f"{self.name}: {self.done}/{self.total} rows, {rate}, {left:,.0f} s left", highlight=False
            )
