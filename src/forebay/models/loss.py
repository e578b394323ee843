"""The frozen head and the losses, on supervised slots only.

Guarantees: no tensor of [slots, vocabulary] ever exists: slots go through the head in chunks, and a chunk's gradient
with respect to its hidden rows is computed in the forward pass, while its probabilities are at hand (4HV operations per
slot; recomputing them in backward would take 6HV). The loss is a sum, times a scale known before the forward pass
(1 / the window's weight sum), so gradients add up over micro-steps and replicas (G6). Weights never enter the counts of
hits; a slot of weight zero is unscored, neither hit nor miss. Called by `models.step` and the guard.

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
from forebay.models.matmul import fast, times_transposed

#: Smoothing of D-PACE confidences when the configuration does not say.
DPACE_ALPHA = 0.5

#: Most bytes of a chunk of logits in the compute dtype. Products of few rows are slow, above all in bf16; larger ones
#: fall out of the caches and of the allocator's pools.
CHUNK_BYTES = 8 * 2**20
GPU_CHUNK_BYTES = 2**30


@dataclass(frozen=True)
class FrozenHead:
    """The target's head. `kept` narrows it to some token ids: a training shortlist or a reduced draft vocabulary.

    `norm` is the target's final norm, needed only where the loss reads the target's own distribution.
    """

    weight: Tensor  # [vocabulary, H] in the compute dtype
    rows: Tensor  # [V, H]: `weight`, or its kept rows
    columns: Tensor  # [H, V]: the same; a copy laid out for the fast product where that pays, else a view
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
            return cls(weight, weight, _columns(weight), None, None, scale, softcap, norm, bias)
        kept = kept.to(weight.device, torch.int64)
        row_of = torch.full((len(weight),), -1, dtype=torch.int64, device=weight.device)
        row_of[kept] = torch.arange(len(kept), device=weight.device)
        rows = weight[kept].contiguous()
        return cls(weight, rows, _columns(rows), kept, row_of, scale, softcap, norm, bias)

    def logits(self, hidden: Tensor, kept: bool = True) -> Tensor:
        """[C, H] -> [C, V] (`kept`) or [C, vocabulary], scaled and soft-capped as the target does."""
        out = times_transposed(hidden, self.rows if kept else self.weight)
        if self.bias is not None:
            out += self.bias if self.kept is None or not kept else self.bias[self.kept]
        if self.scale != 1.0:
            out *= self.scale
        if self.softcap is not None:
            out.div_(self.softcap).tanh_().mul_(self.softcap)
        return out


def _columns(rows: Tensor) -> Tensor:
    return rows.T.contiguous() if fast(rows) else rows.T


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
        limit = CHUNK_BYTES if hidden.device.type == "cpu" else GPU_CHUNK_BYTES
        most = min(chunk, max(16, limit // (hidden.element_size() * len(head.rows))))
        chunk = -(-count // -(-count // most)) if count else most  # even chunks
        exact = torch.promote_types(hidden.dtype, torch.float32)
        losses, confidence = (torch.empty(count, dtype=exact, device=hidden.device) for _ in range(2))
        hits = torch.empty(count, dtype=torch.bool, device=hidden.device)
        slopes = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        wide = None if hidden.dtype == exact else hidden.new_empty(chunk, len(head.rows), dtype=exact)
        for begin in range(0, count, chunk):
            part = slice(begin, min(begin + chunk, count))
            logits = head.logits(hidden[part])
            if wide is not None:
                logits = wide[: len(logits)].copy_(logits)
            bent = None if head.softcap is None or slopes is None else 1 - (logits / head.softcap) ** 2
            wanted = labels[part]
            target = None
            if terms.soft:
                target = _target_logits(last, part, head).to(exact)
                if terms.target_labels:
                    wanted = target.argmax(-1)
                target = target if head.kept is None else target[:, head.kept]
            row = wanted if head.row_of is None else head.row_of[wanted]
            losses[part], confidence[part], hits[part], slope = _chunk_losses(
                logits, row, target, terms, head.row_of is not None
            )
            if slopes is not None:
                slope = slope if bent is None else slope.mul_(bent)
                slopes[part] = times_transposed(slope.to(hidden.dtype), head.columns)
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


def _chunk_losses(
    logits: Tensor, row: Tensor, target: Tensor | None, terms: Terms, narrowed: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Loss [C], confidence [C], hit [C] and the loss's slope in the logits [C, V] of one chunk.

    `row` is the label's row, -1 for a label outside the kept vocabulary: never a hit, no gradient from its ce.
    """
    inside = (row >= 0).to(logits.dtype)
    at = row.clamp_min(0)[:, None]
    top = logits.amax(-1)
    own = logits.gather(1, at)[:, 0]
    hit = (own == top) & (row >= 0)
    # The logits are not read again unless a kl term needs them, so their memory is reused.
    q = torch.softmax(logits, -1) if terms.kl else torch.softmax(logits, -1, out=logits)
    # The largest probability is at least 1/V, so this log is safe where log q[label] would not be.
    log_sum = top - q.amax(-1).log()
    ce = (log_sum - own) * inside
    loss, confidence = ce * terms.ce, (-ce).exp() * inside
    if target is None or not (terms.kl or terms.tv):
        slope = q.scatter_add_(1, at, torch.full_like(at, -1.0, dtype=q.dtype))
        if narrowed or terms.ce != 1.0:
            slope.mul_((terms.ce * inside)[:, None])
        return loss, confidence, hit, slope
    log_p = target.log_softmax(-1)
    p = log_p.exp()
    slope = q * (terms.ce * inside)[:, None]
    slope.scatter_add_(1, at, -(terms.ce * inside)[:, None])
    if terms.kl:
        loss = loss + terms.kl * (p * (log_p - logits)).sum(-1).add_(log_sum)
        slope.add_(q, alpha=terms.kl).sub_(p, alpha=terms.kl)
    distance = (p - q).abs().sum(-1) / 2
    if terms.tv:
        loss = loss + terms.tv * distance
        sign = torch.sign(q - p)
        slope.add_(q * (sign - (q * sign).sum(-1, keepdim=True)), alpha=terms.tv / 2)
    return loss, confidence if terms.ce else 1 - distance, hit, slope


def block_loss(
    hidden: Tensor,
    slots: Tensor,
    labels: Tensor,
    weights: Tensor,
    head: FrozenHead,
    config: LossConfig,
    scale: float | Tensor = 1.0,
    last: Tensor | None = None,
    first_slot: int = 1,
) -> tuple[Tensor, BlockSums]:
    """`scale` x sum of weight x loss over the slots of one item, and its sums (without the scale).

    hidden [A, B, H]; slots [S] into the flattened [A * B]; labels [S] token ids; weights [S] (0: padding, unscored);
    last [S, H]: the target's last hidden state that predicts each slot's label, for soft losses. `first_slot` is where
    a block's run of drafts begins (the spec's).
    """
    blocks, block, _ = hidden.shape
    terms = Terms.of(config)
    rows = hidden.flatten(0, 1).index_select(0, slots)
    losses, confidence, hits = SlotLosses.apply(rows, labels, last, head, terms, config.chunk_slots)
    scored = weights > 0
    used = weights.to(losses.dtype)
    if config.decay == "dpace":
        used = used * dpace_weights(confidence, scored, slots, blocks, block, config.dpace_alpha or DPACE_ALPHA)
    total = torch.dot(losses, used)
    return total * scale, _sums(total.detach(), weights, hits & scored, scored, slots, (blocks, block, first_slot))


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
