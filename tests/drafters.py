"""Small drafters in the exported layout, and a drafter that foresees the text with planted mistakes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from forebay.config import LossConfig
from forebay.data.pack import HostBatch, ItemShape, pack_item
from forebay.decode.drafter import ServedDrafter
from forebay.decode.evaluate import greedy_reference
from forebay.decode.serve import _Batch
from forebay.flow.plan import Job
from forebay.models.drafter import Drafter
from forebay.models.spec import DrafterSpec
from forebay.models.step import Borrowed, micro_step
from forebay.models.target import Target
from forebay.models.walk import Walk
from tiny import LAYER_IDS, MASK_ID, ROWS


def zlab_config(**overrides: Any) -> dict[str, Any]:
    """D0 beside T0 as a z-lab `config.json`; `dflash_config` entries may be given by name."""
    dflash = {"mask_token_id": MASK_ID, "target_layer_ids": list(LAYER_IDS)}
    for name in (
        *("mask_token_id", "target_layer_ids", "causal", "sample_from_anchor", "window_from", "sliding_causal"),
        *("trained_max_length", "target_fingerprint"),
    ):
        if name in overrides:
            dflash[name] = overrides.pop(name)
    config = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "block_size": 4,
        "num_hidden_layers": 2,
        "num_target_layers": 6,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 64,
        "rms_norm_eps": 1e-6,
        "vocab_size": ROWS,
        "max_position_embeddings": 512,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "layer_types": ["full_attention", "full_attention"],
        "tie_word_embeddings": False,
        "dtype": "float32",
    }
    return {**config, **overrides, "dflash_config": dflash}


def zlab_tensors(config: dict[str, Any], seed: int = 0, scale: float = 0.15) -> dict[str, Tensor]:
    """Random weights for `config`."""
    g = torch.Generator().manual_seed(seed)
    h, d, width = config["hidden_size"], config["head_dim"], config["intermediate_size"]
    q, kv = config["num_attention_heads"] * d, config["num_key_value_heads"] * d
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (h, len(config["dflash_config"]["target_layer_ids"]) * h),
        "hidden_norm.weight": (h,),
        "norm.weight": (h,),
    }
    for i in range(config["num_hidden_layers"]):
        name = f"layers.{i}."
        shapes |= {name + "input_layernorm.weight": (h,), name + "post_attention_layernorm.weight": (h,)}
        shapes |= {name + "self_attn.q_norm.weight": (d,), name + "self_attn.k_norm.weight": (d,)}
        shapes |= {name + "self_attn.q_proj.weight": (q, h), name + "self_attn.o_proj.weight": (h, q)}
        shapes |= {name + "self_attn.k_proj.weight": (kv, h), name + "self_attn.v_proj.weight": (kv, h)}
        shapes |= {name + "mlp.gate_proj.weight": (width, h), name + "mlp.up_proj.weight": (width, h)}
        shapes |= {name + "mlp.down_proj.weight": (h, width)}
    return {
        key: 1 + 0.1 * torch.randn(shape, generator=g) if len(shape) == 1 else scale * torch.randn(shape, generator=g)
        for key, shape in shapes.items()
    }


def random_drafter(seed: int = 0, **overrides: Any) -> ServedDrafter:
    config = zlab_config(**overrides)
    return ServedDrafter(config, zlab_tensors(config, seed))


def foresee(monkeypatch: Any, texts: dict[tuple[int, ...], list[int]], right: float, seed: int = 0) -> None:
    """Make every draft the known continuation `texts[prompt]`, each token right with probability `right`."""
    g = torch.Generator().manual_seed(seed)

    def draft(self: _Batch, following: Tensor, start: Tensor) -> Tensor:
        logits = torch.zeros(len(following), self.drafter.drafts_per_round, ROWS)
        for i, row in enumerate(r for r in self.rows if not r.tokens):
            known = texts[tuple(row.prompt)][len(row.verified) :]
            for j in range(self.drafter.drafts_per_round):
                token = known[j] if j < len(known) and torch.rand(1, generator=g) < right else 7
                logits[i, j, token] = 1.0
        return logits

    monkeypatch.setattr(_Batch, "_draft", draft)


class _Row:
    """A store of one row, supervised from the last prompt token on."""

    def __init__(self, tokens: list[int], prompt: int) -> None:
        self._tokens = np.array(tokens, np.int32)
        self._mask = np.arange(len(tokens)) >= prompt - 1

    def tokens(self, row: int) -> np.ndarray:
        return self._tokens

    def mask(self, row: int) -> np.ndarray:
        return self._mask


def item_of(tokens: list[int], prompt: int, spec: DrafterSpec, gamma: float | None = None) -> HostBatch:
    """A packed item of one text with a block at every legal anchor."""
    count = len(tokens) - prompt
    shape = ItemShape(len(tokens), count, count * spec.block_size, spec.block_size, spec.sample_from_anchor)
    job = Job(0, 0, 0, (0,), (len(tokens),), (1,), len(tokens), len(tokens), count, 0)
    return pack_item(_Row(tokens, prompt), job, shape, seed=0, anchor_rate=1.0, anchors_per_row=count, gamma=gamma)


def train_on_own_text(
    model: Any,
    spec: DrafterSpec,
    tensors: dict[str, Tensor],
    prompt: list[int],
    *,
    tokens: int = 40,
    steps: int = 120,
    shift: int = 0,
) -> Walk:
    """Train on the target's own greedy answer to one prompt, labels moved by `shift`; the trainer's side of it."""
    row = prompt + greedy_reference(model, [prompt], max_new_tokens=tokens, eos=())[0]
    batch = item_of(row, len(prompt), spec)
    drafter = Drafter(spec)
    drafter.load_state_dict(tensors)
    target = Target(model, spec.target_layer_ids)
    borrowed = Borrowed.of(target, torch.float32)
    features = torch.zeros(len(row), target.feature_width)
    target.capture(batch, features)
    labels = np.array(row)[np.minimum(batch.slot_source + 1 + shift, len(row) - 1)]
    batch = replace(batch, slot_label=labels.astype(np.int32))
    adam = torch.optim.Adam(drafter.parameters(), lr=3e-3)
    for _ in range(steps):
        adam.zero_grad()
        micro_step(drafter, batch, features, borrowed, LossConfig(decay="none"), 1 / batch.weight_sum)
        adam.step()
    return Walk(target, drafter, borrowed)
