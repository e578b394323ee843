"""Kill and break real tiny-model runs, many times, and count what was lost: `tests/soak.py --kills 200 --faults 50`.

One process imports everything once and forks a child per life of a run, so that a kill costs a second. A child writes
its phase to memory shared with the parent; the parent kills it with SIGKILL at a random instant and reads the phase in
which it died. A run is resumed until it ends; then its ledger, its metrics and every bit of its weights and optimizer
state are compared with those of an undisturbed run. Runs with random planted faults must end complete, or with one
cause and complete after a resume without the faults. Exit code 1 where anything was lost.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import json
import mmap
import os
import random
import signal
import struct
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
sys.path.insert(0, str(Path(__file__).resolve().parent))

import tiny
from forebay import api, config
from forebay.errors import ForebayError
from forebay.flow.plan import EpochPlan
from forebay.observe import metrics
from forebay.runtime import faults
from forebay.runtime.local import LocalRuntime

TRAINING, WINDOW, WRITING, EVALUATING = range(4)  # bytes of the shared memory
PEAK_AT, HELD_AT, SIZE = 8, 16, 24  # int64: peak of charged bytes, peak of bytes in slots
PLACES = {"extract", "prefetch", "train", "eval", "checkpoint"}
HANG_S = 90.0  # a life that takes longer hangs
BUDGET = 2**20


# -- the world ---------------------------------------------------------------------------------------------------------


def make_world(folder: Path) -> None:
    """A tiny target and a token store of 96 rows, 2 held out."""
    folder.mkdir(parents=True, exist_ok=True)
    tiny.save_tiny_target(folder / "target")
    words = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]

    def row(number: int) -> dict[str, Any]:
        rng = random.Random(number)
        asked, answer = (" ".join(rng.choices(words, k=rng.randint(low, 20))) for low in (2, 5))
        turns = [{"role": "user", "content": f"say {asked}"}, {"role": "assistant", "content": f"{answer} {number}"}]
        return {"id": str(number), "messages": turns}

    for name, numbers in (("train", range(96)), ("heldout", range(1000, 1002))):
        tiny.write_jsonl(folder / f"{name}.jsonl", [row(n) for n in numbers])
    api.prepare(
        [folder / "train.jsonl"],
        folder / "store",
        target=folder / "target",
        heldout=folder / "heldout.jsonl",
        max_length=256,
        progress=False,
    )


def run_config(world: Path, run_dir: Path, **sections: Any) -> config.RunConfig:
    values: dict[str, Any] = {
        "run_dir": str(run_dir),
        "target": {"model": str(world / "target"), "layer_ids": [0, 2, 4], "dtype": "float32", "self_test": False},
        "data": {"store": str(world / "store")},
        "drafter": {"layers": 1, "block_size": 4, "intermediate_size": 64},
        "plan": {"token_budget": 256},
        "buffer": {"min_fill": 4, "bytes": BUDGET, "draw": "planned"},
        "optim": {"epochs": 2, "window": 4, "lr": 1e-3},
        "eval": {"prompts": 2, "max_new_tokens": 8, "at_start": False},
        "checkpoint": {"every_steps": 2},
        "runtime": {"threads": 1},
    }
    for name, section in sections.items():
        values[name] = {**values.get(name, {}), **section} if isinstance(section, dict) else section
    return config.from_dict(values)


# -- a life ------------------------------------------------------------------------------------------------------------


class Life:
    """One process of a run, forked; `shared` is written by it and read by the parent, also after its death."""

    def __init__(self, work: Callable[[mmap.mmap], dict[str, Any]], log: Path) -> None:
        self.shared = mmap.mmap(-1, SIZE)
        self._result = log.with_suffix(".result")
        self._result.unlink(missing_ok=True)
        self.pid = os.fork()
        if self.pid == 0:
            os._exit(self._child(work, log))
        self.status: int | None = None

    def _child(self, work: Callable[[mmap.mmap], dict[str, Any]], log: Path) -> int:
        handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(handle, 1)
        os.dup2(handle, 2)
        faulthandler.register(signal.SIGUSR1)
        try:
            self._result.write_text(json.dumps(work(self.shared)))
        except BaseException:  # noqa: BLE001 - the child's end; the parent reports it
            traceback.print_exc()
            return 1
        return 0

    def ended(self) -> bool:
        if self.status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.status = status
        return self.status is not None

    def wait(self, until: Callable[[], bool] = lambda: False, limit_s: float = HANG_S) -> bool:
        """Until the process has ended or `until()` holds. False: neither happened in time."""
        deadline = time.monotonic() + limit_s
        while not self.ended() and not until():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.0005)
        return True

    def kill(self) -> None:
        if not self.ended():
            os.kill(self.pid, signal.SIGKILL)
            _, self.status = os.waitpid(self.pid, 0)

    @property
    def killed(self) -> bool:
        return self.status is not None and os.WIFSIGNALED(self.status)

    @property
    def exit_code(self) -> int:
        assert self.status is not None
        return os.waitstatus_to_exitcode(self.status)

    @property
    def result(self) -> dict[str, Any]:
        return json.loads(self._result.read_text()) if self._result.is_file() else {}

    @property
    def peaks(self) -> tuple[int, ...]:
        return struct.unpack_from("qq", self.shared, PEAK_AT)

    @property
    def phase(self) -> str:
        """Where it is, or where it died. One of them; a write in the background counts before the window."""
        if self.shared[WRITING]:
            return "checkpoint"
        if self.shared[WINDOW]:
            return "window"
        if self.shared[EVALUATING]:
            return "evaluation"
        return "between" if self.shared[TRAINING] else "starting"


def marked(shared: mmap.mmap, place: int, inner: Callable[..., Any]) -> Callable[..., Any]:
    def call(*given: Any, **named: Any) -> Any:
        shared[place] = 1
        try:
            return inner(*given, **named)
        finally:
            shared[place] = 0

    return call


def live(shared: mmap.mmap, run: config.RunConfig, overrides: tuple[str, ...] = ()) -> dict[str, Any]:
    """What a person does: `train`, or `train --resume` where the folder holds a run. In the child."""
    folder = Path(run.run_dir)
    resume = (folder / "config.yaml").is_file()
    if resume:
        run = config.load(folder / "config.yaml", list(overrides))
    try:
        local = LocalRuntime(run, resume=resume)
        local.training.step.accumulate = marked(shared, WINDOW, local.training.step.accumulate)
        local.run.checkpoints._write_files = marked(shared, WRITING, local.run.checkpoints._write_files)
        local.training.evaluate = marked(shared, EVALUATING, local.training.evaluate)
        acquire, pool = local.pool.acquire, local.pool

        def acquire_and_tell() -> Any:
            slot = acquire()
            held = (pool.made - pool.free) * slot.nbytes
            peak = max(held, struct.unpack_from("q", shared, HELD_AT)[0])
            struct.pack_into("qq", shared, PEAK_AT, local.run.coordinator.admission.peak, peak)
            return slot

        pool.acquire = acquire_and_tell
        shared[TRAINING] = 1
        summary = local.train()
    except ForebayError as error:
        return {"cause": str(error)}
    except RuntimeError as error:  # a bug, or what stands for one: the first cause is in it
        return {"cause": str(error), "traceback": traceback.format_exc()}
    return {
        "finished": summary["finished"],
        "lost_slots": pool.made - pool.free,
        "quarantined": summary["jobs_quarantined"],
        "committed": summary["jobs_committed"],
        "planned": summary["jobs_planned"],
    }


# -- what was lost -----------------------------------------------------------------------------------------------------


def trained(folder: Path) -> Counter[tuple[int, int]]:
    """How often each job is in the history of the weights. A step that was not finite is not in them."""
    steps = [line for line in metrics.read(folder / "metrics.jsonl", "step") if line["finite"]]
    return Counter((line["epoch"], job) for line in steps for job in line["jobs"])


def planned(folder: Path) -> set[tuple[int, int]]:
    plans = [EpochPlan.load(file) for file in sorted((folder / "plans").glob("*.plan"))]
    return {(plan.epoch, job) for plan in plans for job in range(len(plan))}


def outcome(folder: Path) -> dict[str, Any]:
    """Everything of a finished run that must not depend on how often it was killed."""
    last = sorted((folder / "checkpoints").glob("step-*/DONE"))[-1].parent
    timeless = ("epoch", "step", "jobs", "loss", "lr", "grad_norm", "uniform_accept_length")
    return {
        "step": last.name,
        "weights": (last / "drafter.safetensors").read_bytes(),
        "optimizer": (last / "optimizer.safetensors").read_bytes(),
        "exported": (folder / "drafter" / "model.safetensors").read_bytes(),
        "metrics": [[line[k] for k in timeless] for line in metrics.read(folder / "metrics.jsonl", "step")],
        "evals": [[e["step"], e["when"], e["accept_length"]] for e in metrics.read(folder / "metrics.jsonl", "eval")],
    }


class Soak:
    """The counts, and the loops that make them."""

    def __init__(self, folder: Path, world: Path, seed: int) -> None:
        self.folder, self.world, self.rng = folder, world, random.Random(seed)
        self.phases: Counter[str] = Counter()
        self.endings: Counter[str] = Counter()
        self.struck: Counter[str] = Counter()
        self.kills = self.runs = self.lost = self.twice = self.hung = self.over = self.faulted = self.leaks = 0
        self.identical = True
        self.unclear: list[str] = []

    def life(self, run: config.RunConfig, overrides: tuple[str, ...] = ()) -> Life:
        return Life(lambda shared: live(shared, run, overrides), Path(run.run_dir + ".log"))

    def bury(self, life: Life) -> None:
        """What holds for every life, however it ended."""
        self.over += max(life.peaks) > BUDGET
        self.leaks += life.result.get("lost_slots", 0) != 0

    def settle(self, folder: Path, quarantined: int = 0) -> None:
        """Count a finished run's jobs."""
        counts, jobs = trained(folder), planned(folder)
        self.lost += len(jobs - counts.keys()) - quarantined
        self.twice += sum(n - 1 for n in counts.values())

    # -- kills -------------------------------------------------------------------------------------------------------

    def kill_runs(self, kills: int) -> None:
        """Runs killed at random instants until `kills` are done; every fourth run draws live."""
        reference = run_config(self.world, self.folder / "undisturbed")
        life = self.life(reference)
        started = time.monotonic()
        assert life.wait() and life.result.get("finished"), Path(reference.run_dir + ".log").read_text()
        took, expected = time.monotonic() - started, outcome(Path(reference.run_dir))
        while self.kills < kills:
            self.runs += 1
            draw = "live" if self.runs % 4 == 0 else "planned"
            run = run_config(self.world, self.folder / f"killed-{self.runs}", buffer={"draw": draw})
            if not self.until_finished(run, kills, took / 3):
                continue
            self.settle(Path(run.run_dir))
            if draw == "planned" and outcome(Path(run.run_dir)) != expected:
                self.identical = False
                self.unclear.append(f"{run.run_dir} differs from the undisturbed run")

    def until_finished(self, run: config.RunConfig, kills: int, life_s: float) -> bool:
        """One run's lives. False: it hung, or failed by itself."""
        while True:
            life = self.life(run)
            if self.kills < kills:
                self.kill_at_random(life, life_s)
            if not life.wait():
                return self.hangs(life, run)
            self.bury(life)
            if life.killed:
                self.kills += 1
                self.phases[life.phase] += 1
            elif life.result.get("finished"):
                return True
            else:
                self.unclear.append(f"{run.run_dir} ended by itself: {life.result or life.exit_code}")
                return False

    def kill_at_random(self, life: Life, life_s: float) -> None:
        """Most kills are uniform in time; a third each is made to fall into a write and into a window, a few early."""
        aim = self.rng.choice([None, None, None, WRITING, WRITING, WINDOW, WINDOW, "start"])
        if aim != "start":
            life.wait(lambda: bool(life.shared[TRAINING]))
        life.wait(limit_s=self.rng.uniform(0, life_s))
        if isinstance(aim, int):
            life.wait(lambda: bool(life.shared[aim]), limit_s=life_s)
            life.wait(limit_s=self.rng.uniform(0, 0.01))
        life.kill()

    def hangs(self, life: Life, run: config.RunConfig) -> bool:
        os.kill(life.pid, signal.SIGUSR1)  # its stacks go to the log
        time.sleep(0.5)
        life.kill()
        self.hung += 1
        self.unclear.append(f"{run.run_dir} hangs: its stacks are in {run.run_dir}.log")
        return False

    def checkpoint_share(self) -> float:
        """Share of the training thread's time that checkpoints take, at one per 50 steps of 200 or more."""
        run = run_config(
            self.world,
            self.folder / "share",
            optim={"epochs": 20},
            checkpoint={"every_steps": 50},
            eval={"guard": False, "every_steps": 50},
        )
        life = self.life(run)
        assert life.wait(), Path(run.run_dir + ".log").read_text()
        summary = json.loads(Path(run.run_dir, "summary.json").read_text())
        return float(summary["waits"]["drafter"]["checkpoint"])

    # -- faults ------------------------------------------------------------------------------------------------------

    def random_faults(self) -> list[dict[str, Any]]:
        """One or two faults at random places."""
        rng = self.rng
        kinds = [
            {
                "kind": "raise",
                "where": rng.choice(["extract", "prefetch", "train", "eval"]),
                "times": rng.randint(1, 2),
            },
            {"kind": "raise", "job": rng.randrange(8), "times": -1},  # poison
            {"kind": "hang", "where": rng.choice(["extract", "prefetch", "train"]), "seconds": rng.uniform(0.1, 2.0)},
            *({"kind": kind} for kind in ("nan", "zeros", "swap", "repeat", "short")),
            {"kind": rng.choice(["nan", "zeros", "swap"]), "job": rng.randrange(8), "times": -1},
            {"kind": "nan", "where": "train", "times": rng.choice([1, 2, 30])},
            {"kind": "exit", "where": rng.choice(sorted(PLACES))},
            {"kind": "disk_full", "file": rng.choice(["drafter.safetensors", "state.json", "DONE"])},
            {"kind": "truncate_shard"},
            *({"kind": "sigterm", "where": where} for where in rng.sample(sorted(PLACES), 3)),
            {"kind": "sigterm", "where": "train", "times": 2},
            {"kind": "sigkill", "where": rng.choice(["extract", "prefetch", "train", "eval"])},
            {"kind": "sigkill", "where": "checkpoint", "file": rng.choice(["optimizer.safetensors", "rename", "DONE"])},
        ]
        chosen = [dict(fault) for fault in rng.sample(kinds, rng.choice([1, 1, 2]))]
        for fault in chosen:
            if rng.random() < 0.5 and fault.get("where") != "eval" and "job" not in fault:
                fault["step"] = 2 * rng.randrange(4)
        return chosen

    def fault_runs(self, count: int) -> None:
        for number in range(count):
            planted = self.random_faults()
            run = run_config(
                self.world,
                self.folder / f"faulted-{number}",
                faults=planted,
                buffer={"draw": self.rng.choice(["planned", "live"])},
                runtime={
                    "threads": 1,
                    "targets": ["cpu"] * self.rng.choice([1, 2]),
                    "on_poison": self.rng.choice(["stop", "continue"]),
                    "lease_s": 0.5,
                },
            )
            self.faulted += 1
            self.endings[self.one_faulted(run)] += 1
            self.struck.update(line["kind"] for line in faults.struck(run.run_dir))

    def one_faulted(self, run: config.RunConfig) -> str:
        """To its end: a run that died or stopped goes on as it is, one that ended with a cause without its faults."""
        overrides: tuple[str, ...] = ()
        ending = "complete"
        for _ in range(8):
            life = self.life(run, overrides)
            if not life.wait():
                self.hangs(life, run)
                return "hung"
            self.bury(life)
            result = life.result
            if result.get("finished"):
                self.settle(Path(run.run_dir), result["quarantined"])
                return ending if not result["quarantined"] else f"{ending}, with jobs quarantined by name"
            if "cause" in result:
                if not self.is_clear(result):
                    self.unclear.append(f"{run.run_dir}: {result}")
                ending, overrides = "one cause, complete after a resume", ("faults=[]",)
            elif life.killed or life.exit_code in (faults.EXIT_CODE, 128 + signal.SIGTERM):
                ending = "died, complete after a resume" if ending == "complete" else ending
            elif result.get("finished") is False:
                ending = "stopped in good order, complete after a resume" if ending == "complete" else ending
            else:
                self.unclear.append(f"{run.run_dir} ended with {life.exit_code}")
                return "unclear"
        self.unclear.append(f"{run.run_dir} never ended")
        return "never ended"

    @staticmethod
    def is_clear(result: dict[str, Any]) -> bool:
        """One cause, named; where it is not one that a user can mend, the planted error must be the cause shown."""
        return "planted" in result["cause"] if "traceback" in result else "resume with: " in result["cause"]

    def report(self) -> dict[str, Any]:
        return {
            "kills": self.kills,
            "killed_runs": self.runs,
            "jobs_lost": self.lost,
            "jobs_twice": self.twice,
            "weights_identical": self.identical,
            "kills_by_phase": dict(self.phases),
            "faulted_runs": self.faulted,
            "faults_struck": dict(self.struck),
            "endings": dict(self.endings),
            "hung": self.hung,
            "budget_exceeded": self.over,
            "slots_leaked": self.leaks,
            "unclear": self.unclear,
        }


def warm() -> None:
    """What every life would import and build, once, before the first fork. No tensor is made."""
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping
    from transformers.models.qwen3 import modeling_qwen3, tokenization_qwen2  # noqa: F401

    get_checkpoint_conversion_mapping("qwen3")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--faults", type=int, default=50)
    parser.add_argument("--checkpoint-share", action="store_true", help="measure what checkpoints cost the training")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--keep", help="folder for the runs (default: a temporary one, removed)")
    given = parser.parse_args()
    started = time.monotonic()
    with contextlib.ExitStack() as stack:
        folder = Path(given.keep or stack.enter_context(tempfile.TemporaryDirectory(prefix="forebay-soak-")))
        folder.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(ImportError, AttributeError):  # other versions of transformers: only slower
            warm()
        assert len(os.listdir("/proc/self/task")) == 1, "forking is safe from one thread only"
        world = Life(lambda shared: make_world(folder / "world") or {"made": True}, folder / "world.log")
        assert world.wait() and world.result, (folder / "world.log").read_text()
        soak = Soak(folder, folder / "world", given.seed)
        if given.kills:
            soak.kill_runs(given.kills)
        if given.faults:
            soak.fault_runs(given.faults)
        share = {"checkpoint_share": soak.checkpoint_share()} if given.checkpoint_share else {}
        report = {**soak.report(), **share, "wall_s": round(time.monotonic() - started, 1)}
    print(json.dumps(report) if given.json else "\n".join(f"{k}: {v}" for k, v in report.items()))
    bad = ("jobs_lost", "jobs_twice", "hung", "budget_exceeded", "slots_leaked", "unclear")
    return int(any(report[key] for key in bad) or not report["weights_identical"])


if __name__ == "__main__":
    sys.exit(main())
