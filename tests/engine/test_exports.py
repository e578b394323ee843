"""Our exports in a real vLLM: its text, its accept length, and what `forebay check --engine vllm` says of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from conftest import EOS, NEW, TRAINED_TOKENS, Case
from forebay.decode.target_side import TargetSide
from forebay.engine.agreement import EngineRun, _disagreements, check_engine, run_engine
from forebay.engine.process import Served
from forebay.io.formats import write_drafter

EAGER = {"enforce_eager": True}


@pytest.fixture(scope="session")
def runs(case: Case, tmp_path_factory: pytest.TempPathFactory) -> dict[str, EngineRun]:
    """Both exports over the short prompts, then the long ones; the engine alone is asked once."""
    place, prompts = tmp_path_factory.mktemp("exports"), case.short + case.long
    out: dict[str, EngineRun] = {}
    plain: Served | None = None
    for layout in ("zlab", "speculators"):
        folder = write_drafter(place / layout, case.drafter, layout, target=str(case.folder))
        out[layout] = run_engine(folder, case.folder, prompts, eos=EOS, max_new_tokens=NEW, plain=plain, **EAGER)
        plain = out[layout].plain
    return out


@pytest.mark.parametrize("layout", ["zlab", "speculators"])
def test_the_engines_text_is_the_same_with_the_drafter_as_without(
    case: Case, runs: dict[str, EngineRun], layout: str
) -> None:
    run = runs[layout]
    assert run.differing(TargetSide(case.model, ())) == []
    assert run.drafted.count >= 100 and run.drafted.drafts > 0


@pytest.mark.parametrize("layout", ["zlab", "speculators"])
def test_the_engine_accepts_as_many_drafts_as_our_loop(case: Case, runs: dict[str, EngineRun], layout: str) -> None:
    ours = case.by_our_loop(case.short + case.long)
    assert list(_disagreements(runs[layout], [], ours.accept_length)) == []
    assert runs[layout].drafted.accept_length > 1.5, "the drafter is of use, so the comparison says something"


def test_the_engines_own_text_is_the_loops_reference(case: Case, runs: dict[str, EngineRun]) -> None:
    assert case.by_our_loop(case.short + case.long).identical_to_target
    from forebay.decode.evaluate import greedy_reference

    theirs = greedy_reference(case.model, case.short, max_new_tokens=NEW, eos=EOS)
    assert runs["zlab"].plain.tokens[: len(case.short)] == theirs


def test_a_fault_of_the_engines_build_is_told(runs: dict[str, EngineRun]) -> None:
    """Found by trying, so a build without it says nothing; each is a sentence about what is computed otherwise."""
    for said in runs["zlab"].faults:
        assert "k_norm" in said


def test_a_drafter_trained_on_short_texts_drafts_at_three_times_their_length(case: Case, tmp_path: Path) -> None:
    """And the check names the export that does not: its positions are those of the longest trained text."""
    assert min(map(len, case.long)) >= 3 * TRAINED_TOKENS
    folder = write_drafter(tmp_path / "drafter", case.drafter)
    ours = case.by_our_loop(case.long).accept_length
    good = check_engine(folder, case.folder, case.model, case.long, ours, max_new_tokens=NEW, **EAGER)
    assert good["agrees"], good["disagreements"]
    assert good["drafts"] > 0 and good["accept_length"] == pytest.approx(ours, rel=0.02) and ours > 2
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": TRAINED_TOKENS + 15}))
    old = check_engine(folder, case.folder, case.model, case.long, ours, max_new_tokens=NEW, **EAGER)
    assert not old["agrees"] and old["accept_length"] < 1.5
    assert any("max_position_embeddings is 60, the target's 512" in line for line in old["disagreements"])
    assert any("accept length" in line for line in old["disagreements"])
