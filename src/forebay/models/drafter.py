"""The DFlash drafter: a few Qwen3-style layers whose queries are blocks of slots and whose keys also span the context.

Guarantees: parameter names are those of the z-lab layout (`fc`, `hidden_norm`, `norm`, `layers.N....`); masters keep
the dtype they were built with (fp32), and the forward pass computes in the dtype of the features it is given. The
embedding and the head are the target's: they come in as tensors, are never owned, and never reach the state dict.
Every parameter is trained; the only buffers are the map of a reduced vocabulary. Called by `models.step` and the guard;
served drafters live in `decode/`, apart from this.

Legend: T context tokens, K captured layers, A anchors, B slots of a block, H hidden size.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from forebay.models.attention import BlockView, KeysValues, attend
from forebay.models.matmul import linear
from forebay.models.pointwise import feed_forward, rms_norm, rotate
from forebay.models.spec import DrafterSpec
from forebay.models.vocabulary import kept_of, map_tensors, require_same

Rope = tuple[Tensor, Tensor]  # cos and sin
Rows = Callable[[Tensor], Tensor]  # some rows -> others: a row for each slot, or the rows of some slots


class Linear(nn.Module):
    """`x @ weight.T` in the dtype of `x`; the weight keeps its own."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight)


class RMSNorm(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class Attention(nn.Module):
    def __init__(self, spec: DrafterSpec) -> None:
        super().__init__()
        self.head_dim = spec.head_dim
        self.q_proj = Linear(spec.hidden_size, spec.heads * spec.head_dim)
        self.k_proj = Linear(spec.hidden_size, spec.kv_heads * spec.head_dim)
        self.v_proj = Linear(spec.hidden_size, spec.kv_heads * spec.head_dim)
        self.o_proj = Linear(spec.heads * spec.head_dim, spec.hidden_size)
        self.q_norm = RMSNorm(spec.head_dim, spec.rms_eps)
        self.k_norm = RMSNorm(spec.head_dim, spec.rms_eps)

    def keys_values(self, x: Tensor, rope: Rope, spread: Rows) -> KeysValues:
        """Keys and values [P, G, D] of rows x: fused context features or normed slots, by the same weights."""
        k, v = (project(x).unflatten(-1, (-1, self.head_dim)) for project in (self.k_proj, self.v_proj))
        return rotate(spread(self.k_norm(k)), rope), spread(v)

    def forward(
        self, x: Tensor, context: KeysValues, rope: Rope, view: BlockView, layer: int, spread: Rows, keep: Rows
    ) -> Tensor:
        """Normed slots x, which `spread` makes [A*B, H] -> [A*B, H], or the rows of it that `keep` keeps."""
        q = rotate(spread(self.q_norm(self.q_proj(x).unflatten(-1, (-1, self.head_dim)))), rope)
        return self.o_proj(keep(attend(q, context, self.keys_values(x, rope, spread), view, layer)))


class FeedForward(nn.Module):
    def __init__(self, spec: DrafterSpec) -> None:
        super().__init__()
        self.gate_proj = Linear(spec.hidden_size, spec.intermediate_size)
        self.up_proj = Linear(spec.hidden_size, spec.intermediate_size)
        self.down_proj = Linear(spec.intermediate_size, spec.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return feed_forward(x, self.gate_proj.weight, self.up_proj.weight, self.down_proj.weight)


class Layer(nn.Module):
    def __init__(self, spec: DrafterSpec) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(spec.hidden_size, spec.rms_eps)
        self.self_attn = Attention(spec)
        self.post_attention_layernorm = RMSNorm(spec.hidden_size, spec.rms_eps)
        self.mlp = FeedForward(spec)

    def forward(
        self, x: Tensor, context: KeysValues, rope: Rope, view: BlockView, layer: int, spread: Rows, keep: Rows
    ) -> Tensor:
        x = keep(spread(x)) + self.self_attn(self.input_layernorm(x), context, rope, view, layer, spread, keep)
        return x + self.mlp(self.post_attention_layernorm(x))


class Drafter(nn.Module):
    """Weights are uninitialised until `models.init` fills them or a state dict is loaded.

    `flex` (off): attention by FlexAttention, on devices other than a CPU.
    """

    flex = False

    def __init__(self, spec: DrafterSpec) -> None:
        super().__init__()
        self.spec = spec
        self.fc = Linear(spec.feature_size, spec.hidden_size)
        self.hidden_norm = RMSNorm(spec.hidden_size, spec.rms_eps)
        self.layers = nn.ModuleList(Layer(spec) for _ in range(spec.layers))
        self.norm = RMSNorm(spec.hidden_size, spec.rms_eps)
        if spec.draft_vocab_size is not None:
            self.register_buffer("d2t", torch.zeros(spec.draft_vocab_size, dtype=torch.int64))
            self.register_buffer("t2d", torch.zeros(spec.vocab_size, dtype=torch.bool))

    @property
    def kept(self) -> Tensor | None:
        """Token ids of the reduced draft vocabulary, or None for the full one."""
        size = self.spec.draft_vocab_size
        return None if size is None else kept_of(dict(self.named_buffers()), size, self.spec.vocab_size)

    def set_vocabulary(self, kept: Tensor) -> None:
        """Store a reduced vocabulary. A drafter that has one refuses another."""
        if self.t2d.any():
            require_same(self.kept, kept)
        tensors = map_tensors(kept.cpu(), self.spec.vocab_size)
        kept_of(tensors, len(self.d2t), len(self.t2d))
        for name, tensor in tensors.items():
            getattr(self, name).copy_(tensor)

    def context(self, features: Tensor, positions: Tensor) -> list[KeysValues]:
        """Keys and values of the context in every layer, once for all blocks: features [T, K*H], positions [T]."""
        rope = rope_table(positions, self.spec, features.dtype)
        fused = self.hidden_norm(self.fc(features))
        return [layer.self_attn.keys_values(fused, rope, as_they_are) for layer in self.layers]

    def blocks(
        self,
        context: list[KeysValues],
        anchor_positions: Tensor,
        anchor_embeds: Tensor,
        mask_embed: Tensor,
        view: BlockView,
        wanted: Tensor | None = None,
    ) -> Tensor:
        """Hidden states of the slots `wanted` [S] (a * B + j is slot j of block a), ready for the head: [S, H].

        All of them where none are given, [A*B, H]. No other slot goes beyond the last layer's attention.

        anchor_positions [A], anchor_embeds [A, H] and mask_embed [H] (embedding scale applied, in the compute dtype);
        view: what each block sees (`attention.block_view`). All masks of all blocks enter the first layer alike: until
        positions turn them, one row stands for them all.
        """
        blocks, block = len(anchor_positions), self.spec.block_size
        positions = anchor_positions[:, None] + torch.arange(block, device=anchor_positions.device)
        rope = rope_table(positions.flatten(), self.spec, anchor_embeds.dtype)

        def spread(rows: Tensor) -> Tensor:
            """[A + 1, ...] anchors and the mask -> [A*B, ...] slots."""
            masks = rows[blocks:, None].expand(blocks, block - 1, *rows.shape[1:])
            return torch.cat([rows[:blocks, None], masks], dim=1).flatten(0, 1)

        def keep(rows: Tensor) -> Tensor:
            return rows if wanted is None else rows.index_select(0, wanted)

        x, last = torch.cat([anchor_embeds, mask_embed[None]]), len(self.layers) - 1
        for i, layer in enumerate(self.layers):
            x = layer(x, context[i], rope, view, i, as_they_are if i else spread, keep if i == last else as_they_are)
        return self.norm(x)


def as_they_are(rows: Tensor) -> Tensor:
    """The `Rows` that changes nothing."""
    return rows


def rope_table(positions: Tensor, spec: DrafterSpec, dtype: torch.dtype) -> Rope:
    """cos and sin [P, 1, head_dim / 2] of the spec's rope at `positions` [P], computed in fp32 (fp64 for fp64)."""
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    angles = positions.to(exact)[:, None] * rope_frequencies(spec, positions.device).to(exact)
    return angles.cos()[:, None].to(dtype), angles.sin()[:, None].to(dtype)


def rope_frequencies(spec: DrafterSpec, device: torch.device | str = "cpu") -> Tensor:
    """Angle per position of each pair of channels, fp32 [head_dim / 2]. A CUDA graph cannot copy it to its device."""
    rope = spec.rope
    steps = torch.arange(0, spec.head_dim, 2, dtype=torch.int64, device=device).float() / spec.head_dim
    plain = 1.0 / (rope["rope_theta"] ** steps)
    if rope["rope_type"] == "linear":
        return plain / rope["factor"]
    if rope["rope_type"] == "llama3":
        # Slow channels are stretched by `factor`, fast ones kept, those in between blended by how often they turn
        # within the original context.
        turns = rope["original_max_position_embeddings"] * plain / (2 * math.pi)
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        kept = ((turns - low) / (high - low)).clamp(0, 1)
        return kept * plain + (1 - kept) * plain / rope["factor"]
    return plain
