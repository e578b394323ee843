"""The fixtures of the cases (CASES.md): T0, D0, TK0, TK1, R0, made on the fly, seconds on one CPU core.

    model = tiny_target()                      # T0, fp32, random weights from a seed
    folder = save_tiny_target(tmp_path / "t0")  # the same as a Hugging Face folder, with TK0

Byte-level BPE, so that every text survives encode -> decode. Importing this module imports no torch.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

PAD, EOS, EOT, START = 0, 1, 2, 3
ROWS = 320  # embedding rows of T0
TK0_SIZE, TK1_SIZE = 301, 320
LAYER_IDS = (0, 2, 4)  # D0
MASK_ID = 310  # D0: a spare row under TK0

R0: dict[str, Any] = {
    "id": "a",
    "messages": [
        {"role": "user", "content": "hi there"},
        {"role": "assistant", "content": "one two three four five six"},
    ],
}

#: D0 as keyword arguments of `forebay.config.DrafterConfig`.
D0: dict[str, Any] = {"layers": 2, "block_size": 4, "mask_token_id": MASK_ID, "intermediate_size": 64}

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_PAIRS = (  # noqa: SIM905
    "Ġ t|h e|Ġ a|o n|i n|e r|Ġ s|a n|r e|Ġ o|Ġ w|a t|e n|i s|o r|e s|Ġt he|i t|Ġ b|n d|o u|Ġ c|Ġ f|Ġ m|i ng|e d|Ġ p|"
    "Ġa nd|Ġo f|Ġt o|a r|l e|Ġ i|u s|Ġ h|v e|o t|l l|a s|s t|Ġ d|Ġ n|a l|o m|u r|Ġ l|i c|Ġ g|r o|e l|c h|e t|i d|a m|"
    "i l|u t|Ġ e|i m|Ġ y|Ġ u"
).split("|")


def toy_tokenizer(size: int = TK0_SIZE) -> Any:
    """TK0 (`size` 301) or TK1 (320): ids 0..size-1 all real, pad 0, eos 1, eot 2, ChatML without generation markers."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<pad>", "<eos>", "<|im_end|>", "<|im_start|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate(special + alphabet)}
    merges: list[tuple[str, str]] = []
    for pair in _PAIRS:
        left, right = pair.split(" ")
        if len(vocab) == size:
            break
        if right not in vocab:  # "i ng" needs "n g" first
            merges.append((right[0], right[1]))
            vocab[right] = len(vocab)
        if len(vocab) < size:
            merges.append((left, right))
            vocab[left + right] = len(vocab)
    assert len(vocab) == size, (len(vocab), size)
    core = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="<eos>")
    tokenizer.chat_template = CHATML
    return tokenizer


def tiny_target(seed: int = 0, **overrides: Any) -> Any:
    """T0: a random Qwen3ForCausalLM in eval mode, fp32. `overrides` are fields of Qwen3Config."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    fields: dict[str, Any] = {
        "vocab_size": ROWS,
        "hidden_size": 32,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 64,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "pad_token_id": PAD,
        "eos_token_id": [EOS, EOT],
        "bos_token_id": None,
        # wide enough that layers matter and greedy text does not collapse to one token
        "initializer_range": 0.15,
    }
    fields.update(overrides)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(Qwen3Config(**fields))
    model.generation_config.eos_token_id = [EOS, EOT]
    model.generation_config.pad_token_id = PAD
    return model.eval()


def save_tiny_target(folder: str | Path, seed: int = 0, tokenizer_size: int = TK0_SIZE, **overrides: Any) -> Path:
    """Write T0 and TK0 as a Hugging Face folder, and return it. `overrides` as in `tiny_target`."""
    out = Path(folder)
    tiny_target(seed, **overrides).save_pretrained(out)
    toy_tokenizer(tokenizer_size).save_pretrained(out)
    return out


def write_jsonl(path: str | Path, rows: list[dict[str, Any]]) -> Path:
    """J(x): a JSONL file with the rows x."""
    out = Path(path)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return out
