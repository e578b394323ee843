"""`forebay bench designs` on the tiny target: the same rows, steps and first weights under every variant."""

from pathlib import Path

import numpy as np
import pytest

from forebay import config
from forebay.bench import designs
from forebay.data.store import TokenStore
from forebay.errors import UsageError


def test_variants_train_on_the_same_rows_for_the_same_steps_and_differ_in_their_windows(
    configuration, tmp_path, capsys
):
    """A sorted plan's windows are of one kind."""
    run = configuration(plan={"token_budget": 256, "bucket_edges": [90, 120, 256]}, optim={"epochs": 1})
    file = tmp_path / "run.yaml"
    file.write_text(config.dump(run))
    rows = designs.compare(config.load(file), designs.DESIGNS[::3], seeds=1, steps=5)
    capsys.readouterr()
    first, last = rows
    assert (first["steps"], first["jobs"]) == (last["steps"], last["jobs"]) and 4 <= first["steps"] <= 6
    assert first["r"] < last["r"] and last["distinct_buckets"] < first["distinct_buckets"]
    assert first["loss"].keys() == last["loss"].keys() > {"all"}
    assert all(np.isfinite(value) for row in rows for value in [*row["loss"].values(), row["accept_length"]])
    assert all(0 <= row[f"idle_{side}"] <= 1 and row["cpu_s"] > 0 for row in rows for side in ("target", "drafter"))
    assert not Path(run.run_dir).exists(), "the run's own folder is not touched"
    lines = designs.table(rows).splitlines()
    assert len(lines) == 4 and lines[3].startswith("| shared + buffered, sorted plan |")


def test_a_sample_of_a_store_holds_the_same_rows(world, tmp_path):
    designs.sample_store(world / "store", tmp_path / "few", rows=10, seed=1)
    whole, few = TokenStore.open(world / "store" / "train"), TokenStore.open(tmp_path / "few" / "train", verify=True)
    assert len(few) == 10 and few.fingerprint != whole.fingerprint
    for row in range(10):
        (same,) = np.flatnonzero(whole.ids == few.ids[row])
        assert np.array_equal(few.tokens(row), whole.tokens(same)) and np.array_equal(few.mask(row), whole.mask(same))
        assert few.eligible[row] == whole.eligible[same]
    assert len(TokenStore.open(tmp_path / "few" / "heldout")) == 6


def test_reuse_is_compared_at_equal_steps_or_refused():
    assert [v.optim["epochs"] for v in designs.reuse_variants([1, 2, 4], 4)] == [4, 2, 1]
    with pytest.raises(UsageError, match=r"optim.epochs 2 is not a multiple of reuse 4.*optim.epochs=8"):
        designs.reuse_variants([1, 4], 2)
