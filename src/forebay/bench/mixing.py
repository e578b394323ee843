"""`forebay bench mixing`: what the order of jobs and the queue do to gradients, on a tiny model. Minutes on one core.

Four bands of lengths speak four languages (each a noisy affine map from token to token), so that a window of one band
has a gradient of its own: the case in which mixing matters most. For each order and queue the real plan is drawn by the
real coordinator on a virtual clock; at the same weights every window's gradient is held against that of all
items together (cosine, length ratio), and a drafter trained for equal steps is held against held-out text of all bands.
Called by the command line.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from forebay.bench.flow import Design
from forebay.config import DrafterConfig, LossConfig
from forebay.data.pack import HostBatch, ItemShape, anchor_counts, pack_item
from forebay.flow.coordinator import FlowSettings
from forebay.flow.mixing import excess_of_order
from forebay.flow.plan import EpochPlan, PlanParams, choose_anchors_per_item, plan_epoch
from forebay.flow.simulate import Load, simulate
from forebay.models.drafter import Drafter
from forebay.models.init import init_random
from forebay.models.spec import drafter_spec
from forebay.models.step import Borrowed, micro_step
from forebay.models.target import Target

VOCABULARY = 32
BANDS = ((24, 47), (48, 95), (96, 191), (192, 383))
BUDGET, BLOCK, RATE, WINDOW = 512, 4, 0.25, 8
LAYER_IDS = (0, 2, 4)
EPOCHS, GRADIENT_EPOCHS, LEARNING_RATE = 6, 3, 3e-3
CASES = tuple(
    (Design(order=order, queue=queue), min_fill)
    for order in ("filled", "shuffled", "sorted")
    for queue, min_fill in (("buffered", 10), ("buffered", 64), ("per_drafter", 8), ("bucketed", 8))
)


class Languages:
    """Rows in memory: band b's next token is its own map of the last one, with 15 % noise; all tokens supervised."""

    def __init__(self, seed: int, tokens_per_band: int) -> None:
        rng = np.random.default_rng(seed)
        self._rows: list[np.ndarray] = []
        for band, (low, high) in enumerate(BANDS):
            total = 0
            while total < tokens_per_band:
                row = np.empty(rng.integers(low, high + 1), dtype=np.int32)
                row[0] = rng.integers(VOCABULARY)
                for i in range(1, len(row)):
                    known = (row[i - 1] * (5 + 6 * band) + 17 * band + 7) % VOCABULARY
                    row[i] = known if rng.random() < 0.85 else rng.integers(VOCABULARY)
                self._rows.append(row)
                total += len(row)
        self.lengths = np.array([len(row) for row in self._rows], dtype=np.int32)
        self.anchors = anchor_counts(self.lengths - 1, RATE, 512)

    def tokens(self, row: int) -> np.ndarray:
        return self._rows[row]

    def mask(self, row: int) -> np.ndarray:
        return np.ones(len(self._rows[row]), dtype=bool)


@dataclass
class Ready:
    """An item as a drafter trains on it."""

    batch: HostBatch
    features: torch.Tensor


def plan_of(data: Languages, order: str, epoch: int, seed: int) -> EpochPlan:
    most = choose_anchors_per_item(data.lengths, data.anchors, BUDGET)
    params = PlanParams(
        token_budget=BUDGET,
        anchors_per_item=most,
        slots_per_item=most * (BLOCK - 1),
        scored_slots=BLOCK - 1,
        bucket_edges=tuple(high for _, high in BANDS),
        order=order,
        window=WINDOW,
        item_bytes=1,
        seed=seed,
    )
    return plan_epoch(data.lengths, data.anchors, params, epoch)


class Bench:
    """The tiny target, its data, and the gradients of a drafter."""

    def __init__(self, seed: int, tokens_per_band: int) -> None:
        from transformers import Qwen3Config, Qwen3ForCausalLM

        torch.manual_seed(seed)
        config = Qwen3Config(
            vocab_size=VOCABULARY + 8,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=6,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            max_position_embeddings=512,
            tie_word_embeddings=False,
            initializer_range=0.1,
        )
        self.target = Target(Qwen3ForCausalLM(config).eval(), LAYER_IDS)
        self.spec = drafter_spec(
            DrafterConfig(layers=2, block_size=BLOCK, intermediate_size=128),
            config.to_dict(),
            target_layer_ids=LAYER_IDS,
            num_target_layers=6,
            vocab_size=VOCABULARY + 8,
            mask_token_id=VOCABULARY + 4,
            trained_max_length=512,
            dtype="float32",
        )
        self.borrowed = Borrowed.of(self.target, torch.float32)
        self.seed = seed
        self.data = Languages(seed, tokens_per_band)
        heldout = Languages(seed + 1000, tokens_per_band // 5)
        self.heldout = self.items(heldout, plan_of(heldout, "shuffled", 0, seed))
        self._items: dict[tuple[str, int], list[Ready]] = {}

    def items(self, data: Languages, plan: EpochPlan) -> list[Ready]:
        """Every job of the plan with its hidden states."""
        shape = ItemShape(BUDGET, plan.params.anchors_per_item, plan.params.slots_per_item, BLOCK)
        out = []
        for i in range(len(plan)):
            batch = pack_item(
                data, plan.job(i), shape, seed=self.seed, anchor_rate=RATE, anchors_per_row=512, gamma=2.0
            )
            features = torch.zeros(BUDGET, self.target.feature_width)
            self.target.capture(batch, features)
            out.append(Ready(batch, features))
        return out

    def of_epoch(self, order: str, epoch: int) -> list[Ready]:
        if (order, epoch) not in self._items:
            self._items = {key: items for key, items in self._items.items() if key[0] == order}  # one order at a time
            self._items[order, epoch] = self.items(self.data, plan_of(self.data, order, epoch, self.seed))
        return self._items[order, epoch]

    def fresh_drafter(self) -> Drafter:
        drafter = Drafter(self.spec)
        init_random(drafter, self.seed)
        return drafter

    def accumulate(self, drafter: Drafter, item: Ready, scale: float) -> float:
        """Backward of one item; returns its loss sum."""
        sums = micro_step(drafter, item.batch, item.features, self.borrowed, LossConfig(), scale)
        return float(sums.loss)

    def heldout_loss(self, drafter: Drafter) -> float:
        total = 0.0
        for item in self.heldout:
            sums = micro_step(drafter, item.batch, item.features, self.borrowed, LossConfig(), 1.0, backward=False)
            total += float(sums.loss)
        return total / sum(item.batch.weight_sum for item in self.heldout)


def gradients(bench: Bench, drafter: Drafter, items: Sequence[Ready]) -> torch.Tensor:
    """[items, parameters]: the gradient of each item's loss sum."""
    out = []
    for item in items:
        drafter.zero_grad(set_to_none=True)
        bench.accumulate(drafter, item, 1.0)
        out.append(torch.cat([p.grad.flatten() for p in drafter.parameters() if p.grad is not None]))
    drafter.zero_grad(set_to_none=True)
    return torch.stack(out)


def against_population(
    each: torch.Tensor, weights: torch.Tensor, windows: Sequence[Sequence[int]]
) -> tuple[list[float], list[float]]:
    """Cosine and length ratio of every window's gradient to that of all items."""
    whole = each.sum(0) / weights.sum()
    cosines, ratios = [], []
    for jobs in windows:
        mine = each[list(jobs)].sum(0) / weights[list(jobs)].sum()
        cosines.append(float(torch.nn.functional.cosine_similarity(mine, whole, dim=0)))
        ratios.append(float(mine.norm() / whole.norm()))
    return cosines, ratios


def draw_windows(bench: Bench, design: Design, min_fill: int, epochs: int) -> list[list[tuple[int, ...]]]:
    """The windows of each epoch as the coordinator draws them, targets being the bottleneck."""
    plans = [plan_of(bench.data, design.order, e, bench.seed) for e in range(epochs)]
    settings = FlowSettings(
        budget_bytes=2 * min_fill + WINDOW + 4,
        window=WINDOW,
        min_fill=min_fill,
        targets=3,
        drafters=2,
        queue=design.queue,
        seed=bench.seed,
    )
    rng = np.random.default_rng(bench.seed)
    load = Load(produce=lambda job, worker: float(rng.uniform(0.8, 1.2)), consume=lambda job, replica: 0.3)
    windows: list[list[tuple[int, ...]]] = [[] for _ in plans]
    for window in simulate(settings, plans, load).windows:
        windows[window.epoch].append(window.jobs)
    return windows


def measure(bench: Bench, design: Design, min_fill: int, epochs: int, trained: Drafter) -> dict[str, Any]:
    """One row: mixing, gradients at the weights of `trained`, and the held-out loss of a drafter of its own."""
    windows = draw_windows(bench, design, min_fill, epochs)
    cosines: list[float] = []
    ratios: list[float] = []
    excesses = []
    for epoch, drawn in enumerate(windows[:GRADIENT_EPOCHS]):
        items = bench.of_epoch(design.order, epoch)
        whole = [jobs for jobs in drawn if len(jobs) == WINDOW]
        weights = torch.tensor([item.batch.weight_sum for item in items])
        found = against_population(gradients(bench, trained, items), weights, whole)
        cosines += found[0]
        ratios += found[1]
        buckets = plan_of(bench.data, design.order, epoch, bench.seed).buckets
        excesses.append(excess_of_order(buckets[np.array(whole).ravel()], WINDOW))
    drafter, losses = train(bench, design.order, windows)
    return {
        "order": design.order,
        "queue": design.queue,
        "min_fill": min_fill,
        "seed": bench.seed,
        "r": float(np.mean(excesses)),
        "cosine_mean": float(np.mean(cosines)),
        "cosine_p10": float(np.quantile(cosines, 0.1)),
        "length_ratio_mean": float(np.mean(ratios)),
        "length_ratio_p90": float(np.quantile(ratios, 0.9)),
        "steps": len(losses),
        "heldout_loss": bench.heldout_loss(drafter),
    }


def train(bench: Bench, order: str, windows: Sequence[Sequence[tuple[int, ...]]]) -> tuple[Drafter, list[float]]:
    """Window-normalised steps with cosine decay; returns the drafter and the loss of every step."""
    drafter = bench.fresh_drafter()
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    steps = sum(len(epoch) for epoch in windows)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    losses = []
    for epoch, drawn in enumerate(windows):
        items = bench.of_epoch(order, epoch)
        for jobs in drawn:
            weight = sum(items[job].batch.weight_sum for job in jobs)
            losses.append(sum(bench.accumulate(drafter, items[job], 1 / weight) for job in jobs) / weight)
            torch.nn.utils.clip_grad_norm_(drafter.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            schedule.step()
    return drafter, losses


def run(seeds: Sequence[int] = (0, 1), epochs: int = EPOCHS, tokens_per_band: int = 10_000) -> list[dict[str, Any]]:
    """Every case for every seed. Gradients are taken at the weights after one well-mixed epoch."""
    rows = []
    for seed in seeds:
        bench = Bench(seed, tokens_per_band)
        trained, _ = train(bench, "shuffled", draw_windows(bench, Design(order="shuffled"), 10, 1))
        rows += [measure(bench, design, min_fill, epochs, trained) for design, min_fill in CASES]
    return rows


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Means over the seeds, as a Markdown table."""
    lines = [
        "| order | queue | min fill | r | cosine mean | cosine p10 | length ratio mean | p90 | held-out loss |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for key in dict.fromkeys((row["order"], row["queue"], row["min_fill"]) for row in rows):
        mine = [row for row in rows if (row["order"], row["queue"], row["min_fill"]) == key]
        mean = {name: float(np.mean([row[name] for row in mine])) for name in mine[0] if name not in ("order", "queue")}
        lines.append(
            f"| {key[0]} | {key[1]} | {key[2]} | {mean['r']:+.3f} | {mean['cosine_mean']:.3f} | "
            f"{mean['cosine_p10']:.3f} | {mean['length_ratio_mean']:.2f} | {mean['length_ratio_p90']:.2f} | "
            f"{mean['heldout_loss']:.4f} |"
        )
    return "\n".join(lines)


def main(argv: Sequence[str]) -> list[dict[str, Any]]:
    """`forebay bench mixing`."""
    parser = argparse.ArgumentParser(prog="forebay bench mixing", description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1], help="one experiment per seed")
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    parser.add_argument("--tokens-per-band", type=int, default=10_000)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="a list of rows instead of a table")
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    rows = run(args.seeds, args.epochs, args.tokens_per_band)
    print(json.dumps(rows, indent=1) if args.json else table(rows))
    return rows
