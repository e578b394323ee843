"""Runs inside the Python of an installed vLLM and does what it is told in JSON lines: serve prompts, count drafts.

Guarantees: imports nothing of Forebay and nothing outside the standard library and the engine, so that the engine may
have another Python and another transformers; the first line on stdin says what to load, every further one is a request,
every line on stdout is one answer. Whatever the engine prints goes to stderr. An error is an answer, `{"error": ...}`,
and where the engine cannot be used at all `"unusable"` says why. Called by `engine.process`, never imported by it.

    start    {"model", "speculative": {...} | null, "options": LLM(...) arguments, "time_drafts": bool}
    generate {"prompts": [[id]], "max_tokens", "at_once", "stop": [id]} -> tokens, seconds, counters
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any, TextIO

COUNTERS = {
    "drafts": "vllm:spec_decode_num_drafts",
    "draft_tokens": "vllm:spec_decode_num_draft_tokens",
    "accepted": "vllm:spec_decode_num_accepted_tokens",
}
BY_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos"


class Unusable(Exception):
    """This Python has no engine that can do what was asked."""


def speculative_methods() -> list[str]:
    """The speculative methods that the installed vLLM knows. Unusable: there is no vLLM."""
    if importlib.util.find_spec("vllm") is None:
        raise Unusable(f"vLLM is not installed for {sys.executable}")
    from typing import get_args

    from vllm.config import speculative

    def words(kind: Any) -> list[str]:
        return [kind] if isinstance(kind, str) else [word for part in get_args(kind) for word in words(part)]

    return words(speculative.SpeculativeMethod)


def version() -> str:
    import vllm

    return str(vllm.__version__)


def faults() -> list[str]:
    """What this build computes otherwise than training did, found by trying: sentences."""
    import torch
    from vllm import _custom_ops
    from vllm.platforms import current_platform

    found = []
    if current_platform.is_cpu():
        x, stacked = torch.ones(2, 1, 1, 16), torch.tensor([[1.0], [3.0]]).expand(2, 16).contiguous()
        out = torch.empty_like(x)
        _custom_ops.rms_norm(out, x, stacked, 1e-6)
        if abs(float(out[1].mean()) - 3) > 0.1:
            found.append(
                "its CPU kernel norms the context keys of every draft layer by the first layer's k_norm, so drafts "
                "(never the text) are somewhat worse than on a GPU where the layers' k_norm differ"
            )
    return found


class Served:
    """One loaded engine."""

    def __init__(self, start: dict[str, Any]) -> None:
        wanted = start.get("speculative")
        known = speculative_methods()
        if wanted is not None and wanted["method"] not in known:
            raise Unusable(f"vLLM {version()} for {sys.executable} has no speculative method '{wanted['method']}'")
        from vllm import LLM

        options = {"enable_prefix_caching": False, "disable_log_stats": False, **start.get("options", {})}
        if wanted is not None:
            options["speculative_config"] = wanted
        self.llm = LLM(model=start["model"], skip_tokenizer_init=True, **options)
        self.draft_seconds: float | None = None
        if start.get("time_drafts") and wanted is not None:
            self._time_drafts()

    def _time_drafts(self) -> None:
        """Sum the seconds of the drafter's own passes: in process and on a CPU, where nothing runs on after a call."""
        runner = self.llm.llm_engine.model_executor.driver_worker.worker.model_runner
        propose, self.draft_seconds = runner.drafter.propose, 0.0

        def timed(*args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            try:
                return propose(*args, **kwargs)
            finally:
                self.draft_seconds += time.perf_counter() - begin

        runner.drafter.propose = timed

    def counters(self) -> dict[str, Any]:
        """Drafts, drafted and accepted tokens since the start, accepted by position."""
        found = {metric.name: metric for metric in self.llm.get_metrics()}
        out: dict[str, Any] = {key: getattr(found.get(name), "value", 0) for key, name in COUNTERS.items()}
        out["by_position"] = list(getattr(found.get(BY_POSITION), "values", []))
        return out

    def generate(
        self, prompts: list[list[int]], max_tokens: int, stop: list[int], at_once: int | None
    ) -> dict[str, Any]:
        """Greedy answers to `prompts`, `at_once` of them at a time; seconds and counters of this request alone."""
        from vllm import SamplingParams

        asked = [{"prompt_token_ids": ids} for ids in prompts]
        sampling = SamplingParams(
            temperature=0.0,
            max_tokens=max_tokens,
            ignore_eos=True,  # the ends of text are the caller's, not guessed from the folder
            stop_token_ids=stop,
            detokenize=False,
        )
        before, drafting = self.counters(), self.draft_seconds
        size, tokens = at_once or len(asked), []
        begin = time.perf_counter()
        for first in range(0, len(asked), size):
            done = self.llm.generate(asked[first : first + size], sampling, use_tqdm=False)
            tokens += [list(answer.outputs[0].token_ids) for answer in done]
        seconds = time.perf_counter() - begin
        after = self.counters()
        earlier = before["by_position"] or [0] * len(after["by_position"])
        return {
            "tokens": tokens,
            "seconds": seconds,
            "draft_seconds": None if drafting is None else self.draft_seconds - drafting,
            **{key: after[key] - before[key] for key in COUNTERS},
            "by_position": [b - a for a, b in zip(earlier, after["by_position"], strict=True)],
        }


def main(commands: TextIO, answers: TextIO) -> None:
    """Until stdin ends. The answer to the start says what was loaded; `--methods` asks only what could be."""

    def say(value: dict[str, Any]) -> None:
        answers.write(json.dumps(value) + "\n")
        answers.flush()

    def answered(work: Callable[[], dict[str, Any]]) -> bool:
        try:
            say(work())
        except Unusable as error:
            say({"unusable": str(error)})
        except Exception as error:  # noqa: BLE001 - it is the answer
            say({"error": f"{type(error).__name__}: {error}"})
        else:
            return True
        return False

    if "--methods" in sys.argv:
        answered(lambda: {"methods": speculative_methods(), "version": version()})
        return
    served: list[Served] = []

    def load() -> dict[str, Any]:
        served.append(Served(json.loads(commands.readline())))
        return {"ready": version(), "faults": faults()}

    if answered(load):
        for line in commands:
            request = json.loads(line)
            answered(lambda: getattr(served[0], request.pop("do"))(**request))  # noqa: B023 - called at once


if __name__ == "__main__":
    # The engine and its libraries print: only answers may go where the answers are read.
    private = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    sys.path = [p for p in sys.path if os.path.abspath(p or ".") != os.path.dirname(os.path.abspath(__file__))]
    main(sys.stdin, private)
