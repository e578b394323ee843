"""Measuring a drafter while it trains: held-out accept length by the serving loop, and the guard (G8).

Guarantees: what is measured is the drafter as an engine would read it, from its exported form; the guard always judges
in fp32; the target is used alone while it is measured with, and is given back in its own dtype. Called by
`runtime.training`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from forebay.config import EvalConfig
from forebay.decode.drafter import ServedDrafter
from forebay.decode.evaluate import Report, evaluate
from forebay.decode.guard import guard
from forebay.decode.serve import Generation
from forebay.decode.target_side import TargetSide
from forebay.io.formats import zlab
from forebay.models.load import cast
from forebay.models.step import Borrowed
from forebay.models.walk import Walk
from forebay.observe.clock import WorkerClock
from forebay.runtime.assembly import Assembly
from forebay.runtime.run import Run
from forebay.runtime.turn import Turn


class HeldOut:
    """The evaluations of one run; `evals` are those so far, oldest first."""

    def __init__(
        self,
        models: Assembly,
        config: EvalConfig,
        in_use: Turn,
        clock: WorkerClock,
        run: Run,
        evals: list[dict[str, Any]],
    ) -> None:
        """`in_use`: whoever holds it has the first target to itself."""
        self.models, self.config, self.in_use, self.clock = models, config, in_use, clock
        self.run, self.evals = run, evals
        self.prompts = models.prepared.heldout_prompts

    def measure(self, when: str, step: int) -> None:
        """Held-out accept length by the serving loop; with the guard, the trainer's forward over the same rounds."""
        if not self.prompts:
            return
        dtype = torch.float32 if self.config.dtype == "float32" else self.models.target.dtype
        report, generations = self._loop(dtype, self.prompts)
        self._record(when, step, report)
        if self.config.guard:
            self.guard(step, generations if dtype == torch.float32 else None)

    def guard(self, step: int, generations: list[Generation] | None = None) -> None:
        """Compare on the first `guard_prompts` prompts. `generations`: the fp32 loop's, where it has run already."""
        count = self.config.guard_prompts
        if generations is None:
            _, generations = self._loop(torch.float32, self.prompts[:count])
        lead = self.models.lead
        with self._target_as(torch.float32) as model:
            served = self.served(torch.float32)
            device = next(lead.parameters()).device
            borrowed = Borrowed.of(self.models.target, torch.float32, lead.kept, device)
            walk = Walk(self.models.target, lead, borrowed)
            side = TargetSide(model, served.layer_ids)
            report = guard(generations[:count], walk, target=side, drafter=served)
        self.run.log.write("guard", step, report.to_dict())
        ties = f" ({report.near_ties} near-ties)" if report.near_ties else ""
        self.run.say(f"guard: trainer and serving loop agree in {report.agreement:.1%} of {report.rounds} rounds{ties}")

    def measured(self, when: str, step: int) -> bool:
        """Whether these weights have been measured (by a run that was killed after its last checkpoint)."""
        return any(entry["when"] == when and entry["step"] == step for entry in self.evals)

    def served(self, dtype: torch.dtype) -> ServedDrafter:
        """The drafter as an engine would read it, from its exported form in memory."""
        models, stored = self.models, self.models.stored()
        spec = replace(models.spec, dtype=str(dtype).removeprefix("torch."))
        tensors = zlab.zlab_tensors(spec, stored.tensors, stored.vocabulary)
        return ServedDrafter(zlab.zlab_config(spec, models.extras), tensors, dtype, models.target.device)

    def _loop(self, dtype: torch.dtype, prompts: list[list[int]]) -> tuple[Report, list[Generation]]:
        with self._target_as(dtype) as model:
            return evaluate(
                model,
                self.served(dtype),
                prompts,
                max_new_tokens=self.config.max_new_tokens,
                batch_size=self.config.batch_size,
                reference=False,
            )

    @contextlib.contextmanager
    def _target_as(self, dtype: torch.dtype) -> Iterator[Any]:
        """The first target, alone, in `dtype` (bf16 -> fp32 -> bf16 loses nothing)."""
        target = self.models.target
        own = target.dtype
        with self.in_use(self.clock):
            if dtype != own:
                cast(target.model, dtype)
            try:
                yield target.model
            finally:
                if dtype != own:
                    cast(target.model, own)
                if target.device.type == "cuda":  # its worker goes on in a stream of its own
                    torch.cuda.synchronize(target.device)

    def _record(self, when: str, step: int, report: Report) -> None:
        entry = {
            "when": when,
            "step": step,
            "accept_length": report.accept_length,
            "accept_length_by_request": report.accept_length_by_request,
            "acceptance_by_position": report.acceptance_by_position,
            "by_answer_length": report.by_answer_length,
            "rounds": report.rounds,
            "prompts": report.prompts,
            "seconds": round(report.seconds, 2),
        }
        self.evals.append(entry)
        self.run.log.write("eval", step, entry)
        shares = " ".join(f"{share:.2f}" for share in report.acceptance_by_position)
        self.run.say(f"step {step}: held-out accept length {report.accept_length:.3f} (by position {shares})")
