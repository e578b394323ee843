"""Speculative generation for a notebook: text in, text out, with how many drafts were accepted.

Guarantees: the texts are the target's own (see `serve`); the drafter is checked against the target before the first
token. A convenience over `serve`, not a server. Public through `api`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from forebay.config import TargetConfig
from forebay.decode.check import check_contract
from forebay.decode.drafter import ServedDrafter, load_drafter
from forebay.decode.evaluate import eos_ids
from forebay.decode.serve import Generation, Progress, serve
from forebay.decode.target_side import TargetSide, decoder_layers
from forebay.errors import UsageError
from forebay.models.load import load_model, load_tokenizer


@dataclass(frozen=True)
class Answer:
    """What one prompt gave. `accepted[r]` drafts were accepted in whole round r; `finish` is "eos" or "length"."""

    text: str
    tokens: list[int] = field(repr=False)
    accepted: list[int] = field(repr=False)
    finish: str

    @property
    def accept_length(self) -> float:
        """Tokens per verification, over this answer's whole rounds (1.0 if there was none)."""
        return 1 + sum(self.accepted) / len(self.accepted) if self.accepted else 1.0


class SpeculativeGenerator:
    """A target, its tokenizer and a drafter.

    >>> generator = SpeculativeGenerator.from_folders("path/to/target", "path/to/drafter")
    >>> generator("Tell me a story.").text
    """

    @classmethod
    def from_folders(
        cls,
        target: str | Path,
        drafter: str | Path,
        *,
        gguf_file: str | None = None,
        dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto",
        device: str = "cpu",
    ) -> SpeculativeGenerator:
        """Load a Hugging Face target folder and a drafter (an exported folder, a checkpoint, or a run).

        Raises what loading either raises, and ContractError where they do not belong together.
        """
        where = TargetConfig(model=str(target), gguf_file=gguf_file, dtype=dtype)
        model = load_model(where, device)
        return cls(model, load_tokenizer(where), load_drafter(drafter, num_target_layers=len(decoder_layers(model))))

    def __init__(self, model: Any, tokenizer: Any, drafter: ServedDrafter) -> None:
        """Raises ContractError where `drafter` does not belong to `model`."""
        check_contract(drafter.config, model)
        self.target = TargetSide(model, drafter.layer_ids)
        self.drafter = ServedDrafter(drafter.config, drafter.tensors, self.target.dtype, self.target.device)
        self.tokenizer = tokenizer
        self.eos = eos_ids(model)

    def __call__(self, prompt: str | Sequence[dict[str, str]], **options: Any) -> Answer:
        """Answer one prompt: a user's text, or a conversation as `messages`. `options` as in `generate`."""
        return self.generate([prompt], **options)[0]

    def generate(
        self,
        prompts: Sequence[str | Sequence[dict[str, str]]],
        *,
        max_new_tokens: int = 256,
        temperature: float = 0.0,
        seed: int = 0,
        batch_size: int = 16,
        progress: Progress | None = None,
    ) -> list[Answer]:
        """Answer several prompts at once, in their order. Temperature 0 is greedy."""
        out = self.tokens(
            [self.encode(p) for p in prompts],
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            seed=seed,
            batch_size=batch_size,
            progress=progress,
        )
        return [
            Answer(self.tokenizer.decode(g.tokens, skip_special_tokens=True), g.tokens, g.accepted, g.finish)
            for g in out
        ]

    def tokens(self, prompts: Sequence[Sequence[int]], **options: Any) -> list[Generation]:
        """As `generate`, from token ids to everything the loop recorded."""
        return serve(self.target, self.drafter, prompts, eos_token_ids=self.eos, **options)

    def encode(self, prompt: str | Sequence[dict[str, str]]) -> list[int]:
        """Token ids of a user's text or of a conversation, by the target's chat template."""
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        if not messages:
            raise UsageError("the conversation is empty: give at least one message")
        encoded = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True)
        return list(encoded["input_ids"] if hasattr(encoded, "keys") else encoded)


__all__ = ["Answer", "SpeculativeGenerator", "load_drafter"]
