"""The `forebay` command: a thin layer over `forebay.api`.

Exit codes: 0 done, 1 failed, 2 usage. Results go to stdout (JSON with `--json`), everything else to stderr.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from forebay import __version__
from forebay.bench import SUBJECTS
from forebay.environment import set_defaults
from forebay.errors import DataError, ForebayError, UsageError, nearest

EXAMPLES = {
    "config": "forebay config run.yaml optim.lr=3e-4",
    "prepare": "forebay prepare answers.jsonl --target ./model --out ./store --heldout-share 0.02",
    "regenerate": "forebay regenerate prompts.jsonl --target ./model --out answers.jsonl --max-new-tokens 512",
    "plan": "forebay plan run.yaml plan.token_budget=4096",
    "train": "forebay train run.yaml    then, after a stop:    forebay train --resume runs/my-run",
    "eval": "forebay eval runs/my-run/drafter --target ./model --store ./store --json",
    "export": "forebay export runs/my-run --format zlab --out ./drafter",
    "import": "forebay import ./their-drafter --target ./model --out ./drafter",
    "check": "forebay check ./drafter --target ./model --store ./store",
    "status": "forebay status runs/my-run",
    "bench": "forebay bench flow --quick",
}


class Parser(argparse.ArgumentParser):
    """An argument parser that names the nearest option or command, and exits with 2."""

    def error(self, message: str) -> Any:
        known = [o for a in self._actions for o in a.option_strings]
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                known += [*action.choices, *(o for sub in action.choices.values() for o in sub._option_string_actions)]
        wrong = re.search(r"(?:invalid choice: '|unrecognized arguments: )([^' ]+)", message)
        hint = nearest(wrong.group(1), known) if wrong else ""
        self.exit(2, f"{self.format_usage()}{self.prog}: {message}{hint}\n")


def _command(commands: Any, name: str, summary: str, run: Callable[[argparse.Namespace], Any]) -> Parser:
    parser: Parser = commands.add_parser(
        name,
        help=summary,
        description=summary,
        epilog=f"example: {EXAMPLES[name]}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    return parser


def _target_options(parser: Parser, required: bool = True) -> None:
    parser.add_argument(
        "--target", required=required, metavar="DIR", help="folder of the target model (or one GGUF file)"
    )
    parser.add_argument("--gguf-file", metavar="NAME", help="the GGUF file in it, if it holds several")


def _field_option(parser: Parser) -> None:
    parser.add_argument(
        "--field",
        action="append",
        default=[],
        metavar="NAME=THEIRS",
        help="rows have the field NAME of a layout under another name, e.g. messages=dialogue",
    )


def build_parser() -> Parser:
    parser = Parser(prog="forebay", description="Train DFlash drafters for speculative decoding.")
    parser.add_argument("--version", action="version", version=f"forebay {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=Parser, required=True)

    p = _command(commands, "config", "print a run's configuration, resolved and checked", _config)
    p.add_argument("file")
    p.add_argument("overrides", nargs="*", metavar="key=value")

    p = _command(commands, "prepare", "conversations -> token store, with a report of what was kept and why", _prepare)
    p.add_argument("inputs", nargs="+", help="JSONL, JSON or Parquet files, folders or globs")
    _target_options(p)
    p.add_argument("--out", required=True, metavar="DIR", help="the token store to write")
    p.add_argument("--heldout", metavar="FILE", help="held-out conversations in a file of their own")
    p.add_argument(
        "--heldout-share", type=float, default=0.05, metavar="S", help="or this share of the rows, by content hash"
    )
    p.add_argument("--max-length", type=int, default=2048, metavar="N", help="longer rows are cut (counted)")
    p.add_argument("--last-turn-only", action="store_true", help="supervise only the last assistant turn")
    p.add_argument(
        "--template-arg", action="append", default=[], metavar="key=value", help="e.g. enable_thinking=false"
    )
    p.add_argument("--chat-template", metavar="FILE", help="a Jinja file in place of the tokenizer's own template")
    p.add_argument("--split-turns", action="store_true", help="one row per assistant turn, as it was when answered")
    p.add_argument("--text-separator", metavar="TEXT", help="rows with ready `text`: what stands before each answer")
    p.add_argument("--requests", action="append", metavar="FILE", help="requests of a batch whose answers are given")
    _field_option(p)
    p.add_argument("--max-unsupervised", type=float, default=0.05, metavar="S", help="stop above this share of rows")
    p.add_argument("--on-policy", type=int, default=0, metavar="N", help="let the target continue N rows and compare")
    p.add_argument("--strict", action="store_true", help="stop on any dropped row")
    p.add_argument("--workers", type=int, metavar="N", help="processes; default: by the size of the input")
    p.add_argument("--json", action="store_true")

    p = _command(commands, "regenerate", "let the target answer prompts", _regenerate)
    p.add_argument("prompts")
    _target_options(p, required=False)
    p.add_argument("--out", required=True, metavar="FILE")
    p.add_argument("--endpoint", metavar="URL", help="an OpenAI-compatible server instead of the in-process target")
    p.add_argument("--model", metavar="NAME", help="the model's name at the endpoint")
    p.add_argument("--max-new-tokens", type=int, default=512, metavar="N")
    p.add_argument("--batch-size", type=int, default=64, metavar="N", help="rows at once, or requests at once")
    p.add_argument("--temperature", type=float, default=0.0, metavar="T")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--dtype", default="auto", choices=["auto", "float32", "bfloat16", "float16"])
    p.add_argument("--device", default="cpu")
    p.add_argument("--timeout", type=float, default=120.0, metavar="S", help="of one request to the endpoint")
    p.add_argument("--retries", type=int, default=3, metavar="N", help="of a request to the endpoint")
    p.add_argument("--on-fail", choices=["skip", "stop"], default="skip", help="when all retries of a prompt failed")
    p.add_argument("--api-key", metavar="KEY")
    _field_option(p)
    p.add_argument("--template-arg", action="append", default=[], metavar="key=value")
    p.add_argument("--json", action="store_true")

    p = _command(commands, "plan", "describe an epoch: jobs, padding, mixing, memory; trains nothing", _plan)
    p.add_argument("file")
    p.add_argument("overrides", nargs="*", metavar="key=value")
    p.add_argument("--json", action="store_true")

    p = _command(commands, "train", "train a drafter, or go on with a run that was stopped", _train)
    p.add_argument("file", nargs="?", help="the run's YAML file (not with --resume)")
    p.add_argument("overrides", nargs="*", metavar="key=value")
    p.add_argument("--resume", metavar="RUN", help="folder of the run to go on with")
    p.add_argument(
        "--allow-change", action="append", default=[], metavar="FIELD", help="contract field that may differ"
    )
    p.add_argument("--json", action="store_true")

    p = _command(commands, "eval", "accept length and losslessness of a drafter, by the serving loop", _eval)
    p.add_argument("drafter", help="an exported drafter, or a run folder")
    _target_options(p)
    p.add_argument("--store", metavar="DIR", help="token store whose held-out prompts are used")
    p.add_argument("--prompts", metavar="FILE", help="or conversations of your own (JSONL)")
    p.add_argument("--limit", type=int, metavar="N", help="at most N prompts")
    p.add_argument("--max-new-tokens", type=int, default=64, metavar="N")
    p.add_argument("--batch-size", type=int, default=16, metavar="N")
    p.add_argument("--temperature", type=float, default=0.0, metavar="T")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--step", metavar="best|last|N", default="best", help="which checkpoint of a run")
    p.add_argument("--no-speed", action="store_true", help="leave out the speed measurement")
    p.add_argument(
        "--dtype",
        choices=["float32", "auto"],
        default="float32",
        help="auto: the faster one, for long answers; equality of the text is judged in float32 only",
    )
    p.add_argument("--json", action="store_true")

    p = _command(commands, "export", "write a drafter for an engine", _export)
    p.add_argument("source", help="a run folder or a checkpoint")
    p.add_argument("--format", choices=["zlab", "speculators"], default="zlab")
    p.add_argument("--out", required=True, metavar="DIR")
    p.add_argument("--step", metavar="best|last|N", default="best", help="which checkpoint of a run")
    _target_options(p, required=False)
    p.add_argument("--overwrite", action="store_true", help="replace a drafter that is there")

    p = _command(commands, "import", "read a drafter of another trainer", _import)
    p.add_argument("source")
    _target_options(p)
    p.add_argument("--out", required=True, metavar="DIR")

    p = _command(commands, "check", "tell whether an engine will agree with what was trained", _check)
    p.add_argument("drafter")
    _target_options(p)
    p.add_argument("--store", metavar="DIR")
    p.add_argument("--prompts", metavar="FILE")
    p.add_argument("--limit", type=int, default=16, metavar="N")
    p.add_argument("--max-new-tokens", type=int, default=48, metavar="N")
    p.add_argument("--engine", choices=["vllm"], help="serve the prompts by the engine that is installed, too")
    p.add_argument("--engine-python", metavar="PATH", help="its Python; default: FOREBAY_ENGINE_PYTHON, then this one")
    p.add_argument("--json", action="store_true")

    p = _command(commands, "status", "what a run is doing, from outside", _status)
    p.add_argument("run_dir")
    p.add_argument("--json", action="store_true")

    p = _command(commands, "bench", f"measure: {', '.join(SUBJECTS)}", _bench)
    p.add_argument("what", choices=SUBJECTS)
    p.add_argument("options", nargs=argparse.REMAINDER, help="see forebay bench WHAT --help")
    return parser


def _out(value: Any, as_json: bool, text: str | None = None) -> None:
    print(json.dumps(value, indent=None if as_json else 1) if as_json or text is None else text)


def _template_args(items: Sequence[str]) -> dict[str, Any]:
    import yaml

    return {key: yaml.safe_load(value) for key, value in _pairs("--template-arg", items).items()}


def _pairs(option: str, items: Sequence[str]) -> dict[str, str]:
    out = {}
    for item in items:
        key, sep, value = item.partition("=")
        if not sep or not key or not value:
            raise UsageError(f"{option} '{item}' is not of the form key=value")
        out[key] = value
    return out


def _config(a: argparse.Namespace) -> None:
    from forebay import config

    print(config.dump(config.load(a.file, a.overrides)), end="")


def _prepare(a: argparse.Namespace) -> None:
    from forebay import api
    from forebay.data.report import render
    from forebay.observe.console import console

    template = None
    if a.chat_template is not None:
        if not Path(a.chat_template).is_file():
            raise UsageError(f"no file at {a.chat_template}: --chat-template takes a Jinja file")
        template = Path(a.chat_template).read_text(encoding="utf-8")
    try:
        report = api.prepare(
            a.inputs,
            a.out,
            target=a.target,
            gguf_file=a.gguf_file,
            heldout=a.heldout,
            heldout_share=a.heldout_share,
            on_policy_rows=a.on_policy,
            max_length=a.max_length,
            last_turn_only=a.last_turn_only,
            split_turns=a.split_turns,
            text_separator=a.text_separator,
            fields=_pairs("--field", a.field),
            requests=a.requests,
            chat_template=template,
            template_kwargs=_template_args(a.template_arg) or None,
            strict=a.strict,
            max_unsupervised=a.max_unsupervised,
            workers=a.workers,
        )
    except DataError:
        file = Path(a.out) / "report.json"
        stopped = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {"kept": 0}
        if stopped["kept"]:  # what is wrong with some of the rows is in the table; of no row it is all in one line
            console.print(render(stopped))
        raise
    console.print(render(report))
    _out(report, a.json, f"token store: {a.out}")


def _regenerate(a: argparse.Namespace) -> None:
    from forebay import api

    if (a.target is None) == (a.endpoint is None):
        raise UsageError("give either --target DIR (in process) or --endpoint URL (a server), not both and not neither")
    summary = api.regenerate(
        a.prompts,
        a.out,
        target=a.target,
        gguf_file=a.gguf_file,
        endpoint=a.endpoint,
        model=a.model,
        max_new_tokens=a.max_new_tokens,
        batch_size=a.batch_size,
        temperature=a.temperature,
        seed=a.seed,
        dtype=a.dtype,
        device=a.device,
        template_args=_template_args(a.template_arg),
        fields=_pairs("--field", a.field),
        server={"timeout_s": a.timeout, "retries": a.retries, "on_fail": a.on_fail, "api_key": a.api_key},
    )
    _out(summary, a.json)


def _plan(a: argparse.Namespace) -> None:
    from forebay import api, config

    description = api.plan(config.load(a.file, a.overrides))
    _out(description, a.json, api.plan_text(description))


def _train(a: argparse.Namespace) -> None:
    from forebay import api, config

    if a.resume is None and a.file is None:
        raise UsageError("give a run's YAML file, or --resume RUN to go on with one")
    if a.resume is not None:
        overrides = ([a.file] if a.file else []) + a.overrides
        summary = api.resume(a.resume, overrides, allow_change=a.allow_change)
    else:
        summary = api.train(config.load(a.file, a.overrides))
    _out(summary, a.json)


def _eval(a: argparse.Namespace) -> None:
    from forebay import api

    report = api.evaluate(
        a.drafter,
        target=a.target,
        gguf_file=a.gguf_file,
        store=a.store,
        prompts=a.prompts,
        limit=a.limit,
        max_new_tokens=a.max_new_tokens,
        batch_size=a.batch_size,
        temperature=a.temperature,
        seed=a.seed,
        speed=not a.no_speed,
        step=a.step,
        dtype=a.dtype,
    )
    _out(report, a.json)


def _export(a: argparse.Namespace) -> None:
    from forebay import api

    options = {"target": a.target, "gguf_file": a.gguf_file, "overwrite": a.overwrite}
    print(api.export(a.source, a.out, format=a.format, step=a.step, **options))


def _import(a: argparse.Namespace) -> None:
    from forebay import api

    print(api.import_drafter(a.source, a.out, target=a.target, gguf_file=a.gguf_file))


def _check(a: argparse.Namespace) -> int:
    from forebay import api

    report = api.check(
        a.drafter,
        target=a.target,
        gguf_file=a.gguf_file,
        store=a.store,
        prompts=a.prompts,
        limit=a.limit,
        max_new_tokens=a.max_new_tokens,
        engine=a.engine,
        engine_python=a.engine_python,
    )
    _out(report, a.json)
    return 0 if report.get("ok", True) else 1


def _status(a: argparse.Namespace) -> None:
    from forebay import api

    status = api.status(a.run_dir)
    _out(status, a.json, api.status_text(status))


def _bench(a: argparse.Namespace) -> None:
    from forebay.bench import main

    main(a.what, a.options)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    set_defaults()
    arguments = build_parser().parse_args(argv)
    try:
        code = arguments.run(arguments)
    except ForebayError as error:
        print(f"forebay {arguments.command}: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print(f"forebay {arguments.command}: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        return 0
    except OSError as error:
        print(f"forebay {arguments.command}: {error.filename or 'file system'}: {error.strerror}", file=sys.stderr)
        return 1
    return int(code or 0)


if __name__ == "__main__":
    sys.exit(main())
