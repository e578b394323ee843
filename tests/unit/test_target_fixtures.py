"""The fixtures other tests stand on: T0 loads from its folder, TK0 keeps any text, TK1 has no spare row."""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tiny import EOT, R0, ROWS, TK0_SIZE, TK1_SIZE, save_tiny_target, tiny_target, toy_tokenizer


def test_the_tiny_target_loads_from_its_folder_with_its_tokenizer(tmp_path):
    folder = save_tiny_target(tmp_path / "t0")
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer.apply_chat_template(R0["messages"], tokenize=True, return_dict=False)
    assert ids[-2] == EOT and len(tokenizer) == TK0_SIZE and max(ids) < TK0_SIZE
    with torch.inference_mode():
        assert torch.equal(model(torch.tensor([ids])).logits, tiny_target()(torch.tensor([ids])).logits)


def test_the_toy_tokenizers_keep_any_text_and_count_as_the_cases_say():
    for size in (TK0_SIZE, TK1_SIZE):
        tokenizer = toy_tokenizer(size)
        assert len(tokenizer) == size <= ROWS
        text = "the singing – naïve 思考 <think>\n\n</think> and\tall\r\n"
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
        assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (0, 1)
        assert tokenizer.mask_token_id is None


def test_the_tiny_target_is_a_function_of_its_seed():
    a, b, c = (tiny_target(s).lm_head.weight for s in (0, 0, 1))
    assert torch.equal(a, b) and not torch.equal(a, c)
