"""The speculators export through the code of the PyPI package `speculators` 0.9: loads, and its forward gives our loss.

Runs in the environment of `scripts/interop_env.sh` (`make interop`); skipped elsewhere.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from drafters import item_of, zlab_config, zlab_tensors
from tiny import save_tiny_target, tiny_target

pytest.importorskip("speculators", reason="the package speculators is not installed here: run `make interop`")

import speculators.models.dflash.core as core
from speculators.model import SpeculatorModel
from speculators.models.dflash import DFlashDraftModel

from forebay.config import LossConfig
from forebay.decode.check import check_drafter
from forebay.io.formats import StoredDrafter, read_drafter, write_drafter
from forebay.io.formats.zlab import zlab_spec
from forebay.models.drafter import Drafter
from forebay.models.step import Borrowed, micro_step
from forebay.models.target import Target

SLIDING = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 8, "use_sliding_window": True}
PROMPT = 6


def drafter_of(**overrides: Any) -> StoredDrafter:
    config = zlab_config(**overrides)
    return StoredDrafter(zlab_spec(config, config["dtype"]), zlab_tensors(config, seed=1))


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_target(tmp_path_factory.mktemp("t0"), seed=2)


def loaded(folder: Path, target: Path, stored: StoredDrafter) -> Any:
    """Our export as the package loads it, embedding and head from the target's folder."""
    write_drafter(folder, stored, "speculators", target=str(target), target_architecture="Qwen3ForCausalLM")
    model = SpeculatorModel.from_pretrained(folder)
    assert isinstance(model, DFlashDraftModel)
    # Flex attention has no backward on a CPU; the package chooses the kernel when it builds the model.
    model.config.transformer_layer_config._attn_implementation = "sdpa"
    model._attn_impl, model._create_mask_fn = "sdpa", core.create_mask
    return model.train()


def test_the_package_loads_and_validates_our_export(tmp_path: Path, target_folder: Path) -> None:
    stored = drafter_of(sample_from_anchor=True)
    model = loaded(tmp_path / "drafter", target_folder, stored)
    state = model.state_dict()
    for name, tensor in stored.tensors.items():
        assert torch.equal(state[name], tensor), name
    assert not any(torch.isnan(t).any() for t in state.values())
    config = model.config
    assert (config.block_size, config.mask_token_id, config.sample_from_anchor) == (4, 310, True)
    assert list(model.target_layer_ids) == [1, 3, 5]
    assert config.speculators_config.proposal_methods[0].speculative_tokens == 4
    assert model.rotary_emb.config.rope_parameters["rope_theta"] == 10000.0


def test_what_the_package_saves_again_is_still_the_same_drafter(tmp_path: Path, target_folder: Path) -> None:
    stored = drafter_of()
    loaded(tmp_path / "a", target_folder, stored).save_pretrained(tmp_path / "b")
    back = read_drafter(tmp_path / "b", num_target_layers=6)
    assert back.spec == stored.spec
    assert all(torch.equal(back.tensors[k], v) for k, v in stored.tensors.items())


@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"sample_from_anchor": True},
        {**SLIDING, "window_from": "anchor"},
        {**SLIDING, "window_from": "anchor", "sliding_causal": False},
        {**SLIDING, "layer_types": ["full_attention", "sliding_attention"], "window_from": "anchor"},
    ],
)
def test_the_packages_forward_gives_our_loss_and_gradients(
    tmp_path: Path, target_folder: Path, monkeypatch: Any, overrides: dict[str, Any]
) -> None:
    """Fresh random weights; the same text, anchors, labels and decay. Its loss divides by slots, ours by weights."""
    stored = drafter_of(**overrides)
    spec = stored.spec
    model = loaded(tmp_path / "drafter", target_folder, stored)
    target = Target(tiny_target(seed=2), spec.target_layer_ids)
    row = torch.randint(4, 300, (40,), generator=torch.Generator().manual_seed(0)).tolist()
    batch = item_of(row, PROMPT, spec, gamma=4.0)
    whole = batch.anchors[: batch.n_anchors] < len(row) - spec.block_size  # the package takes whole blocks only
    anchors = batch.anchors[: batch.n_anchors][whole]
    keep = whole[batch.slot_index[: batch.n_slots] // spec.block_size]
    features, last = torch.zeros(len(row), target.feature_width), torch.zeros(len(row), 32)
    target.capture(batch, features, last)

    drafter = Drafter(spec)
    drafter.load_state_dict(stored.tensors)
    weight = batch.slot_weight.copy()
    weight[: batch.n_slots] *= keep
    from dataclasses import replace

    sums = micro_step(
        drafter,
        replace(batch, slot_weight=weight),
        features,
        Borrowed.of(target, torch.float32),
        LossConfig(labels="target", gamma=4.0),
        1 / int(keep.sum()),
        last_hidden=last,
    )

    def chosen(*_: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.from_numpy(anchors).long(), torch.ones(len(anchors), dtype=torch.bool)

    monkeypatch.setattr(core, "select_anchors", chosen)
    kwargs, _ = DFlashDraftModel.get_trainer_kwargs(
        loss_fn="ce", loss_implementation="eager", max_anchors=len(anchors), dflash_decay_gamma=4.0
    )
    mask = torch.zeros(1, len(row), dtype=torch.long)
    mask[:, PROMPT - 1 :] = 1
    _, loss, _ = model(
        hidden_states=features[None],
        input_ids=torch.tensor([row]),
        loss_mask=mask,
        verifier_last_hidden_states=last[None],
        document_ids=torch.zeros(1, len(row), dtype=torch.long),
        position_ids=torch.arange(len(row))[None],
        **kwargs,
    )
    ours = float(sums.loss) / int(keep.sum())
    assert ours == pytest.approx(float(loss.detach()), rel=1e-5)
    loss.backward()
    theirs = dict(model.named_parameters())
    for name, parameter in drafter.named_parameters():
        torch.testing.assert_close(parameter.grad, theirs[name].grad, rtol=1e-3, atol=1e-6)


def test_forebay_check_runs_the_package_and_reports_its_agreement(tmp_path: Path, target_folder: Path) -> None:
    folder = write_drafter(tmp_path / "drafter", drafter_of(), "speculators", target=str(target_folder))
    report = check_drafter(folder, tiny_target(seed=2), [[5, 6, 7]], target_folder=target_folder, max_new_tokens=8)
    assert report["ok"] and report["peers"]["speculators"]["identical"] is True
