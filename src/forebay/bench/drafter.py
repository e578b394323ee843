"""`forebay bench drafter`: one real training step of the drafter on random data, timed.

A step is everything a run does for a window of one item: forward, head and loss, backward, clipping, AdamW. Every token
is supervised and every block whole, so all slots are scored. Reported: medians after a warm-up, the share of the matmul
speed measured in the same process, and how far the resident memory grew beyond what the imports took (so run it in a
process of its own). Called by `api`; imports the model and nothing of a run.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from forebay.config import LossConfig
from forebay.cost.flops import DrafterShape, drafter_flops
from forebay.errors import UsageError
from forebay.models.drafter import Drafter
from forebay.models.init import init_random
from forebay.models.loss import FrozenHead
from forebay.models.matmul import times_transposed
from forebay.models.spec import DrafterSpec
from forebay.models.step import Borrowed, micro_step

WARM_UP = 3
CAPTURED = 3


def bench_drafter(
    hidden: int = 256,
    layers: int = 2,
    block: int = 16,
    tokens: int = 512,
    anchors: int = 64,
    vocab: int = 32_000,
    dtype: str = "float32",
    threads: int | None = None,
    steps: int = 10,
    device: str = "cpu",
    seed: int = 0,
) -> dict[str, Any]:
    """Time training steps. Returns plain numbers; see the module for what they mean."""
    if threads:
        torch.set_num_threads(threads)
    import_all_of_torch()
    before = resident_bytes()
    compute, heads = getattr(torch, dtype), max(1, hidden // 64)
    spec = DrafterSpec(
        hidden_size=hidden,
        target_hidden_size=hidden,
        layers=layers,
        heads=heads,
        kv_heads=next(n for n in range(max(1, hidden // 128), 0, -1) if heads % n == 0),
        head_dim=min(64, hidden),
        intermediate_size=3 * hidden,
        vocab_size=vocab,
        block_size=block,
        mask_token_id=vocab - 1,
        target_layer_ids=tuple(range(CAPTURED)),
        num_target_layers=12,
        trained_max_length=tokens,
        dtype=dtype,
    )
    drafter = Drafter(spec)
    init_random(drafter, seed)
    drafter.to(device)
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float32).to(device, compute)

    borrowed = Borrowed(normal(vocab, hidden), FrozenHead.build(normal(vocab, hidden).div_(hidden**0.5), compute))
    features = normal(tokens, CAPTURED * hidden)
    batch = whole_blocks(tokens, anchors, block, vocab - 1, seed)
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=6e-4, weight_decay=0.0, fused=True)
    loss = LossConfig()
    scale = 1 / float(batch.slot_weight.sum())

    def step() -> None:
        micro_step(drafter, batch, features, borrowed, loss, scale, dtype=compute)
        torch.nn.utils.clip_grad_norm_(drafter.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    wall, cpu, least = timed(step, steps, device)
    growth = max(0, peak_resident_bytes() - before)  # the system counts the two in different ways
    flops = drafter_flops(DrafterShape.of(spec), tokens=tokens, anchors=anchors, slots=batch.n_slots)
    peak = matmul_flops_per_s(compute, device)
    return {
        "context_tokens_per_s": tokens / wall,
        "slots_per_s": batch.n_slots / wall,
        "peak_memory_growth_bytes": growth,
        "share_of_peak": flops / wall / peak,
        "step_s": wall,
        "step_cpu_s": cpu,
        "step_cpu_s_least": least,
        "step_flops": flops,
        "matmul_flops_per_s": peak,
        "parameters": sum(p.numel() for p in drafter.parameters()),
        "threads": torch.get_num_threads(),
    }


def import_all_of_torch() -> None:
    """torch imports its compiler (70 MB) when the first optimizer is made: an import like the others."""
    torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], fused=True)


def whole_blocks(tokens: int, anchors: int, block: int, vocab: int, seed: int) -> SimpleNamespace:
    """One document of `tokens` tokens, all supervised, with `anchors` random anchors whose blocks fit."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, vocab, tokens)
    rows = np.sort(rng.choice(tokens - block + 1, anchors, replace=anchors > tokens - block + 1))
    slots = np.arange(1, block)
    index = (np.arange(anchors)[:, None] * block + slots).ravel()
    return SimpleNamespace(
        tokens=ids,
        positions=np.arange(tokens),
        doc_offsets=np.array([0, tokens]),
        anchors=rows,
        anchor_start=np.zeros(anchors, np.int64),
        n_anchors=anchors,
        slot_index=index,
        slot_label=ids[rows[:, None] + slots].ravel(),
        slot_weight=np.tile(np.exp(-(slots - 1) / 7.0), anchors).astype(np.float32),
        slot_source=(rows[:, None] + slots - 1).ravel(),
        n_slots=len(index),
    )


def matmul_flops_per_s(dtype: torch.dtype, device: str = "cpu", size: int = 1024) -> float:
    """The best of many square products, by the library that the step uses."""
    a, b = (torch.randn(size, size).to(device, dtype) for _ in range(2))
    fastest = min(timed(lambda: times_transposed(a, b), 1, device, warm_up=0)[0] for _ in range(40))
    return float(2 * size**3 / fastest)


def timed(step: Any, steps: int, device: str, warm_up: int = WARM_UP) -> tuple[float, float, float]:
    """Median wall seconds, median CPU seconds and least CPU seconds of a call."""
    wall, cpu = [], []
    for i in range(warm_up + steps):
        start, used = time.perf_counter(), time.process_time()
        step()
        if device != "cpu":
            torch.cuda.synchronize(device)
        if i >= warm_up:
            wall.append(time.perf_counter() - start)
            cpu.append(time.process_time() - used)
    return statistics.median(wall), statistics.median(cpu), min(cpu)


def resident_bytes() -> int:
    """Resident memory now; where the system does not say, the peak so far."""
    status = Path("/proc/self/statm")
    if status.is_file():
        return int(status.read_text().split()[1]) * resource.getpagesize()
    return peak_resident_bytes()


def peak_resident_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="forebay bench drafter",
        description="time one training step of a drafter on random data",
        epilog="example: forebay bench drafter --vocab 32000 --threads 2 --json",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    for name, default, what in (
        ("hidden", 256, "hidden size"),
        ("layers", 2, "draft layers"),
        ("block", 16, "block size"),
        ("tokens", 512, "context tokens"),
        ("anchors", 64, "blocks"),
        ("vocab", 32_000, "rows of the head"),
        ("steps", 10, "timed steps"),
    ):
        p.add_argument(f"--{name}", type=int, default=default, help=what)
    p.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="compute dtype")
    p.add_argument("--threads", type=int, help="torch threads (all cores if not given)")
    p.add_argument("--device", default="cpu", help="cpu or cuda:N")
    p.add_argument("--seed", type=int, default=0, help="of the data and weights")
    p.add_argument("--json", action="store_true", help="print one JSON object")
    return p


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Run and print. Raises UsageError for numbers that make no measurement."""
    options = vars(parser().parse_args(argv))
    as_json = options.pop("json")
    for name in ("hidden", "layers", "tokens", "anchors", "vocab", "steps"):
        if options[name] < 1:
            raise UsageError(f"--{name} {options[name]} must be at least 1")
    if not 2 <= options["block"] <= options["tokens"]:
        raise UsageError(f"--block {options['block']} must be from 2 to --tokens {options['tokens']}")
    figures = bench_drafter(**options)
    if as_json:
        print(json.dumps(figures))
    else:
        for key, value in figures.items():
            print(f"{key:28} {value:,.4g}" if isinstance(value, float) else f"{key:28} {value:,}")
    return figures


if __name__ == "__main__":
    main()
