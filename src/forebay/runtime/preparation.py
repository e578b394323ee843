"""What a run needs to know before its first tensor: the rows, the item's one shape, its bytes, the epochs' plans.

Guarantees: everything that can be refused from the configuration, the data's lengths and the target's configuration is
refused here, with both numbers and the fix; nothing is loaded beyond a tokenizer. Called by `api` and the runtimes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from forebay.config import RunConfig
from forebay.data.pack import ItemShape, anchor_counts, host_bytes
from forebay.data.store import TokenStore, damage
from forebay.errors import ConfigError, ContractError, DataError
from forebay.flow.admission import check_budget
from forebay.flow.mixing import warnings_of_plan
from forebay.flow.plan import EpochPlan, PlanParams, choose_anchors_per_item, choose_edges, plan_epoch


@dataclass(frozen=True)
class Preparation:
    """The decided part of a run."""

    config: RunConfig
    train: TokenStore
    heldout: TokenStore | None
    anchors: np.ndarray  # int64 [rows], anchors of each row
    shape: ItemShape
    params: PlanParams

    @classmethod
    def of(cls, config: RunConfig, *, feature_width: int, hidden_size: int, state_bytes: int) -> Preparation:
        """`feature_width` K * H and `hidden_size` H of the target; `state_bytes` of one stored element."""
        train, heldout, anchors = open_data(config)
        lengths, plan = np.asarray(train.lengths), config.plan
        block = config.drafter.block_size
        per_item = plan.anchors_per_item or choose_anchors_per_item(lengths, anchors, plan.token_budget)
        scored = block if config.drafter.sample_from_anchor else block - 1
        shape = ItemShape(
            token_budget=plan.token_budget,
            anchors=per_item,
            slots=plan.slots_per_item or per_item * scored,
            block_size=block,
            sample_from_anchor=config.drafter.sample_from_anchor,
        )
        width = feature_width + (hidden_size if config.loss.needs_last_hidden else 0)
        params = PlanParams(
            token_budget=plan.token_budget,
            anchors_per_item=shape.anchors,
            slots_per_item=shape.slots,
            scored_slots=scored,
            bucket_edges=plan.bucket_edges or choose_edges(lengths[anchors > 0], plan.token_budget),
            order=plan.order,
            draw=config.buffer.draw,
            window=config.optim.window,
            min_fill=config.buffer.min_fill,
            max_age=config.buffer.max_age,
            item_bytes=plan.token_budget * width * state_bytes + host_bytes(shape, config.buffer.reuse),
            reuse=config.buffer.reuse,
            seed=config.seed,
            data_fingerprint=train.fingerprint,
        )
        return cls(config, train, heldout, anchors, shape, params)

    def check_intact(self, rows: Sequence[int]) -> None:
        """Raise DataError where a shard that holds `rows` was cut since it was opened: reading it would be a SIGBUS."""
        shards = self.train.manifest["shards"]
        ends = np.cumsum([shard["rows"] for shard in shards])
        for number in np.unique(np.searchsorted(ends, rows, side="right")):
            for problem in damage(self.train.folder, [shards[number]], verify=False):
                raise DataError(f"{self.train.folder} was damaged while the run read it: {problem}")

    def plan(self, epoch: int) -> EpochPlan:
        """The jobs of one epoch."""
        return plan_epoch(np.asarray(self.train.lengths), self.anchors, self.params, epoch)

    def stored_plans(self, folder: Path, keep: bool) -> list[EpochPlan]:
        """Every epoch's plan. `keep`: those stored in `folder` are the run's, and are refused where they are another's;
        otherwise nothing was trained by them, and all are made anew."""
        plans = []
        for epoch in range(self.config.optim.epochs):
            file = folder / f"epoch-{epoch:03d}.plan"
            if not keep or not file.is_file():
                plans.append(self.plan(epoch))
                continue
            try:
                plans.append(EpochPlan.load(file, expect=self.params))
            except ContractError as error:
                raise ContractError(
                    f"{error}\nthe plan of a run that has begun cannot change: start a run of its own "
                    "(drafter.init_from takes this one's weights)"
                ) from None
        return plans

    def facts(self, plan: EpochPlan, jobs: Sequence[int]) -> dict[str, Any]:
        """Of a window of jobs: `supervised` tokens, room for slots, items by bucket, and what was full."""
        each, real = [plan.job(job) for job in jobs], sum(int(plan.real[job]) for job in jobs)
        counts = np.bincount(plan.buckets[list(jobs)], minlength=len(self.params.bucket_edges))
        count, padded = max(1, len(jobs)), sum(job.padded_tokens for job in each)
        anchors = sum(job.anchors for job in each)
        return {
            "slot_room": count * self.shape.slots,
            "supervised": sum(int(self.train.supervised[list(job.rows)].sum()) for job in each),
            "bucket_counts": counts.tolist(),
            "distinct_buckets": int(np.count_nonzero(counts)),
            "target_padding_share": round(1 - real / max(1, padded), 4),
            "item_tail_share": round(1 - real / (count * self.shape.token_budget), 4),
            "anchor_fill_share": round(anchors / (count * self.shape.anchors), 4),
        }

    def mixing_warnings(self, plan: EpochPlan) -> list[str]:
        """Why windows of this plan will not be mixed, if they will not."""
        p = self.params
        return warnings_of_plan(plan.buckets, p.order, p.window, p.min_fill, p.seed, p.reuse)

    def check(self, jobs: int) -> list[str]:
        """Raise ConfigError where the buffer cannot work with such items (G3); returns warnings."""
        buffer = self.config.buffer
        return check_budget(
            buffer.bytes,
            self.params.item_bytes,
            buffer.min_fill,
            self.config.optim.window,
            len(self.config.runtime.targets),
            jobs,
            buffer.max_age,
            buffer.reuse,
        )

    @property
    def heldout_prompts(self) -> list[list[int]]:
        """Token ids of the held-out prompts of an evaluation: the first `eval.prompts` of the held-out store."""
        if self.heldout is None:
            return []
        count = min(self.config.eval.prompts, len(self.heldout))
        return [np.asarray(self.heldout.prompt(i)).tolist() for i in range(count)]


def open_data(config: RunConfig) -> tuple[TokenStore, TokenStore | None, np.ndarray]:
    """The rows to train on, those held out, and the anchors of each training row.

    Raises what can be known of the data without a target, so that nobody waits for its weights first.
    """
    store, plan = Path(config.data.store), config.plan
    train = TokenStore.open(store / "train")
    heldout = TokenStore.open(store / "heldout") if (store / "heldout").is_dir() else None
    longest = int(np.asarray(train.lengths).max(initial=0))
    if longest > plan.token_budget:
        raise ConfigError(
            f"plan.token_budget {plan.token_budget} is below the longest sequence of {longest} tokens: raise it to "
            f"{longest} or prepare the data with --max-length {plan.token_budget}"
        )
    anchors = anchor_counts(np.asarray(train.eligible), plan.anchor_rate, plan.anchors_per_row)
    if not anchors.any():
        raise DataError(
            f"none of the {len(train)} rows of {store} has two supervised tokens in a row: see its report.json"
        )
    if config.eval.guard and not heldout:
        raise DataError(
            f"{store} has no held-out part, so accept length cannot be measured: prepare with --heldout FILE or "
            "--heldout-share, or set eval.guard=false"
        )
    return train, heldout, anchors


def description(config: RunConfig, target_config: Any, layer_ids: tuple[int, ...]) -> dict[str, Any]:
    """What `forebay plan` says of the first epoch, from the target's configuration alone."""
    hidden = int(target_config.hidden_size)
    half = config.target.dtype in ("bfloat16", "float16", "auto")
    prepared = Preparation.of(
        config, feature_width=len(layer_ids) * hidden, hidden_size=hidden, state_bytes=2 if half else 4
    )
    plan = prepared.plan(0)
    out = plan.describe()
    out["warnings"] = [*prepared.check(len(plan)), *prepared.mixing_warnings(plan)]
    out["buffer_bytes"] = config.buffer.bytes
    out["epochs"] = config.optim.epochs
    return out
