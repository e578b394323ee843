"""Library use: text in, text out, in the target's own words."""

from __future__ import annotations

import pytest

from drafters import random_drafter
from forebay.decode.evaluate import greedy_reference
from forebay.decode.generator import SpeculativeGenerator
from forebay.errors import ContractError, UsageError
from tiny import EOS, EOT, tiny_target, toy_tokenizer


def test_a_generator_answers_texts_and_conversations_as_the_target_would() -> None:
    model, tokenizer = tiny_target(), toy_tokenizer()
    generator = SpeculativeGenerator(model, tokenizer, random_drafter())
    talk = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "yes?"},
        {"role": "user", "content": "on"},
    ]
    answers = generator.generate(["hi there", talk], max_new_tokens=12)
    prompts = [generator.encode("hi there"), generator.encode(talk)]
    assert len(prompts[1]) > len(prompts[0])
    assert [a.tokens for a in answers] == greedy_reference(model, prompts, max_new_tokens=12, eos=[EOS, EOT])
    assert answers[0].text == tokenizer.decode(answers[0].tokens, skip_special_tokens=True)
    assert 1.0 <= answers[0].accept_length <= 4.0
    assert generator("hi there", max_new_tokens=12) == answers[0]
    sampled = generator("hi there", max_new_tokens=12, temperature=1.0, seed=3)
    assert sampled == generator("hi there", max_new_tokens=12, temperature=1.0, seed=3)


def test_a_drafter_of_another_target_and_an_empty_conversation_are_refused() -> None:
    with pytest.raises(ContractError, match="vocab_size"):
        SpeculativeGenerator(tiny_target(), toy_tokenizer(), random_drafter(vocab_size=300))
    with pytest.raises(UsageError, match="empty"):
        SpeculativeGenerator(tiny_target(), toy_tokenizer(), random_drafter()).encode([])
