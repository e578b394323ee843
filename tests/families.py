"""Six model families in small: tokenizers trained here on a few sentences, and templates of their style.

Byte-level BPE (ChatML, Llama-3, gpt-oss, Qwen3) and SentencePiece-like ones (Gemma: BPE with byte fallback and `▁` for
every space; Mistral: Unigram with a `▁` before the first word). Every text survives encode -> decode.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

TEMPLATES = Path(__file__).parent / "data" / "templates"
CORPUS = [
    "The quick brown fox jumps over the lazy dog, and then it sleeps under the old tree near the river.",
    "What is two and three? Two and three is five. One two three four five six seven eight nine ten.",
    "def add(a, b):\n    return a + b\n\nprint(add(1, 2))  # a number, and a list [1, 2, 3] and {'a': 'b'}",
    "Explain in a few words how a forebay works: it takes uneven flow in and gives steady flow out.",
    "Überall grüßen Bäume. 你好, 世界. Привет, мир! naïve café résumé … “quoted” 🙂",
] * 4

FAMILIES: dict[str, dict[str, Any]] = {
    "chatml": {"kind": "bytes", "marks": ["<|im_start|>", "<|im_end|>"], "eos": "<|im_end|>", "end": "<|im_end|>"},
    "llama3": {
        "kind": "bytes",
        "marks": ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|end_of_text|>"],
        "bos": "<|begin_of_text|>",
        "eos": "<|end_of_text|>",
        "end": "<|eot_id|>",
    },
    "gemma": {
        "kind": "sentencepiece_bpe",
        "marks": ["<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"],
        "bos": "<bos>",
        "eos": "<eos>",
        "end": "<end_of_turn>",
    },
    "mistral": {
        "kind": "unigram",
        "marks": ["<s>", "</s>", "[INST]", "[/INST]"],
        "bos": "<s>",
        "eos": "</s>",
        "end": "</s>",
    },
    "harmony": {
        "kind": "bytes",
        "marks": ["<|start|>", "<|message|>", "<|channel|>", "<|end|>", "<|return|>", "<|call|>"],
        "eos": "<|return|>",
        "end": "<|return|>",
        "header": "<|channel|>final<|message|>",  # written by the target
    },
    "qwen3": {
        "kind": "bytes",
        "marks": ["<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>"],
        "eos": "<|im_end|>",
        "end": "<|im_end|>",
        "header": "<think>\n\n</think>\n\n",  # written by the target, unless the prompt supplies it
    },
}


@cache
def family(name: str) -> Any:
    """The tokenizer of a family, with its template."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    facts = FAMILIES[name]
    special = [AddedToken(t, special="think" not in t and "tool" not in t, normalized=False) for t in facts["marks"]]
    if facts["kind"] == "bytes":
        core = Tokenizer(models.BPE())
        words = Regex(r"\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\s+") if name == "llama3" else None
        split = [pre_tokenizers.Split(words, "isolated")] if words else []
        bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not words)
        core.pre_tokenizer = pre_tokenizers.Sequence([*split, bytes_])
        core.normalizer = normalizers.NFC() if name == "qwen3" else None
        core.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        core.train_from_iterator(
            CORPUS, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
        )
    elif facts["kind"] == "sentencepiece_bpe":
        core = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
        core.normalizer = normalizers.Replace(" ", "▁")
        core.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
        core.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
        bytes_ = [f"<0x{b:02X}>" for b in range(256)]
        core.train_from_iterator(
            CORPUS, trainers.BpeTrainer(vocab_size=600, special_tokens=["<unk>", *bytes_], show_progress=False)
        )
    else:
        metaspace = {"replacement": "▁", "prepend_scheme": "first"}
        pieces = _unigram_pieces()
        core = Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=True))
        core.pre_tokenizer = pre_tokenizers.Metaspace(**metaspace, split=False)
        core.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(**metaspace), decoders.Fuse()])
    core.add_special_tokens([t for t in special if t.special])
    core.add_tokens([t for t in special if not t.special])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, bos_token=facts.get("bos"), eos_token=facts["eos"])
    tokenizer.chat_template = (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")
    return tokenizer


def _unigram_pieces() -> list[tuple[str, float]]:
    """`▁` and single characters of the corpus, its words, and all bytes as a last resort."""
    words = {f"▁{w}" for text in CORPUS for w in text.split(" ") if w.isalpha()} | {
        w for t in CORPUS for w in t.split(" ")
    }
    characters = {c for text in CORPUS for c in text.replace(" ", "▁")}
    pieces = [("<unk>", 0.0), *((f"<0x{b:02X}>", -30.0) for b in range(256))]
    pieces += [(c, -8.0) for c in sorted(characters)]
    return pieces + [(w, -6.0) for w in sorted(words) if len(w) > 1]
