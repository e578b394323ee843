"""The serving loop on many target families: the target's own greedy text, whatever their caches and windows are."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from drafters import random_drafter
from forebay.decode.evaluate import compare, greedy_reference
from forebay.decode.serve import serve
from forebay.decode.target_side import TargetSide
from forebay.models.facts import read_facts
from target_families import TEXT, WRAPPED, family

SUPPORTED = [name for name in (*TEXT, *WRAPPED) if name not in ("gpt2", "gemma3n")]
PROMPTS = [[17, 240, 33], [99] * 7, list(range(20, 32))]


@pytest.mark.parametrize("name", SUPPORTED)
def test_every_family_is_served_losslessly_and_embeds_as_its_first_layer_reads(name: str) -> None:
    model: Any = family(name)
    drafter = random_drafter()
    target = TargetSide(model, drafter.layer_ids)
    facts = read_facts(model, name)
    raw = model.get_input_embeddings().weight[torch.tensor([5, 80])] * facts.embed_scale
    torch.testing.assert_close(target.embed(torch.tensor([5, 80])), raw, rtol=1e-4, atol=1e-6)
    out = serve(target, drafter, PROMPTS, max_new_tokens=14, batch_size=3)
    expected = greedy_reference(model, PROMPTS, max_new_tokens=14, eos=(), batch_size=1)
    assert all(d["near_tie"] for d in compare(target, out, expected))
