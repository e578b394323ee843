"""What a job costs before it runs: floating-point operations of the target and of the drafter (DFLASH.md).

Guarantees: counts matrix products and attention, a multiply-add as two; norms, softmax and rotary angles (a few per
cent) are left out. Pure arithmetic, no torch. Called by the planner's report, `cost.devices` and the benchmarks.

Symbols: H hidden, K captured layers, S context tokens, A anchors, B block, V rows of the head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class TargetShape:
    """Dimensions of the layers that run; `layers` counts up to and including the last captured one."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int  # active width for mixtures of experts
    vocab: int

    @classmethod
    def of(cls, facts: Any, layers_run: int | None = None) -> TargetShape:
        """From `models.facts.TargetFacts`."""
        return cls(
            layers_run or facts.num_layers,
            facts.hidden_size,
            facts.heads,
            facts.kv_heads,
            facts.head_dim,
            facts.intermediate_size,
            facts.vocab_size,
        )


@dataclass(frozen=True)
class DrafterShape:
    """Dimensions of a drafter. `captured` is K."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int  # rows of the head that training uses
    captured: int
    block: int

    @classmethod
    def of(cls, spec: Any, vocab: int | None = None) -> DrafterShape:
        """From `models.spec.DrafterSpec`; `vocab` where training uses a shortlist."""
        return cls(
            spec.layers,
            spec.hidden_size,
            spec.heads,
            spec.kv_heads,
            spec.head_dim,
            spec.intermediate_size,
            vocab or spec.draft_vocab_size or spec.vocab_size,
            len(spec.target_layer_ids),
            spec.block_size,
        )

    @property
    def parameters(self) -> int:
        """Trained parameters: fc, hidden_norm, norm and the layers."""
        norms = 2 * self.hidden + 2 * self.head_dim
        return self.captured * self.hidden**2 + 2 * self.hidden + self.layers * (layer_parameters(self) + norms)


def layer_parameters(shape: TargetShape | DrafterShape) -> int:
    """Weights of one layer's matrix products that a token passes through."""
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    return shape.hidden * (2 * q + 2 * kv + 3 * shape.intermediate)


def target_flops_per_token(shape: TargetShape, length: float, *, head: bool = False) -> float:
    """Forward of one token in a sequence of `length`, attention at its causal mean; `head`: with logits."""
    products = 2 * shape.layers * layer_parameters(shape)
    attention = 2 * shape.layers * shape.heads * shape.head_dim * length
    return products + attention + (2 * shape.hidden * shape.vocab if head else 0)


def drafter_flops(
    shape: DrafterShape,
    *,
    tokens: int,
    anchors: int,
    slots: int,
    visible: float | None = None,
    recompute_logits: bool = False,
) -> float:
    """Forward and backward of one item. visible: mean context that a block sees (default: half of `tokens`).

    Masks enter the first layer alike, so one row of queries, keys and values stands for them all there; only supervised
    slots go beyond the last layer's attention (models.drafter).
    """
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    context = tokens * (4 * shape.captured * shape.hidden**2 + 12 * shape.layers * shape.hidden * kv)
    queries = anchors * shape.block
    alike = max(0, queries - anchors - 1) * shape.hidden * (q + 2 * kv)
    beyond = (queries - slots) * shape.hidden * (q + 3 * shape.intermediate)
    body = 6 * (queries * shape.layers * layer_parameters(shape) - alike - beyond)
    head = slots * (6 if recompute_logits else 4) * shape.hidden * shape.vocab
    seen = (tokens / 2 if visible is None else visible) + shape.block
    attention = queries * 14 * shape.layers * shape.heads * shape.head_dim * seen
    return context + body + head + attention
