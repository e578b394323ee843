"""Captures of many families equal a plain forward; embedding and head are what the facts say; the rest is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from forebay.errors import TargetError
from forebay.models.checks import Packed
from forebay.models.target import Target
from target_families import LAYERS, ROWS, TEXT, WRAPPED, family

REFUSED = {"gpt2": "embedding row", "gemma3n": "shape"}
SUPPORTED = [name for name in (*TEXT, *WRAPPED) if name not in REFUSED]
LENGTHS = (3, 7, 12)


def prompts(seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(4, 299, n).tolist() for n in LENGTHS]


def reference(target: Target, ids: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """([n, K * H], logits [n, V]) by transformers alone."""
    with torch.no_grad():
        out = target.model(input_ids=torch.tensor([ids]), output_hidden_states=True, use_cache=False)
    return torch.cat([out.hidden_states[i + 1][0] for i in target.layer_ids], -1), out.logits[0]


@pytest.mark.parametrize("name", SUPPORTED)
def test_captured_states_equal_a_plain_forward_alone_and_batched(name):
    """C51 (right padding), for every supported family, with embedding and head as the facts say."""
    target = Target(family(name), (0, 2, 4))
    texts = prompts()
    expected = [reference(target, ids) for ids in texts]
    for splits in ((1, 1, 1), (1, 2), (3,)):
        batch = Packed.of(texts, splits)
        out = torch.full((len(batch.tokens) + 5, target.feature_width), 7.0)
        last = torch.zeros(len(batch.tokens) + 5, target.facts.hidden_size)
        echo = target.capture(batch, out, last)
        n = len(batch.tokens)
        assert np.array_equal(echo, batch.tokens)
        torch.testing.assert_close(out[:n], torch.cat([states for states, _ in expected]), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(
            target.logits(last[:n]), torch.cat([logits for _, logits in expected]), rtol=1e-4, atol=1e-4
        )
        assert not out[n:].any(), "padding of the slot is not zero"

    first = []
    hook = target.layers[0].register_forward_pre_hook(
        lambda module, args, kwargs: first.append(args[0] if args else kwargs["hidden_states"]), with_kwargs=True
    )
    reference(target, texts[0])
    hook.remove()
    torch.testing.assert_close(target.embed(torch.tensor([texts[0]])), first[0])
    assert target.facts.num_layers == LAYERS
    assert target.facts.embedding_rows == target.facts.vocab_size == ROWS
    tied = target.model.get_input_embeddings().weight is target.model.get_output_embeddings().weight
    assert target.facts.tied == tied


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_a_family_that_does_something_else_is_refused_by_name(name):
    model = family(name)
    with pytest.raises(TargetError, match=f"{type(model).__name__} is not supported.*{REFUSED[name]}"):
        Target(model, (0, 2, 4))


def test_facts_of_experts_give_the_width_one_token_passes_through():
    """C111: routed experts times their width plus the shared one."""
    assert (f := Target(family("qwen3_moe"), (0,)).facts).experts == 4 and f.intermediate_size == 48
    assert Target(family("qwen3_next"), (0,)).facts.intermediate_size == 2 * 24 + 24
    assert Target(family("deepseek_v3"), (0,)).facts.intermediate_size == 2 * 24 + 24
    assert Target(family("llama"), (0,)).facts.experts == 0


def test_scales_and_soft_caps_are_found():
    gemma, granite, cohere = (Target(family(n), (0,)).facts for n in ("gemma2", "granite", "cohere"))
    assert gemma.embed_scale == pytest.approx(32**0.5) and gemma.logit_softcap == 30.0
    assert (granite.embed_scale, granite.logit_scale) == (3.0, 0.5)
    assert cohere.logit_scale == 0.25


def test_a_head_that_does_more_than_the_facts_say_is_refused():
    """Planted: logits scaled where no field of the config says so."""
    model = family("llama")
    model.lm_head.register_forward_hook(lambda module, args, out: out * 1.0)  # harmless: same logits
    Target(model, (0,))
    forward = model.forward

    def scaled(*args, **kwargs):
        out = forward(*args, **kwargs)
        out.logits = out.logits * 1.5
        return out

    model.forward = scaled
    with pytest.raises(TargetError, match="its logits are not"):
        Target(model, (0,))
