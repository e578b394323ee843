"""`forebay bench designs RUN.yaml`: what the designs of the flow, or reuse, do to real training.

Every variant trains a drafter on the same store, for the same number of steps, from the same first weights, once for
each seed; the variants take turns, so that drift of the machine hits all. Measured of each run: items per second (by
the clock and by CPU seconds) from the start of the threads to the last step, the idle share of both sides, the peak of
charged bytes, r and buckets of its windows; then, of the trained drafter, the loss on held-out rows by length and the
held-out accept length. Printed are means and, in brackets, the standard deviation over the seeds. Called by the command
line.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from forebay import config as configuration
from forebay.bench import given_run, takes_run
from forebay.config import RunConfig
from forebay.data.pack import anchor_counts, pack_item
from forebay.data.store import INDEX, Rows, StoreWriter, TokenStore
from forebay.errors import DataError, UsageError
from forebay.flow.plan import plan_epoch
from forebay.models.step import micro_step
from forebay.observe.console import say
from forebay.runtime.local import LocalRuntime
from forebay.runtime.preparation import Preparation
from forebay.runtime.training import use_threads

HELDOUT_ROWS = 96  # whose loss is taken
NEVER = 10**9


@dataclass(frozen=True)
class Variant:
    """What differs between the runs that are compared: sections of the configuration."""

    name: str
    buffer: dict[str, Any] = field(default_factory=dict)
    plan: dict[str, Any] = field(default_factory=dict)
    optim: dict[str, Any] = field(default_factory=dict)


DESIGNS = (
    Variant("per_target + per_drafter", {"dispatch": "per_target", "queue": "per_drafter", "draw": "live"}),
    Variant("shared + bucketed", {"dispatch": "shared", "queue": "bucketed", "draw": "live"}),
    Variant("shared + buffered", {"dispatch": "shared", "queue": "buffered"}),
    Variant("shared + buffered, sorted plan", {"dispatch": "shared", "queue": "buffered"}, {"order": "sorted"}),
)


def reuse_variants(uses: Sequence[int], epochs: int) -> list[Variant]:
    """Equal steps: as many epochs fewer as an item has more uses."""
    for reuse in uses:
        if epochs % reuse:
            raise UsageError(
                f"optim.epochs {epochs} is not a multiple of reuse {reuse}: equal steps need optim.epochs="
                f"{epochs * reuse}, say"
            )
    return [Variant(f"reuse {k}", {"reuse": k}, {}, {"epochs": epochs // k}) for k in uses]


def sample_store(source: Path, out: Path, rows: int, seed: int) -> None:
    """A store of `rows` random rows of source/train, with the held-out part of `source`."""
    store = TokenStore.open(source / "train")
    chosen = np.sort(np.random.default_rng(seed).permutation(len(store))[:rows]).tolist()
    index = store.index[chosen].astype(INDEX)
    index["grams"] = 0
    tokens, masks = (np.concatenate([part(row) for row in chosen]) for part in (store.tokens, store.mask))
    own = ("format", "complete", "fingerprint", "rows", "tokens", "key", "shards")
    writer = StoreWriter(out / "train", store.manifest["key"], [])
    writer.append(Rows(tokens, masks, index, np.empty(0, np.uint64)))
    writer.close_shard()
    writer.finish({k: v for k, v in store.manifest.items() if k not in own})
    if (source / "heldout").is_dir():
        os.symlink((source / "heldout").resolve(), out / "heldout")


def config_of(base: RunConfig, variant: Variant, run_dir: str, store: str, seed: int) -> RunConfig:
    values = base.model_dump(mode="json")
    values |= {"run_dir": run_dir, "seed": seed, "data": {"store": store}}
    for section in ("buffer", "plan", "optim"):
        values[section] |= getattr(variant, section)
    values["eval"] |= {"guard": False, "at_start": False, "every_steps": NEVER}
    values["checkpoint"] |= {"every_steps": NEVER, "background": False}
    values["target"]["self_test"] = False
    return configuration.from_dict(values)


class Measured:
    """One run with its figures taken between the start of its threads and its last step, and after its evaluation."""

    def __init__(self, config: RunConfig) -> None:
        self.local = LocalRuntime(config, quiet=True)
        self.row: dict[str, Any] = {}
        training = self.local.training
        begin, evaluate = training.begin, training.evaluate

        def beginning(threads: int) -> None:
            begin(threads)
            self.cpu_s = time.process_time()

        def ending(when: str) -> None:
            self._stop_the_clock()
            evaluate(when)
            self.row["loss"] = self.heldout_loss()

        training.begin, training.evaluate = beginning, ending  # type: ignore[method-assign]

    def _stop_the_clock(self) -> None:
        local = self.local
        wall, cpu = time.monotonic() - local.clocks.started, time.process_time() - self.cpu_s
        shares = local.clocks.shares()
        idle = {f"idle_{role}": 1 - float(shares[role]["busy_share"]) for role in ("target", "drafter")}  # type: ignore[arg-type]
        self.row |= {"wall_s": wall, "cpu_s": cpu, **idle}

    def heldout_loss(self) -> dict[str, float]:
        """Mean loss of held-out rows by length band (the plan's buckets; its upper edge), and of all."""
        models, config = self.local.models, self.local.config
        prepared, lead = models.prepared, models.replicas[0]
        store, params = prepared.heldout, replace(prepared.params, order="sorted", draw="live", reuse=1)
        assert store is not None
        lengths, plan = np.asarray(store.lengths), config.plan
        anchors = anchor_counts(np.asarray(store.eligible), plan.anchor_rate, plan.anchors_per_row)
        anchors[(lengths > params.bucket_edges[-1]) | (anchors > params.anchors_per_item)] = 0
        anchors[HELDOUT_ROWS:] = 0
        jobs = plan_epoch(lengths, anchors, params, 0)
        gamma = config.loss.gamma_for(config.drafter.block_size) if config.loss.decay == "exp" else None
        rates = {"anchor_rate": plan.anchor_rate, "anchors_per_row": plan.anchors_per_row, "gamma": gamma}
        compute, device = self.local.extract(0), lead.borrowed.embed.device
        threads = torch.get_num_threads()
        use_threads(models.cores)
        loss, weight = np.zeros(len(params.bucket_edges)), np.zeros(len(params.bucket_edges))
        for number in range(len(jobs)):
            batch = pack_item(store, jobs.job(number), prepared.shape, seed=0, **rates)
            item = compute(batch)
            last = item.slot.last_hidden
            sums = micro_step(
                lead.module,
                batch,
                item.slot.features.to(device),
                lead.borrowed,
                config.loss,
                1.0,
                last_hidden=None if last is None else last.to(device),
                dtype=models.dtype,
                backward=False,
            )
            self.local.release(item)
            loss[batch.job.bucket] += float(sums.loss)
            weight[batch.job.bucket] += batch.weight_sum
        use_threads(threads)
        bands = {str(edge): loss[b] / weight[b] for b, edge in enumerate(params.bucket_edges) if weight[b]}
        return {**bands, "all": float(loss.sum() / weight.sum())}

    def run(self) -> dict[str, Any]:
        summary = self.local.train()
        mixing, row = summary["mixing"], self.row
        items = summary["jobs_committed"] * self.local.config.buffer.reuse
        return {
            **row,
            "items_per_s": items / row["wall_s"],
            "items_per_cpu_s": items / row["cpu_s"],
            "steps": summary["steps"],
            "jobs": summary["jobs_committed"],
            "peak_bytes": summary["peak_bytes"],
            "r": mixing["r"],
            "distinct_buckets": mixing["distinct_buckets"],
            "accept_length": summary["accept_length_after"],
        }


def with_dtypes(base: RunConfig, local: LocalRuntime) -> RunConfig:
    """What `dtype: auto` chose in the first run holds for all."""
    target, runtime = (
        {"dtype": str(dtype).removeprefix("torch.")} for dtype in (local.models.target.dtype, local.models.dtype)
    )
    return base.model_copy(
        update={"target": base.target.model_copy(update=target), "runtime": base.runtime.model_copy(update=runtime)}
    )


def compare(base: RunConfig, variants: Sequence[Variant], seeds: int, steps: int | None) -> list[dict[str, Any]]:
    """One row per seed and variant. `steps`: about so many each, on as many of the store's rows as that takes."""
    source = Path(base.data.store)
    if not (source / "heldout").is_dir():
        raise DataError(f"{source} has no held-out part to measure on: prepare with --heldout FILE or --heldout-share")
    rows: list[dict[str, Any]] = []
    cores = torch.get_num_threads()
    with tempfile.TemporaryDirectory() as folder:
        store = source
        if steps is not None:
            whole = Preparation.of(
                config_of(base, variants[0], folder, str(source), 0), feature_width=1, hidden_size=1, state_bytes=1
            )
            share = steps / (whole.plan(0).windows * whole.config.optim.epochs)
            if share < 1:
                store = Path(folder, "store")
                sample_store(source, store, max(1, round(share * len(whole.train))), base.seed)
        for seed in range(base.seed, base.seed + seeds):
            for variant in variants:
                torch.set_num_threads(cores)
                measured = Measured(config_of(base, variant, f"{folder}/{len(rows)}", str(store), seed))
                rows.append({"variant": variant.name, "seed": seed, **measured.run()})
                base = with_dtypes(base, measured.local)
                shutil.rmtree(f"{folder}/{len(rows) - 1}")
                told = rows[-1]
                say(
                    f"seed {seed}, {variant.name}: {told['steps']} steps in {told['wall_s']:.0f} s, "
                    f"loss {told['loss']['all']:.3f}, accept length {told['accept_length']:.3f}"
                )
    return rows


COLUMNS = {
    "steps": "{:.0f}",
    "jobs": "{:.0f}",
    "wall_s": "{:.0f}",
    "cpu_s": "{:.0f}",
    "items_per_s": "{:.2f}",
    "idle_target": "{:.0%}",
    "idle_drafter": "{:.0%}",
    "peak_bytes": "{:.3g}",
    "r": "{:+.3f}",
    "distinct_buckets": "{:.2f}",
    "accept_length": "{:.3f}",
}


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Means over the seeds and, in brackets, standard deviations, as a Markdown table."""
    bands = list(dict.fromkeys(band for row in rows for band in row["loss"]))
    heads = [*(name.replace("_", " ") for name in COLUMNS), *(f"loss {b if b == 'all' else f'<= {b}'}" for b in bands)]
    lines = ["| variant | " + " | ".join(heads) + " |", "|---" * (len(heads) + 1) + "|"]
    for name in dict.fromkeys(row["variant"] for row in rows):
        mine = [row for row in rows if row["variant"] == name]

        def cell(values: list[float], form: str) -> str:
            spread = f" ({form.format(statistics.stdev(values)).lstrip('+')})" if len(values) > 1 else ""
            return form.format(statistics.mean(values)) + spread

        cells = [cell([row[key] for row in mine], form) for key, form in COLUMNS.items()]
        cells += [cell([row["loss"][band] for row in mine], "{:.3f}") for band in bands]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main(argv: Sequence[str]) -> list[dict[str, Any]]:
    """`forebay bench designs`."""
    p = argparse.ArgumentParser(prog="forebay bench designs", description=(__doc__ or "").split("\n\n")[0])
    takes_run(p)
    p.add_argument("--seeds", type=int, default=3, help="runs of each variant, with the run's seed and those after it")
    p.add_argument("--steps", type=int, help="about so many steps each, on a sample of the rows (default: the run's)")
    p.add_argument(
        "--reuse", type=int, nargs="+", metavar="K", help="compare buffer.reuse K ... at equal steps instead"
    )
    p.add_argument("--json", action="store_true", help="a list of rows instead of a table")
    args = p.parse_intermixed_args(argv)
    given_run(args)
    base = configuration.load(args.file, args.overrides)
    variants = reuse_variants(args.reuse, base.optim.epochs) if args.reuse else DESIGNS
    rows = compare(base, variants, args.seeds, args.steps)
    print(json.dumps(rows, indent=1) if args.json else table(rows))
    return rows
