"""Every command as a user types it: results on stdout, messages on stderr, exit codes, nothing half-written."""

import json
from pathlib import Path

import pytest
import torch

from forebay import config
from forebay.cli import EXAMPLES, build_parser, main
from forebay.data.store import TokenStore

FOUND = sorted(Path(__file__).parents[2].glob("examples/**/*.yaml"))
EXAMPLE_CONFIGS = [file for file in FOUND if "run_dir" in file.read_text()]


def run(capsys, *argv):
    """(exit code, stdout, stderr)."""
    try:
        code = main([str(a) for a in argv])
    except SystemExit as leaving:
        code = leaving.code
    out = capsys.readouterr()
    return code, out.out, out.err


def test_the_whole_way_from_conversations_to_an_engine(world, tmp_path, capsys, configuration, monkeypatch):
    """C107: prepare, plan, train, status, eval, export, import, check; no CUDA, no engine."""
    target, store, folder = world / "target", tmp_path / "store", tmp_path / "run"
    prepare = [
        "prepare",
        world / "train.jsonl",
        "--target",
        target,
        "--out",
        store,
        "--heldout",
        world / "heldout.jsonl",
    ]
    code, out, err = run(capsys, *prepare, "--json")
    report = json.loads(out)
    assert code == 0 and report["kept"] == 78 and "[[" in err

    file = tmp_path / "run.yaml"
    file.write_text(config.dump(configuration(data={"store": str(store)}, optim={"epochs": 1})))
    code, out, _ = run(capsys, "plan", file, "--json")
    keys = "jobs sequences real_tokens target_padding_share item_tail_share anchor_fill_share slot_fill_share mixing_r"
    assert code == 0 and json.loads(out).keys() >= {*keys.split(), "largest_item_bytes"}

    code, out, _ = run(capsys, "train", file, f"run_dir={folder}", "--json")
    summary = json.loads(out)
    assert code == 0 and summary["jobs_committed"] == summary["jobs_planned"]
    code, out, _ = run(capsys, "status", folder)
    assert code == 0 and f"step {summary['steps']} of {summary['total_steps']}" in out

    where = ["--target", target, "--store", store]
    code, out, _ = run(capsys, "eval", folder, *where, "--limit", 4, "--max-new-tokens", 8, "--json")
    found = json.loads(out)
    keys = "accept_length acceptance_by_position rounds prompts identical_to_target near_ties"
    assert code == 0 and found.keys() >= {*keys.split(), "target_tokens_per_s", "speculative_tokens_per_s"}
    assert found["identical_to_target"] is True
    assert found["accept_length"] == pytest.approx(1 + sum(found["acceptance_by_position"]))  # C101

    with monkeypatch.context() as here:
        here.setattr("forebay.models.load.auto_dtype", lambda model: torch.bfloat16)
        code, out, _ = run(
            capsys, "eval", folder, *where, "--limit", 2, "--max-new-tokens", 4, "--dtype", "auto", "--json"
        )
    assert code == 0 and json.loads(out)["identical_to_target"] is None  # judged in fp32 only

    longest = TokenStore.open(store / "train").lengths.max()
    for layout in ("zlab", "speculators"):
        code, _, _ = run(capsys, "export", folder, "--format", layout, "--out", tmp_path / layout)
        assert code == 0 and (tmp_path / layout / "README.md").is_file()
        written = json.loads((tmp_path / layout / "config.json").read_text())
        assert written.get("transformer_layer_config", written)["max_position_embeddings"] == 512  # the target's
        assert {**written, **written.get("dflash_config", {})}["trained_max_length"] == longest
    code, _, _ = run(capsys, "import", tmp_path / "speculators", "--target", target, "--out", tmp_path / "back")
    assert code == 0
    first, again = ((tmp_path / n / "model.safetensors").read_bytes() for n in ("zlab", "back"))
    assert len(first) == len(again)
    code, out, _ = run(capsys, "check", tmp_path / "zlab", *where, "--limit", 2, "--max-new-tokens", 6, "--json")
    assert code == 0 and json.loads(out)["ok"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["trian"], "nearest: 'train'"),
        (["export", "x", "--fromat", "zlab", "--out", "y"], "nearest: '--format'"),
        (["train"], "give a run's YAML file"),
        (["train", "/nowhere.yaml"], "no configuration file"),
        (["train", "--resume", "/nowhere"], "holds no run"),
        (["status", "/nowhere"], "no status"),
        (["eval", "/nowhere", "--target", "/nowhere", "--store", "/nowhere"], "no exported drafter"),
        (["regenerate", "p.jsonl", "--out", "o.jsonl"], "either --target"),
        (["prepare", "/nowhere.jsonl", "--target", "/nowhere", "--out", "/tmp/never"], "no model folder"),
    ],
)
def test_a_usage_error_is_one_message_and_exit_code_2(capsys, argv, message):
    code, out, err = run(capsys, *argv)
    assert code == 2 and message in err and out == "" and "Traceback" not in err


def test_every_command_has_help_with_an_example(capsys):
    for command in EXAMPLES:
        code, out, _ = run(capsys, command, "--help")
        assert code == 0 and f"example: forebay {command}" in out
    assert build_parser().prog == "forebay"


@pytest.mark.parametrize("file", EXAMPLE_CONFIGS, ids=lambda p: p.parent.name)
def test_every_example_configuration_trains_two_steps(file, world, tmp_path, capsys):
    """C108: on the tiny target, with only folders, layer ids and the mask token changed."""
    small = config.load(
        file,
        [
            f"run_dir={tmp_path / 'run'}",
            f"target.model={world / 'target'}",
            "target.layer_ids=[0, 2, 4]",
            f"data.store={world / 'store'}",
            "drafter.mask_token_id=310",
            "drafter.intermediate_size=64",
            "optim.epochs=1",
            "eval.prompts=1",
            "eval.max_new_tokens=4",
        ],
    )
    from forebay.runtime.local import LocalRuntime

    local = LocalRuntime(small, quiet=True)
    after = local.training.after_step

    def stop(window, outcome):
        after(window, outcome)
        if local.training.step.taken == 2:
            local.shell.request_stop()

    local.training.after_step = stop
    assert local.train()["steps"] == 2
