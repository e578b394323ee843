"""Every example script and every cell of the notebook runs, on the tiny target."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

import tiny
from drafters import zlab_config, zlab_tensors
from forebay.io.formats import StoredDrafter, write_drafter
from forebay.io.formats.zlab import zlab_spec

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """T0, a drafter for it, and conversations."""
    folder = tmp_path_factory.mktemp("examples")
    tiny.save_tiny_target(folder / "target")
    config = zlab_config()
    write_drafter(folder / "drafter", StoredDrafter(zlab_spec(config, "float32"), zlab_tensors(config)))
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"say {n} of {n * 7 % 31}"},
                {"role": "assistant", "content": "one two three four five six seven " * (1 + n % 3) + str(n * n)},
            ]
        }
        for n in range(60)
    ]
    (folder / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def run(monkeypatch: Any, script: str, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", [script, *arguments])
    runpy.run_path(str(EXAMPLES / script), run_name="__main__")


def test_generate_prints_the_answers_and_the_accept_length(world: Path, monkeypatch: Any, capsys: Any) -> None:
    run(monkeypatch, "generate.py", str(world / "target"), str(world / "drafter"), "hi there", "and again")
    printed = capsys.readouterr().out
    assert printed.count("accept length") == 2 and "hi there" in printed


def test_train_goes_from_conversations_to_an_exported_drafter(
    world: Path, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    small = ["drafter.layers=1", "drafter.block_size=4", "target.layer_ids=[0,2,4]", "plan.token_budget=512"]
    small += ["optim.epochs=1", "buffer.bytes=16 MiB", "eval.prompts=2", "eval.max_new_tokens=8", "buffer.min_fill=2"]
    run(monkeypatch, "train.py", str(world / "chats.jsonl"), str(world / "target"), str(tmp_path / "out"), *small)
    assert (tmp_path / "out" / "drafter" / "model.safetensors").is_file()
    assert (tmp_path / "out" / "drafter" / "README.md").is_file()
    assert "accept length" in capsys.readouterr().out


def test_engines_exports_both_layouts_and_prints_the_commands(
    world: Path, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    run(monkeypatch, "engines.py", str(world / "drafter"), str(world / "target"), str(tmp_path / "out"))
    assert json.loads((tmp_path / "out" / "speculators" / "config.json").read_text())["block_size"] == 4
    assert json.loads((tmp_path / "out" / "zlab" / "config.json").read_text())["block_size"] == 4
    assert '"num_speculative_tokens": 3' in capsys.readouterr().out


def test_every_cell_of_the_notebook_runs(world: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setenv("TARGET", str(world / "target"))
    monkeypatch.setenv("DRAFTER", str(world / "drafter"))
    notebook = json.loads((EXAMPLES / "speculative_decoding.ipynb").read_text())
    names: dict[str, Any] = {}
    cells = [c for c in notebook["cells"] if c["cell_type"] == "code"]
    for number, cell in enumerate(cells):
        assert cell["outputs"] == [] and cell["execution_count"] is None, "commit the notebook without outputs"
        exec(compile("".join(cell["source"]), f"cell {number}", "exec"), names)
    assert len(cells) >= 4 and "acceptance by position" in capsys.readouterr().out
