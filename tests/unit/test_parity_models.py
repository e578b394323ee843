"""The drafter against tensors dumped from public implementations: hidden states, logits, losses and gradients."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from forebay.config import LossConfig
from forebay.models.drafter import Drafter
from forebay.models.loss import FrozenHead
from forebay.models.spec import DrafterSpec
from forebay.models.step import Borrowed, micro_step, slot_states

FOLDER = Path(os.environ.get("FOREBAY_PARITY", Path(__file__).parents[3] / "shared" / "parity"))
pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason="no parity tensors: set FOREBAY_PARITY to their folder")


def rms_norm(weight, eps):
    return lambda x: torch.nn.functional.rms_norm(x, weight.shape, weight, eps)


def batch(tokens, documents, anchors, slots, labels, weights, sources):
    """A packed item from plain lists."""
    documents = np.asarray(documents)
    cuts = [0, *(np.flatnonzero(np.diff(documents)) + 1), len(documents)]
    starts = np.concatenate([np.full(b - a, a) for a, b in pairwise(cuts)])
    return SimpleNamespace(
        tokens=np.asarray(tokens),
        positions=np.arange(len(tokens)) - starts,
        doc_offsets=np.asarray(cuts),
        anchors=np.asarray(anchors),
        anchor_start=starts[anchors],
        n_anchors=len(anchors),
        slot_index=np.asarray(slots),
        slot_label=np.asarray(labels),
        slot_weight=np.asarray(weights, np.float32),
        slot_source=np.asarray(sources),
        n_slots=len(slots),
    )


@pytest.fixture(scope="module")
def zlab():
    """A z-lab checkpoint, what it was given and what it answered."""
    if not (FOLDER / "zlab").is_dir():
        pytest.skip("no zlab parity tensors")
    config = json.loads((FOLDER / "zlab" / "draft_config.json").read_text())
    spec = DrafterSpec(
        hidden_size=config["hidden_size"],
        target_hidden_size=config["hidden_size"],
        layers=config["num_hidden_layers"],
        heads=config["num_attention_heads"],
        kv_heads=config["num_key_value_heads"],
        head_dim=config["head_dim"],
        intermediate_size=config["intermediate_size"],
        vocab_size=config["vocab_size"],
        block_size=config["block_size"],
        mask_token_id=config["dflash_config"]["mask_token_id"],
        target_layer_ids=tuple(config["dflash_config"]["target_layer_ids"]),
        num_target_layers=config["num_target_layers"],
        rms_eps=config["rms_norm_eps"],
        rope=config["rope_parameters"],
    )
    target = load_file(FOLDER / "zlab" / "target.safetensors")
    drafter = Drafter(spec)
    drafter.load_state_dict(load_file(FOLDER / "zlab" / "draft.safetensors"), strict=True)
    head = FrozenHead.build(target["lm_head.weight"])
    return drafter, Borrowed(target["model.embed_tokens.weight"], head), load_file(FOLDER / "zlab" / "io.safetensors")


def one_block(drafter, borrowed, io, features):
    """Hidden states of the block that the reference served, through the training forward."""
    anchor = io["position_ids"].shape[1] - drafter.spec.block_size
    tokens = io["input_ids"][0].numpy().copy()
    tokens[anchor] = int(io["block_ids"][0, 0])
    # A second, earlier block makes this the training forward over many anchors.
    item = batch(tokens, np.zeros(len(tokens), int), [anchor - 9, anchor], [], [], [], [])
    with torch.no_grad():
        return slot_states(drafter, item, features, borrowed)[1]


def test_a_training_block_equals_the_reference_serving_forward(zlab):
    """C04: features of layers i are HF hidden_states[i + 1]; equal to 1e-5, plain and cached."""
    drafter, borrowed, io = zlab
    features = torch.cat([io[f"target_hidden_states.{i + 1}"][0] for i in drafter.spec.target_layer_ids], dim=-1)
    assert torch.equal(features, io["context_feature"][0])
    hidden = one_block(drafter, borrowed, io, features)
    assert (hidden - io["draft_hidden"][0]).abs().max() < 1e-5
    assert (hidden - io["draft_hidden_cached"][0]).abs().max() < 1e-5
    assert (borrowed.head.logits(hidden) - io["draft_logits"][0]).abs().max() < 1e-5


@pytest.mark.parametrize(
    "fault", ["layer ids off by one", "rope theta changed", "mask token swapped", "epsilon changed"]
)
def test_a_planted_fault_breaks_serving_parity(zlab, fault):
    """Mutation: each of these would pass every shape check, and is seen here."""
    drafter, borrowed, io = zlab
    ids, spec = drafter.spec.target_layer_ids, drafter.spec
    if fault == "layer ids off by one":
        features = torch.cat([io[f"target_hidden_states.{i}"][0] for i in ids], dim=-1)
    else:
        features = io["context_feature"][0]
        change = {
            "rope theta changed": {"rope": {"rope_type": "default", "rope_theta": 5000.0}},
            "mask token swapped": {"mask_token_id": 0},
            "epsilon changed": {"rms_eps": 1e-2},
        }[fault]
        mutant = Drafter(replace(spec, **change))
        mutant.load_state_dict(drafter.state_dict())
        drafter = mutant
    assert (one_block(drafter, borrowed, io, features) - io["draft_hidden"][0]).abs().max() > 1e-4


CASES = ["full_ce_expdecay", "full_kl_packed", "sliding_noncausal_ce"]


def training_case(name, **change):
    """A speculators training step as a drafter, an item, its features and what came out."""
    if not (FOLDER / "speculators" / f"{name}.safetensors").is_file():
        pytest.skip("no speculators parity tensors")
    meta = json.loads((FOLDER / "speculators" / f"{name}.json").read_text())
    t, case = load_file(FOLDER / "speculators" / f"{name}.safetensors"), meta["case"]
    width = t["w.norm.weight"].shape[0]
    spec = DrafterSpec(
        hidden_size=width,
        target_hidden_size=width,
        layers=len(case["layer_types"]),
        heads=meta["heads"],
        kv_heads=meta["kv_heads"],
        head_dim=meta["head_dim"],
        intermediate_size=t["w.layers.0.mlp.up_proj.weight"].shape[0],
        vocab_size=t["w.lm_head.weight"].shape[0],
        block_size=case["block"],
        mask_token_id=meta["mask_token_id"],
        target_layer_ids=tuple(i - 1 for i in meta["target_layer_ids"]),
        num_target_layers=4,
        rms_eps=meta["rms_eps"],
        rope={"rope_type": "default", "rope_theta": meta["rope_theta"]},
        layer_types=tuple(case["layer_types"]),
        sliding_window=case.get("window"),
        window_from="anchor",
        sliding_causal=not case.get("noncausal", False),
    )
    drafter = Drafter(replace(spec, **change))
    own = {k.removeprefix("w."): v for k, v in t.items() if k.startswith("w.")}
    drafter.load_state_dict({k: own[k] for k in drafter.state_dict()}, strict=True)
    assert torch.equal(t["w.lm_head.weight"], t["w.verifier_lm_head.weight"])
    head = FrozenHead.build(own["lm_head.weight"], norm=rms_norm(own["verifier_norm.weight"], meta["rms_eps"]))
    slots = t["out.aligned_loss_mask"][0].nonzero()[:, 0].numpy()
    anchors, block = t["in.anchors"].numpy(), case["block"]
    # A block's label comes from the target's state at anchor + slot - 1: their label convention.
    item = batch(
        t["in.input_ids"][0].numpy(),
        t["in.document_ids"][0].numpy(),
        anchors,
        slots,
        np.zeros(len(slots), int),
        np.exp(-((slots % block) - 1) / meta["gamma"]),
        anchors[slots // block] + slots % block - 1,
    )
    loss = {"ce": {"labels": "target"}, "kl_div": {"weights": {"kl": 1.0}}}[case["loss"]]
    return drafter, Borrowed(own["embed_tokens.weight"], head), item, LossConfig(**loss, chunk_slots=5), t, meta


@pytest.mark.parametrize("name", CASES)
def test_a_training_step_equals_the_reference(name):
    """Hidden states, logits, loss (rescaled to their divisor) and every gradient, to 1e-5."""
    drafter, borrowed, item, loss, t, meta = training_case(name)
    features = t["in.hidden_states"][0]
    hidden = slot_states(drafter, item, features, borrowed)
    assert (hidden.flatten(0, 1) - t["mid.hidden"][0]).abs().max() < 1e-5
    logits = borrowed.head.logits(hidden.flatten(0, 1))
    assert (logits - t["out.logits"][0]).abs().max() < 1e-5 * max(1.0, float(t["out.logits"].abs().max()))
    last = t["in.verifier_last_hidden_states"][0]
    sums = micro_step(drafter, item, features, borrowed, loss, 1 / meta["supervised_slots"], last_hidden=last)
    assert float(sums.loss) / meta["supervised_slots"] == pytest.approx(meta["loss"], rel=1e-5)
    for key, parameter in drafter.named_parameters():
        want = t[f"grad.{key}"]
        assert (parameter.grad - want).abs().max() <= 1e-5 * max(float(want.abs().max()), 1e-3), key


@pytest.mark.parametrize("name", CASES)
def test_hits_and_accepted_runs_equal_the_reference_metrics(name):
    drafter, borrowed, item, _, t, meta = training_case(name)
    last = t["in.verifier_last_hidden_states"][0]
    labels = LossConfig(labels="target")
    sums = micro_step(drafter, item, t["in.hidden_states"][0], borrowed, labels, 1.0, last_hidden=last, backward=False)
    report = sums.report()
    assert report["accuracy_by_slot"] == pytest.approx(meta["acc_per_pos"], abs=1e-6)
    assert report["uniform_accept_length"] == pytest.approx(meta["eal"], abs=1e-6)


@pytest.mark.parametrize(
    "change",
    [
        {"sliding_causal": True},
        {"window_from": "query"},
        {"layer_types": ("full_attention",) * 2},
        {"sliding_window": 17},
    ],
)
def test_a_planted_window_fault_breaks_training_parity(change):
    """C22's kind: a window that is off, off by one or measured from elsewhere changes the hidden states."""
    drafter, borrowed, item, _, t, _ = training_case("sliding_noncausal_ce", **change)
    hidden = slot_states(drafter, item, t["in.hidden_states"][0], borrowed)
    assert (hidden.flatten(0, 1) - t["mid.hidden"][0]).abs().max() > 1e-4
