"""The zlab export through the code of the PyPI package `dflash`: same hidden states, tokens and accepted counts.

Runs in the environment of `scripts/interop_env.sh` (`make interop`); skipped elsewhere.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from drafters import train_on_own_text, zlab_config, zlab_tensors
from tiny import tiny_target

pytest.importorskip("dflash", reason="the package dflash is not installed here: run `make interop`")

from dflash.model import DFlashDraftModel, build_target_layer_ids

from forebay.decode.check import check_drafter
from forebay.decode.drafter import ServedDrafter
from forebay.decode.guard import drafts_along
from forebay.decode.peers import run_dflash
from forebay.decode.serve import serve
from forebay.decode.target_side import TargetSide
from forebay.io.formats import StoredDrafter, write_drafter
from forebay.io.formats.zlab import zlab_spec
from forebay.models.facts import default_layer_ids

PROMPT = [17, 240, 33, 99, 5]
SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8, "use_sliding_window": True}
VARIANTS: list[dict[str, Any]] = [
    {},
    {"causal": True},
    SLIDING,
    {**SLIDING, "sliding_causal": False},
    {"rope_parameters": {"rope_type": "linear", "rope_theta": 5e5, "factor": 4.0}},
]


def drafter_of(**overrides: Any) -> StoredDrafter:
    config = zlab_config(**overrides)
    return StoredDrafter(zlab_spec(config, config["dtype"]), zlab_tensors(config, seed=1))


@pytest.mark.parametrize("overrides", VARIANTS)
@torch.inference_mode()
def test_the_package_computes_the_same_hidden_states_from_our_export(tmp_path: Path, overrides: dict[str, Any]) -> None:
    """Fresh random weights, every variant that the layout can say: 1e-5 in fp32."""
    folder = write_drafter(tmp_path / "drafter", drafter_of(**overrides))
    theirs = DFlashDraftModel.from_pretrained(folder, dtype=torch.float32).eval()
    ours = ServedDrafter.from_folder(folder)
    model = tiny_target(seed=2)
    text = torch.randint(4, 300, (1, 30), generator=torch.Generator().manual_seed(0))
    states = model(text, output_hidden_states=True).hidden_states
    features = torch.cat([states[i + 1] for i in ours.layer_ids], -1)[:, :25]
    block = torch.full((1, 4), ours.mask_token_id)
    block[0, 0] = text[0, 25]
    embeds = model.get_input_embeddings()(block)
    expected = theirs(position_ids=torch.arange(29)[None], noise_embedding=embeds, target_hidden=features)
    from forebay.decode.drafter import Context

    context = Context(ours.layers)
    ours.extend(context, features, torch.arange(25)[None])
    hidden = ours.forward(embeds, 25 + torch.arange(4)[None], context, torch.ones(1, 25, dtype=torch.bool))
    torch.testing.assert_close(hidden, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("overrides", VARIANTS)
def test_the_package_generates_the_same_tokens_in_the_same_rounds(overrides: dict[str, Any]) -> None:
    """A trained drafter, so that rounds accept several drafts, on seen and unseen prompts."""
    stored = drafter_of(**overrides)
    model = tiny_target(seed=2)
    walk = train_on_own_text(model, stored.spec, stored.tensors, PROMPT, steps=100)
    stored.tensors = {k: v.detach() for k, v in walk.drafter.state_dict().items()}
    served = ServedDrafter.from_stored(stored)  # with the configuration that an export has
    prompts = [PROMPT, PROMPT[:3], [200, 31], [9] * 12]
    out = serve(TargetSide(model, served.layer_ids), served, prompts, max_new_tokens=30, eos_token_ids=(1, 2))
    assert sum(out[0].accepted) / len(out[0].accepted) > 1.5
    report = run_dflash(served, model, out, 30)
    assert report["identical"] is True, report
    assert report["same_tokens"] == 1.0 and report["prompts"] == 4


def test_forebay_check_runs_the_package_and_reports_its_agreement(tmp_path: Path) -> None:
    folder = write_drafter(tmp_path / "drafter", drafter_of())
    report = check_drafter(folder, tiny_target(seed=2), [PROMPT, [8, 9]], max_new_tokens=12)
    assert report["ok"] and report["peers"]["dflash"]["identical"] is True


def test_a_drafter_served_with_other_layer_ids_is_not_identical() -> None:
    """Mutation: the comparison would notice."""
    stored = drafter_of()
    model = tiny_target(seed=2)
    walk = train_on_own_text(model, stored.spec, stored.tensors, PROMPT, steps=100)
    stored.tensors = {k: v.detach() for k, v in walk.drafter.state_dict().items()}
    other = ServedDrafter(zlab_config(target_layer_ids=[1, 3, 5]), stored.tensors)
    out = serve(TargetSide(model, other.layer_ids), other, [PROMPT], max_new_tokens=30)
    right = ServedDrafter(zlab_config(), stored.tensors)
    assert run_dflash(right, model, out, 30)["identical"] is False


def test_default_layer_ids_are_the_packages() -> None:
    for layers in (8, 16, 28, 30, 32, 36, 48, 64):
        for count in (1, 2, 3, 5):
            assert list(default_layer_ids(layers, count)) == build_target_layer_ids(layers, count)


def test_the_walk_along_a_text_drafts_what_the_loop_drafted() -> None:
    """The helper that diagnoses is right under this transformers too."""
    config = zlab_config()
    served = ServedDrafter(config, zlab_tensors(config, seed=1))
    side = TargetSide(tiny_target(seed=2), served.layer_ids)
    (out,) = serve(side, served, [PROMPT], max_new_tokens=12)
    assert drafts_along(side, served, out.prompt + out.verified, out.starts).tolist() == out.drafts
