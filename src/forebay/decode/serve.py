"""The serving loop: draft a block, verify it with the target in one forward, keep what the target would have said.

Guarantees: with temperature 0 the tokens are the target's own greedy tokens (up to rounding where two logits tie);
with a temperature they are distributed as the target's own samples (rejection sampling). Batched over prompts: one
target forward verifies the blocks of all rows. Without a drafter the same loop decodes one token at a time. It does
not tokenise. Called by `evaluate`, `guard`, `check` and `api`.

Shapes: N rows, C cached columns, B block size, J drafts per round, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from forebay.decode.drafter import Context, ServedDrafter
from forebay.decode.target_side import TargetSide
from forebay.errors import UsageError


@dataclass
class Generation:
    """What one prompt gave. Token i of `verified` follows `prompt + verified[:i]`.

    A round is *whole* unless the text ended in it: what would have followed the end of text cannot be judged, whether
    the drafter foresaw the end or not. Such a round is not in `accepted`; `cut_rounds` counts it. The round in which
    `max_new_tokens` is passed is whole (the target judged all of it): `tokens` is cut there, `verified` is not.
    """

    prompt: list[int]
    tokens: list[int] = field(default_factory=list)
    verified: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)  # accepted drafts of each whole round
    starts: list[int] = field(default_factory=list)  # index in prompt + verified of each whole round's anchor
    drafts: list[list[int]] = field(default_factory=list)  # drafted tokens of each whole round
    margins: list[list[float]] = field(default_factory=list)  # best minus second-best draft logit
    cut_rounds: int = 0
    finish: Literal["eos", "length"] = "length"


Progress = Callable[[int, int], None]


@torch.inference_mode()
def serve(
    target: TargetSide,
    drafter: ServedDrafter | None,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    eos_token_ids: Iterable[int] = (),
    batch_size: int = 16,
    temperature: float = 0.0,
    seed: int = 0,
    progress: Progress | None = None,
) -> list[Generation]:
    """Generate for every prompt (token ids); the results are in the prompts' order.

    `drafter=None` decodes plainly, one token per forward. `temperature=0` is greedy. `progress(done, total)`.
    """
    if any(len(p) == 0 for p in prompts):
        raise UsageError("a prompt is empty: the serving loop needs at least one token to start from")
    if max_new_tokens < 1 or batch_size < 1 or temperature < 0:
        raise UsageError(
            f"max_new_tokens {max_new_tokens} and batch_size {batch_size} must be at least 1, "
            f"temperature {temperature} at least 0"
        )
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    results: dict[int, Generation] = {}
    generator = torch.Generator(device=target.device).manual_seed(seed)
    eos = frozenset(eos_token_ids)
    while order:
        # A round adds at least one token to each row and at most a block of columns, some of them stale.
        columns = len(prompts[order[-1]]) + max_new_tokens * (drafter.drafts_per_round + 1 if drafter else 1)
        count = min(batch_size, target.rows_at_once(columns) or batch_size)
        rows, order = order[-count:], order[:-count]  # the longest first: memory runs out at once or not at all
        batch = _Batch(target, drafter, [list(prompts[i]) for i in rows], max_new_tokens, eos, temperature, generator)
        results.update(zip(rows, batch.run(), strict=True))
        if progress is not None:
            progress(len(results), len(prompts))
    return [results[i] for i in range(len(prompts))]


class _Batch:
    """The rows of one batch and what they share: the target's cache, the drafter's context, the mask over both."""

    def __init__(
        self,
        target: TargetSide,
        drafter: ServedDrafter | None,
        prompts: list[list[int]],
        max_new_tokens: int,
        eos: frozenset[int],
        temperature: float,
        generator: torch.Generator,
    ) -> None:
        self.target, self.drafter = target, drafter
        self.limit, self.eos = max_new_tokens, eos
        self.temperature, self.generator = temperature, generator
        self.rows = [Generation(prompt) for prompt in prompts]

    def run(self) -> list[Generation]:
        """Prefill, then rounds until every row is finished."""
        live = list(self.rows)
        following = self._prefill()
        for row, token in zip(live, following.tolist(), strict=True):
            row.verified.append(token)
        while True:
            going = [i for i, row in enumerate(live) if not self._finished(row)]
            if not going:
                return self.rows
            if len(going) < len(live):
                live = [live[i] for i in going]
                following = self._select(torch.tensor(going, device=following.device), following)
            following = self._round(live, following)

    def _prefill(self) -> Tensor:
        """Read the prompts (padded on the left) and choose each row's first token `[N]`."""
        device = self.target.device
        longest = max(len(row.prompt) for row in self.rows)
        tokens = torch.zeros(len(self.rows), longest, dtype=torch.long, device=device)
        self.visible = torch.zeros(len(self.rows), longest, dtype=torch.bool, device=device)  # [N, C]
        for i, row in enumerate(self.rows):
            tokens[i, longest - len(row.prompt) :] = torch.tensor(row.prompt, device=device)
            self.visible[i, longest - len(row.prompt) :] = True
        positions = (self.visible.long().cumsum(-1) - 1).clamp(min=0)
        self.target.start()
        logits, features = self.target.forward(tokens, positions, self.visible, last_only=True)
        if self.drafter is not None:
            self.context = Context(self.drafter.layers)
            self.drafter.extend(self.context, features, positions)
        return self._choose(logits[:, -1])

    def _round(self, live: list[Generation], following: Tensor) -> Tensor:
        """One round of all live rows; returns each row's next token `[N]`."""
        start = self.visible.sum(-1, keepdim=True)  # [N, 1]: the position of the block's first token
        draft_logits = self._draft(following, start)
        drafts = self._choose(draft_logits)
        checked = torch.cat([following[:, None], drafts], 1)
        steps = torch.arange(checked.shape[1], device=checked.device)
        positions = start + steps
        seen = torch.cat([self.visible, torch.ones_like(checked, dtype=torch.bool)], 1)
        logits, features = self.target.forward(checked, positions, seen)
        accepted, following = judge(drafts, draft_logits, logits, self.temperature, self.generator)
        # Columns that no row keeps leave the cache; those that only some rows keep are hidden from the others.
        width = int(accepted.max()) + 1
        self.target.take_back(checked.shape[1] - width)
        kept = steps[:width] <= accepted[:, None]
        if self.drafter is not None:
            self.drafter.extend(self.context, features[:, :width], positions[:, :width])
        self.visible = torch.cat([self.visible, kept], 1)
        margins = _margins(draft_logits)
        for row, count, drafted, gaps, token in zip(
            live, accepted.tolist(), drafts.tolist(), margins.tolist(), following.tolist(), strict=True
        ):
            self._record(row, count, drafted, gaps, token)
        return following

    def _draft(self, following: Tensor, start: Tensor) -> Tensor:
        """Draft logits `[N, J, V]` of the block that starts with `following`; J = 0 without a drafter."""
        if self.drafter is None:
            return torch.zeros(len(following), 0, 1, device=following.device)
        block = torch.full((len(following), self.drafter.block_size), self.drafter.mask_token_id, device=start.device)
        block[:, 0] = following
        positions = start + torch.arange(self.drafter.block_size, device=start.device)
        hidden = self.drafter.forward(self.target.embed(block), positions, self.context, self.visible)
        return self.drafter.draft_logits(hidden, self.target.head)

    def _choose(self, logits: Tensor) -> Tensor:
        if self.temperature == 0 or logits.numel() == 0:
            return logits.argmax(-1) if logits.numel() else logits.new_empty(logits.shape[:-1], dtype=torch.long)
        shares = torch.softmax(logits / self.temperature, -1)
        return torch.multinomial(shares.flatten(0, -2), 1, generator=self.generator).view(shares.shape[:-1])

    def _record(self, row: Generation, accepted: int, drafts: list[int], margins: list[float], token: int) -> None:
        new = [*drafts[:accepted], token]
        ended = next((i for i, t in enumerate(new) if t in self.eos), None)
        if self.drafter is not None and ended is not None:
            row.cut_rounds += 1
        elif self.drafter is not None:
            row.starts.append(len(row.prompt) + len(row.verified) - 1)
            row.accepted.append(accepted)
            row.drafts.append(drafts)
            row.margins.append(margins)
        row.verified += new if ended is None else new[: ended + 1]

    def _finished(self, row: Generation) -> bool:
        if row.verified[-1] in self.eos:
            row.finish = "eos" if len(row.verified) <= self.limit else "length"
        elif len(row.verified) < self.limit:
            return False
        row.tokens = row.verified[: self.limit]
        return True

    def _select(self, rows: Tensor, following: Tensor) -> Tensor:
        self.target.select(rows)
        if self.drafter is not None:
            self.context = self.context.select(rows)
        self.visible = self.visible[rows]
        return following[rows]


def judge(
    drafts: Tensor, draft_logits: Tensor, logits: Tensor, temperature: float, generator: torch.Generator | None = None
) -> tuple[Tensor, Tensor]:
    """How many drafts of each row are accepted `[N]`, and the token that follows them `[N]`.

    drafts `[N, J]`, draft_logits `[N, J, V]`, target logits `[N, J + 1, V]`. Temperature 0 accepts the longest prefix
    equal to the target's argmax. Otherwise a draft x is accepted with probability min(1, p(x) / q(x)), and after the
    first rejection the token is drawn from max(p - q, 0), so every token is distributed as p, the target's.
    """
    count, size = drafts.shape
    row = torch.arange(count, device=drafts.device)
    if temperature == 0:
        best = logits.argmax(-1)
        accepted = (drafts == best[:, :size]).long().cumprod(-1).sum(-1)
        return accepted, best[row, accepted]
    p = torch.softmax(logits / temperature, -1)
    if size == 0:
        return torch.zeros_like(row), torch.multinomial(p[:, 0], 1, generator=generator)[:, 0]
    q = torch.softmax(draft_logits / temperature, -1)
    ratio = p[:, :size].gather(-1, drafts[..., None]) / q.gather(-1, drafts[..., None])
    chance = torch.rand(count, size, generator=generator, device=drafts.device)
    accepted = (chance < ratio[..., 0]).long().cumprod(-1).sum(-1)
    q = torch.cat([q, torch.zeros_like(q[:, :1])], 1)  # after a whole block accepted nothing is taken off p
    rest = (p - q).clamp(min=0)[row, accepted]
    # p == q up to rounding leaves nothing: then p itself is the right distribution.
    rest = torch.where(rest.sum(-1, keepdim=True) > 0, rest, p[row, accepted])
    return accepted, torch.multinomial(rest, 1, generator=generator)[:, 0]


def _margins(draft_logits: Tensor) -> Tensor:
    if draft_logits.shape[1] == 0:
        return draft_logits.new_zeros(draft_logits.shape[:2])
    best = draft_logits.float().topk(2, -1).values
    return best[..., 0] - best[..., 1]
