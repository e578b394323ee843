"""Does a drafter trained by our step serve as well as one trained by the PyPI package `speculators` 0.9.0?

Both train on the same captured items from the same first weights, with the same anchors, order, schedule and labels
(the target's argmax), by the same loop below; only forward, loss and backward differ. Both are judged by our serving
loop on the same held-out prompts. Runs in the environment of `scripts/interop_env.sh`:

    P=.venv-interop/bin/python; B="benchmarks/against_speculators.py --out SCRATCH --target T --store S"
    $P $B capture --jobs 120              # items through the target once
    $P $B check                           # the two sides agree on loss and, after some steps, on weights
    $P $B train ours theirs --steps 120   # every seed: another order of the items, other anchors
    $P $B judge ours theirs               # then: `table`

What was done already (weights, verdicts in SCRATCH) is not done again.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from forebay import config as configuration
from forebay.config import LossConfig, OptimConfig, RunConfig
from forebay.data.pack import HostBatch, pack_item
from forebay.decode.drafter import ServedDrafter
from forebay.decode.evaluate import evaluate
from forebay.flow.plan import Job
from forebay.io.formats import StoredDrafter, write_drafter, zlab
from forebay.models.load import cast
from forebay.models.step import Borrowed, micro_step
from forebay.runtime.assembly import Assembly
from forebay.stages.train import learning_rate

GAMMA = 2.0
OPTIM = OptimConfig(lr=2e-3, warmup_share=0.04, clip=1.0)
#: How each contestant starts, what it minimises, whether a repeated item has other anchors; `theirs` and `ours` are the
#: comparison.
KINDS = {
    "theirs": ("target", "fixed-exp-decay", True),
    "ours": ("target", "exp", True),
    "ours-dpace": ("target", "dpace", True),
    "ours-random": ("random", "exp", True),
    "ours-same-anchors": ("target", "exp", False),
}
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}

Backward = Callable[["Item", Tensor | float | None], float]


@dataclass
class Item:
    """One packed item: its anchors and slots (`batch`), what the target gave, which tokens are supervised."""

    batch: HostBatch
    features: Tensor  # bf16 [tokens, K * H]
    last: Tensor  # bf16 [tokens, H]
    supervised: np.ndarray  # bool [tokens]


class Bench:
    """The shared ground: target, store, items, first weights."""

    def __init__(self, a: argparse.Namespace, init: str = "target", dtype: str = "bfloat16") -> None:
        self.a, self.out = a, Path(a.out)
        self.config: RunConfig = configuration.from_dict(
            {
                "run_dir": str(self.out / "run"),
                "target": {"model": a.target, "dtype": dtype, "self_test": False},
                "data": {"store": a.store},
                "drafter": {"layers": 2, "block_size": 4, "init": init, "mask_token_id": 16},
                "loss": {"labels": "target", "gamma": GAMMA},
                "plan": {"token_budget": a.tokens, "anchor_rate": a.anchor_rate},
                "eval": {"prompts": a.prompts},
                "runtime": {"threads": a.threads, "dtype": dtype},
            }
        )
        self.models = Assembly(self.config, None, lambda text: None, self.config, frozenset())
        self.target, self.prepared = self.models.target, self.models.prepared

    def capture(self) -> None:
        """Features and last hidden states of `--jobs` items, drawn from the first epoch's plan."""
        plan = self.prepared.plan(0)
        chosen = np.sort(np.random.default_rng(0).permutation(len(plan))[: self.a.jobs])
        self.out.mkdir(parents=True, exist_ok=True)
        for number, index in enumerate(chosen.tolist()):
            job = plan.job(index)
            batch = self._pack(job, 0)
            count = int(batch.doc_offsets[-1])
            features = torch.zeros(count, self.target.feature_width, dtype=torch.bfloat16)
            last = torch.zeros(count, self.target.facts.hidden_size, dtype=torch.bfloat16)
            self.target.capture(batch, features, last)
            save_file({"features": features, "last": last}, self.out / f"item-{number:04d}.safetensors")
        (self.out / "jobs.json").write_text(json.dumps([asdict(plan.job(i)) for i in chosen.tolist()]))

    def _pack(self, job: Job, seed: int) -> HostBatch:
        plan = self.config.plan
        return pack_item(
            self.prepared.train,
            job,
            self.prepared.shape,
            seed=seed,
            anchor_rate=plan.anchor_rate,
            anchors_per_row=plan.anchors_per_row,
            gamma=GAMMA,
        )

    def items(self, seed: int, steps: int, fresh: bool = True) -> Iterator[Item]:
        """`steps` items in the seed's order, with its anchors; those of a second pass have other anchors if `fresh`."""
        jobs = json.loads((self.out / "jobs.json").read_text())
        rng = np.random.default_rng(seed)
        order = np.concatenate([rng.permutation(len(jobs)) for _ in range(-(-steps // len(jobs)))])[:steps]
        for step, number in enumerate(order.tolist()):
            fields = {k: tuple(v) if isinstance(v, list) else v for k, v in jobs[number].items()}
            batch = self._pack(Job(**fields), 1000 * seed + (step // len(jobs) if fresh else 0))
            tensors = load_file(self.out / f"item-{number:04d}.safetensors")
            supervised = np.concatenate([self.prepared.train.mask(row) for row in batch.job.rows]).astype(bool)
            yield Item(batch, tensors["features"], tensors["last"], supervised)

    def ours(self, loss: LossConfig, dtype: torch.dtype) -> tuple[torch.nn.Module, Backward]:
        """Our drafter and its step; divided by the item's weight sum unless told otherwise."""
        module, borrowed = self.models.lead, Borrowed.of(self.target, dtype)

        def backward(item: Item, divisor: Tensor | float | None = None) -> float:
            divisor = item.batch.weight_sum if divisor is None else divisor
            sums = micro_step(
                module, item.batch, item.features, borrowed, loss, 1 / divisor, last_hidden=item.last, dtype=dtype
            )
            return float(sums.loss) / float(divisor)

        return module, backward

    def theirs(self, dtype: torch.dtype) -> tuple[torch.nn.Module, Backward]:
        """The package's model, which reads our export of the first weights, and its own loss.

        It is run as its trainer runs it (fp32 masters, autocast), but for sdpa attention, since FlexAttention has no
        backward on a CPU, and for its anchors, which are the item's. Its loss divides by the supervised slots.
        """
        import speculators.models.dflash.core as core
        from speculators.model import SpeculatorModel

        stored = self.models.stored()
        stored = StoredDrafter(replace(stored.spec, dtype="float32"), stored.tensors, stored.vocabulary)
        folder = self.out / f"first-weights-{self.config.target.dtype}"
        if not folder.exists():
            write_drafter(
                folder, stored, "speculators", target=str(Path(self.a.target)), target_architecture="LlamaForCausalLM"
            )
        model: Any = SpeculatorModel.from_pretrained(folder)
        model.config.transformer_layer_config._attn_implementation = "sdpa"
        model._attn_impl, model._create_mask_fn = "sdpa", core.create_mask
        model.train()
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        assert trained.keys() == stored.tensors.keys()
        assert all(torch.equal(p, stored.tensors[name]) for name, p in trained.items())
        assert torch.equal(model.lm_head.weight.to(self.target.dtype), self.target.head_weight)
        block = model.block_size

        def backward(item: Item, _: Tensor | float | None = None) -> float:
            batch, count = item.batch, len(item.supervised)
            anchors = torch.from_numpy(batch.anchors[: batch.n_anchors].astype(np.int64))
            core.select_anchors = lambda *_: (anchors, torch.ones(len(anchors), dtype=torch.bool))
            # The last block may reach beyond the text: room for it, unsupervised and of no document.
            pad = (0, 0, 0, block)
            mask = torch.nn.functional.pad(torch.from_numpy(item.supervised).long(), (0, block))
            documents = torch.nn.functional.pad(
                torch.from_numpy(batch.documents[:count].astype(np.int64)), (0, block), value=-1
            )
            tokens, positions = (
                torch.nn.functional.pad(torch.from_numpy(x[:count].astype(np.int64)), (0, block))
                for x in (batch.tokens, batch.positions)
            )
            kwargs, _unused = type(model).get_trainer_kwargs(
                loss_fn="ce", loss_implementation="eager", max_anchors=len(anchors), dflash_decay_gamma=GAMMA
            )
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
                _, loss, _ = model(
                    hidden_states=torch.nn.functional.pad(item.features.to(dtype), pad)[None],
                    input_ids=tokens[None],
                    loss_mask=mask[None],
                    verifier_last_hidden_states=torch.nn.functional.pad(item.last.to(dtype), pad)[None],
                    document_ids=documents[None],
                    position_ids=positions[None],
                    **kwargs,
                )
            loss.backward()
            return float(loss.detach())

        return model, backward

    def contestant(self, kind: str, dtype: torch.dtype) -> tuple[torch.nn.Module, Backward]:
        if kind == "theirs":
            return self.theirs(dtype)
        _, decay, _ = KINDS[kind]
        loss = LossConfig(labels="target", decay=decay, gamma=GAMMA if decay == "exp" else None)
        return self.ours(loss, dtype)

    def served(self, tensors: dict[str, Tensor], dtype: torch.dtype) -> ServedDrafter:
        """The drafter as an engine would read it."""
        spec = replace(self.models.spec, dtype=str(dtype).removeprefix("torch."))
        return ServedDrafter(zlab.zlab_config(spec, self.models.extras), zlab.zlab_tensors(spec, tensors), dtype)


def optimise(module: torch.nn.Module, backward: Backward, items: Iterator[Item], steps: int, **kw: Any) -> list[float]:
    """One item a step: AdamW without weight decay, warm-up and cosine, clip. Returns the losses."""
    parameters = [p for p in module.parameters() if p.requires_grad]
    adam = torch.optim.AdamW(parameters, lr=OPTIM.lr, betas=OPTIM.betas, eps=OPTIM.eps, weight_decay=0.0)
    losses = []
    for step, item in enumerate(items):
        adam.param_groups[0]["lr"] = learning_rate(step, steps, OPTIM)
        adam.zero_grad()
        losses.append(backward(item, kw["divisor"](item) if "divisor" in kw else None))
        torch.nn.utils.clip_grad_norm_(parameters, OPTIM.clip)
        adam.step()
    return losses


def train(a: argparse.Namespace, kind: str, seed: int) -> None:
    file = Path(a.out) / f"{kind}-{seed}.safetensors"
    if file.exists():
        return
    init, _, fresh = KINDS[kind]
    bench = Bench(a, init, a.dtype)
    module, backward = bench.contestant(kind, DTYPES[a.dtype])
    wall, cpu = time.perf_counter(), time.process_time()
    losses = optimise(module, backward, bench.items(seed, a.steps, fresh), a.steps)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    tensors = {name: p.detach() for name, p in module.named_parameters() if p.requires_grad}
    save_file(tensors, file)
    facts = {"steps": a.steps, "first": losses[0], "last": statistics.mean(losses[-10:]), "s": wall, "cpu_s": cpu}
    file.with_suffix(".json").write_text(json.dumps(facts))
    print(kind, seed, {k: round(v, 3) for k, v in facts.items()}, flush=True)


def judge(a: argparse.Namespace, bench: Bench, kind: str, seed: int) -> None:
    """`kind` "first" is the drafter before its first step."""
    file = Path(a.out) / f"{kind}-{seed}.verdict.json"
    if file.exists():
        return
    dtype = DTYPES[a.judge_dtype]
    cast(bench.target.model, dtype)
    tensors = dict(bench.models.stored().tensors)
    if kind != "first":
        tensors = load_file(Path(a.out) / f"{kind}-{seed}.safetensors")
    report, _ = evaluate(
        bench.target.model,
        bench.served(tensors, dtype),
        bench.prepared.heldout_prompts,
        max_new_tokens=a.new_tokens,
        batch_size=16,
        reference=False,
    )
    file.write_text(json.dumps(report.to_dict()))
    shares = " ".join(f"{x:.3f}" for x in report.acceptance_by_position)
    print(f"{kind} {seed}: {report.accept_length:.4f} ({shares}), {report.rounds} rounds, {report.prompts} prompts, "
          f"{report.seconds:.0f} s", flush=True)  # fmt: skip


def check(a: argparse.Namespace) -> None:
    """In fp32, both losses divided by the supervised slots: the first loss, gradients and weights after some steps."""
    ours, theirs = Bench(a, dtype="float32"), Bench(a, dtype="float32")
    mine, back = ours.contestant("ours", torch.float32)
    other, their_back = theirs.contestant("theirs", torch.float32)
    first = {name: p.detach().clone() for name, p in mine.named_parameters()}
    item = next(ours.items(0, 1))
    losses = back(item, item.batch.n_slots), their_back(item)
    other_of = dict(other.named_parameters())
    worst = max(float((p.grad - other_of[n].grad).norm() / other_of[n].grad.norm()) for n, p in mine.named_parameters())
    print(f"{item.batch.n_anchors} anchors, {item.batch.n_slots} slots; first loss {losses[0]:.7f}, {losses[1]:.7f}; "
          f"largest relative difference of a gradient {worst:.1e}", flush=True)  # fmt: skip
    runs = [
        optimise(m, b, bench.items(0, a.steps), a.steps, divisor=lambda i: i.batch.n_slots)
        for bench, m, b in ((ours, mine, back), (theirs, other, their_back))
    ]
    moved = sum(float((p.detach() - first[n]).square().sum()) for n, p in mine.named_parameters()) ** 0.5
    apart = sum(float((p.detach() - other_of[n].detach()).square().sum()) for n, p in mine.named_parameters()) ** 0.5
    print(f"after {a.steps} steps: losses {runs[0][-1]:.6f} and {runs[1][-1]:.6f}; the weights are {apart:.2e} apart "
          f"after moving {moved:.2e}: {apart / moved:.1e}")  # fmt: skip


def table(a: argparse.Namespace) -> None:
    def read(kind: str, seed: int, suffix: str) -> dict[str, Any] | None:
        file = Path(a.out) / f"{kind}-{seed}{suffix}"
        return json.loads(file.read_text()) if file.exists() else None

    print("| seed | theirs | ours | ratio | rounds judged | last losses x weight | CPU s a step |\n|" + "---|" * 7)
    ratios, means = [], {"theirs": [], "ours": []}
    for seed in range(a.seeds):
        verdicts = {k: read(k, seed, ".verdict.json") for k in means}
        facts = {k: read(k, seed, ".json") for k in means}
        if not all(verdicts.values()):
            continue
        for k in means:
            means[k].append(verdicts[k]["accept_length"])
        ratios.append(means["ours"][-1] / means["theirs"][-1])
        print(f"| {seed} | {means['theirs'][-1]:.4f} | {means['ours'][-1]:.4f} | {ratios[-1]:.4f} | "
              + " / ".join(str(v["rounds"]) for v in verdicts.values()) + " | "
              + " / ".join(f"{f['last']:.3f}" for f in facts.values()) + " | "
              + " / ".join(f"{f['cpu_s'] / f['steps']:.2f}" for f in facts.values()) + " |")  # fmt: skip
    theirs, ours = (statistics.mean(means[k]) for k in ("theirs", "ours"))
    print(f"| mean | {theirs:.4f} | {ours:.4f} | {ours / theirs:.4f} | | | |")
    print("\n| | by seed | mean | less ours, by seed |\n|" + "---|" * 4)
    for kind in ("first", *(k for k in KINDS if k != "theirs")):
        found = {s: v["accept_length"] for s in range(a.seeds) if (v := read(kind, s, ".verdict.json"))}
        if found:
            apart = [x - means["ours"][s] for s, x in found.items()] if kind.startswith("ours-") else []
            seeds, differences = (
                ", ".join(f"{x:{f}.4f}" for x in xs) for f, xs in (("", found.values()), ("+", apart))
            )
            print(f"| {kind} | {seeds} | {statistics.mean(found.values()):.4f} | {differences} |")


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--out", required=True, help="scratch folder")
    p.add_argument("--target", default="runs/demo/target")
    p.add_argument("--store", default="runs/demo/store")
    p.add_argument("--tokens", type=int, default=640, help="tokens of an item")
    p.add_argument("--anchor-rate", type=float, default=0.3)
    p.add_argument("--seeds", type=int, default=3)
    p.add_argument("--first-seed", type=int, default=0)
    p.add_argument("--threads", type=int, default=1)
    p.add_argument("--prompts", type=int, default=128)
    p.add_argument("--new-tokens", type=int, default=48)
    p.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="compute dtype of both sides' training")
    p.add_argument("--judge-dtype", choices=DTYPES, default="float32")
    sub = p.add_subparsers(dest="phase", required=True)
    sub.add_parser("capture").add_argument("--jobs", type=int, default=120)
    sub.add_parser("check").add_argument("--steps", type=int, default=5)
    trainer, judged = sub.add_parser("train"), sub.add_parser("judge")
    trainer.add_argument("kinds", nargs="+", choices=KINDS)
    trainer.add_argument("--steps", type=int, default=120)
    judged.add_argument("kinds", nargs="+", choices=["first", *KINDS])
    sub.add_parser("table")
    a = p.parse_args()
    torch.set_num_threads(a.threads)
    seeds = range(a.first_seed, a.seeds)
    if a.phase == "train":
        for seed in seeds:
            for kind in a.kinds:
                train(a, kind, seed)
    elif a.phase == "judge":
        bench = Bench(a)
        for seed in seeds:
            for kind in a.kinds:
                judge(a, bench, kind, seed)
    elif a.phase == "capture":
        Bench(a).capture()
    else:
        {"check": check, "table": table}[a.phase](a)


if __name__ == "__main__":
    main()
