"""The demo's drafter on its real target, through both packages. Skipped until `make demo` has run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("dflash", reason="the package dflash is not installed here: run `make interop`")
pytest.importorskip("speculators", reason="the package speculators is not installed here: run `make interop`")

from forebay import api

DEMO = Path(__file__).parents[2] / "runs" / "demo"


@pytest.mark.skipif(not (DEMO / "drafter").is_dir(), reason="no demo drafter: run `make demo` first")
def test_the_demo_drafter_gives_the_same_tokens_and_rounds_in_the_package_as_in_our_loop(tmp_path: Path) -> None:
    """On held-out prompts of the demo, in fp32; the speculators export of the same drafter loads."""
    report = api.check(DEMO, target=DEMO / "target", store=DEMO / "store", limit=4, max_new_tokens=32)
    assert report["ok"], json.dumps(report["peers"], indent=1)
    assert report["peers"]["dflash"]["identical"] is True
    assert report["peers"]["dflash"]["tokens_per_round"] == pytest.approx(report["accept_length"], rel=0.1)
    assert report["peers"]["speculators"]["identical"] is True
