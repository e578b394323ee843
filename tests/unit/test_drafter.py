"""The drafter itself: its spec, rope, weights, first values, vocabulary, optimiser wiring and micro-step."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from drafter_items import CE, HIDDEN, VOCAB, borrowed, drafter, features, gradients, item, spec
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from forebay.config import DrafterConfig, LossConfig, from_dict
from forebay.errors import ConfigError, ContractError
from forebay.models import loss as loss_module
from forebay.models import matmul, pointwise
from forebay.models import step as step_module
from forebay.models.drafter import Drafter, rope_frequencies, rope_table
from forebay.models.init import init_from_target, init_random
from forebay.models.matmul import linear, times_transposed
from forebay.models.pointwise import feed_forward, rms_norm, rotate
from forebay.models.spec import (
    UNLIMITED,
    DrafterSpec,
    drafter_rope,
    drafter_spec,
    feed_forward_width,
    target_positions,
)
from forebay.models.step import micro_step
from forebay.models.vocabulary import draft_vocabulary, kept_of, map_tensors, shortlist

# Spec


def test_a_spec_survives_json_and_names_unknown_and_missing_fields():
    made = spec(layer_types=("sliding_attention", "full_attention"), sliding_window=8)
    assert DrafterSpec.from_dict(json.loads(json.dumps(made.to_dict()))) == made
    with pytest.raises(ContractError, match=r"unknown drafter field 'block_sise' \(nearest: 'block_size'\)"):
        DrafterSpec.from_dict(made.to_dict() | {"block_sise": 4})


@pytest.mark.parametrize("name", ["target_layer_ids", "mask_token_id", "block_size"])
def test_a_drafter_that_does_not_say_is_refused_not_guessed(name):
    """C39."""
    values = spec().to_dict()
    del values[name]
    with pytest.raises(ContractError, match=name):
        DrafterSpec.from_dict(values)


@pytest.mark.parametrize(
    ("ids", "said"), [((1, 3, 6), r"valid 0\.\.5"), ((3, 3, 5), "repeats"), ((-1,), "valid"), ((), "empty")]
)
def test_layer_ids_out_of_range_repeated_or_empty_are_refused(ids, said):
    """C38."""
    with pytest.raises(ConfigError, match=said):
        spec(target_layer_ids=ids)


@pytest.mark.parametrize("size", [0, -1, VOCAB + 1])
def test_a_draft_vocabulary_of_impossible_size_is_refused(size):
    """C32."""
    with pytest.raises(ConfigError, match=f"draft_vocab_size {size}"):
        spec(draft_vocab_size=size)


YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32768}
TARGET = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 96, "rms_norm_eps": 1e-5}


def made_for(target, config=None, notices=None):
    return drafter_spec(
        config or DrafterConfig(layers=2, block_size=4),
        target,
        target_layer_ids=(0, 2),
        num_target_layers=6,
        vocab_size=VOCAB,
        mask_token_id=310,
        trained_max_length=128,
        notices=notices,
    )


def test_a_spec_takes_its_shapes_from_the_target():
    made = made_for(TARGET | {"num_key_value_heads": 2, "head_dim": 16})
    assert (made.heads, made.kv_heads, made.head_dim, made.intermediate_size, made.rms_eps) == (4, 2, 16, 96, 1e-5)
    assert (made.feature_size, made.scored_slots, made.first_slot, made.head_rows) == (64, 3, 1, VOCAB)
    assert made_for(TARGET, DrafterConfig(sample_from_anchor=True)).scored_slots == 16
    assert made_for(TARGET).trained_max_length == 128


@pytest.mark.parametrize(
    ("fields", "positions"),
    [
        ({"max_position_embeddings": 4096}, 4096),
        ({"n_positions": 1024}, 1024),
        ({}, UNLIMITED),
        ({"max_position_embeddings": 4096, "rope_scaling": None, "rope_parameters": None}, 4096),
        # yarn in both habits: positions already stretched, and not yet
        ({"max_position_embeddings": 131072, "rope_scaling": YARN}, 131072),
        ({"max_position_embeddings": 40960, "rope_parameters": YARN}, 131072),
        ({"max_position_embeddings": 40960, "rope_parameters": {"full_attention": YARN, "sliding": {}}}, 131072),
    ],
)
def test_a_drafter_reaches_as_far_as_its_target_reads(fields, positions):
    assert target_positions(fields) == made_for(TARGET | fields).max_positions == positions


def test_a_mixture_of_experts_gives_its_active_width_and_never_contracts():
    """C111: per-expert width 21 below hidden 32."""
    notices: list[str] = []
    one = TARGET | {"moe_intermediate_size": 21, "num_experts_per_tok": 1}
    assert feed_forward_width(one, notices) == 96 and "contract" in notices[-1]
    assert feed_forward_width(one | {"num_experts_per_tok": 4, "shared_expert_intermediate_size": 10}) == 94
    assert made_for(one, notices=notices).intermediate_size == 96


# Rope


def test_fields_that_only_the_target_understands_leave_the_rope():
    """C20: partial rotation and mrope sections are gone, and the same spec comes back from JSON: equal cos and sin."""
    notices: list[str] = []
    target = TARGET | {
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e7,
            "partial_rotary_factor": 0.25,
            "mrope_section": [2, 1, 1],
        }
    }
    made = made_for(target, notices=notices)
    assert made.rope == {"rope_type": "default", "rope_theta": 1e7} and "mrope_section" in notices[0]
    again = DrafterSpec.from_dict(json.loads(json.dumps(made.to_dict())))
    for ours, theirs in zip(*(rope_table(torch.arange(200), s, torch.float32) for s in (made, again)), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default", "rope_theta": 1e5},
        {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
        {
            "rope_type": "llama3",
            "rope_theta": 5e5,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ],
)
def test_rope_frequencies_equal_those_of_transformers(rope):
    made = spec(rope=drafter_rope({"rope_parameters": rope}), head_dim=64)
    config = LlamaConfig(hidden_size=256, num_attention_heads=4, head_dim=64, rope_parameters=rope)
    if rope["rope_type"] == "default":
        want = 1.0 / (rope["rope_theta"] ** (torch.arange(0, 64, 2).float() / 64))
    else:
        want, _ = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, "cpu")
    assert torch.allclose(rope_frequencies(made), want, rtol=1e-6, atol=0)


def test_an_unsupported_rope_becomes_the_default_and_says_so():
    notices: list[str] = []
    rope = drafter_rope({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4, "factor": 4.0}}, notices)
    assert rope == {"rope_type": "default", "rope_theta": 1e4} and "longrope" in notices[0]
    per_layer = {
        "full_attention": {"rope_type": "default", "rope_theta": 1e6},
        "sliding_attention": {"rope_theta": 1.0},
    }
    assert drafter_rope({"rope_parameters": per_layer})["rope_theta"] == 1e6
    with pytest.raises(ConfigError, match="no rope of type 'yarn'"):
        spec(rope={"rope_type": "yarn", "rope_theta": 1e4})


# Weights

KEYS = {
    "fc.weight",
    "hidden_norm.weight",
    "norm.weight",
    *(
        f"layers.{i}.{part}.weight"
        for i in range(2)
        for part in (
            "input_layernorm",
            "post_attention_layernorm",
            *(f"self_attn.{x}" for x in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")),
            *(f"mlp.{x}" for x in ("gate_proj", "up_proj", "down_proj")),
        )
    ),
}


def test_the_state_dict_has_the_zlab_names_and_neither_embedding_nor_head():
    made = drafter()
    assert set(made.state_dict()) == KEYS == {name for name, p in made.named_parameters() if p.requires_grad}
    assert set(drafter(draft_vocab_size=50).state_dict()) == KEYS | {"d2t", "t2d"}


def test_random_weights_depend_on_the_seed_alone():
    a, b, c = (drafter(seed=s).state_dict() for s in (1, 1, 2))
    assert all(torch.equal(a[k], b[k]) for k in a) and not torch.equal(a["fc.weight"], c["fc.weight"])


def small_target():
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=HIDDEN,
            intermediate_size=64,
            num_hidden_layers=6,
            num_attention_heads=4,
            num_key_value_heads=2,
        )
    )


def test_a_drafter_started_from_its_target_copies_layers_and_passes_the_last_captured_layer():
    made, layers = drafter(), {i: m.state_dict() for i, m in enumerate(small_target().model.layers)}
    assert init_from_target(made, layers) == []
    for draft, source in zip(made.layers, (4, 5), strict=True):
        own = draft.state_dict()
        assert all(torch.equal(own[k], v) for k, v in layers[source].items())
        assert all(torch.equal(own[f"self_attn.{k}.weight"], torch.ones(8)) for k in ("q_norm", "k_norm"))
    states = features(7)
    assert torch.equal(made.fc(states), states[:, -HIDDEN:])
    chosen = drafter()
    init_from_target(chosen, layers, (0, 3), final_norm=torch.full((HIDDEN,), 0.5), norm_offset=1.0)
    assert torch.equal(chosen.norm.weight, torch.full((HIDDEN,), 1.5))
    assert torch.equal(chosen.layers[1].mlp.up_proj.weight, layers[3]["mlp.up_proj.weight"])


def test_what_does_not_fit_stays_random_and_is_said():
    made, layers = drafter(intermediate_size=40), {i: m.state_dict() for i, m in enumerate(small_target().model.layers)}
    before = made.layers[0].mlp.up_proj.weight.clone()
    notices = init_from_target(made, layers)
    assert "mlp.gate_proj, mlp.up_proj, mlp.down_proj" in notices[0]
    assert torch.equal(made.layers[0].mlp.up_proj.weight, before)
    with pytest.raises(ConfigError, match=r"names 9: valid 0\.\.5"):
        init_from_target(made, layers, (1, 9))


# Vocabulary


def test_a_draft_vocabulary_is_padded_to_its_size_and_deterministic():
    """C31: 54 ids seen, 300 asked for."""
    counts = np.zeros(VOCAB, int)
    counts[200:254] = np.arange(1, 55)
    kept = draft_vocabulary(counts, 300, VOCAB)
    assert len(kept) == 300 and torch.equal(kept, draft_vocabulary(counts, 300, VOCAB))
    assert set(range(200, 254)) <= set(kept.tolist()) and kept.tolist() == sorted(set(kept.tolist()))
    for size in (0, -1, VOCAB + 1, 4.0):
        with pytest.raises(ConfigError):
            draft_vocabulary(counts, size, VOCAB)


def test_a_map_is_read_back_and_never_assumed():
    """C33, C34: bit-equal after a round trip; missing, contradictory or different maps are errors."""
    kept = torch.tensor([1, 5, 7, 300])
    tensors = map_tensors(kept, VOCAB)
    assert torch.equal(kept_of(tensors, 4, VOCAB), kept)
    with pytest.raises(ContractError, match="no d2t/t2d map"):
        kept_of({}, 4, VOCAB)
    with pytest.raises(ContractError, match="same tokens"):
        kept_of(tensors | {"d2t": torch.zeros(4, dtype=torch.int64)}, 4, VOCAB)
    first, second = drafter(draft_vocab_size=4), drafter(draft_vocab_size=4)
    with pytest.raises(ContractError):
        _ = first.kept
    first.set_vocabulary(kept)
    second.load_state_dict(first.state_dict())
    assert torch.equal(second.kept, kept)
    second.set_vocabulary(kept)
    with pytest.raises(ContractError, match="differs from the checkpoint's in 2 token ids"):
        second.set_vocabulary(torch.tensor([1, 5, 8, 300]))
    assert drafter().kept is None


def test_a_shortlist_holds_the_seen_tokens_and_the_low_ids():
    counts = np.zeros(VOCAB + 9, int)
    counts[[3, 50, 317, 325]] = 1
    assert shortlist(counts, 5, VOCAB).tolist() == [0, 1, 2, 3, 4, 50, 317]


def test_a_shortlist_trains_the_same_slots_and_keeps_the_full_head_for_serving():
    """With every id kept the narrowed head gives the full head's gradient; with fewer, all slots still count."""
    batch, context, made = item([30], [(0, 4), (0, 9)]), features(30), drafter()
    micro_step(made, batch, context, borrowed(), CE, 1.0)
    want = gradients(made)
    micro_step(made, batch, context, borrowed(kept=torch.arange(VOCAB)), CE, 1.0)
    for name, grad in gradients(made).items():
        assert torch.allclose(grad, want[name], atol=1e-5), name
    seen = shortlist(np.bincount(batch.tokens, minlength=VOCAB), 3, VOCAB)
    lent = borrowed(kept=seen)
    sums = micro_step(made, batch, context, lent, CE, 1.0)
    assert int(sums.scored.sum()) == 6 and lent.head.weight.shape == (VOCAB, HIDDEN)


# Arithmetic


def test_fast_products_equal_plain_ones_with_their_gradients():
    generator = torch.Generator().manual_seed(0)
    x, w, up = (torch.randn(*s, generator=generator) for s in ((37, 24), (50, 24), (37, 50)))
    assert torch.allclose(times_transposed(x, w), x @ w.T, atol=1e-5)
    assert torch.allclose(times_transposed(up, w.T), up @ w, atol=1e-5)
    ours = [t.clone().requires_grad_() for t in (x, w)]
    plain = [t.clone().requires_grad_() for t in (x, w)]
    got = torch.autograd.grad(linear(*ours), ours, up)
    want = torch.autograd.grad(plain[0] @ plain[1].T, plain, up)
    for a, b in zip(got, want, strict=True):
        assert torch.allclose(a, b, atol=1e-4)


def test_the_processors_maker_chooses_the_library(tmp_path):
    """MKL on Intel's, oneDNN on others; not a measurement, which could fall otherwise after a resume (G7)."""
    for name, intel in (("GenuineIntel", True), ("AuthenticAMD", False)):
        (tmp_path / name).write_text(f"processor : 0\nvendor_id\t: {name}\nmodel name\t: some\n")
        assert matmul.made_by_intel(tmp_path / name) is intel
    assert not matmul.made_by_intel(tmp_path / "nowhere")
    assert not (matmul.ONEDNN and matmul.made_by_intel())


def test_the_rows_of_wanted_slots_are_those_of_all():
    """A slot that nobody wants does not go through the last layer's feed-forward, nor a mask through any product."""
    made, lent, context = drafter(torch.float64), borrowed(torch.float64), features(30, torch.float64)
    batch = item([30], [(0, 4), (0, 9), (0, 20)])
    parts = step_module._Item(made, batch, context, lent, torch.float64)
    whole, wanted = slice(0, 3), torch.tensor([1, 3, 10])
    rows: dict[str, list[int]] = {}
    for name, module in made.named_modules():
        if name.endswith(("q_proj", "mlp")):
            module.register_forward_hook(lambda m, x, y, name=name: rows.setdefault(name, []).append(len(y)))
    with torch.no_grad():
        all_of_them, some = parts.states(parts.context(), whole), parts.states(parts.context(), whole, wanted)
    assert all_of_them.shape == (12, HIDDEN) and torch.allclose(some, all_of_them[wanted], atol=1e-12)
    assert rows == {
        "layers.0.self_attn.q_proj": [4, 4],
        "layers.0.mlp": [12, 12],
        "layers.1.self_attn.q_proj": [12, 12],
        "layers.1.mlp": [12, 3],
    }


def test_the_norm_the_rotation_and_the_feed_forward_have_exact_gradients():
    generator = torch.Generator().manual_seed(0)

    def of(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()

    x, weight = of(5, 3, 8), of(8)
    assert torch.allclose(rms_norm(x, weight, 1e-6), torch.nn.functional.rms_norm(x, (8,), weight, 1e-6))
    assert torch.autograd.gradcheck(lambda a, b: rms_norm(a, b, 1e-3), (x, weight))
    angles = torch.linspace(0, 3, 20, dtype=torch.float64).view(5, 1, 4)
    turned = torch.polar(torch.ones_like(angles), angles) * torch.complex(*x.detach().chunk(2, -1))
    assert torch.allclose(rotate(x, (angles.cos(), angles.sin())), torch.cat([turned.real, turned.imag], -1))
    assert torch.autograd.gradcheck(lambda a: rotate(a, (angles.cos(), angles.sin())), (x,))
    rows, gate, up, down = of(5, 6), of(7, 6), of(7, 6), of(6, 7)
    want = (torch.nn.functional.silu(rows @ gate.T) * (rows @ up.T)) @ down.T
    assert torch.allclose(feed_forward(rows, gate, up, down), want)
    assert torch.autograd.gradcheck(feed_forward, (rows, gate, up, down))


@pytest.mark.parametrize("queries", [4, 8, 12, 10_000])
def test_blocks_taken_in_parts_give_the_same_gradients(queries, monkeypatch):
    """However many blocks go forward together, also with D-PACE, whose weights live inside a block."""
    batch, context = item([30, 17], [(0, a) for a in range(2, 25, 3)] + [(1, 1), (1, 14)]), features(47, torch.float64)
    made, lent = drafter(torch.float64), borrowed(torch.float64)
    results = []
    for size in (10_000, queries):
        monkeypatch.setattr(step_module, "CPU_QUERIES", size)
        sums = micro_step(made, batch, context, lent, LossConfig(decay="dpace"), 0.1, dtype=torch.float64)
        results.append((sums, gradients(made)))
    (whole, want), (parts, got) = results
    assert all((got[k] - want[k]).abs().max() < 1e-12 for k in want)
    assert parts.loss.item() == pytest.approx(whole.loss.item())
    assert torch.equal(parts.prefix_hits, whole.prefix_hits) and torch.equal(parts.scored, whole.scored)


def test_items_of_many_sizes_take_few_shapes_and_the_rounding_changes_no_gradient(monkeypatch):
    """On a CPU a kernel is compiled for every new shape of a product."""
    made, lent, product = drafter(), borrowed(), matmul.times_transposed
    shapes: dict[int, set] = {1: set(), 32: set()}
    apart = 0.0
    for tokens in range(33, 65):
        anchors = [(0, a) for a in range(1, tokens - 4, 3)]
        batch = item([tokens], anchors, pad=(70 - tokens, 24 - len(anchors), 72 - 3 * len(anchors)))
        context, found = features(70), {}
        for multiple, seen in shapes.items():
            monkeypatch.setattr(step_module, "CPU_MULTIPLE", multiple)
            for module in (matmul, loss_module, pointwise):
                monkeypatch.setattr(
                    module, "times_transposed", lambda x, w, s=seen: (s.add((*x.shape, *w.shape)), product(x, w))[1]
                )
            sums = micro_step(made, batch, context, lent, CE, 0.1)
            found[multiple] = (gradients(made), sums)
        (want, exact), (got, rounded) = found[1], found[32]
        apart = max(apart, *((got[k] - want[k]).norm() / want[k].norm() for k in want))
        assert torch.equal(rounded.scored, exact.scored) and torch.equal(rounded.prefix_hits, exact.prefix_hits)
    assert apart < 1e-5
    assert len(shapes[32]) * 5 < len(shapes[1])


def test_evaluation_leaves_no_gradient_and_counts_the_same():
    batch, context, made = item([30], [(0, 4), (0, 9)]), features(30), drafter()
    silent = micro_step(made, batch, context, borrowed(), CE, 1.0, backward=False)
    assert all(p.grad is None for p in made.parameters())
    assert micro_step(made, batch, context, borrowed(), CE, 1.0).loss.item() == pytest.approx(silent.loss.item())


def test_a_step_asks_a_device_for_no_number(monkeypatch):
    """C115: no item, tolist or nonzero in a micro-step, with hard or soft labels."""
    batch, context, made = item([30, 9], [(0, 4), (0, 9), (1, 2)], pad=(3, 2, 4)), features(42), drafter()
    last, lent = features(42, width=HIDDEN), borrowed(norm=lambda x: x, kept=torch.arange(300))

    def asked(*_args, **_kwargs):
        raise AssertionError("a step synchronised with the device")

    for name in ("item", "tolist", "nonzero", "__bool__", "__float__", "__int__"):
        monkeypatch.setattr(torch.Tensor, name, asked)
    for config in (LossConfig(), LossConfig(weights={"ce": 0.5, "kl": 0.5}), LossConfig(decay="dpace")):
        micro_step(made, batch, context, lent, config, 0.1, last_hidden=last)


# Optimiser wiring


def test_small_gradients_move_a_master_weight_of_one():
    """C42: gradient 0.01, lr 6e-4, 100 steps of the run's AdamW: 0.94; in pure bf16 nothing would move."""
    weight = torch.nn.Parameter(torch.ones(1))
    rounded = torch.ones(1, dtype=torch.bfloat16)
    adam = torch.optim.AdamW([weight], lr=6e-4, weight_decay=0.0, fused=True)
    for _ in range(100):
        weight.grad = torch.full((1,), 0.01)
        adam.step()
        rounded -= 6e-4  # what AdamW takes off here, in bf16: below half a step at 1.0
    assert float(weight) == pytest.approx(0.94, abs=1e-3) and float(rounded) == 1.0


def test_every_tensor_moves_in_bf16_compute():
    """C43: 20 steps of D0, all norms included; masters stay fp32."""
    made = drafter(sample_from_anchor=True)
    before = {k: v.clone() for k, v in made.named_parameters()}
    batch, context = item([40], [(0, a) for a in range(2, 34, 4)], first_slot=0), features(40).bfloat16()
    lent = borrowed(torch.bfloat16)
    adam = torch.optim.AdamW(made.parameters(), lr=6e-4, weight_decay=0.0, fused=True)
    for _ in range(20):
        micro_step(made, batch, context, lent, CE, 1 / batch.weight_sum, dtype=torch.bfloat16)
        adam.step()
        adam.zero_grad()
    assert all(p.dtype == torch.float32 and torch.isfinite(p).all() for p in made.parameters())
    assert [k for k, v in made.named_parameters() if torch.equal(v, before[k])] == []


def trained(batch, context, steps=200, **change):
    made, lent = drafter(**change), borrowed()
    adam = torch.optim.AdamW(made.parameters(), lr=5e-3, weight_decay=0.0, fused=True)
    for _ in range(steps):
        sums = micro_step(made, batch, context, lent, CE, 1 / batch.weight_sum)
        adam.step()
        adam.zero_grad()
    return made, lent, sums.report()


def test_one_row_can_be_overfitted_under_both_slot_conventions():
    """C05, the trainer's half: accept length near the whole block."""
    for first in (0, 1):
        batch = item([24], [(0, a) for a in range(2, 20)], first_slot=first)
        _, _, report = trained(batch, features(24), 120, sample_from_anchor=first == 0)
        assert report["uniform_accept_length"] > 4 - first + 0.9, report


@pytest.mark.parametrize("fault", ["labels off by one", "slot convention swapped", "context off by one"])
def test_a_planted_fault_is_seen_on_an_overfitted_row(fault):
    """Mutations: a drafter trained right, judged under each fault, accepts next to nothing."""
    right = item([24], [(0, a) for a in range(2, 20)])
    made, lent, report = trained(right, features(24), 120)
    assert report["uniform_accept_length"] > 3.9
    batch, context = item([24], [(0, a) for a in range(2, 20)]), features(24)
    if fault == "labels off by one":
        batch.slot_label = right.tokens[np.minimum(right.slot_source + 2, 23)]
    elif fault == "slot convention swapped":
        batch = item([24], [(0, a) for a in range(2, 20)], first_slot=0)
        made.spec = replace(made.spec, sample_from_anchor=True)
    else:
        context = torch.cat([context[1:], context[:1]])
    judged = micro_step(made, batch, context, lent, CE, 1.0, backward=False).report()
    assert judged["uniform_accept_length"] < 2.5, judged


def test_a_reduced_vocabulary_drafter_saves_resumes_and_has_the_same_loss(tmp_path):
    """C30: with a tied target (one matrix for embedding and head), the same loss after a round trip."""
    batch, context, kept = item([30], [(0, 4), (0, 9)]), features(30), torch.arange(0, VOCAB, 2)
    made, tied = drafter(draft_vocab_size=len(kept)), torch.randn(VOCAB, HIDDEN)
    made.set_vocabulary(kept)
    torch.save(made.state_dict(), tmp_path / "drafter.pt")
    again = Drafter(made.spec)
    again.load_state_dict(torch.load(tmp_path / "drafter.pt"))
    lent = [step_module.Borrowed(tied, loss_module.FrozenHead.build(tied, kept=d.kept)) for d in (made, again)]
    one, two = (micro_step(d, batch, context, b, CE, 1.0).loss.item() for d, b in zip((made, again), lent, strict=True))
    assert one == two


def test_random_initialisation_is_not_left_to_the_allocator():
    made = Drafter(spec())
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.fill_(float("nan"))
    init_random(made, 0)
    assert all(torch.isfinite(p).all() for p in made.parameters())


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"loss": {"decay": "dpace", "gamma": 2.0}}, "gamma"),
        ({"loss": {"dpace_alpha": 0.5}}, "dpace_alpha"),
        ({"loss": {"labels": "target", "weights": {"kl": 1.0}}}, "labels"),
        ({"loss": {"labels": "target", "weights": {"ce": 0.0, "kl": 1.0}}}, "labels"),
        ({"loss": {"shortlist": 100}, "drafter": {"draft_vocab_size": 50}}, "shortlist"),
        ({"drafter": {"sliding_window": 64}}, "sliding_window"),
        ({"drafter": {"init_target_layers": [1, 2, 3, 4, 5]}}, "init_target_layers"),
    ],
)
def test_an_option_that_would_be_ignored_is_an_error(values, said):
    """C109."""
    with pytest.raises(ConfigError, match=said):
        from_dict({"run_dir": "r", "target": {"model": "m"}, "data": {"store": "s"}} | values)
