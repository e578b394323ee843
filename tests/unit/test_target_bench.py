"""`forebay bench target` runs, and its three ways do the same work on the same tokens."""

from __future__ import annotations

import json

import pytest
import torch

from forebay import cli
from forebay.bench.target import job_like, main, padded_batches, plain_forward
from forebay.errors import UsageError
from forebay.models.target import Target
from tiny import LAYER_IDS, save_tiny_target, tiny_target


def test_the_plain_way_gives_the_states_that_capturing_gives():
    target = Target(tiny_target(), LAYER_IDS)
    job = job_like(300, 256, 40, splits=3, seed=0)
    out = torch.zeros(len(job.tokens), target.feature_width)
    target.capture(job, out)
    plain = [plain_forward(target, ids, mask)[mask.bool()] for ids, mask in padded_batches(job, target.device)]
    torch.testing.assert_close(out, torch.cat(plain), rtol=1e-4, atol=1e-4)
    assert len(job.splits) == 3 and 200 < len(job.tokens) <= 256


def test_the_command_prints_the_promised_keys(tmp_path, capsys):
    folder = save_tiny_target(tmp_path / "t0", num_hidden_layers=8)
    main(["--model", str(folder), "--dtype", "float32", "--tokens", "128", "--mean", "20", "--rounds", "1", "--json"])
    figures = json.loads(capsys.readouterr().out)
    for key in ("captured_tokens_per_s", "plain_tokens_per_s", "truncated_tokens_per_s", "captured_over_plain"):
        assert figures[key] > 0
    with pytest.raises(UsageError, match="must be at least 1"):
        main(["--model", str(folder), "--rounds", "0"])


@pytest.mark.parametrize(
    ("subject", "name"), [("target", "target"), ("pipeline", "config.yaml"), ("designs", "config.yaml")]
)
def test_without_arguments_the_demos_run_is_measured_or_how_to_make_it_said(
    tmp_path, monkeypatch, capsys, subject, name
):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["bench", subject]) == 2
    assert f"no runs/demo/{name} of the demo's run here: make it with `make demo`" in capsys.readouterr().err
    if subject == "target":
        save_tiny_target(tmp_path / "runs/demo/target", num_hidden_layers=4)
        main(["--dtype", "float32", "--tokens", "64", "--mean", "20", "--rounds", "1", "--json"])
        assert json.loads(capsys.readouterr().out)["model"] == "target"
    else:
        (tmp_path / "runs/demo").mkdir(parents=True)
        (tmp_path / "runs/demo/config.yaml").write_text("run_dir: runs/demo\ntarget: {model: gone}\ndata: {store: s}\n")
        assert cli.main(["bench", subject, "optim.lr=1e-3"]) == 1
        assert "forebay bench: s" in capsys.readouterr().err  # that run, with its override, was taken: it has no store
