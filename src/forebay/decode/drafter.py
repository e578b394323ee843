"""The drafter as an engine runs it: built from an exported folder alone, its context's keys and values cached.

Guarantees: reads only the exported z-lab layout (`config.json` and the tensors beside it) and shares no code with the
trainer's forward, so that a difference between what is trained and what is served shows (guarantee G8). Positions are
given by the caller, per row; nothing is assumed about how they grow. It does not judge whether the folder is
complete (`io.formats.zlab` does). Called by `serve`, `guard` and `check`.

Shapes: N rows, C context columns, B block size, K captured layers, H hidden size, Ht the target's hidden size,
n heads, m key/value heads, D head size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from forebay.errors import ContractError
from forebay.io.drafters import find_drafter
from forebay.io.formats import StoredDrafter, read_drafter
from forebay.io.formats.zlab import lengths, zlab_config, zlab_tensors

Head = Callable[[Tensor], Tensor]


class Context:
    """Keys and values of the context, per draft layer `[N, m, C, D]`. Which columns count is the caller's mask."""

    def __init__(self, layers: int) -> None:
        self.keys: list[Tensor | None] = [None] * layers
        self.values: list[Tensor | None] = [None] * layers
        self.positions: Tensor | None = None  # [N, C]

    def select(self, rows: Tensor) -> Context:
        """A context of `rows` only, in that order (a row may come several times)."""
        chosen = Context(len(self.keys))
        chosen.keys = [None if k is None else k[rows] for k in self.keys]
        chosen.values = [None if v is None else v[rows] for v in self.values]
        chosen.positions = None if self.positions is None else self.positions[rows]
        return chosen


def _joined(old: Tensor | None, new: Tensor, dim: int) -> Tensor:
    return new if old is None else torch.cat([old, new], dim)


class ServedDrafter:
    """A DFlash drafter read from its exported layout."""

    def __init__(
        self,
        config: Mapping[str, Any],
        tensors: Mapping[str, Tensor],
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
    ) -> None:
        """Raises ContractError where the configuration leaves open what must never be guessed."""
        self.config, self.tensors = dict(config), dict(tensors)
        dflash = dict(config.get("dflash_config") or {})
        for name in ("target_layer_ids", "mask_token_id"):
            if dflash.get(name) is None:
                raise ContractError(
                    f"the drafter's config.json has no dflash_config.{name}: it is never derived, so write the value "
                    "that the drafter was trained with"
                )
        self.layer_ids: tuple[int, ...] = tuple(dflash["target_layer_ids"])
        self.mask_token_id: int = dflash["mask_token_id"]
        self.block_size: int = config["block_size"]
        self.sample_from_anchor: bool = bool(dflash.get("sample_from_anchor", False))
        self.drafts_per_round = self.block_size if self.sample_from_anchor else self.block_size - 1
        self.layers: int = config["num_hidden_layers"]
        self.head_dim: int = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        self.eps: float = config["rms_norm_eps"]
        self.dtype, self.device = dtype, torch.device(device)
        self.trained_max_length, self.max_positions = lengths(config)  # tokens; 0 where not known
        self._causal = bool(dflash.get("causal", False))
        self._types = list(config.get("layer_types") or ["full_attention"] * self.layers)
        self._window: int | None = config.get("sliding_window")
        self._window_from: str = dflash.get("window_from", "query")
        self._sliding_causal = bool(dflash.get("sliding_causal", True))
        self.rope = _rotary(config, self.head_dim, self.device)
        self.theta = float(self.rope.config.rope_parameters["rope_theta"])
        vocabulary = ("d2t", "t2d")
        self._weights = {
            key: tensor.to(device=self.device, dtype=dtype) for key, tensor in tensors.items() if key not in vocabulary
        }
        self.vocabulary: Tensor | None = None  # target token id of each draft token id, [Vd]
        if "d2t" in tensors:
            offsets = tensors["d2t"].to(self.device)
            self.vocabulary = offsets + torch.arange(len(offsets), device=self.device)

    @classmethod
    def from_folder(
        cls, folder: str | Path, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu"
    ) -> ServedDrafter:
        """Read an exported folder, strictly."""
        return cls.from_stored(read_drafter(folder), dtype, device)

    @classmethod
    def from_stored(
        cls,
        stored: StoredDrafter,
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
        extras: Mapping[str, Any] | None = None,
    ) -> ServedDrafter:
        """From a drafter that was read. One in another layout is read by its meaning, as the z-lab export of it."""
        tensors = zlab_tensors(stored.spec, stored.tensors, stored.vocabulary, stored.head)
        config = stored.config if stored.format == "zlab" else None
        return cls(config or zlab_config(stored.spec, {**stored.dflash, **(extras or {})}), tensors, dtype, device)

    # -- forward -------------------------------------------------------------------------------------------------

    def extend(self, context: Context, features: Tensor, positions: Tensor) -> None:
        """Add columns to the context: features `[N, c, K*Ht]` of the tokens at `positions` `[N, c]`."""
        fused = self._norm(_product(features.to(self.dtype), self._weights["fc.weight"]), "hidden_norm.weight")
        cos, sin = self.rope(fused, positions)
        for layer in range(self.layers):
            keys, values = self._keys_values(layer, fused, cos, sin)
            context.keys[layer] = _joined(context.keys[layer], keys, 2)
            context.values[layer] = _joined(context.values[layer], values, 2)
        context.positions = _joined(context.positions, positions, 1)

    def forward(self, block: Tensor, positions: Tensor, context: Context, visible: Tensor) -> Tensor:
        """Hidden states `[N, B, H]` of a block of embeddings `[N, B, H]` at `positions` `[N, B]`.

        `visible` `[N, C]` (bool) says which context columns belong to the row's text before the block.
        """
        hidden = block.to(self.dtype)
        cos, sin = self.rope(hidden, positions)
        masks = {kind: self._mask(kind, positions, context, visible) for kind in set(self._types)}
        for layer, kind in enumerate(self._types):
            name = f"layers.{layer}."
            normed = self._norm(hidden, name + "input_layernorm.weight")
            queries = _turned(self._heads(normed, layer, "q"), cos, sin)
            keys, values = self._keys_values(layer, normed, cos, sin)
            attended = F.scaled_dot_product_attention(
                queries,
                _joined(context.keys[layer], keys, 2),
                _joined(context.values[layer], values, 2),
                attn_mask=masks[kind],
                enable_gqa=True,
            )
            attended = attended.transpose(1, 2).flatten(2)
            hidden = hidden + _product(attended, self._weights[name + "self_attn.o_proj.weight"])
            normed = self._norm(hidden, name + "post_attention_layernorm.weight")
            gate, up = (_product(normed, self._weights[f"{name}mlp.{part}_proj.weight"]) for part in ("gate", "up"))
            hidden = hidden + _product(F.silu(gate) * up, self._weights[name + "mlp.down_proj.weight"])
        return self._norm(hidden, "norm.weight")

    def draft_logits(self, hidden: Tensor, head: Head) -> Tensor:
        """Logits `[N, drafts_per_round, V]` of the drafted slots; tokens outside a reduced vocabulary get -inf."""
        count = self.drafts_per_round
        slots = hidden[:, -count:].flatten(0, 1)  # a matrix, for the reason that `_product` gives
        if self.vocabulary is None:
            return head(slots).unflatten(0, (-1, count))
        if "lm_head.weight" in self._weights:
            reduced = F.linear(slots, self._weights["lm_head.weight"])
        else:
            reduced = head(slots)[..., self.vocabulary]
        full = reduced.new_full((len(slots), self.config["vocab_size"]), -torch.inf)
        full[:, self.vocabulary] = reduced
        return full.unflatten(0, (-1, count))

    # -- parts ---------------------------------------------------------------------------------------------------

    def _norm(self, x: Tensor, key: str) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self._weights[key] * wide.to(x.dtype)

    def _heads(self, x: Tensor, layer: int, part: str) -> Tensor:
        """Projection split into heads `[N, heads, L, D]`; queries and keys normed per head."""
        name = f"layers.{layer}.self_attn."
        split = _product(x, self._weights[f"{name}{part}_proj.weight"]).unflatten(-1, (-1, self.head_dim))
        if part != "v":
            split = self._norm(split, f"{name}{part}_norm.weight")
        return split.transpose(1, 2)

    def _keys_values(self, layer: int, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return _turned(self._heads(x, layer, "k"), cos, sin), self._heads(x, layer, "v")

    def _mask(self, kind: str, positions: Tensor, context: Context, visible: Tensor) -> Tensor:
        """Additive mask `[N, 1, B, C + B]`: context before the block in the row's own text, then the block itself."""
        size = positions.shape[1]
        slots = torch.arange(size, device=positions.device)
        sliding = kind == "sliding_attention" and self._window is not None
        before = visible[:, None, :].expand(-1, size, -1)
        if sliding:
            assert context.positions is not None and self._window is not None
            at = context.positions[:, None, :]
            if self._window_from == "query":
                before = before & (at > positions[:, :, None] - self._window)
            else:
                before = before & (at >= positions[:, :1, None] - self._window)
        inside = torch.ones(size, size, dtype=torch.bool, device=positions.device)
        if self._causal or (sliding and self._sliding_causal):
            inside = slots[None, :] <= slots[:, None]
        allowed = torch.cat([before, inside.expand(len(visible), size, size)], -1)[:, None]
        return torch.zeros(allowed.shape, dtype=self.dtype, device=allowed.device).masked_fill(~allowed, -torch.inf)


def load_drafter(
    source: str | Path,
    *,
    step: str = "best",
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    num_target_layers: int | None = None,
) -> ServedDrafter:
    """A drafter ready to serve, from an exported folder of either layout, a checkpoint, or a run's checkpoint `step`.

    `num_target_layers` is needed only for a speculators folder that does not say it.
    """
    found = find_drafter(source, step=step, num_target_layers=num_target_layers)
    return ServedDrafter.from_stored(found.drafter, dtype, device, extras=found.extras)


def _rotary(config: Mapping[str, Any], head_dim: int, device: torch.device) -> Qwen3RotaryEmbedding:
    """The rotary embedding that transformers builds from the exported rope fields, as engines do."""
    rope = config.get("rope_parameters")
    if rope is None and config.get("rope_theta") is not None:
        rope = {"rope_type": "default", **(config.get("rope_scaling") or {}), "rope_theta": config["rope_theta"]}
    if rope is None or rope.get("rope_theta") is None:
        raise ContractError("the drafter's config.json has no rope_theta: it is never guessed, write the trained value")
    built = Qwen3Config(
        hidden_size=config["hidden_size"],
        num_attention_heads=config["num_attention_heads"],
        head_dim=head_dim,
        max_position_embeddings=config.get("max_position_embeddings", 32768),
        rope_parameters=dict(rope),
    )
    return Qwen3RotaryEmbedding(built).to(device)


def _product(x: Tensor, weight: Tensor) -> Tensor:
    """x [..., k] @ weight [m, k].T -> [..., m], as one matrix: for slices of more dimensions torch takes a batched
    product, in bf16 on a CPU over copies of the weights."""
    return F.linear(x.flatten(0, -2), weight).unflatten(0, x.shape[:-1])


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate `[N, heads, L, D]` by the angles `[N, L, D]`."""
    cos, sin = cos[:, None], sin[:, None]
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin
