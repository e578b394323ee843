"""Let the target answer prompts, so that a drafter is trained on what the target would say: `forebay regenerate`.

Guarantees: every usable prompt is answered once, by its content; an answer is on disk within seconds of its end with
its finish reason and what made it; a killed run goes on where it stopped, a line cut by the kill is mended; answers
made with other settings are never mixed in. Prompts that cannot be used are counted by reason. Called by `api`, `cli`;
answers come from a loaded model here, or from a server in `stages.endpoint`.

    where = TargetConfig(model="path/to/target", dtype="bfloat16")
    target, tokenizer = load_model(where), load_tokenizer(where)  # of models.load
    regenerate("prompts.jsonl", "data.jsonl", target=target, tokenizer=tokenizer, max_new_tokens=256)
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from forebay.data.conversation import Conversation, Drop, prompt_of
from forebay.data.layouts import FIELDS, unwrapped
from forebay.data.progress import Progress
from forebay.data.readers import find_files, read
from forebay.data.rows import RowReader, RowSettings
from forebay.errors import DataError, UsageError

FLUSH_S = 2.0
#: Fields that describe the old answer and would be wrong about the new one.
STALE = FIELDS | {"regenerated"}


@dataclass
class Summary:
    """What one call did. `skipped` counts rows without a usable prompt by reason; `failed` names those not answered."""

    rows: int = 0
    written: int = 0
    resumed: int = 0
    duplicates: int = 0
    skipped: dict[str, int] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)
    finish_reasons: dict[str, int] = field(default_factory=dict)
    new_tokens: int = 0
    seconds: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass
class Prompt:
    """One row to answer: its conversation up to the last user turn, its content hash, and where it stands."""

    row: dict[str, Any]
    conversation: Conversation
    place: str

    @property
    def key(self) -> str:
        return self.conversation.id

    @property
    def messages(self) -> list[dict[str, Any]]:
        return self.conversation.messages


class AnswerFile:
    """The output: one JSON line per answer, appended. Opening it mends a cut last line and reads what is there."""

    def __init__(self, path: Path, made_by: dict[str, Any]):
        self.path, self.made_by = path, made_by
        self.keys: set[str] = set()
        self.finish_reasons: Counter[str] = Counter()
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(path, "ab+")  # noqa: SIM115 - closed by __exit__
        self._mend()
        self._flushed = time.monotonic()

    def __enter__(self) -> AnswerFile:
        return self

    def __exit__(self, *exc: object) -> None:
        self._file.close()

    def _mend(self) -> None:
        """Cut what follows the last line break (the file may be huge), then read the keys."""
        size = end = self._file.seek(0, os.SEEK_END)
        while end > 0:
            start = max(0, end - 65536)
            self._file.seek(start)
            found = self._file.read(end - start).rfind(b"\n")
            end = start + found + 1 if found >= 0 else start
            if found >= 0:
                break
        if end < size:
            self._file.truncate(end)
        self._file.seek(0)
        for number, line in enumerate(self._file, 1):
            try:
                row = json.loads(line)
                key, made_by = row["regenerated"]["prompt"], dict(row["regenerated"]["by"])
            except (ValueError, KeyError, TypeError):
                raise UsageError(
                    f"{self.path} line {number} was not written by `forebay regenerate`: give another --out"
                ) from None
            differs = [
                f"{k}: {made_by.get(k)!r} there, {v!r} now" for k, v in self.made_by.items() if made_by.get(k) != v
            ]
            if differs:
                raise UsageError(
                    f"{self.path} was made with other settings ({'; '.join(differs)}): give another --out or the same "
                    "settings"
                )
            self.keys.add(key)
            self.finish_reasons[row.get("finish_reason") or "unknown"] += 1

    def write(self, prompt: Prompt, message: dict[str, Any], finish_reason: str) -> None:
        """Append one answer."""
        row = {k: v for k, v in prompt.row.items() if k not in STALE}
        row["messages"] = [*prompt.conversation.messages, message]
        if prompt.conversation.tools:
            row["tools"] = prompt.conversation.tools
        row["finish_reason"] = finish_reason
        row["regenerated"] = {"prompt": prompt.key, "by": self.made_by}
        self._file.write(json.dumps(row, ensure_ascii=False).encode("utf-8", "replace") + b"\n")
        self.keys.add(prompt.key)
        self.finish_reasons[finish_reason] += 1
        if time.monotonic() - self._flushed > FLUSH_S:
            self._file.flush()
            self._flushed = time.monotonic()


class Prompts:
    """The prompts of files that are still to answer, streamed; what is passed over is counted in the summary."""

    def __init__(
        self, inputs: Any, answered: set[str], summary: Summary, fields: Mapping[str, str] | None = None
    ) -> None:
        """`fields`: a layout's name for a field -> the rows' name for it."""
        self._reader = RowReader(RowSettings(fields=fields or {}))
        self.files = find_files([inputs] if isinstance(inputs, str | os.PathLike) else inputs)
        self.total = sum(1 for _ in read(self.files))
        self._answered, self._summary = answered, summary
        self._skipped: Counter[str] = Counter()
        self._seen: set[str] = set()
        self._first = ""

    def __iter__(self) -> Iterator[Prompt]:
        for record in read(self.files):
            self._summary.rows += 1
            place = f"{self.files[record.file]}:{record.line}"
            row = self._reader.row(record)
            found = row if isinstance(row, Drop) else prompt_of(row)
            if isinstance(row, Drop) or isinstance(found, Drop):
                self.skip(found.reason, f"{place}: {found.detail}")
                continue
            prompt = Prompt(unwrapped(row), found, place)
            if prompt.key in self._seen:
                self._summary.duplicates += 1
            elif prompt.key in self._answered:
                self._summary.resumed += 1
                self._seen.add(prompt.key)
            else:
                self._seen.add(prompt.key)
                yield prompt
        if not self._seen:
            raise DataError(
                f"no row to answer in {self.total} rows ({self._first or 'no rows'}): each line must be like "
                '{"messages": [{"role": "user", "content": "..."}]}'
            )

    def skip(self, reason: str, detail: str) -> None:
        """Count a row that is not answered."""
        self._first = self._first or detail
        self._skipped[reason] += 1
        self._summary.skipped = dict(self._skipped)

    @property
    def passed(self) -> int:
        """Rows that need no answer any more, or never will."""
        return self._summary.duplicates + self._summary.resumed + sum(self._skipped.values())


def regenerate(
    prompts_file: str | os.PathLike[str] | list[str | os.PathLike[str]],
    out_file: str | os.PathLike[str],
    *,
    target: Any,
    tokenizer: Any,
    max_new_tokens: int = 512,
    batch_size: int = 64,
    temperature: float = 0.0,
    seed: int = 0,
    template_kwargs: dict[str, Any] | None = None,
    fields: Mapping[str, str] | None = None,
    progress: bool = True,
) -> Summary:
    """Answer prompts (any format that `prepare` reads) with a loaded target. See the module's guarantees.

    Raises DataError: no usable prompt. UsageError: `out_file` holds answers made with other settings.
    """
    from forebay.stages.generation import Generator, Question, stop_tokens

    started = time.monotonic()
    kwargs = template_kwargs or {}
    stops = stop_tokens(target, tokenizer)
    if not stops:
        raise UsageError("the target names no end token: set eos_token_id in its generation_config.json")
    limit = getattr(target.config.get_text_config(), "max_position_embeddings", None)
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else min(stops)
    generator = Generator(target, stops=stops, pad=pad, temperature=temperature, limit=limit)
    name = Path(str(target.config._name_or_path)).name
    made_by = settings_record(name, kwargs, temperature, seed, max_new_tokens, raw=True)
    summary = Summary()
    with AnswerFile(Path(out_file), made_by) as answers:
        prompts = Prompts(prompts_file, answers.keys, summary, fields)

        def questions() -> Iterator[Question]:
            for prompt in prompts:
                ids = template_ids(tokenizer, prompt.conversation, kwargs)
                if isinstance(ids, Drop):
                    prompts.skip(ids.reason, f"{prompt.place}: {ids.detail}")
                elif limit and len(ids) >= limit:
                    prompts.skip("prompt_too_long", f"{prompt.place}: {len(ids)} tokens, the target takes {limit}")
                else:
                    yield Question(prompt, ids, seed_of(seed, prompt.key))

        with Progress("regenerate", prompts.total, progress) as shown:
            for reply in generator.run(questions(), max_new_tokens=max_new_tokens, batch_size=batch_size):
                text = tokenizer.decode(reply.tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)
                answers.write(reply.about, {"role": "assistant", "content": text}, reply.finish_reason)
                summary.written += 1
                summary.new_tokens += len(reply.tokens)
                shown.update(prompts.passed + summary.written, {"tokens": summary.new_tokens}, known=prompts.passed)
        summary.finish_reasons = dict(answers.finish_reasons)
    summary.seconds = time.monotonic() - started
    return summary


def settings_record(
    model: str, template_kwargs: dict[str, Any], temperature: float, seed: int, max_new_tokens: int, *, raw: bool
) -> dict[str, Any]:
    """What made an answer; stored with each. `raw`: it is the target's text as it is, special tokens included."""
    return {
        "model": model,
        "template_kwargs": template_kwargs,
        "temperature": temperature,
        "seed": seed if temperature > 0 else None,
        "max_new_tokens": max_new_tokens,
        "raw": raw,
    }


def seed_of(seed: int, key: str) -> int:
    """A seed for one prompt, from the run's seed and the prompt's content."""
    return int.from_bytes(hashlib.blake2b(f"{seed}:{key}".encode(), digest_size=7).digest(), "big")


def template_ids(tokenizer: Any, conversation: Conversation, template_kwargs: dict[str, Any]) -> list[int] | Drop:
    """Token ids of a prompt, up to where the answer begins."""
    from forebay.data.template import FAULTS

    try:
        text = tokenizer.apply_chat_template(
            conversation.messages,
            tools=conversation.tools,
            tokenize=False,
            add_generation_prompt=True,
            **template_kwargs,
        )
    except FAULTS as error:
        return Drop("template_error", str(error).splitlines()[0] if str(error) else type(error).__name__)
    return tokenizer(text, add_special_tokens=False)["input_ids"]
