"""What `gpu_check.sh` measures: one JSON object a line. Qwen3-8B shapes with random weights; tiny ones on a CPU.

    python scripts/gpu_check.py [--device cuda] [--seconds 420]

The drafter's step is compiled and captured once, compared with the eager one, and timed with clipping and AdamW; the
target is timed capturing into pinned slots; then both run at once on the device, each in its own thread and stream,
with slots passed from one to the other. Nothing is read from disk and nothing downloaded.
"""

from __future__ import annotations

import argparse
import itertools
import json
import queue
import statistics
import sys
import threading
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from forebay.bench.drafter import matmul_flops_per_s
from forebay.config import LossConfig, OptimConfig
from forebay.cost.flops import DrafterShape, TargetShape, drafter_flops, target_flops_per_token
from forebay.models import graph
from forebay.models.drafter import Drafter
from forebay.models.init import init_random
from forebay.models.spec import DrafterSpec
from forebay.models.step import Borrowed, micro_step
from forebay.models.target import Target
from forebay.observe.clock import WorkerClock
from forebay.runtime.turn import Turn
from forebay.stages.item import Item, SlotPool, beside
from forebay.stages.train import DrafterReplica, DrafterStep

#: Of the target: hidden, heads, kv heads, head width, inner, layers, vocabulary, captured layers. Of the drafter:
#: layers, block. Of an item: tokens, anchors.
SHAPES = {
    "cuda": (4096, 32, 8, 128, 12288, 36, 151936, (1, 9, 17, 25, 33), 5, 16, 16384, 2048),
    "cpu": (64, 4, 2, 16, 128, 6, 512, (1, 3), 2, 4, 256, 32),
}
WINDOW = 4
start = time.monotonic()


def tell(figure: str, **values: Any) -> None:
    rounded = {k: float(f"{v:.5g}") if isinstance(v, float) else v for k, v in values.items()}
    print(json.dumps({"figure": figure, **rounded, "t": round(time.monotonic() - start, 1)}), flush=True)


def fixed_batch(tokens: int, anchors: int, block: int, vocab: int, number: int) -> SimpleNamespace:
    """A full item of documents with log-normal lengths (mean about a twelfth of the item), all tokens supervised."""
    rng = np.random.default_rng(number)
    lengths: list[int] = []
    while sum(lengths) < tokens:
        longest = max(2 * block, tokens // 4)
        lengths.append(int(np.clip(rng.lognormal(np.log(tokens / 12) - 0.125, 0.5), 2 * block, longest)))
    lengths[-1] -= sum(lengths) - tokens
    if lengths[-1] < 2 * block:
        rest = lengths.pop()
        lengths[-1] += rest
    lengths.sort()
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    legal = np.concatenate([np.arange(a, b - block) for a, b in itertools.pairwise(offsets)])
    chosen = np.sort(rng.choice(legal, anchors, replace=anchors > len(legal)))
    ids = rng.integers(0, vocab, tokens).astype(np.int32)
    slots = np.arange(1, block)
    index = (np.arange(anchors)[:, None] * block + slots).ravel()
    weight = np.tile(np.exp(-(slots - 1) / 7.0), anchors).astype(np.float32)
    splits = tuple(len(part) for part in np.array_split(np.arange(len(lengths)), min(4, len(lengths))))
    return SimpleNamespace(
        job=SimpleNamespace(splits=splits, real_tokens=tokens, epoch=0, id=number),
        tokens=ids,
        positions=np.concatenate([np.arange(n) for n in lengths]).astype(np.int32),
        doc_offsets=offsets,
        anchors=chosen.astype(np.int32),
        anchor_start=offsets[np.searchsorted(offsets, chosen, side="right") - 1],
        n_anchors=anchors,
        slot_index=index.astype(np.int32),
        slot_label=ids[chosen[:, None] + slots].ravel(),
        slot_weight=weight,
        slot_source=(chosen[:, None] + slots - 1).ravel().astype(np.int32),
        n_slots=len(index),
        weight_sum=float(weight.sum()),
    )


class Check:
    """The models, the batches and the three timings."""

    def __init__(self, device: str) -> None:
        kind = torch.device(device).type
        hidden, heads, kv, width, inner, layers, vocab, ids, draft, block, tokens, anchors = SHAPES[kind]
        self.device, self.dtype = torch.device(device), torch.bfloat16
        if kind == "cpu":
            graph.BACKEND = "eager"  # a dry run of this script, not of the compiler
        config = Qwen3Config(
            vocab_size=vocab,
            hidden_size=hidden,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=kv,
            head_dim=width,
            intermediate_size=inner,
            tie_word_embeddings=False,
        )
        with torch.device(self.device):
            torch.set_default_dtype(self.dtype)
            model = Qwen3ForCausalLM(config).eval()
            torch.set_default_dtype(torch.float32)
        self.target = Target(model, ids)
        self.spec = DrafterSpec(
            hidden_size=hidden,
            target_hidden_size=hidden,
            layers=draft,
            heads=heads,
            kv_heads=kv,
            head_dim=width,
            intermediate_size=inner,
            vocab_size=vocab,
            block_size=block,
            mask_token_id=vocab - 1,
            target_layer_ids=ids,
            num_target_layers=layers,
            trained_max_length=tokens,
            dtype="bfloat16",
        )
        self.drafter = Drafter(self.spec)
        init_random(self.drafter, 0)
        self.drafter.to(self.device)
        self.borrowed = Borrowed.of(self.target, self.dtype)
        self.loss = LossConfig(chunk_slots=1024)
        self.tokens, self.anchors, self.slots = tokens, anchors, anchors * (block - 1)
        self.batches = [fixed_batch(tokens, anchors, block, vocab - 1, i) for i in range(2 * WINDOW)]
        self.pool = SlotPool(3 * WINDOW, tokens, self.target.feature_width, None, self.dtype, pinned=kind == "cuda")
        self.replica = DrafterReplica(self.drafter, self.borrowed, self.loss, self.dtype)
        self.step = DrafterStep([self.replica], OptimConfig(), 10_000)
        shape = DrafterShape.of(self.spec)
        mean = float(np.mean(np.diff(self.batches[0].doc_offsets)))
        self.drafter_flops = drafter_flops(shape, tokens=tokens, anchors=anchors, slots=self.slots, visible=mean / 2)
        run = TargetShape.of(self.target.facts, ids[-1] + 1)
        self.target_flops = tokens * target_flops_per_token(run, mean)

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def extract(self, batch: Any, side: Any) -> Item:
        slot = self.pool.acquire()
        with torch.cuda.stream(side):
            self.target.capture(batch, slot.features, slot.last_hidden)
        return Item(batch, slot)

    def train(self, items: list[Item]) -> Any:
        clock = WorkerClock("drafter", "drafter")
        return self.step.step([items], Turn(False), clock, lambda item: self.pool.release(item.slot))

    def equality(self) -> None:
        """The compiled, captured step against the eager one, on the same item, bf16 both."""
        items = [self.extract(batch, beside(self.device)) for batch in self.batches[:2]]
        features = [item.slot.features.to(self.device) for item in items]

        def eager(batch: Any, x: torch.Tensor) -> tuple[float, float]:
            sums = micro_step(self.drafter, batch, x, self.borrowed, self.loss, 1 / batch.weight_sum, dtype=self.dtype)
            norm = torch.nn.utils.get_total_norm([p.grad for p in self.drafter.parameters() if p.grad is not None])
            self.drafter.zero_grad(set_to_none=True)
            return float(sums.loss), float(norm)

        want = [eager(item.batch, x) for item, x in zip(items, features, strict=True)]
        before, begun = graph.compilations(), time.monotonic()
        made = self.step.compile(self.tokens, self.anchors, self.slots)
        seconds = time.monotonic() - begun
        for item, (loss, norm) in zip(items, want, strict=True):
            sums = self.replica.micro_step(item, 1 / item.batch.weight_sum)
            found = torch.nn.utils.get_total_norm([p.grad for p in self.drafter.parameters()])
            tell(
                "graph_equals_eager",
                loss_difference=abs(float(sums.loss) - loss) / abs(loss),
                grad_norm_difference=abs(float(found) - norm) / norm,
            )
            self.drafter.zero_grad(set_to_none=False)
            self.pool.release(item.slot)
        tell("compiled", made=made, seconds=seconds, compilations=graph.compilations() - before)

    def target_alone(self, rounds: int) -> float:
        side, times = beside(self.device), []
        for number in range(rounds + 2):
            begun = time.monotonic()
            self.pool.release(self.extract(self.batches[number % len(self.batches)], side).slot)
            times.append(time.monotonic() - begun)
        return statistics.median(times[2:])

    def drafter_alone(self, rounds: int) -> float:
        """Seconds per item: windows of WINDOW items, clipping and AdamW included."""
        times = []
        for _ in range(rounds + 2):
            items = [self.extract(batch, None) for batch in self.batches[:WINDOW]]
            self.wait()
            begun = time.monotonic()
            assert self.train(items).finite
            self.wait()
            times.append((time.monotonic() - begun) / WINDOW)
        return statistics.median(times[2:])

    def together(self, windows: int, target: float, drafter: float) -> float:
        """Share of the ideal with both roles at once, after the first window: work done, in seconds alone, per second.

        target and drafter: seconds per item alone. Work is counted on both sides: the target may run ahead.
        """
        ready: queue.Queue[Any] = queue.Queue(2 * WINDOW)
        made, made_before, begun = 0, 0, 0.0

        def produce() -> None:
            nonlocal made
            try:
                side = beside(self.device)
                for number in range(windows * WINDOW):
                    ready.put(self.extract(self.batches[number % len(self.batches)], side))
                    made += 1
            except BaseException as error:  # noqa: BLE001 - raised where it is drawn
                ready.put(error)

        thread = threading.Thread(target=produce, daemon=True)
        thread.start()
        for number in range(windows):
            items = [ready.get(timeout=120) for _ in range(WINDOW)]
            for item in items:
                if isinstance(item, BaseException):
                    raise item
            self.train(items)
            if number == 0:
                self.wait()
                begun, made_before = time.monotonic(), made
        self.wait()
        seconds = time.monotonic() - begun
        thread.join()
        return ((made - made_before) * target + (windows - 1) * WINDOW * drafter) / seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rounds", type=int, default=6)
    args = parser.parse_args()
    cuda = torch.device(args.device).type == "cuda"
    peak = matmul_flops_per_s(torch.bfloat16, args.device, 8192 if cuda else 512)
    name = torch.cuda.get_device_name(args.device) if cuda else "cpu"
    tell("machine", device=name, torch=torch.__version__, matmul_bf16_flops_per_s=peak)
    check = Check(args.device)
    tell("models", drafter_parameters=sum(p.numel() for p in check.drafter.parameters()))
    check.equality()
    target = check.target_alone(args.rounds)
    tell(
        "target_alone",
        tokens_per_s=check.tokens / target,
        seconds_per_item=target,
        share_of_peak=check.target_flops / target / peak,
    )
    drafter = check.drafter_alone(args.rounds)
    tell(
        "drafter_alone",
        tokens_per_s=check.tokens / drafter,
        slots_per_s=check.slots / drafter,
        seconds_per_item=drafter,
        share_of_peak=check.drafter_flops / drafter / peak,
    )
    share = check.together(2 * args.rounds, target, drafter)
    tell(
        "both_on_one_device",
        tokens_per_s=share * check.tokens / (target + drafter),
        share_of_ideal=share,
        share_of_peak=share * (check.target_flops + check.drafter_flops) / (target + drafter) / peak,
    )
    if cuda:
        tell("memory", peak_bytes=torch.cuda.max_memory_allocated(), reserved_bytes=torch.cuda.max_memory_reserved())


if __name__ == "__main__":
    sys.exit(main())
