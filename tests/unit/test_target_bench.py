"""`forebay bench target` runs, and its three ways do the same work on the same tokens."""

from __future__ import annotations

import json

import pytest
import torch

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
