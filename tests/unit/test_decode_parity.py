"""The serving drafter and loop against tensors of the reference implementation (DFLASH.md; parity/zlab)."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen3Config, Qwen3ForCausalLM

from forebay.decode.drafter import Context, ServedDrafter
from forebay.decode.serve import serve
from forebay.decode.target_side import TargetSide

PARITY = Path(os.environ.get("FOREBAY_PARITY") or Path(__file__).parents[3] / "shared" / "parity") / "zlab"
pytestmark = pytest.mark.skipif(not PARITY.is_dir(), reason=f"no reference tensors at {PARITY} (set FOREBAY_PARITY)")


@pytest.fixture(scope="module")
def reference() -> SimpleNamespace:
    model = Qwen3ForCausalLM(Qwen3Config(**json.loads((PARITY / "target_config.json").read_text()))).eval()
    model.load_state_dict(load_file(PARITY / "target.safetensors"))
    config = json.loads((PARITY / "draft_config.json").read_text())
    drafter = ServedDrafter(config, load_file(PARITY / "draft.safetensors"))
    return SimpleNamespace(
        drafter=drafter, target=TargetSide(model, drafter.layer_ids), io=load_file(PARITY / "io.safetensors")
    )


@torch.inference_mode()
def test_captured_features_and_logits_equal_the_reference(reference: SimpleNamespace) -> None:
    ids = reference.io["input_ids"]
    reference.target.start()
    logits, features = reference.target.forward(ids, torch.arange(40)[None], torch.ones_like(ids, dtype=torch.bool))
    torch.testing.assert_close(logits, reference.io["target_logits"], rtol=0, atol=1e-5)
    torch.testing.assert_close(features, reference.io["context_feature"], rtol=0, atol=1e-5)


@pytest.mark.parametrize("parts", [(25,), (10, 15), (1,) * 25])
@torch.inference_mode()
def test_draft_hidden_and_logits_equal_the_reference_however_the_context_was_cached(
    reference: SimpleNamespace, parts: tuple[int, ...]
) -> None:
    """C04's serving half: the cached path gives what the plain one gives."""
    io, drafter = reference.io, reference.drafter
    context, at = Context(drafter.layers), 0
    for part in parts:
        drafter.extend(context, io["context_feature"][:, at : at + part], torch.arange(at, at + part)[None])
        at += part
    block = reference.target.embed(io["block_ids"])
    torch.testing.assert_close(block, io["noise_embedding"], rtol=0, atol=0)
    hidden = drafter.forward(block, io["position_ids"][:, 25:], context, torch.ones(1, 25, dtype=torch.bool))
    torch.testing.assert_close(hidden, io["draft_hidden"], rtol=0, atol=1e-5)
    logits = drafter.draft_logits(hidden, reference.target.head)
    torch.testing.assert_close(logits, io["draft_logits"][:, 1:], rtol=0, atol=1e-5)


@pytest.mark.parametrize("batch_size", [1, 3, 4])
def test_greedy_tokens_equal_the_reference(reference: SimpleNamespace, batch_size: int) -> None:
    lengths = (1, 5, 17, 40)
    texts = [reference.io[f"greedy.{n}"][0].tolist() for n in lengths]
    prompts = [text[:n] for text, n in zip(texts, lengths, strict=True)]
    out = serve(reference.target, reference.drafter, prompts, max_new_tokens=len(texts[0]) - 1, batch_size=batch_size)
    for text, prompt, generation in zip(texts, prompts, out, strict=True):
        expected = text[len(prompt) :]
        assert generation.tokens[: len(expected)] == expected
