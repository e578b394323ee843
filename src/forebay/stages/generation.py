"""Continuous batched generation with a Hugging Face causal language model, for `forebay regenerate`.

Guarantees: every prompt yields exactly one reply; when a quarter of the running batch is done, its rows leave and the
next prompts take their place; sampled rows draw from a generator of their own, so the seed decides and not the batch.
Does not guarantee that a greedy reply in bfloat16 is the same for every batch size:
near-ties flip with the shape of a matrix product. Called by `stages.regenerate`; needs no other part of Forebay.

Legend: B rows running, W width of the cache, V vocabulary, L longest prompt of a prefill.
"""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

SPARE_COLUMNS = 64  # room in the cache beyond what is used, so that a step copies one column and not the whole cache
LOOK_AHEAD = 4096  # questions sorted by length at a time: memory does not grow with their number
PREFILL_TOKENS = 8192  # padded prompt tokens of one prefill


@dataclass
class Question:
    """One prompt. `about` is the caller's, and comes back with the reply; `seed` decides what is sampled."""

    about: Any
    prompt: Sequence[int]
    seed: int = 0


@dataclass
class Reply:
    """One finished generation. `tokens` ends before the stop token; finish_reason is `stop` or `length`."""

    about: Any
    tokens: list[int]
    finish_reason: str


@dataclass
class _Row:
    about: Any
    prompt: Sequence[int]
    room: int
    generator: torch.Generator | None
    tokens: list[int] = field(default_factory=list)
    reason: str | None = None

    @property
    def cached(self) -> int:
        """Tokens in the cache: the newest one is not yet."""
        return len(self.prompt) + max(0, len(self.tokens) - 1)


class _RoomyLayer(DynamicLayer):
    """A cache layer [B, heads, W, D] that writes new columns in place while it has room."""

    def update(self, key_states, value_states, *args, **kwargs):
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self._stores = [states[:, :, :0] for states in (key_states, value_states)]
            self._width = 0
        width = self._width + key_states.shape[-2]
        for i, states in enumerate((key_states, value_states)):
            if self._stores[i].shape[-2] < width:
                self._stores[i] = _grown(self._stores[i], self._width, width + SPARE_COLUMNS)
            self._stores[i][:, :, self._width : width] = states
        self._width = width
        self.keys, self.values = (store[:, :, :width] for store in self._stores)
        return self.keys, self.values

    def adopt(self, keys: torch.Tensor, values: torch.Tensor, width: int) -> None:
        """Become the owner of two stores whose first `width` columns are in use."""
        self.lazy_initialization(keys, values)
        self._stores, self._width = [keys, values], width
        self.keys, self.values = keys[:, :, :width], values[:, :, :width]


def _grown(store: torch.Tensor, used: int, columns: int) -> torch.Tensor:
    out = store.new_zeros(*store.shape[:2], columns, store.shape[-1])
    out[:, :, :used] = store[:, :, :used]
    return out


def _regroup(parts: list[tuple[Cache, list[int]]], lengths: list[int]) -> Cache:
    """One cache of the named rows of several caches, each row aligned to the right, as narrow as the longest."""
    width = max(lengths)
    out = Cache(layer_class_to_replicate=_RoomyLayer)
    for number in range(len(parts[0][0].layers)):
        stores = []
        for name in ("keys", "values"):
            first = getattr(parts[0][0].layers[number], name)
            store = first.new_zeros(len(lengths), first.shape[1], width + SPARE_COLUMNS, first.shape[3])
            at = 0
            for cache, rows in parts:
                states = getattr(cache.layers[number], name)
                keep = min(width, states.shape[2])
                store[at : at + len(rows), :, width - keep : width] = states[rows, :, states.shape[2] - keep :]
                at += len(rows)
            stores.append(store)
        layer = _RoomyLayer()
        layer.adopt(*stores, width)
        out.layers.append(layer)
    return out


def _mask(lengths: Sequence[int], columns: int, width: int, device: torch.device) -> torch.Tensor:
    """[B, columns]: 1 where a row aligned to the right of `width` columns has a token, and for every later column."""
    starts = width - torch.tensor(lengths, device=device)[:, None]
    return (torch.arange(columns, device=device)[None, :] >= starts).long()


def stop_tokens(model: Any, tokenizer: Any) -> set[int]:
    """Ids at which a reply ends: the generation configuration's and the tokenizer's."""
    ids: set[int] = set()
    for value in (model.generation_config.eos_token_id, model.config.eos_token_id, tokenizer.eos_token_id):
        ids.update(value if isinstance(value, list | tuple) else [] if value is None else [value])
    return ids


class Generator:
    """Runs prompts through the model. `stops` end a reply; `limit` is the model's longest sequence."""

    def __init__(self, model: Any, *, stops: set[int], pad: int, temperature: float = 0.0, limit: int | None = None):
        self.model, self.temperature, self.limit = model, temperature, limit
        self.stops, self.pad = stops, pad
        self.device = next(model.parameters()).device
        takes = inspect.signature(model.forward).parameters
        self.only_last = {"logits_to_keep": 1} if "logits_to_keep" in takes else {}
        self.cache_name = "cache" if "cache" in takes else "past_key_values"
        kinds = {type(layer) for layer in DynamicCache(config=model.config).layers}
        # A sliding layer may keep all its columns (the mask hides the old ones); recurrent states cannot be regrouped.
        self.refills = kinds <= {DynamicLayer, DynamicSlidingWindowLayer}

    @torch.inference_mode()
    def run(self, questions: Iterable[Question], *, max_new_tokens: int, batch_size: int) -> Iterator[Reply]:
        """Replies in the order in which they finish. Questions are read `LOOK_AHEAD` at a time; of these the longest
        run first: what fits then, fits later."""
        source = iter(questions)
        waiting: deque[_Row] = deque()
        running: list[_Row] = []
        cache: Cache | None = None
        mask = torch.empty(0)
        while True:
            if not waiting:
                ahead = [self._row(question, max_new_tokens) for question in islice(source, LOOK_AHEAD)]
                waiting.extend(sorted(ahead, key=lambda row: -len(row.prompt)))
            if not waiting and not running:
                return
            done = sum(row.reason is not None for row in running)
            if not running or (self.refills and done * 4 >= len(running)) or done == len(running):
                yield from (Reply(r.about, r.tokens, r.reason) for r in running if r.reason)
                keep = [i for i, row in enumerate(running) if row.reason is None]
                cache, running = self._refill(cache, keep, running, waiting, batch_size)
                if not running:
                    continue
                width = cache.get_seq_length()
                columns = width + max(row.room - len(row.tokens) for row in running) + 1
                mask = _mask([row.cached for row in running], columns, width, self.device)
                continue  # replies of one token may be done already
            width = cache.get_seq_length()
            tokens = torch.tensor([[row.tokens[-1] if row.tokens else self.pad] for row in running], device=self.device)
            positions = mask[:, : width + 1].sum(1, keepdim=True) - 1
            self._accept(running, self._forward(tokens, mask[:, : width + 1], positions, cache))

    def _row(self, question: Question, max_new_tokens: int) -> _Row:
        length = len(question.prompt)
        room = min(max_new_tokens, (self.limit or 2**31) - length)
        assert length and room > 0, f"a prompt of {length} tokens leaves no room in {self.limit}"
        generator = torch.Generator().manual_seed(question.seed) if self.temperature > 0 else None
        return _Row(question.about, question.prompt, room, generator)

    def _refill(
        self, cache: Cache | None, keep: list[int], running: list[_Row], waiting: deque[_Row], batch_size: int
    ) -> tuple[Cache | None, list[_Row]]:
        """Drop what is done, prefill what fits, and join the two."""
        rows = [running[i] for i in keep]
        parts = [(cache, keep)] if keep else []
        while waiting and len(rows) < batch_size:
            longest = len(waiting[0].prompt)
            count = max(1, min(batch_size - len(rows), PREFILL_TOKENS // longest))
            new = [waiting.popleft() for _ in range(min(count, len(waiting)))]
            fresh = (
                Cache(layer_class_to_replicate=_RoomyLayer) if self.refills else DynamicCache(config=self.model.config)
            )
            lengths = [len(row.prompt) for row in new]
            tokens = torch.tensor([[self.pad] * (longest - len(r.prompt)) + list(r.prompt) for r in new])
            mask = _mask(lengths, longest, longest, self.device)
            positions = (mask.cumsum(1) - 1).clamp(min=0)
            self._accept(new, self._forward(tokens.to(self.device), mask, positions, fresh))
            rows += new
            if not self.refills:
                return fresh, rows
            parts.append((fresh, list(range(len(new)))))
        if not rows:
            return None, []
        if not parts[1:] and parts[0][0] is cache and len(rows) == len(running):
            return cache, rows
        return _regroup(parts, [row.cached for row in rows]), rows

    def _forward(self, tokens: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor, cache: Cache) -> torch.Tensor:
        """Logits [B, V] of the last column."""
        out = self.model(
            input_ids=tokens,
            attention_mask=mask,
            position_ids=positions,
            use_cache=True,
            **{self.cache_name: cache},
            **self.only_last,
        )
        return out.logits[:, -1]

    def _accept(self, rows: list[_Row], logits: torch.Tensor) -> None:
        """Append each live row's next token, and mark the rows that end with it."""
        chosen = logits.argmax(-1).tolist() if self.temperature <= 0 else self._sample(rows, logits)
        for row, token in zip(rows, chosen, strict=True):
            if row.reason is not None:
                continue
            if token in self.stops:
                row.reason = "stop"
                continue
            row.tokens.append(token)
            if len(row.tokens) >= row.room:
                row.reason = "length"

    def _sample(self, rows: list[_Row], logits: torch.Tensor) -> list[int]:
        shares = torch.softmax(logits.float() / self.temperature, -1).cpu()
        return [int(torch.multinomial(s, 1, generator=r.generator)) for s, r in zip(shares, rows, strict=True)]
