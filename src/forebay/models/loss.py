"""The frozen head and the losses, on supervised slots only.

Guarantees: no tensor of [slots, vocabulary] ever exists: slots go through the head in chunks, for a cross-entropy over
pieces of the vocabulary too, and a chunk's gradient with respect to its hidden rows is computed in the forward pass,
while its probabilities are at hand (4HV operations per slot; recomputing them in backward would take 6HV). The loss is
a sum, times a scale known before the forward pass (1 / the window's weight sum), so gradients add up over micro-steps
and replicas (G6). Weights never enter the counts of hits; a slot of weight zero is unscored, neither hit nor miss.
Called by `models.step`, `models.graph` and the guard.

Legend: S slots, V rows of the head, H hidden size, A anchors, B slots of a block.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from forebay.config import LossConfig
from forebay.errors import ContractError
from forebay.models.matmul import times_transposed

#: Smoothing of D-PACE confidences when the configuration does not say.
DPACE_ALPHA = 0.5

#: Most bytes of a chunk's logits in the compute dtype: larger ones fall out of the caches and the allocator's pools.
CHUNK_BYTES = 4 * 2**20
GPU_CHUNK_BYTES = 2**30

#: Fewest slots of a chunk: products of few rows are slow, above all in bf16.
FEWEST_SLOTS = 16

#: A label's logit, while it is kept out of the sums, is this far below the largest: e^-80 adds nothing, and powers that
#: underflow are slow.
KEPT_OUT = -80.0


@dataclass(frozen=True)
class FrozenHead:
    """The target's head. `kept` narrows it to some token ids: a training shortlist or a reduced draft vocabulary.

    `norm` is the target's final norm, needed only where the loss reads the target's own distribution.
    """

    weight: Tensor  # [vocabulary, H] in the compute dtype
    rows: Tensor  # [V, H]: `weight`, or its kept rows
    kept: Tensor | None = None  # [V] token ids, rising
    row_of: Tensor | None = None  # [vocabulary] row of each token id, -1 where it was left out
    scale: float = 1.0
    softcap: float | None = None
    norm: Callable[[Tensor], Tensor] | None = None
    bias: Tensor | None = None  # [vocabulary]

    @classmethod
    def build(
        cls,
        weight: Tensor,
        dtype: torch.dtype = torch.float32,
        kept: Tensor | None = None,
        scale: float = 1.0,
        softcap: float | None = None,
        norm: Callable[[Tensor], Tensor] | None = None,
        bias: Tensor | None = None,
    ) -> FrozenHead:
        """Cast once, and copy the kept rows once."""
        weight = weight.detach().to(dtype)
        bias = None if bias is None else bias.detach().to(dtype)
        if kept is None:
            return cls(weight, weight, None, None, scale, softcap, norm, bias)
        kept = kept.to(weight.device, torch.int64)
        row_of = torch.full((len(weight),), -1, dtype=torch.int64, device=weight.device)
        row_of[kept] = torch.arange(len(kept), device=weight.device)
        return cls(weight, weight[kept].contiguous(), kept, row_of, scale, softcap, norm, bias)

    def logits(self, hidden: Tensor, kept: bool = True, part: slice = slice(None)) -> Tensor:
        """[C, H] -> [C, V] (`kept`; `part` of them) or [C, vocabulary], scaled and soft-capped as the target does."""
        out = times_transposed(hidden, (self.rows if kept else self.weight)[part])
        if self.bias is not None:
            out += (self.bias if self.kept is None or not kept else self.bias[self.kept])[part]
        if self.scale != 1.0:
            out *= self.scale
        if self.softcap is not None:
            out.div_(self.softcap).tanh_().mul_(self.softcap)
        return out


@dataclass
class BlockSums:
    """Sums of one or more micro-steps, on the device, added without a host synchronisation. Slot j is at index j."""

    loss: Tensor  # [] sum of weight x loss
    weight: Tensor  # [] sum of the weights, before D-PACE
    hits: Tensor  # [B] scored slots whose argmax is the label
    scored: Tensor  # [B]
    prefix_hits: Tensor  # [B] blocks whose slots up to j were all hits
    prefix_scored: Tensor  # [B] blocks whose slots up to j were all scored

    def __add__(self, other: BlockSums) -> BlockSums:
        return BlockSums(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    @classmethod
    def zeros(cls, block: int, device: torch.device | str = "cpu") -> BlockSums:
        def zero(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.float64, device=device)

        return cls(zero(), zero(), zero(block), zero(block), zero(block), zero(block))

    def report(self) -> dict[str, Any]:
        """Plain numbers (synchronises): loss, accuracy, per-slot acceptance and the uniform-anchor accept length."""
        hits, scored, ahead, seen = (x.tolist() for x in (self.hits, self.scored, self.prefix_hits, self.prefix_scored))
        slots = [j for j in range(len(scored)) if scored[j] or seen[j]]
        acceptance = [ahead[j] / seen[j] if seen[j] else 0.0 for j in slots]
        return {
            "loss": float(self.loss) / max(float(self.weight), 1e-300),
            "weight_sum": float(self.weight),
            "slots": int(sum(scored)),
            "accuracy": sum(hits) / max(sum(scored), 1),
            "accuracy_by_slot": [hits[j] / scored[j] if scored[j] else 0.0 for j in slots],
            "acceptance_by_slot": acceptance,
            "uniform_accept_length": 1.0 + sum(acceptance),
        }


@dataclass(frozen=True)
class Terms:
    """Weights of the summed losses, and which labels the hard one uses."""

    ce: float = 1.0
    kl: float = 0.0
    tv: float = 0.0
    target_labels: bool = False

    @classmethod
    def of(cls, config: LossConfig) -> Terms:
        given = config.weights
        return cls(given.get("ce", 0.0), given.get("kl", 0.0), given.get("tv", 0.0), config.labels == "target")

    @property
    def soft(self) -> bool:
        """Whether the target's distribution is needed."""
        return self.kl > 0 or self.tv > 0 or self.target_labels


class SlotLosses(torch.autograd.Function):
    """Loss of each slot [S], with its hidden gradient already computed when the forward pass ends.

    Also returned, without gradients: the drafter's confidence in each slot [S] (the label's probability, or the
    acceptance probability sum(min(p, q)) where no ce term is asked for) and whether its argmax is the label [S].
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, labels: Tensor, last: Tensor | None, head: FrozenHead, terms: Terms, chunk: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """hidden [S, H], labels [S] token ids, last [S, H] the target's last hidden state for each slot."""
        count = len(hidden)
        exact = torch.promote_types(hidden.dtype, torch.float32)
        room = (CHUNK_BYTES if hidden.device.type == "cpu" else GPU_CHUNK_BYTES) // hidden.element_size()
        most = min(chunk, max(FEWEST_SLOTS, room // len(head.rows))) if terms.soft else chunk
        chunk = _even(count, most)
        losses, confidence = (torch.empty(count, dtype=exact, device=hidden.device) for _ in range(2))
        hits = torch.empty(count, dtype=torch.bool, device=hidden.device)
        slopes = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        for begin in range(0, count, chunk):
            part = slice(begin, min(begin + chunk, count))
            if terms.soft:
                target = _target_logits(last, part, head).to(exact)
                found = _soft_losses(hidden[part], labels[part], head, slopes is not None, target, terms)
            else:
                found = _hard_losses(hidden[part], labels[part], head, slopes is not None, terms.ce, room)
            losses[part], confidence[part], hits[part], slope = found
            if slopes is not None:
                slopes[part] = slope
        if slopes is not None:
            ctx.save_for_backward(slopes.mul_(head.scale) if head.scale != 1.0 else slopes)
        ctx.mark_non_differentiable(confidence, hits)
        return losses, confidence, hits

    @staticmethod
    def backward(ctx: Any, upstream: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        (slopes,) = ctx.saved_tensors
        return slopes * upstream.to(slopes.dtype)[:, None], None, None, None, None, None


def _target_logits(last: Tensor | None, part: slice, head: FrozenHead) -> Tensor:
    """The target's own logits [C, vocabulary] from its last hidden state before the final norm."""
    if last is None or head.norm is None:
        raise ContractError(
            "this loss reads the target's distribution, but the items carry no last hidden state or the head has no "
            "final norm: capture it (loss.needs_last_hidden) or train with ce on the data's tokens"
        )
    return head.logits(head.norm(last[part].to(head.weight.dtype)), kept=False)


def _even(count: int, most: int) -> int:
    """Size of the fewest like pieces of `count`, each of `most` at most."""
    return -(-count // -(-count // most)) if count else most


def _rows_of(labels: Tensor, head: FrozenHead) -> tuple[Tensor, Tensor]:
    """The head's row of each label [C] (0 for a label outside the kept vocabulary), and whether it has one."""
    row = labels if head.row_of is None else head.row_of[labels]
    return row.clamp_min(0), row >= 0


def _bent(logits: Tensor, softcap: float) -> Tensor:
    """Slope of soft-capped logits in the plain ones."""
    return 1 - (logits / softcap) ** 2


Losses = tuple[Tensor, Tensor, Tensor, Tensor | None]


def _hard_losses(
    hidden: Tensor, labels: Tensor, head: FrozenHead, slope_wanted: bool, weight: float, room: int
) -> Losses:
    """Cross-entropy [C] times `weight`, confidence [C], hit [C] and the loss's slope in `hidden` [C, H].

    The vocabulary is read once, in pieces of at most `room` logits, and sums over what was read are kept relative
    to the largest logit (as FlashAttention does with keys, arXiv 2205.14135). A label is kept out of the sums, so that
    where it is all but certain its slope is still exact. A label outside the kept vocabulary is never a hit and has no
    slope.
    """
    exact = torch.promote_types(hidden.dtype, torch.float32)
    row, inside = _rows_of(labels, head)
    vocabulary, at = len(head.rows), row[:, None]
    top, own = (hidden.new_full((len(hidden), 1), float("-inf"), dtype=exact) for _ in range(2))
    others, pull = torch.zeros_like(top), torch.zeros_like(hidden, dtype=exact)
    piece = _even(vocabulary, max(1, room // len(hidden)))
    for begin in range(0, vocabulary, piece):
        part = slice(begin, min(begin + piece, vocabulary))
        logits = head.logits(hidden, part=part).to(exact)
        column = at - begin
        here = (column >= 0) & (column < logits.shape[1])
        column = column.clamp(0, logits.shape[1] - 1)
        found = logits.gather(1, column)
        own = torch.where(here, found, own)
        bent = None if head.softcap is None else _bent(logits, head.softcap)
        above = torch.maximum(top, logits.amax(-1, keepdim=True))
        logits.scatter_(1, column, torch.where(here, above + KEPT_OUT, found))
        odds = logits.sub_(above).exp_()
        fade = (top - above).exp_()
        others.mul_(fade).add_(odds.sum(-1, keepdim=True))
        if slope_wanted:
            odds = odds if bent is None else odds.mul_(bent)
            pull.mul_(fade).add_(times_transposed(odds.to(hidden.dtype), head.rows[part].T))
        top = above
    total = others + (own - top).exp_()
    ce = (total.log() + top - own)[:, 0] * inside
    hit = (own == top)[:, 0] & inside
    if not slope_wanted:
        return ce * weight, (-ce).exp() * inside, hit, None
    missing = others if head.softcap is None else others * _bent(own, head.softcap)
    slope = pull.addcmul_(head.rows[row].to(exact), missing, value=-1).mul_(inside[:, None] * weight / total)
    return ce * weight, (-ce).exp() * inside, hit, slope.to(hidden.dtype)


def _soft_losses(
    hidden: Tensor, labels: Tensor, head: FrozenHead, slope_wanted: bool, target: Tensor, terms: Terms
) -> Losses:
    """The same for losses that read the target's logits [C, vocabulary], with a chunk's logits [C, V] at once."""
    exact = target.dtype
    row, inside = _rows_of(target.argmax(-1) if terms.target_labels else labels, head)
    target = target if head.kept is None else target[:, head.kept]
    logits = head.logits(hidden).to(exact)
    at, counted = row[:, None], inside.to(exact)
    top, own = logits.amax(-1), logits.gather(1, at)[:, 0]
    log_q, log_p = logits.log_softmax(-1), target.log_softmax(-1)
    q, p = log_q.exp(), log_p.exp()
    ce = -log_q.gather(1, at)[:, 0] * counted
    loss, confidence = ce * terms.ce, (-ce).exp() * counted
    slope = q * (terms.ce * counted)[:, None]
    slope.scatter_add_(1, at, -(terms.ce * counted)[:, None])
    if terms.kl:
        loss = loss + terms.kl * (p * (log_p - log_q)).sum(-1)
        slope.add_(q, alpha=terms.kl).sub_(p, alpha=terms.kl)
    distance = (p - q).abs().sum(-1) / 2
    if terms.tv:
        loss = loss + terms.tv * distance
        sign = torch.sign(q - p)
        slope.add_(q * (sign - (q * sign).sum(-1, keepdim=True)), alpha=terms.tv / 2)
    if head.softcap is not None:
        slope.mul_(_bent(logits, head.softcap))
    of_hidden = times_transposed(slope.to(hidden.dtype), head.rows.T) if slope_wanted else None
    return loss, confidence if terms.ce else 1 - distance, (own == top) & inside, of_hidden


def block_loss(
    hidden: Tensor,
    slots: Tensor,
    labels: Tensor,
    weights: Tensor,
    head: FrozenHead,
    config: LossConfig,
    shape: tuple[int, int, int],
    scale: float | Tensor = 1.0,
    last: Tensor | None = None,
) -> tuple[Tensor, BlockSums]:
    """`scale` x sum of weight x loss over the slots of one item, and its sums (without the scale).

    hidden [S, H]; slots [S] (a * B + j is slot j of block a); labels [S] token ids; weights [S] (0: padding, unscored);
    shape: A, B and the slot at which a block's run of drafts begins (the spec's `first_slot`); last [S, H]: the
    target's last hidden state that predicts each slot's label, for soft losses.
    """
    terms = Terms.of(config)
    losses, confidence, hits = SlotLosses.apply(hidden, labels, last, head, terms, config.chunk_slots)
    scored = weights > 0
    used = weights.to(losses.dtype)
    if config.decay == "dpace":
        used = used * dpace_weights(confidence, scored, slots, *shape[:2], config.dpace_alpha or DPACE_ALPHA)
    total = torch.dot(losses, used)
    return total * scale, _sums(total.detach(), weights, hits & scored, scored, slots, shape)


def dpace_weights(confidence: Tensor, scored: Tensor, slots: Tensor, blocks: int, block: int, alpha: float) -> Tensor:
    """D-PACE: how much the expected accepted run grows with each slot's log confidence [S], not differentiated.

    Slot j's weight is the sum over slots k >= j of the product over slots i <= k of (1 - alpha) * confidence_i + alpha.
    """
    smooth = torch.ones(blocks * block, dtype=confidence.dtype, device=confidence.device)
    counted = torch.zeros_like(smooth).index_add_(0, slots, scored.to(smooth.dtype))
    smooth.index_add_(0, slots, ((1 - alpha) * confidence.detach() + alpha - 1) * scored)
    run = smooth.view(blocks, block).cumprod(-1) * counted.view(blocks, block)
    return run.flip(-1).cumsum(-1).flip(-1).flatten()[slots]


def _sums(
    total: Tensor, weights: Tensor, hits: Tensor, scored: Tensor, slots: Tensor, shape: tuple[int, int, int]
) -> BlockSums:
    blocks, block, first = shape

    def grid(values: Tensor) -> Tensor:
        flat = torch.zeros(blocks * block, dtype=torch.float64, device=values.device)
        return flat.index_add_(0, slots, values.to(torch.float64)).view(blocks, block)

    def runs(values: Tensor) -> Tensor:
        """Blocks whose slots first..j are all set, for each j [B]."""
        return torch.cat([values.new_zeros(first), values[:, first:].cumprod(-1).sum(0)])

    hit, seen = grid(hits), grid(scored)
    # A run counts where all its slots are scored: a block cut by its document's end says nothing of longer runs.
    prefix_scored, prefix_hits = runs(seen), runs(hit)
    return BlockSums(
        total.to(torch.float64), weights.to(torch.float64).sum(), hit.sum(0), seen.sum(0), prefix_hits, prefix_scored
    )
