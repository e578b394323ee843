"""Batched generation gives what the model says token by token, whatever the batch and the refilling."""

import pytest
import torch
from transformers import GptOssConfig, GptOssForCausalLM, LlamaConfig, LlamaForCausalLM

from forebay.stages.generation import Generator, Question

SIZES = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(3)
    config = LlamaConfig(
        **SIZES, intermediate_size=48, max_position_embeddings=64, eos_token_id=1, initializer_range=0.6
    )
    return LlamaForCausalLM(config).eval()


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    draw = torch.Generator().manual_seed(seed)
    return [
        torch.randint(2, 64, (int(n),), generator=draw).tolist() for n in torch.randint(1, 20, (count,), generator=draw)
    ]


def asked(texts, seeds=None):
    return [
        Question(i, text, seed) for i, (text, seed) in enumerate(zip(texts, seeds or [0] * len(texts), strict=True))
    ]


@torch.inference_mode()
def plain(model, prompt, stops, room):
    tokens = []
    while len(tokens) < room:
        token = int(model(input_ids=torch.tensor([prompt + tokens])).logits[0, -1].argmax())
        if token in stops:
            return tokens, "stop"
        tokens.append(token)
    return tokens, "length"


@pytest.mark.parametrize("batch_size", [1, 3, 8, 64])
def test_replies_equal_the_models_own_greedy_text_for_every_batch_size(model, batch_size):
    """Refilled rows, dropped rows and left padding must not change a token."""
    texts, stops = prompts(23), set(range(1, 9))
    generator = Generator(model, stops=stops, pad=0, limit=64)
    replies = list(generator.run(asked(texts), max_new_tokens=12, batch_size=batch_size))
    assert sorted(r.about for r in replies) == list(range(23))
    assert {r.finish_reason for r in replies} == {"stop", "length"}
    for reply in replies:
        assert (reply.tokens, reply.finish_reason) == plain(model, texts[reply.about], stops, 12)


def test_sliding_layers_give_the_same_text_as_the_model_itself():
    torch.manual_seed(0)
    config = GptOssConfig(
        **SIZES,
        head_dim=8,
        intermediate_size=24,
        num_local_experts=2,
        num_experts_per_tok=1,
        sliding_window=6,
        eos_token_id=1,
    )
    model = GptOssForCausalLM(config).eval()
    texts, stops = prompts(7, seed=1), {1, 2, 3, 4}
    for reply in Generator(model, stops=stops, pad=0).run(asked(texts), max_new_tokens=12, batch_size=3):
        assert (reply.tokens, reply.finish_reason) == plain(model, texts[reply.about], stops, 12)


def test_a_reply_ends_at_the_models_longest_sequence(model):
    [reply] = Generator(model, stops=set(), pad=0, limit=16).run(asked([[5] * 10]), max_new_tokens=99, batch_size=4)
    assert (len(reply.tokens), reply.finish_reason) == (6, "length")


def test_sampling_depends_on_the_rows_seed_and_not_on_the_batch(model):
    texts = prompts(9)
    runs = []
    for batch_size, seeds in ((2, range(9)), (9, range(9)), (9, range(100, 109))):
        generator = Generator(model, stops={1}, pad=0, temperature=1.0)
        replies = generator.run(asked(texts, seeds), max_new_tokens=8, batch_size=batch_size)
        runs.append({r.about: r.tokens for r in replies})
    assert runs[0] == runs[1] != runs[2]
