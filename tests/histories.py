"""Run folders made without training: lines as a run writes them, of any length, with a plan and an evaluation or two.

    folder = write_run(tmp_path / "run", steps=400)

Importing this module imports no torch.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from forebay import config
from forebay.flow.simulate import plan_of_jobs

WINDOW = 4


def step_lines(steps: int, seed: int = 0, seconds: float = 0.5) -> list[dict[str, Any]]:
    rng = np.random.default_rng(seed)
    jobs = rng.permutation(steps * WINDOW)
    loss = 3 + 3 * np.exp(-np.arange(steps) / (steps / 5)) + 0.2 * rng.standard_normal(steps)
    return [
        {
            "kind": "step",
            "step": i + 1,
            "t": round((i + 1) * seconds, 3),
            "epoch": 0,
            "lr": 1e-3,
            "finite": True,
            "jobs": sorted(jobs[i * WINDOW : (i + 1) * WINDOW].tolist()),
            "tokens": 1000 + i % 7,
            "slots": 700,
            "tokens_per_s": 2000.0,
            "supervised_tokens_per_s": 900.0,
            "data_wait_share": 0.25,
            "eta_s": round((steps - i) * seconds, 1),
            "mixing_r": float(rng.normal(0, 0.05)),
            "occupancy": int(rng.integers(10, 30)),
            "age_max": int(rng.integers(0, 90)),
            "charged_bytes": int(rng.integers(2**20, 2**24)),
            "loss": float(loss[i]),
            "grad_norm": float(rng.lognormal()),
            "uniform_accept_length": 1 + i / steps,
        }
        for i in range(steps)
    ]


def eval_line(step: int, accept: float) -> dict[str, Any]:
    bands = [{"from": 1, "to": 64, "prompts": 3, "rounds": 40, "accept_length": accept - 0.1}]
    bands.append({"from": 65, "to": None, "prompts": 3, "rounds": 60, "accept_length": accept + 0.1})
    by_position = [0.5 * (accept - 1), 0.3 * (accept - 1), 0.2 * (accept - 1)]
    line = {"kind": "eval", "step": step, "t": step / 2, "when": "step" if step else "start", "accept_length": accept}
    return {**line, "acceptance_by_position": by_position, "by_answer_length": bands, "rounds": 100, "prompts": 6}


def write_run(folder: Path, steps: int = 60, seed: int = 0, **overrides: Any) -> Path:
    """A run of `steps` steps over four buckets; `overrides` are sections of its configuration."""
    (folder / "plans").mkdir(parents=True)
    sections = {"run_dir": str(folder), "target": {"model": "target"}, "data": {"store": str(folder / "store")}}
    (folder / "config.yaml").write_text(config.dump(config.from_dict({**sections, **overrides})))
    rng = np.random.default_rng(seed)
    buckets = rng.choice(4, size=steps * WINDOW, p=[0.4, 0.3, 0.2, 0.1]).tolist()
    plan_of_jobs(buckets, window=WINDOW, real=[b + 1 for b in buckets]).save(folder / "plans" / "epoch-000.plan")
    lines = [eval_line(0, 1.0), *step_lines(steps, seed), eval_line(steps, 2.0)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    shares = {
        "prefetch": {"busy_share": 0.1, "wait_share": 0.9, "waits": {"jobs": 0.9}},
        "target": {"busy_share": 0.98, "wait_share": 0.02, "waits": {"producer_wait_room": 0.02}},
        "drafter": {"busy_share": 0.7, "wait_share": 0.3, "waits": {"consumer_wait_fill": 0.3}},
    }
    status = {"doing": "training", "step": steps, "total_steps": steps, "unix_time": 0, "shares": shares, "waits": []}
    (folder / "status.json").write_text(json.dumps({**status, "failures": []}))
    return folder
