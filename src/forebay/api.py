"""The public Python functions; every command of `forebay` is a thin layer over one of them.

Paths are strings or path-likes; results are plain dicts and lists that survive JSON; what a user can mend is raised as
a `forebay.errors.ForebayError` with the fix. Nothing heavy is imported before a function needs it.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from forebay import config as configuration
from forebay.config import RunConfig, TargetConfig
from forebay.errors import DataError, ForebayError, UsageError, nearest

NOTES_SHOWN = 5
PathLike = str | os.PathLike[str]


def _target(folder: PathLike, gguf_file: str | None = None, dtype: str = "auto") -> TargetConfig:
    return TargetConfig(model=os.fspath(folder), gguf_file=gguf_file, dtype=dtype)  # type: ignore[arg-type]


def prepare(
    inputs: Sequence[PathLike],
    out: PathLike,
    *,
    target: PathLike,
    gguf_file: str | None = None,
    heldout: PathLike | Sequence[PathLike] | None = None,
    heldout_share: float = 0.05,
    on_policy_rows: int = 0,
    **options: Any,
) -> dict[str, Any]:
    """Conversations -> a token store at `out`; returns its report. See `data.prepare.prepare` for the options.

    `on_policy_rows`: how many rows the target is asked to continue greedily, to tell whether it wrote the answers.
    """
    from forebay.data.prepare import prepare as run
    from forebay.models.load import load_model, load_tokenizer
    from forebay.observe.console import say

    where = _target(target, gguf_file)
    files = [heldout] if isinstance(heldout, str | os.PathLike) else heldout
    report = run(
        list(inputs),
        out,
        tokenizer=load_tokenizer(where),
        heldout=None if files is None else list(files),
        heldout_share=heldout_share,
        notice=say,
        **options,
    )
    if on_policy_rows:
        from forebay.data.store import TokenStore
        from forebay.stages.onpolicy import add_to_report, check_on_policy

        store = TokenStore.open(Path(out) / "train")
        add_to_report(out, check_on_policy(store, load_model(where), rows=on_policy_rows))
        report = json.loads((Path(out) / "report.json").read_text(encoding="utf-8"))
    return report


def plan(config: RunConfig) -> dict[str, Any]:
    """What an epoch of this run would be: jobs, padding, fills, mixing r, bytes. Loads no weights."""
    from forebay.models.facts import default_layer_ids, layers_notice
    from forebay.models.load import load_config
    from forebay.runtime.preparation import description

    text = load_config(config.target)
    layers = text.num_hidden_layers
    ids = config.target.layer_ids or default_layer_ids(layers, config.target.captured_layers)
    described = description(config, text, ids)
    if notice := layers_notice(config.target, ids, layers):
        described["warnings"].append(notice)
    return described


def plan_text(d: dict[str, Any]) -> str:
    """A plan's description for people."""
    mib = 2**20
    lines = [
        f"jobs {d['jobs']}  windows {d['windows']}  sequences {d['sequences']} ({d['sequences_left_out']} left out)",
        f"tokens {d['real_tokens']}; target padding {d['target_padding_share']:.1%}, "
        f"item tail {d['item_tail_share']:.1%}",
        f"anchors per item {d['anchors_per_item']} (filled {d['anchor_fill_share']:.1%}), "
        f"slots {d['slots_per_item']} (filled {d['slot_fill_share']:.1%})",
        f"mixing r {d['mixing_r']:+.3f} (0 is random, below is better, alarm at 0.1)",
        f"largest item {d['largest_item_bytes'] / mib:.2f} MiB; "
        f"the buffer needs {d['buffer_bytes_needed'] / mib:.1f} MiB and has {d['buffer_bytes'] / mib:.1f} MiB",
        "buckets: " + "  ".join(f"<={b['up_to_tokens']}: {b['share']:.1%}" for b in d["buckets"]),
    ]
    return "\n".join([*lines, *(f"warning: {w}" for w in d["warnings"])])


def train(config: RunConfig, *, quiet: bool = False) -> dict[str, Any]:
    """Train a drafter from the start; returns the run's summary (also in `summary.json`)."""
    from forebay.runtime.local import LocalRuntime

    return LocalRuntime(config, quiet=quiet).train()


def resume(
    run_dir: PathLike, overrides: Sequence[str] = (), *, allow_change: Sequence[str] = (), quiet: bool = False
) -> dict[str, Any]:
    """Go on with a run that was stopped or killed, from its last finished checkpoint."""
    from forebay.runtime.local import LocalRuntime

    file = Path(run_dir) / "config.yaml"
    if not file.is_file():
        raise UsageError(f"{run_dir} holds no run (no config.yaml): give the run_dir of a run that was started")
    config = configuration.load(file, [*overrides, f"run_dir={json.dumps(os.fspath(run_dir))}"])
    return LocalRuntime(config, resume=True, allow_change=frozenset(allow_change), quiet=quiet).train()


def status(run_dir: PathLike) -> dict[str, Any]:
    """What a run last said of itself: step, who waits for what, flow counters. `age_s` tells how old that is."""
    file = Path(run_dir) / "status.json"
    if not file.is_file():
        raise UsageError(f"no status at {run_dir}: give the folder of a run that was started")
    out: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    out["age_s"] = round(time.time() - out["unix_time"], 1)
    return out


def status_text(s: dict[str, Any]) -> str:
    """A status for people."""
    from forebay.observe.clock import in_words

    lines = [f"step {s['step']} of {s['total_steps']}: {s['doing']} ({s['age_s']:.0f} s ago)"]
    for stage, shares in s["shares"].items():
        lines.append(f"{stage}: busy {shares['busy_share']:.0%}, waiting {shares['wait_share']:.0%}")
    lines += [
        f"{w['worker']} waits {w['seconds']:.0f} s for {in_words(w['waits_for'])}"
        for w in s["waits"]
        if w["seconds"] >= 1
    ]
    return "\n".join([*lines, *s["failures"]])


def prompts_of(
    tokenizer: Any, store: PathLike | None, prompts: PathLike | None, limit: int | None = None
) -> list[list[int]]:
    """Token ids of prompts from a store's held-out part, or from a file of conversations."""
    if (store is None) == (prompts is None):
        raise UsageError("give either a token store (--store DIR) or a file of prompts (--prompts FILE)")
    if store is not None:
        from forebay.data.store import TokenStore

        folder = Path(store)
        rows = TokenStore.open(folder / "heldout" if (folder / "heldout").is_dir() else folder)
        found = [rows.prompt(i).tolist() for i in range(len(rows))]
    else:
        from forebay.data.conversation import Conversation, prompt_of
        from forebay.data.readers import find_files, parse, read

        if not getattr(tokenizer, "chat_template", None):
            raise DataError("the target's tokenizer has no chat template: give prompts by --store, prepared with one")
        found, unusable = [], 0
        for record in read(find_files([prompts or ""])):
            row = parse(record.payload)
            asked = prompt_of(row) if isinstance(row, dict) else None
            if not isinstance(asked, Conversation):
                unusable += 1
                continue
            encoded = tokenizer.apply_chat_template(asked.messages, tools=asked.tools, add_generation_prompt=True)
            found.append(list(encoded["input_ids"]))
        if unusable:
            from forebay.observe.console import say

            say(f"{unusable} rows of {prompts} hold no prompt and are left out")
    if not found:
        raise DataError(
            f"no prompt in {store or prompts}: prepare with a held-out part, or give a file of conversations"
        )
    return found[:limit]


def evaluate(
    drafter: PathLike,
    *,
    target: PathLike,
    gguf_file: str | None = None,
    store: PathLike | None = None,
    prompts: PathLike | None = None,
    limit: int | None = None,
    max_new_tokens: int = 64,
    batch_size: int = 16,
    temperature: float = 0.0,
    seed: int = 0,
    speed: bool = True,
    step: str = "best",
    dtype: str = "float32",
) -> dict[str, Any]:
    """Accept length, acceptance by position, equality with the target's greedy text (fp32), speed of both.

    `drafter`: an exported folder, a checkpoint, or a run (its `step`: "best", "last" or a number). The speeds
    are measured in the faster dtype, one prompt at a time, on the first four prompts. `dtype` auto measures
    accept length in the faster one too, for many or long answers; equality is judged in fp32 only.
    """
    import torch

    from forebay.decode.check import check_contract
    from forebay.decode.evaluate import evaluate as run
    from forebay.decode.evaluate import measure_speed
    from forebay.decode.generator import load_drafter
    from forebay.models.load import auto_dtype, cast, load_model, load_tokenizer

    where = _target(target, gguf_file, "float32")
    served = load_drafter(drafter, step=step)
    ids = prompts_of(load_tokenizer(where), store, prompts, limit)
    model = load_model(where)
    check_contract(served.config, model, str(target))
    faster = auto_dtype(model) if speed or dtype == "auto" else torch.float32
    quick = load_drafter(drafter, step=step, dtype=faster)
    if dtype == "auto":
        cast(model, faster)
        served = quick
    options = {"max_new_tokens": max_new_tokens, "batch_size": batch_size, "temperature": temperature, "seed": seed}
    report, _ = run(model, served, ids, **options)
    if speed:
        cast(model, faster)
        report.target_tokens_per_s, report.speculative_tokens_per_s = measure_speed(
            model, quick, ids[:4], max_new_tokens=max_new_tokens
        )
    _warn(report.notes)
    return report.to_dict()


def export(
    source: PathLike,
    out: PathLike,
    *,
    format: str = "zlab",
    step: str = "best",
    target: PathLike | None = None,
    gguf_file: str | None = None,
    overwrite: bool = False,
) -> str:
    """Write the drafter of a run, checkpoint or folder for an engine (`zlab` or `speculators`); returns the folder.

    `target`: how the engine will find the target (default: the name that training knew it by). Where it is a folder and
    the draft vocabulary is reduced, the rows of its head travel with the drafter.
    """
    from forebay.io.drafters import export_drafter, find_drafter

    head = None
    if target is not None and find_drafter(source, step=step).drafter.vocabulary is not None:
        from forebay.models.load import load_model

        head = load_model(_target(target, gguf_file)).get_output_embeddings().weight
    named = None if target is None else os.fspath(target)
    options: dict[str, Any] = {"format": format, "step": step, "overwrite": overwrite, "gguf_file": gguf_file}
    return str(export_drafter(source, out, target=named, head=head, **options))


def import_drafter(source: PathLike, out: PathLike, *, target: PathLike, gguf_file: str | None = None) -> str:
    """Read another trainer's drafter, strictly, into a folder that `drafter.init_from` and every command take."""
    from forebay.io.drafters import import_drafter as run
    from forebay.models.load import load_config
    from forebay.models.spec import target_positions

    text = load_config(_target(target, gguf_file))
    positions = target_positions(text.to_dict())
    return str(run(source, out, num_target_layers=text.num_hidden_layers, max_positions=positions))


def check(
    drafter: PathLike,
    *,
    target: PathLike,
    gguf_file: str | None = None,
    store: PathLike | None = None,
    prompts: PathLike | None = None,
    limit: int | None = 16,
    max_new_tokens: int = 48,
    engine: str | None = None,
    engine_python: PathLike | None = None,
) -> dict[str, Any]:
    """Will an engine agree? Contract field by field, our loop, then the installed peers' own code; `ok` sums it up.

    `engine`: "vllm" drives the vLLM that is installed for `engine_python` (default: FOREBAY_ENGINE_PYTHON, then this
    Python) over the same prompts; what it says is under "engine". EngineError: there is none, or none that can.
    """
    from forebay.decode.check import check_drafter
    from forebay.models.load import load_model, load_tokenizer

    where = _target(target, gguf_file, "float32")
    if engine is not None:
        from forebay.engine.process import require_engine

        require_engine(engine, where, engine_python)
    ids = prompts_of(load_tokenizer(where), store, prompts, limit)
    model = load_model(where)
    report = check_drafter(drafter, model, ids, target_folder=target, max_new_tokens=max_new_tokens)
    _warn(report["notes"])
    _warn([f"wrong weights: {line}" for line in report["wrong_weights"]])
    if engine is not None:
        from forebay.engine.agreement import check_engine

        with _exported(drafter, target) as folder:
            said = check_engine(
                folder,
                target,
                model,
                ids,
                report["accept_length"],
                max_new_tokens=max_new_tokens,
                python=engine_python,
            )
        _warn([f"{said['engine']}: {line}" for line in [*said["disagreements"], *said["faults"]]])
        report |= {"engine": said, "ok": report["ok"] and said["agrees"]}
    return report


def _warn(notes: Sequence[str]) -> None:
    from forebay.observe.console import say

    for note in notes[:NOTES_SHOWN]:
        say(f"warning: {note}")
    if len(notes) > NOTES_SHOWN:
        say(f"warning: and {len(notes) - NOTES_SHOWN} more like it")


@contextlib.contextmanager
def _exported(drafter: PathLike, target: PathLike) -> Iterator[Path]:
    """The folder that an engine can load: `drafter` itself, or an export of the run or checkpoint that it is."""
    folder = Path(drafter)
    if (folder / "config.json").is_file():
        yield folder
        return
    with tempfile.TemporaryDirectory() as place:
        yield Path(export(folder, Path(place) / "drafter", target=target))


def load_drafter(source: PathLike, **options: Any) -> Any:
    """A drafter ready to serve. See `decode.generator.load_drafter`."""
    from forebay.decode.generator import load_drafter as load

    return load(os.fspath(source), **options)


def __getattr__(name: str) -> Any:
    if name == "SpeculativeGenerator":  # a class, so that it can be subclassed and its docstring read
        from forebay.decode.generator import SpeculativeGenerator

        return SpeculativeGenerator
    raise AttributeError(f"module 'forebay.api' has no attribute '{name}'{nearest(name, __all__)}")


def regenerate(
    prompts: PathLike,
    out: PathLike,
    *,
    target: PathLike | None = None,
    gguf_file: str | None = None,
    endpoint: str | None = None,
    model: str | None = None,
    dtype: str = "auto",
    device: str = "cpu",
    batch_size: int = 64,
    template_args: dict[str, Any] | None = None,
    server: dict[str, Any] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """The target's answers to prompts, in process or from an OpenAI-compatible endpoint; returns counts.

    `batch_size`: rows (or requests) at once. `server`: options of the endpoint (timeout_s, retries, on_fail, api_key).
    """
    for name, value, least in (
        ("batch_size", batch_size, 1),
        *((k, v, 1) for k, v in options.items() if k == "max_new_tokens"),
    ):
        if value < least:
            raise UsageError(f"{name} {value} must be at least {least}")
    if options.get("temperature", 0.0) < 0:
        raise UsageError(f"temperature {options['temperature']} must be at least 0 (0 is greedy)")
    if endpoint is not None:
        from forebay.stages.endpoint import regenerate_by_endpoint

        done = regenerate_by_endpoint(
            Path(prompts),
            Path(out),
            endpoint=endpoint,
            model=model,
            concurrency=batch_size,
            template_kwargs=template_args,
            **(server or {}),
            **options,
        )
        return done.as_dict()
    from forebay.models.load import load_model, load_tokenizer
    from forebay.stages.regenerate import regenerate as run

    where = _target(target or "", gguf_file, dtype)
    tokenizer = load_tokenizer(where)
    summary = run(
        prompts,
        out,
        target=load_model(where, device),
        tokenizer=tokenizer,
        batch_size=batch_size,
        template_kwargs=template_args or {},
        **options,
    )
    return summary.as_dict()


__all__ = [
    "ForebayError",
    "SpeculativeGenerator",  # noqa: F822 - see __getattr__
    "check",
    "evaluate",
    "export",
    "import_drafter",
    "load_drafter",
    "plan",
    "prepare",
    "regenerate",
    "resume",
    "status",
    "train",
]
