"""What a run holds in memory, known before it starts: items, the target's forward, the drafter's step.

Guarantees: every estimate grows with every dimension; for the tests' target and drafter it is within a quarter of the
measured peak (C90). It counts tensors, not what an allocator or a library keeps beside them (on CPU a few hundred MB of
code and caches). Pure arithmetic, no torch. Called by `forebay plan`, the start of a run and `docs`.

Symbols: H hidden, K captured layers, T tokens of an item, A anchors, B block, S slots, V head rows, Q = A * B queries.
"""

from __future__ import annotations

from dataclasses import dataclass

from forebay.cost.flops import DrafterShape, TargetShape, layer_parameters

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
CPU_QUERIES = 1024  # that models.step takes together on a CPU
CHUNK_SCORES = 2**18  # of models.attention
CHUNK_BYTES = 4 * 2**20  # of models.loss


def state_bytes(tokens: int, captured: int, hidden: int, dtype: str, last_hidden: bool = False) -> int:
    """Hidden states of `tokens` tokens: K * H each, one more H where the last hidden state is carried."""
    return tokens * (captured + last_hidden) * hidden * DTYPE_BYTES[dtype]


def item_bytes(
    tokens: int, anchors: int, slots: int, captured: int, hidden: int, dtype: str, last_hidden: bool = False
) -> int:
    """A whole item: states, and tokens, positions, documents, anchors, slots as 4-byte numbers (data.pack)."""
    host = 4 * (3 * tokens + 2 * anchors + 4 * slots)
    return state_bytes(tokens, captured, hidden, dtype, last_hidden) + host


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes by holder."""

    target_weights: int
    target_forward: int
    drafter_state: int  # masters, gradients, AdamW's moments
    drafter_step: int
    drafter_head: int  # embedding and head where the drafter's device holds a copy
    buffer: int

    @property
    def total(self) -> int:
        """The two roles at once, as with `device_sharing: split`."""
        return sum(vars(self).values())

    def describe(self) -> str:
        parts = ", ".join(f"{name.replace('_', ' ')} {value / 2**30:.2f}" for name, value in vars(self).items())
        return f"{self.total / 2**30:.2f} GiB ({parts})"


def target_forward_bytes(shape: TargetShape, rows: int, longest: int, dtype: str) -> int:
    """Peak of one sub-batch [rows, longest] beyond weights and slot: a layer's widest moment.

    That is the residual and its norm, gate, up and their product, or queries, keys and values with an fp32 copy.
    """
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    feed_forward = 3 * shape.hidden + 3 * shape.intermediate
    attention = 3 * shape.hidden + 3 * q + 3 * kv
    tables = 4 * shape.head_dim
    return rows * longest * (max(feed_forward, attention) + tables) * DTYPE_BYTES[dtype]


def drafter_step_bytes(
    shape: DrafterShape,
    *,
    tokens: int,
    anchors: int,
    slots: int,
    dtype: str,
    chunk_slots: int = 512,
    queries_at_once: int | None = CPU_QUERIES,
) -> int:
    """Peak of one micro-step beyond masters, moments and the item: what backward needs, gradients, a head chunk.

    queries_at_once: None where an item's blocks go in one part (a GPU).
    """
    d = DTYPE_BYTES[dtype]
    hidden, inner, layers = shape.hidden, shape.intermediate, shape.layers
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    queries = anchors * shape.block
    part = queries if queries_at_once is None else min(queries, max(queries_at_once, shape.block))
    part_slots = slots * part / max(queries, 1)
    # keys before and after their norm, values, and the gradients that the blocks leave on both
    context = tokens * (2 * hidden + layers * 5 * kv + 4 * shape.head_dim)
    alike = 2 * hidden + q + kv  # of the first layer, where one row stands for all masks
    body = part * (layers * (4 * hidden + 3 * q + 3 * kv + 2 * inner) + 3 * hidden - alike + 4 * shape.head_dim)
    rows = max(1, min(chunk_slots, part_slots))
    piece = min(shape.vocab, CHUNK_BYTES / (d * rows))
    scores = min(CHUNK_SCORES, part * shape.heads * tokens)
    moments = (  # the widest of these, one after the other
        2 * part_slots * hidden * d + rows * (piece * (4 + (d if d < 4 else 0)) + 4 * hidden * 4),
        part * (4 * inner + 2 * hidden) * d,
        2 * scores * 4 + (part * (3 * q + 2 * kv - 2 * inner - 2 * hidden) + tokens * 4 * kv) * d,  # after the other
    )
    casts = shape.parameters * d if d < 4 else 0
    return int((context + body) * d + max(moments) + casts + 4 * shape.parameters)


def drafter_state_bytes(shape: DrafterShape) -> int:
    """fp32 masters, gradients and AdamW's two moments."""
    return 16 * shape.parameters


def target_weight_bytes(shape: TargetShape, dtype: str, *, tied: bool, layers: int | None = None) -> int:
    """Weights of a dense target (for a mixture of experts count the file instead)."""
    embeddings = (1 if tied else 2) * shape.vocab * shape.hidden
    return ((layers or shape.layers) * layer_parameters(shape) + embeddings) * DTYPE_BYTES[dtype]


def estimate_memory(
    target: TargetShape,
    drafter: DrafterShape,
    *,
    tokens: int,
    anchors: int,
    slots: int,
    longest: int,
    buffer_bytes: int,
    target_dtype: str,
    drafter_dtype: str,
    total_layers: int | None = None,
    tied: bool = True,
    shared_head: bool = True,
    chunk_slots: int = 512,
) -> MemoryEstimate:
    """Everything a run of one target and one drafter holds. shared_head: both roles use the same copy of the head."""
    head = drafter.vocab * drafter.hidden * DTYPE_BYTES[drafter_dtype]
    return MemoryEstimate(
        target_weights=target_weight_bytes(target, target_dtype, tied=tied, layers=total_layers),
        target_forward=target_forward_bytes(target, max(1, tokens // longest), longest, target_dtype),
        drafter_state=drafter_state_bytes(drafter),
        drafter_step=drafter_step_bytes(
            drafter, tokens=tokens, anchors=anchors, slots=slots, dtype=drafter_dtype, chunk_slots=chunk_slots
        ),
        drafter_head=0 if shared_head else 2 * head,
        buffer=buffer_bytes,
    )
