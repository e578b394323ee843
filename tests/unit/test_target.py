"""The target: loading, layer ids, packing into the slot, early stop, threads."""

from __future__ import annotations

import json
import math
import threading

import numpy as np
import pytest
import torch

from forebay.config import TargetConfig
from forebay.errors import ConfigError, DataError, TargetError, UsageError
from forebay.models import load
from forebay.models.checks import Packed
from forebay.models.facts import check_layer_ids, default_layer_ids, layers_notice
from forebay.models.load import load_model, load_tokenizer, locate, measure_dtypes
from forebay.models.target import Target
from tiny import LAYER_IDS, save_tiny_target, tiny_target, toy_tokenizer

TEXTS = [[5, 6, 7], [9, 8, 7, 6, 5, 4, 3], list(range(20, 32))]


def constant_layers(model):
    """Layer i outputs the constant i."""
    for i, layer in enumerate(model.model.layers):
        layer.forward = lambda hidden_states, _i=i, **_: torch.full_like(hidden_states, float(_i))
    return model


@pytest.mark.parametrize(("layers", "ids"), [(36, (1, 9, 17, 25, 33)), (30, (1, 8, 14, 20, 27))])
def test_default_layer_ids_are_those_of_released_drafters(layers, ids):
    assert default_layer_ids(layers) == ids


@pytest.mark.parametrize(
    ("layers", "ids"), [(2, (0,)), (3, (1,)), (4, (2,)), (5, (1, 2)), (6, (1, 2, 3)), (8, (1, 2, 3, 4, 5))]
)
def test_the_default_fits_a_small_target_and_says_so(layers, ids, tmp_path):
    target = Target.load(TargetConfig(model=str(save_tiny_target(tmp_path / "t", num_hidden_layers=layers))))
    assert target.layer_ids == default_layer_ids(layers) == ids
    notice = layers_notice(TargetConfig(model="t"), ids, layers)
    assert notice is None if len(ids) == 5 else f"has {layers} layers: {len(ids)} of them are captured" in notice
    assert layers_notice(TargetConfig(model="t", captured_layers=1), (1,), layers) is None


def test_a_target_of_one_layer_has_none_to_capture(tmp_path):
    folder = save_tiny_target(tmp_path / "t", num_hidden_layers=1)
    with pytest.raises(ConfigError, match=r"layer 0 is the last.*allow_last_layer"):
        Target.load(TargetConfig(model=str(folder)))


def test_default_layer_ids_of_one_and_of_too_many_layers():
    assert default_layer_ids(6, 1) == (3,) and default_layer_ids(6, 3) == (1, 2, 3)
    with pytest.raises(ConfigError, match=r"captured_layers 5 does not fit .* 6 layers: lower .* to 3"):
        default_layer_ids(6, 5)


@pytest.mark.parametrize("ids", [[1, 3, 6], [3, 3, 5], [-1], [], [4, 2], [0, 5]])
def test_impossible_layer_ids_are_refused_with_the_valid_range(ids):
    """C38; unsorted ids and the last layer as well."""
    with pytest.raises(ConfigError, match=r"valid 0\.\.5|must rise|is the last"):
        check_layer_ids(ids, 6)
    assert check_layer_ids([0, 5], 6, allow_last=True) == (0, 5)


def test_features_are_the_outputs_of_the_named_layers_and_the_last_is_refused_unless_allowed():
    """C37, and C41: the width tells the two settings apart."""
    model = constant_layers(tiny_target())
    target = Target(model, LAYER_IDS)
    out = torch.full((22, target.feature_width), -1.0)
    target.capture(Packed.of(TEXTS, (1, 2)), out)
    assert out.unflatten(-1, (3, 32)).unique(dim=-1).squeeze(-1).unique(dim=0).tolist() == [[0, 2, 4]]
    with pytest.raises(ConfigError, match="layer 5 is the last"):
        Target(model, (0, 2, 5))
    wider = Target(model, (0, 2, 4, 5), allow_last_layer=True)
    assert (target.feature_width, wider.feature_width) == (3 * 32, 4 * 32)


def test_what_a_slot_holds_beyond_the_item_becomes_zero():
    """Steps of fixed shape read padding: a state that was not finite must not stay there for the next item."""
    target = Target(tiny_target(), LAYER_IDS)
    out, last = (torch.full((30, width), math.nan) for width in (target.feature_width, 32))
    target.capture(Packed.of(TEXTS, (1, 2)), out, last)
    assert out.isfinite().all() and last.isfinite().all()
    assert not out[22:].any() and not last[22:].any() and out[:22].any(-1).all()


def test_an_allowed_last_layer_is_captured_before_the_final_norm():
    """C41: HF's hidden_states[-1] is after the norm; ours is before."""
    target = Target(tiny_target(), (0, 5), allow_last_layer=True)
    out = torch.zeros(3, 64)
    target.capture(Packed.of(TEXTS[:1], (1,)), out)
    with torch.no_grad():
        states = target.model(torch.tensor(TEXTS[:1]), output_hidden_states=True).hidden_states
    torch.testing.assert_close(target.final_norm(out[:, 32:]), states[-1][0])


def test_left_padding_in_transformers_gives_the_states_that_right_padding_gives_here():
    """C51: real positions agree; the pad token's value is never read."""
    target = Target(tiny_target(), LAYER_IDS)
    longest = max(map(len, TEXTS))
    ids = torch.tensor([[0] * (longest - len(t)) + t for t in TEXTS])
    mask = torch.tensor([[0] * (longest - len(t)) + [1] * len(t) for t in TEXTS])
    positions = (mask.cumsum(-1) - 1).clamp_min(0)
    with torch.no_grad():
        states = target.model(
            ids, attention_mask=mask, position_ids=positions, output_hidden_states=True, use_cache=False
        ).hidden_states
    expected = torch.cat([states[i + 1] for i in LAYER_IDS], -1)[mask.bool()]
    out = torch.zeros(22, target.feature_width)
    target.capture(Packed.of(TEXTS, (3,)), out)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


def test_nothing_after_the_last_captured_layer_runs():
    target = Target(tiny_target(), LAYER_IDS)
    ran = []
    for name, module in (
        ("layer 5", target.layers[5]),
        ("norm", target.final_norm),
        ("head", target.model.lm_head),
    ):
        module.register_forward_pre_hook(lambda *_, _name=name: ran.append(_name))
    out, last = torch.zeros(22, target.feature_width), torch.zeros(22, 32)
    target.capture(Packed.of(TEXTS, (3,)), out)
    assert ran == []
    target.capture(Packed.of(TEXTS, (3,)), out, last)
    assert ran == ["layer 5"]


def test_the_same_job_twice_gives_identical_states():
    """C53: nothing leaks from one forward into the next."""
    target, batch = Target(tiny_target(), LAYER_IDS), Packed.of(TEXTS, (1, 2))
    first, second = torch.zeros(22, target.feature_width), torch.zeros(22, target.feature_width)
    target.capture(batch, first)
    target.capture(Packed.of([TEXTS[2]], (1,)), torch.zeros(12, target.feature_width))
    target.capture(batch, second)
    assert torch.equal(first, second)


def test_the_slot_may_have_another_dtype():
    target = Target(tiny_target(), LAYER_IDS)
    full, half = torch.zeros(22, 96), torch.zeros(22, 96, dtype=torch.bfloat16)
    for out in (full, half):
        target.capture(Packed.of(TEXTS, (3,)), out)
    assert torch.equal(full.bfloat16(), half)


def test_a_plain_forward_in_another_thread_is_not_stopped_while_capturing():
    """The evaluation generates with the model that a worker captures with."""
    target = Target(tiny_target(), LAYER_IDS)
    inside, go = threading.Event(), threading.Event()

    def pause(*_):
        if threading.current_thread() is worker:
            inside.set()
            assert go.wait(20)

    target.layers[1].register_forward_hook(pause)
    out = torch.zeros(22, target.feature_width)
    worker = threading.Thread(target=lambda: target.capture(Packed.of(TEXTS, (3,)), out))
    worker.start()
    assert inside.wait(20)
    with torch.no_grad():
        logits = target.model(torch.tensor([TEXTS[0]])).logits
    go.set()
    worker.join(20)
    assert logits.shape == (1, 3, 320) and (out != 0).any()


def test_a_token_without_an_embedding_row_is_an_error_on_the_host():
    """C35."""
    target = Target(tiny_target(), LAYER_IDS)
    with pytest.raises(DataError, match="token 5000 >= 320 embedding rows"):
        target.capture(Packed.of([[4, 5000]], (1,)), torch.zeros(2, target.feature_width))


def test_a_folder_loads_with_facts_and_the_fingerprint_is_the_same_in_every_dtype(tmp_path):
    folder = save_tiny_target(tmp_path / "t0")
    one, two = (Target.load(TargetConfig(model=str(folder), dtype=d, captured_layers=3)) for d in ("float32", "auto"))
    assert one.facts.identity == two.facts.identity and one.facts.name == "t0"
    assert one.layer_ids == (1, 2, 3) and one.dtype == torch.float32
    assert one.facts.eos_token_ids == (1, 2) and one.facts.rope["rope_theta"] == 10000.0
    other = Target.load(TargetConfig(model=str(save_tiny_target(tmp_path / "t1", seed=1)), captured_layers=3))
    assert other.facts.fingerprint != one.facts.fingerprint
    assert len(load_tokenizer(TargetConfig(model=str(folder)))) == 301


def test_layer_ids_of_a_checkpoint_go_before_the_configuration(tmp_path):
    config = TargetConfig(model=str(save_tiny_target(tmp_path / "t0")), dtype="float32", layer_ids=(1, 2))
    assert Target.load(config).layer_ids == (1, 2)
    assert Target.load(config, layer_ids=(0, 2, 4)).layer_ids == (0, 2, 4)


def test_a_tied_model_saved_without_its_head_loads_the_head_from_the_embedding(tmp_path):
    """C30, the target's part."""
    from safetensors.torch import load_file

    folder = save_tiny_target(tmp_path / "t0", tie_word_embeddings=True)
    assert "lm_head.weight" not in load_file(folder / "model.safetensors")
    target = Target.load(TargetConfig(model=str(folder), dtype="float32", captured_layers=1))
    assert target.facts.tied and torch.equal(target.head_weight, target.embed_weight)


def test_weights_missing_from_the_folder_are_an_error_not_random_numbers(tmp_path):
    from safetensors.torch import load_file, save_file

    folder = save_tiny_target(tmp_path / "t0")
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.3.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(TargetError, match=r"lacks 1 weights .*layers.3.mlp.up_proj"):
        load_model(TargetConfig(model=str(folder)))


def test_a_folder_that_is_no_model_is_one_clear_message(tmp_path):
    with pytest.raises(UsageError, match="no model folder at"):
        locate(TargetConfig(model=str(tmp_path / "none")))
    with pytest.raises(UsageError, match=r"neither a config.json nor a .gguf"):
        locate(TargetConfig(model=str(tmp_path)))
    (tmp_path / "a.gguf").touch()
    assert locate(TargetConfig(model=str(tmp_path))) == (tmp_path, "a.gguf")
    assert locate(TargetConfig(model=str(tmp_path / "a.gguf"))) == (tmp_path, "a.gguf")
    (tmp_path / "b.gguf").touch()
    with pytest.raises(UsageError, match=r"holds 2 GGUF files: set target.gguf_file to one of a.gguf, b.gguf"):
        locate(TargetConfig(model=str(tmp_path)))
    with pytest.raises(UsageError, match=r"no file c.gguf"):
        locate(TargetConfig(model=str(tmp_path), gguf_file="c.gguf"))


@pytest.mark.parametrize("config", [{"model_type": "nonsense"}, {"model_type": "t5"}, {"model_type": "llama"}])
def test_an_unknown_kind_of_model_or_absent_weights_are_one_clear_message(tmp_path, config):
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(TargetError, match="not a causal language model that this transformers can load"):
        load_model(TargetConfig(model=str(tmp_path)))
    if config["model_type"] == "nonsense":
        with pytest.raises(TargetError, match="has no tokenizer that transformers can read"):
            load_tokenizer(TargetConfig(model=str(tmp_path)))


def test_a_cast_keeps_rotary_frequencies_in_fp32():
    model = tiny_target()
    before = model.model.rotary_emb.inv_freq.clone()
    load.cast(model, torch.bfloat16)
    assert model.lm_head.weight.dtype == torch.bfloat16 and torch.equal(model.model.rotary_emb.inv_freq, before)


def test_a_quantised_target_is_left_as_it_is_and_never_cast(monkeypatch, tmp_path):
    """Planted: one weight in fp8, whose numbers mean nothing without a scale."""
    model = tiny_target()
    weight = model.model.layers[0].mlp.up_proj.weight
    weight.data = weight.data.to(torch.float8_e4m3fn)
    monkeypatch.setattr(load, "_from_pretrained", lambda *_: (model, {"missing_keys": []}))
    (tmp_path / "config.json").touch()
    loaded = load_model(TargetConfig(model=str(tmp_path)))
    assert loaded.model.layers[0].mlp.up_proj.weight.dtype == torch.float8_e4m3fn
    assert loaded.lm_head.weight.dtype == torch.float32
    with pytest.raises(UsageError, match=r"is quantised and cannot be cast: remove target.dtype=bfloat16"):
        load_model(TargetConfig(model=str(tmp_path), dtype="bfloat16"))


def test_faster_products_give_the_same_logits_and_keys_and_can_be_taken_back(tmp_path):
    folder = save_tiny_target(tmp_path / "t0")
    plain, loaded = tiny_target(), load_model(TargetConfig(model=str(folder), dtype="float32"))
    assert type(loaded.lm_head) is load.FastLinear and loaded.state_dict().keys() == plain.state_dict().keys()
    ids = torch.tensor([TEXTS[2]])
    with torch.inference_mode():
        expected = plain(ids).logits
        torch.testing.assert_close(loaded(ids).logits, expected, rtol=1e-4, atol=1e-5)
        with load.plain_products(loaded):
            assert torch.equal(loaded(ids).logits, expected)
    assert type(loaded.lm_head) is load.FastLinear
    x = torch.ones(9, 32, requires_grad=True)
    loaded.lm_head(x).sum().backward()  # a gradient in the input takes torch's own way
    assert x.grad is not None


def test_measuring_dtypes_leaves_the_model_as_it_was(monkeypatch):
    model = tiny_target()
    layers, weights = list(model.model.layers), [p.clone() for p in model.parameters()]
    monkeypatch.setattr(load, "MEASURE_S", 0.01)
    seconds = measure_dtypes(model, (torch.float32, torch.bfloat16))
    assert all(0 < s < float("inf") for s in seconds.values())
    assert list(model.model.layers) == layers and not any(layer._forward_hooks for layer in layers)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), weights, strict=True))


def test_a_gguf_file_gives_the_model_it_was_made_from(tmp_path):
    """The reduced path of the demo's model: one .gguf in a folder, dequantised."""
    gguf = pytest.importorskip("gguf")
    from transformers import LlamaConfig, LlamaForCausalLM

    heads, kv, dim = 4, 2, 8
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=301,
            hidden_size=32,
            num_hidden_layers=4,
            num_attention_heads=heads,
            num_key_value_heads=kv,
            intermediate_size=64,
            max_position_embeddings=128,
            tie_word_embeddings=True,
            rms_norm_eps=1e-5,
        )
    ).eval()
    writer = gguf.GGUFWriter(tmp_path / "tiny.gguf", "llama")
    writer.add_block_count(4)
    writer.add_context_length(128)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(64)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv)
    writer.add_rope_dimension_count(dim)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(301)
    vocab = toy_tokenizer().get_vocab()
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(sorted(vocab, key=vocab.__getitem__))

    def interleaved(weight, n):  # GGUF's order of rotary dimensions
        return weight.reshape(n, 2, dim // 2, 32).swapaxes(1, 2).reshape(weight.shape)

    names = {
        "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    }  # fmt: skip
    state = {k: v.numpy() for k, v in model.state_dict().items()}
    writer.add_tensor("token_embd.weight", state["model.embed_tokens.weight"])
    writer.add_tensor("output_norm.weight", state["model.norm.weight"])
    for i in range(4):
        for ours, theirs in names.items():
            weight = state[f"model.layers.{i}.{ours}.weight"]
            if theirs in ("attn_q", "attn_k"):
                weight = interleaved(weight, heads if theirs == "attn_q" else kv)
            writer.add_tensor(f"blk.{i}.{theirs}.weight", np.ascontiguousarray(weight))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    target = Target.load(TargetConfig(model=str(tmp_path), dtype="float32", layer_ids=(0, 1)))
    assert target.facts.name == "tiny" and target.facts.num_layers == 4
    ids = torch.tensor([TEXTS[2]])
    with torch.no_grad():
        torch.testing.assert_close(target.model(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-4)
