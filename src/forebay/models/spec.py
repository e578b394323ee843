"""What a drafter is, as plain numbers: everything that training, export and serving must agree on.

Guarantees: a `DrafterSpec` is complete (nothing about the drafter's mathematics is decided elsewhere), consistent
(checked when it is built) and survives `to_dict`/`from_dict`. Rope fields that only the target understands (mrope
sections, partial rotation, one table per layer type) are removed here, once, so training and export see the same table.
Imports no torch. Built from the configuration and the target's text configuration by `drafter_spec`; read by
`models.drafter`, `io.formats` and the checkpoint's contract.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from forebay.config import DrafterConfig
from forebay.errors import ConfigError, ContractError, nearest

#: Rope tables that `models.drafter` can build, and the fields each of them reads besides `rope_theta`.
ROPE_FIELDS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}

#: Positions of a drafter whose target names no limit of its own.
UNLIMITED = 131_072


@dataclass(frozen=True)
class DrafterSpec:
    """A DFlash drafter. `hidden_size` is the width of the embedding and head it shares with its target.

    Slots: slot 0 of a block is its anchor. Without `sample_from_anchor` slot j = 1.. predicts token anchor + j and
    slot 0 predicts nothing; with it slot j = 0.. predicts token anchor + j + 1.
    Sliding layers see context from `anchor + j - sliding_window + 1` on (`window_from: query`) or from
    `anchor - sliding_window` on (`window_from: anchor`).
    Lengths, in tokens, 0 where not known: `trained_max_length` is the longest text it was trained on, `max_positions`
    how far its target reads, which is how far engines must be let use it.
    """

    hidden_size: int
    target_hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int
    rms_eps: float = 1e-6
    rope: dict[str, Any] = field(default_factory=lambda: {"rope_type": "default", "rope_theta": 10000.0})
    sample_from_anchor: bool = False
    causal: bool = False
    layer_types: tuple[str, ...] = ()
    sliding_window: int | None = None
    window_from: str = "query"
    sliding_causal: bool = True
    trained_max_length: int = 0
    max_positions: int = 0
    draft_vocab_size: int | None = None
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        object.__setattr__(self, "target_layer_ids", tuple(self.target_layer_ids))
        object.__setattr__(self, "layer_types", tuple(self.layer_types) or ("full_attention",) * self.layers)
        if len(self.layer_types) != self.layers:
            raise ConfigError(f"layer_types names {len(self.layer_types)} layers but the drafter has {self.layers}")
        if self.heads % self.kv_heads:
            raise ConfigError(f"{self.heads} heads cannot share {self.kv_heads} key-value heads: make them divide")
        check_layer_ids(self.target_layer_ids, self.num_target_layers)
        if self.mask_token_id < 0:
            raise ConfigError(f"mask_token_id {self.mask_token_id} must not be negative")
        if self.draft_vocab_size is not None and not 1 <= self.draft_vocab_size <= self.vocab_size:
            raise ConfigError(
                f"draft_vocab_size {self.draft_vocab_size} must be between 1 and the {self.vocab_size} rows of the "
                "target's head (null: the full vocabulary)"
            )
        if self.rope.get("rope_type") not in ROPE_FIELDS:
            raise ConfigError(
                f"the drafter has no rope of type '{self.rope.get('rope_type')}': use one of {', '.join(ROPE_FIELDS)}"
            )

    @property
    def feature_size(self) -> int:
        """Width of a token's captured features: captured layers x target hidden size."""
        return len(self.target_layer_ids) * self.target_hidden_size

    @property
    def first_slot(self) -> int:
        """The first slot that carries loss."""
        return 0 if self.sample_from_anchor else 1

    @property
    def scored_slots(self) -> int:
        """Slots of a block that carry loss, which is also how many tokens a block drafts."""
        return self.block_size - self.first_slot

    @property
    def head_rows(self) -> int:
        """Rows of the drafter's head: the reduced draft vocabulary, or the target's whole one."""
        return self.draft_vocab_size or self.vocab_size

    def is_sliding(self, layer: int) -> bool:
        return self.layer_types[layer] == "sliding_attention"

    def is_causal(self, layer: int) -> bool:
        """Whether slot j of a block sees only slots 0..j in this layer."""
        return self.causal or (self.is_sliding(layer) and self.sliding_causal)

    def to_dict(self) -> dict[str, Any]:
        """JSON-able; `from_dict` gives an equal spec back."""
        return {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self).items()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> DrafterSpec:
        known = {f.name for f in fields(cls)}
        for key in values:
            if key not in known:
                raise ContractError(f"unknown drafter field '{key}'{nearest(key, known)}")
        missing = [k for k in ("target_layer_ids", "mask_token_id", "block_size") if values.get(k) is None]
        if missing:
            raise ContractError(f"the drafter does not say its {', '.join(missing)}: these are never guessed")
        return cls(**values)


def check_layer_ids(ids: tuple[int, ...], num_target_layers: int) -> None:
    """C38: refuse ids that are empty, repeated, unsorted or out of the target's range."""
    shown = list(ids)
    if not ids:
        raise ConfigError("target_layer_ids is empty: name at least one target layer")
    if min(ids) < 0 or max(ids) >= num_target_layers:
        raise ConfigError(f"target_layer_ids {shown}: valid 0..{num_target_layers - 1} for this target")
    if shown != sorted(set(ids)):
        raise ConfigError(f"target_layer_ids {shown} must rise without repeats")


def drafter_rope(target: Mapping[str, Any], notices: list[str] | None = None) -> dict[str, Any]:
    """The drafter's rope from a target's text configuration: only `rope_type`, `rope_theta` and the type's own fields.

    A target rope that the drafter cannot build becomes the default table with the same theta, and a notice says so:
    a drafter is trained with its own table, so this is a choice, not an error.
    """
    notices = [] if notices is None else notices
    given = dict(target.get("rope_parameters") or target.get("rope_scaling") or {})
    if given and all(isinstance(v, Mapping) for v in given.values()):  # one table per layer type
        given = dict(given.get("full_attention") or next(iter(given.values())))
    theta = given.get("rope_theta") or target.get("rope_theta") or 10000.0
    kind = given.get("rope_type") or given.get("type") or "default"
    wanted = ROPE_FIELDS.get(kind)
    if wanted is None or any(given.get(name) is None for name in wanted):
        if kind not in ("mrope", "default"):
            notices.append(f"the target's rope is '{kind}'; the drafter uses a default rope with theta {theta:g}")
        kind, wanted = "default", ()
    dropped = sorted(set(given) & {"mrope_section", "mrope_interleaved", "partial_rotary_factor"})
    if dropped:
        notices.append(f"the drafter's rope leaves out the target's {', '.join(dropped)}")
    return {"rope_type": kind, "rope_theta": float(theta)} | {name: given[name] for name in wanted}


def target_positions(target: Mapping[str, Any]) -> int:
    """How many tokens the target of this text configuration reads at most.

    Rope that stretches an original length (yarn and its kin) may reach further than `max_position_embeddings` says.
    """
    limit = int(_first(target, "max_position_embeddings", "n_positions", "max_seq_len", "seq_length") or UNLIMITED)
    rope = target.get("rope_parameters") or target.get("rope_scaling") or {}
    tables = [t for t in (rope, *rope.values()) if isinstance(t, Mapping)]
    reached = [(t.get("factor") or 0) * (t.get("original_max_position_embeddings") or 0) for t in tables]
    return max(limit, *map(int, reached), 1)


def feed_forward_width(target: Mapping[str, Any], notices: list[str] | None = None) -> int:
    """The target's own FFN width; for a mixture of experts the width active per token, never below 3 x hidden."""
    notices = [] if notices is None else notices
    hidden = int(target["hidden_size"])
    active = _first(target, "num_experts_per_tok", "num_experts_per_token", "moe_topk")
    expert = target.get("moe_intermediate_size")
    width = int(_first(target, "intermediate_size", "ffn_hidden_size", "n_inner") or 4 * hidden)
    if active:
        width = int(active) * int(expert or width) + int(target.get("shared_expert_intermediate_size") or 0)
        notices.append(f"mixture of experts: the drafter's FFN takes the active width {width}")
    if width < hidden:
        notices.append(f"an FFN of {width} would contract the hidden size {hidden}: the drafter uses {3 * hidden}")
        width = 3 * hidden
    return width


def drafter_spec(
    config: DrafterConfig,
    target: Mapping[str, Any],
    *,
    target_layer_ids: tuple[int, ...],
    num_target_layers: int,
    vocab_size: int,
    mask_token_id: int,
    trained_max_length: int,
    dtype: str = "bfloat16",
    notices: list[str] | None = None,
) -> DrafterSpec:
    """The drafter that `config` asks for beside a target whose text configuration is `target` (a mapping).

    `vocab_size` counts the rows of the target's head. What was decided for the user is appended to `notices`.
    """
    notices = [] if notices is None else notices
    hidden = int(target["hidden_size"])
    heads = int(_first(target, "num_attention_heads", "n_head", "num_heads") or 0)
    if not heads:
        raise ConfigError("the target's configuration names no attention heads: this architecture is not supported")
    return DrafterSpec(
        hidden_size=hidden,
        target_hidden_size=hidden,
        layers=config.layers,
        heads=heads,
        kv_heads=int(target.get("num_key_value_heads") or heads),
        head_dim=int(target.get("head_dim") or hidden // heads),
        intermediate_size=config.intermediate_size or feed_forward_width(target, notices),
        vocab_size=vocab_size,
        block_size=config.block_size,
        mask_token_id=mask_token_id,
        target_layer_ids=target_layer_ids,
        num_target_layers=num_target_layers,
        rms_eps=float(_first(target, "rms_norm_eps", "layer_norm_epsilon", "norm_eps") or 1e-6),
        rope=drafter_rope(target, notices),
        sample_from_anchor=config.sample_from_anchor,
        causal=config.causal,
        layer_types=config.layer_types or (),
        sliding_window=config.sliding_window,
        window_from=config.window_from,
        sliding_causal=config.sliding_causal,
        trained_max_length=trained_max_length,
        max_positions=target_positions(target),
        draft_vocab_size=config.draft_vocab_size,
        dtype=dtype,
    )


def _first(values: Mapping[str, Any], *names: str) -> Any:
    return next((values[name] for name in names if values.get(name) is not None), None)
