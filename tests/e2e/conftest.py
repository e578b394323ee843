"""A tiny target and a token store, made once; `configuration(...)` gives a run over them."""

import json
import random

import pytest

import tiny
from forebay import api, config

WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]


def row(number):
    rng = random.Random(number)
    prompt, answer = rng.choices(WORDS, k=rng.randint(2, 9)), rng.choices(WORDS, k=rng.randint(5, 40))
    messages = [
        {"role": "user", "content": f"say {' '.join(prompt)} {number}"},
        {"role": "assistant", "content": " ".join(answer)},
    ]
    return {"id": str(number), "messages": messages}


@pytest.fixture(scope="session")
def world(tmp_path_factory):
    """Folder with `target/` (T0) and `store/` (72 rows, 6 held out)."""
    folder = tmp_path_factory.mktemp("world")
    tiny.save_tiny_target(folder / "target")
    for name, numbers in (("train", range(72)), ("heldout", range(1000, 1006))):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row(i)) + "\n" for i in numbers))
    api.prepare(
        [folder / "train.jsonl"],
        folder / "store",
        target=folder / "target",
        heldout=folder / "heldout.jsonl",
        max_length=256,
        progress=False,
    )
    return folder


@pytest.fixture
def configuration(world, tmp_path):
    """`configuration(buffer={...})`: a run in a fresh folder, two epochs of about 18 jobs."""

    def make(run="run", **sections):
        values = {
            "run_dir": str(tmp_path / run),
            "target": {"model": str(world / "target"), "layer_ids": [0, 2, 4], "dtype": "float32", "self_test": False},
            "data": {"store": str(world / "store")},
            "drafter": {"layers": 2, "block_size": 4, "intermediate_size": 64},
            "plan": {"token_budget": 512},
            "buffer": {"min_fill": 4, "bytes": "16 MiB"},
            "optim": {"epochs": 2, "window": 4, "lr": 1e-3},
            "eval": {"prompts": 2, "max_new_tokens": 8, "at_start": False},
            "checkpoint": {"every_steps": 3},
        }
        for name, section in sections.items():
            values[name] = {**values[name], **section} if isinstance(values.get(name), dict) else section
        return config.from_dict(values)

    return make
