"""`forebay bench target`: capturing against a plain transformers forward and against a forward that keeps nothing.

Guarantees: the three ways run in turn on the same padded batches in one process, so that drift of the machine hits
all; tokens are real ones (padding is work, not output); `captured_share_of_truncated` is by CPU seconds. Does not
measure the pipeline around it. Called by `forebay bench target`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from forebay.bench import of_the_demo
from forebay.config import TargetConfig
from forebay.cost.flops import TargetShape, target_flops_per_token
from forebay.errors import UsageError
from forebay.models.checks import Packed
from forebay.models.load import plain_products
from forebay.models.target import Target


def job_like(vocab: int, tokens: int, mean: int, splits: int, seed: int) -> Packed:
    """A random job of about `tokens` tokens: log-normal lengths, sorted, in `splits` sub-batches of like lengths."""
    rng = np.random.default_rng(seed)
    lengths: list[int] = []
    while True:
        length = int(np.clip(rng.lognormal(np.log(mean) - 0.125, 0.5), 8, tokens))
        if sum(lengths) + length > tokens:
            break
        lengths.append(length)
    rows = [rng.integers(0, vocab, n).tolist() for n in sorted(lengths or [tokens])]
    parts = [len(p) for p in np.array_split(np.arange(len(rows)), min(splits, len(rows)))]
    return Packed.of(rows, tuple(parts))


def bench_target(
    config: TargetConfig,
    *,
    device: str = "cpu",
    tokens: int = 2048,
    mean: int = 200,
    splits: int = 4,
    rounds: int = 5,
    threads: int | None = None,
    seed: int = 0,
) -> dict[str, Any]:
    """Medians over `rounds` different jobs, after one warm-up of each way. The keys of `--json`."""
    if threads:
        torch.set_num_threads(threads)
    target = Target.load(config, device)
    out = torch.empty(tokens, target.feature_width, dtype=target.dtype, device=target.device)
    wall: dict[str, list[float]] = {}
    cpu: dict[str, list[float]] = {}
    real, padded = [], []
    for number in range(rounds + 1):
        job = job_like(target.facts.vocab_size, tokens, mean, splits, seed + number)
        batches = padded_batches(job, target.device)
        ways: dict[str, Callable[[], Any]] = {
            "captured": lambda job=job: target.capture(job, out),
            "plain": lambda batches=batches: [plain_forward(target, ids, mask) for ids, mask in batches],
            "truncated": lambda batches=batches: [target.run(ids) for ids, _ in batches],
        }
        for name in sorted(ways, reverse=bool(number % 2)):  # neither way always runs on the other's caches
            seconds = timed(ways[name], target.device)
            if number:
                wall.setdefault(name, []).append(seconds[0])
                cpu.setdefault(name, []).append(seconds[1])
        if number:
            real.append(len(job.tokens))
            padded.append(sum(ids.numel() for ids, _ in batches))
    rates = {name: statistics.median(n / s for n, s in zip(real, wall[name], strict=True)) for name in wall}
    shape = TargetShape.of(target.facts, target.layer_ids[-1] + 1)
    flops = target_flops_per_token(shape, mean)
    return {
        "captured_tokens_per_s": rates["captured"],
        "plain_tokens_per_s": rates["plain"],
        "truncated_tokens_per_s": rates["truncated"],
        "captured_over_plain": _ratio(wall["plain"], wall["captured"]),
        "captured_over_plain_cpu": _ratio(cpu["plain"], cpu["captured"]),
        "captured_share_of_truncated": _ratio(cpu["truncated"], cpu["captured"]),
        "padding_share": 1 - sum(real) / sum(padded),
        "flops_per_token": flops,
        "achieved_flops": flops * rates["captured"],
        "model": target.facts.name,
        "dtype": str(target.dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "device": str(target.device),
        "layer_ids": list(target.layer_ids),
        "rounds": rounds,
        "tokens": tokens,
    }


def _ratio(above: Sequence[float], below: Sequence[float]) -> float:
    return statistics.median(a / b for a, b in zip(above, below, strict=True))


def padded_batches(job: Packed, device: torch.device) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(ids, mask), both [n, t], of each sub-batch: what a plain forward gets."""
    batches, row = [], 0
    for count in job.splits:
        lengths = np.diff(job.doc_offsets[row : row + count + 1])
        mask = np.arange(int(lengths.max()))[None, :] < lengths[:, None]
        ids = np.zeros(mask.shape, np.int64)
        ids[mask] = job.tokens[job.doc_offsets[row] : job.doc_offsets[row + count]]
        batches.append((torch.from_numpy(ids).to(device), torch.from_numpy(mask.astype(np.int64)).to(device)))
        row += count
    return batches


@torch.inference_mode()
def plain_forward(target: Target, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """What a script without Forebay does: every layer's states, concatenated where wanted, and logits."""
    with plain_products(target.model):
        result = target.model(input_ids=ids, attention_mask=mask, output_hidden_states=True, use_cache=False)
    return torch.cat([result.hidden_states[i + 1] for i in target.layer_ids], dim=-1)


def timed(work: Callable[[], Any], device: torch.device) -> tuple[float, float]:
    """(wall, CPU) seconds, the device's own work included."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start, start_cpu = time.perf_counter(), time.process_time()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start, time.process_time() - start_cpu


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="forebay bench target",
        description="Capture against a plain and a truncated forward.",
        epilog="example: forebay bench target --model ./my-model --dtype bfloat16 --json",
    )
    p.add_argument("--model", help="folder of the target, or its GGUF file (default: the demo's)")
    p.add_argument("--dtype", default="auto", choices=["auto", "float32", "bfloat16", "float16"])
    p.add_argument("--device", default="cpu")
    p.add_argument("--tokens", type=int, default=2048, help="token budget of a job")
    p.add_argument("--mean", type=int, default=200, help="mean length of a row")
    p.add_argument("--splits", type=int, default=4, help="sub-batches of a job")
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument("--threads", type=int)
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--json", action="store_true")
    return p


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Run and print. Raises UsageError for numbers that make no measurement."""
    a = parser().parse_args(argv)
    if min(a.tokens, a.mean, a.splits, a.rounds) < 1:
        raise UsageError("--tokens, --mean, --splits and --rounds must be at least 1")
    figures = bench_target(
        TargetConfig(model=a.model or of_the_demo("target", "--model DIR"), dtype=a.dtype),
        device=a.device,
        tokens=a.tokens,
        mean=a.mean,
        splits=a.splits,
        rounds=a.rounds,
        threads=a.threads,
        seed=a.seed,
    )
    if a.json:
        print(json.dumps(figures))
    else:
        for key, value in figures.items():
            print(f"{key:28} {value:,.4g}" if isinstance(value, float) else f"{key:28} {value}")
    return figures


if __name__ == "__main__":
    main()
