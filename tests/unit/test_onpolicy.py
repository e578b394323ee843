"""The on-policy check tells the target's own answers from another's."""

import json

import numpy as np
import pytest

from forebay.stages.generation import Generator, Question
from forebay.stages.onpolicy import OnPolicy, add_to_report, check_on_policy
from tiny import tiny_target


class Rows:
    """A store of prompts and what some target answered."""

    def __init__(self, target, temperature=0.0):
        draw = np.random.default_rng(0)
        prompts = [draw.integers(4, 300, 12).tolist() for _ in range(20)]
        generator = Generator(target, stops=set(), pad=0, temperature=temperature)
        replies = generator.run(
            [Question(i, p, seed=i) for i, p in enumerate(prompts)], max_new_tokens=24, batch_size=8
        )
        self.rows = [(np.array(prompts[r.about] + r.tokens, np.int32), len(prompts[r.about])) for r in replies]

    def __len__(self):
        return len(self.rows)

    def tokens(self, row):
        return self.rows[row][0]

    def mask(self, row):
        ids, prompt = self.rows[row]
        return (np.arange(len(ids)) >= prompt).astype(np.uint8)


@pytest.fixture(scope="module")
def target():
    return tiny_target(seed=0)


def test_the_targets_own_greedy_answers_agree_and_another_targets_do_not(target):
    """C105."""
    own = check_on_policy(Rows(target), target)
    other = check_on_policy(Rows(tiny_target(seed=1)), target)
    assert own.agreement > 0.999 and not own.suspect and own.tokens == 20 * 24
    assert other.agreement < 0.2 and other.suspect
    assert "warning" in other.sentence and "forebay regenerate" in other.sentence


def test_sampled_answers_agree_about_as_often_as_the_target_is_confident(target):
    """A shifted mask or prompt would break the equality, so this also guards the check itself."""
    sampled = check_on_policy(Rows(target, temperature=1.0), target)
    spread = 4 * np.sqrt(sampled.confidence * (1 - sampled.confidence) / sampled.tokens)
    assert abs(sampled.agreement - sampled.confidence) < spread


@pytest.mark.parametrize(
    ("agreement", "confidence", "suspect"),
    [(0.99, 0.8, False), (0.85, 0.85, False), (0.85, 0.93, True), (0.5, 0.5, True)],
)
def test_the_verdict_weighs_agreement_against_confidence(agreement, confidence, suspect):
    assert OnPolicy(50, 1000, agreement, confidence, 0.0).suspect is suspect


def test_the_result_joins_the_report_and_an_empty_store_says_so(target, tmp_path):
    from forebay.data.prepare import prepare
    from forebay.data.report import render
    from forebay.data.store import TokenStore
    from tiny import R0, toy_tokenizer, write_jsonl

    data = write_jsonl(tmp_path / "a.jsonl", [R0] * 3)
    prepare([data], tmp_path / "s", tokenizer=toy_tokenizer(), heldout_share=0, progress=False)
    result = check_on_policy(TokenStore.open(tmp_path / "s" / "train"), target)
    add_to_report(tmp_path / "s", result)
    report = json.loads((tmp_path / "s" / "report.json").read_text())
    assert report["on_policy"]["suspect"] and report["on_policy"]["rows"] == 3
    assert any("on-policy check" in str(part) for part in render(report).renderables)
    empty = check_on_policy(TokenStore.open(tmp_path / "s" / "heldout"), target)
    assert not empty.suspect and "no row" in empty.sentence
