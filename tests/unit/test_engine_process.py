"""Engines that are not there, are too old, or die: one line each, before anything heavy."""

import sys
from pathlib import Path

import pytest

from forebay.cli import main
from forebay.config import TargetConfig
from forebay.engine import driver
from forebay.engine.process import Engine, EngineError, engine_python, require_engine
from forebay.errors import UsageError


def python_that_says(folder, line, code=0):
    """An engine's Python in the place of a real one: prints `line`, logs a few, ends."""
    script = folder / "python"
    script.write_text(f"#!/bin/sh\necho 'what the engine logged' >&2\nprintf '%s' '{line}'\nexit {code}\n")
    script.chmod(0o755)
    return script


@pytest.mark.skipif(bool(driver.importlib.util.find_spec("vllm")), reason="vLLM is installed here")
def test_without_an_engine_check_says_in_one_line_what_to_install(tmp_path, capsys):
    (tmp_path / "config.json").write_text("{}")
    given = ["check", str(tmp_path), "--target", str(tmp_path), "--store", str(tmp_path), "--engine", "vllm"]
    assert main([*given, "--engine-python", sys.executable]) == 1
    said = capsys.readouterr().err.strip()
    assert said.count("\n") == 0 and "vLLM is not installed" in said and "pip install vllm" in said


def test_an_engine_without_dflash_is_named_with_its_version(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    old = python_that_says(tmp_path, '{"methods": ["eagle", "mtp"], "version": "0.9.1"}\n')
    with pytest.raises(EngineError, match=r"vLLM 0\.9\.1 does not know DFlash drafters: install vLLM 0\.32 or newer"):
        require_engine("vllm", TargetConfig(model=str(tmp_path)), old)


def test_an_engine_that_dies_gives_the_last_lines_of_its_log(tmp_path):
    with pytest.raises(EngineError, match=r"exit 3\):\nwhat the engine logged"):
        Engine("target", python=python_that_says(tmp_path, "", 3))


def test_a_python_that_is_not_there_is_refused():
    with pytest.raises(UsageError, match="no Python at /no/such/python"):
        engine_python("/no/such/python")


def test_a_gguf_target_is_refused_before_the_engine_starts(tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(UsageError, match="is a GGUF file"):
        require_engine("vllm", TargetConfig(model=str(tmp_path)), sys.executable)


def test_the_driver_imports_nothing_of_ours():
    """It runs in the engine's Python, where Forebay is not."""
    text = Path(driver.__file__).read_text(encoding="utf-8")
    assert "import forebay" not in text and "from forebay" not in text
