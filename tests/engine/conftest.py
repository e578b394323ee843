"""What is served by a real vLLM in its own Python: `make engine`. Skipped where FOREBAY_ENGINE_PYTHON names none.

An engine takes half a minute to start, so each is started once and the answers are shared.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from drafters import train_on_own_text, zlab_config, zlab_tensors
from forebay.decode.drafter import ServedDrafter
from forebay.decode.evaluate import Report, evaluate, greedy_reference
from forebay.engine.process import PYTHON_VARIABLE
from forebay.io.formats import StoredDrafter
from forebay.io.formats.zlab import zlab_spec
from tiny import save_tiny_target, tiny_target

#: vLLM's attention on a CPU refuses heads of size 8.
SHAPE = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64}
EOS = (1, 2)
PROMPT = [17, 240, 33, 99, 5]
TRAINED_TOKENS = 45
NEW = 24


def pytest_collection_modifyitems(items: list[Any]) -> None:
    if PYTHON_VARIABLE not in os.environ:
        skip = pytest.mark.skip(reason=f"{PYTHON_VARIABLE} names no engine: run `make engine`")
        for item in items:
            if Path(__file__).parent in item.path.parents:
                item.add_marker(skip)


@dataclass(frozen=True)
class Case:
    """A tiny target, a drafter trained on the first 45 tokens of one text of it, and prompts of two lengths."""

    folder: Path
    model: Any
    drafter: StoredDrafter
    short: list[list[int]]
    long: list[list[int]]

    def by_our_loop(self, prompts: list[list[int]]) -> Report:
        return evaluate(self.model, ServedDrafter.from_stored(self.drafter), prompts, max_new_tokens=NEW)[0]


@pytest.fixture(scope="session")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder = save_tiny_target(tmp_path_factory.mktemp("engine") / "target", seed=3, **SHAPE)
    model = tiny_target(seed=3, **SHAPE)
    config = zlab_config(**SHAPE, num_hidden_layers=1, layer_types=["full_attention"])
    spec = zlab_spec(config, "float32")
    walk = train_on_own_text(model, spec, zlab_tensors(config, seed=1), PROMPT, tokens=TRAINED_TOKENS - 5, steps=150)
    drafter = StoredDrafter(spec, {k: v.detach() for k, v in walk.drafter.state_dict().items()})
    text = PROMPT + greedy_reference(model, [PROMPT], max_new_tokens=200, eos=())[0]
    short = [PROMPT, text[:12], PROMPT[:3], [200, 31], [9] * 12]
    return Case(folder, model, drafter, short, [text[:n] for n in (140, 150, 165, 181)])
