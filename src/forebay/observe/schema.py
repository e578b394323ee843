"""What a run measures: every field of a line of `metrics.jsonl`, its unit, what it means, what is good, what to do.

Guarantees: nothing is logged that is not in `METRICS`, and docs/metrics.md is made from it (tests compare both). A name
never changes its meaning; a new one may come. Read by the trackers, the report and the page. Pure Python.

    python -m forebay.observe.schema > docs/metrics.md
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Metric:
    """One field of the lines of one kind. `shape`: one number, a list, or numbers by name."""

    kind: str
    name: str
    unit: str
    meaning: str
    good: str = ""
    otherwise: str = ""
    shape: str = "number"
    where: str = ""  # when the field is there, if not always


KINDS = {
    "step": "one line for every optimizer step, also for one that was not taken (`finite` false)",
    "eval": "one line for every held-out evaluation, by the serving loop",
    "guard": "one line for every comparison of the trainer's forward with the serving loop (G8)",
    "note": "what went wrong, once",
}


def _of(kind: str, *rows: tuple[str, ...], where: str = "") -> list[Metric]:
    """Rows of (name, unit, meaning, good, otherwise); the unit may carry a shape: `[]` a list, `{}` by name."""
    out = []
    for name, unit, *text in rows:
        shape = "list" if unit.endswith("[]") else "by name" if unit.endswith("{}") else "number"
        out.append(Metric(kind, name, unit.removesuffix("[]").removesuffix("{}"), *text, shape=shape, where=where))
    return out


METRICS: tuple[Metric, ...] = (
    *_of(
        "step",
        ("step", "steps", "optimizer steps taken, this one included"),
        ("t", "s", "seconds since the start of this life of the run"),
        ("epoch", "", "epoch of the window, from 0"),
        ("finite", "bool", "whether the step was taken", "true", "its jobs are trained later; look at `jobs`' rows"),
        ("jobs", "ids[]", "jobs of the window"),
        ("eta_s", "s", "seconds to the last step, at the mean rate of this life"),
    ),
    *_of(
        "step",
        ("loss", "nats", "weighted loss of the window", "falls, steeply at first", "lower optim.lr; look at the masks"),
        (
            "loss_by_bucket",
            "nats{}",
            "the same by the bucket of the item",
            "no bucket stays behind",
            "more of its rows",
        ),
        ("lr", "", "learning rate of the step"),
        ("grad_norm", "", "norm of the gradient before clipping", "below optim.clip mostly", "lower optim.lr"),
        ("accuracy", "share", "scored slots whose most likely token is the label", "rises"),
        ("accuracy_by_slot", "share[]", "the same by slot of the block", "falls gently from slot to slot"),
        ("acceptance_by_slot", "share[]", "blocks that are right up to this slot, at uniformly drawn anchors"),
        (
            "uniform_accept_length",
            "tokens",
            "1 + the sum of `acceptance_by_slot`: what a block would give at a random place. Not what is served",
            "rises with the held-out accept length",
            "where it alone rises: more rows, fewer epochs",
        ),
    ),
    *_of(
        "step",
        ("tokens", "tokens", "real tokens of the window"),
        ("slots", "slots", "scored slots of the window"),
        ("tokens_per_s", "tokens/s", "real tokens trained on, mean of this life"),
        ("supervised_tokens_per_s", "tokens/s", "supervised tokens among them, mean of this life"),
        (
            "data_wait_share",
            "share",
            "share of its time that the drafter waited for items",
            "below 0.05",
            "add targets",
        ),
        ("target_padding_share", "share", "padding in the target's batches of the window", "below 0.1", "more buckets"),
        ("item_tail_share", "share", "unused tokens at the items' ends", "below 0.1", "raise plan.token_budget"),
        ("anchor_fill_share", "share", "used anchors of the items", "above 0.8", "plan.anchors_per_item: null"),
        ("slot_fill_share", "share", "used head rows of the items", "above 0.8", "plan.slots_per_item: null"),
    ),
    *_of(
        "step",
        (
            "mixing_r",
            "",
            "excess chance that two items of the window share a bucket: 0 is random, below is better, 1 is one bucket",
            "about 0 on average, over 100 windows at most 0.02",
            "above 0.1: plan.order: filled, or raise buffer.min_fill",
        ),
        ("mixing_r_epoch", "", "its mean over the epoch so far", "at most 0.02", "as for `mixing_r`"),
        ("bucket_counts", "items[]", "items of the window by bucket", "like the corpus over some windows"),
        ("distinct_buckets", "buckets", "buckets in the window"),
        (
            "occupancy",
            "items",
            "items in the buffer when the window was drawn",
            "between min fill and full",
            "at min fill: targets limit; full: drafters limit",
        ),
        ("buffered_items", "items", "items in the buffer now"),
        ("charged_bytes", "bytes", "bytes charged now: leased, held, and drawn but not yet released", "below budget"),
        ("charged_share", "share", "the same as a share of buffer.bytes", "high only when the drafters limit"),
        ("age_p50", "draws", "draws that an item waited, median of the epoch so far", "about the occupancy x 0.7"),
        ("age_p99", "draws", "99th percentile of the same", "about 5 times the occupancy", "above: set buffer.max_age"),
        ("age_max", "draws", "longest wait in the window"),
        ("forced_share", "share", "items drawn because of buffer.max_age", "0 to 0.05", "raise buffer.max_age"),
    ),
    *_of(
        "step",
        ("jobs_by_state", "jobs{}", "jobs pending, leased, ready, drawn, committed, quarantined", "0 quarantined"),
        ("requeues", "jobs", "jobs that went back after an error, so far", "0", "see the notes and `forebay status`"),
        ("expired", "jobs", "leases that ran out, so far", "0", "raise runtime.lease_s, or look for a hang"),
        ("quarantined", "jobs", "jobs given up, so far", "0", "their rows are named in the notes"),
        ("stale_puts", "items", "items that came after their lease had ended, so far", "0", "raise runtime.lease_s"),
        ("skipped_steps", "steps", "steps not taken because they were not finite, so far", "0", "lower optim.lr"),
        ("epoch_passes", "draws", "draws from the next epoch because this one's jobs waited for room", "0 or few"),
    ),
    *_of(
        "step",
        (
            "workers",
            "{}",
            "by worker, since the start of this life: `busy_s`; `wait_s` by what was waited for; for targets "
            "also `jobs` done and `fill`, the share of the token budget that they used",
            "the stage that limits is busy nearly always",
            "`forebay diagnose RUN`",
        ),
        (
            "process_bytes",
            "bytes",
            "memory of this process (resident)",
            "flat after the first epoch",
            "a leak: report it",
        ),
    ),
    *_of(
        "step",
        ("device_bytes", "bytes{}", "memory allocated by device", "flat"),
        ("device_peak_bytes", "bytes{}", "the most of it so far", "below the device's memory"),
        ("device_busy_share", "share{}", "utilisation by device, where the driver tells", "near 1 for who limits"),
        where="with a GPU",
    ),
    *_of(
        "eval",
        ("step", "steps", "optimizer steps in the weights"),
        ("t", "s", "seconds since the start of this life of the run"),
        ("when", "", "`start`, `step` or `end`"),
        (
            "accept_length",
            "tokens",
            "tokens that a round of the serving loop gives, over all rounds: 1 + accepted drafts",
            "rises; 1 is an untrained drafter",
            "more rows answered by the target, more epochs",
        ),
        ("accept_length_by_request", "tokens", "the same within each prompt, then the mean over prompts"),
        ("acceptance_by_position", "share[]", "rounds that accept the first j drafts", "falls gently"),
        ("by_answer_length", "{}", "accept length by band of answer length: `from`, `to`, `prompts`, `rounds`"),
        ("rounds", "rounds", "rounds of the loop"),
        ("prompts", "prompts", "held-out prompts", "100 or more for two digits", "raise eval.prompts"),
        ("seconds", "s", "wall time of the evaluation"),
    ),
    *_of(
        "guard",
        ("step", "steps", "optimizer steps in the weights"),
        ("t", "s", "seconds since the start of this life of the run"),
        ("rounds", "rounds", "rounds compared"),
        ("near_ties", "rounds", "rounds left out because two tokens were nearly equal"),
        ("agreement", "share", "rounds in which both accept as many drafts", "0.99 or more, else the run stops"),
        ("slot_agreement", "share", "single drafts that are equal"),
        ("loop_acceptance", "share[]", "acceptance by position in the loop"),
        ("trainer_acceptance", "share[]", "the same in the trainer's forward"),
        ("agreement_by_position", "share[]", "agreement by position"),
    ),
    *_of(
        "note",
        ("step", "steps", "optimizer steps in the weights"),
        ("t", "s", "seconds since the start of this life of the run"),
        ("failed", "", "the message of what ended this life"),
    ),
)


def metrics(kind: str) -> dict[str, Metric]:
    """The fields of one kind of line, by name."""
    return {metric.name: metric for metric in METRICS if metric.kind == kind}


def markdown() -> str:
    """docs/metrics.md."""
    lines = [
        "# Metrics: every field of a run's `metrics.jsonl`",
        "",
        "Made from `src/forebay/observe/schema.py` by `python -m forebay.observe.schema > docs/metrics.md`. A line has",
        "`kind` and the fields below. Trackers (`runtime.loggers`) get the numbers under `kind/name`, lists under",
        "`kind/name/0`, `kind/name/1`, ..., and what is by name under `kind/name/NAME`.",
    ]
    for kind, about in KINDS.items():
        lines += [
            "",
            f"## `{kind}`: {about}",
            "",
            "| field | unit | meaning | good | otherwise |",
            "|---|---|---|---|---|",
        ]
        for metric in metrics(kind).values():
            unit = {"list": f"{metric.unit}, a list", "by name": f"{metric.unit}, by name".lstrip(", ")}
            meaning = f"{metric.meaning} ({metric.where})" if metric.where else metric.meaning
            cells = (f"`{metric.name}`", unit.get(metric.shape, metric.unit), meaning, metric.good, metric.otherwise)
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(markdown(), end="")
