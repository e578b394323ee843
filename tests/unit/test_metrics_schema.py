"""One schema of metrics, and the document made from it. That a run's log has its fields: tests/e2e/test_metrics.py."""

from pathlib import Path

from forebay.observe.schema import KINDS, METRICS, markdown

ROOT = Path(__file__).parents[2]


def test_the_document_is_the_schema():
    assert (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8") == markdown()


def test_every_metric_is_named_once_and_explained():
    assert len({(m.kind, m.name) for m in METRICS}) == len(METRICS) and {m.kind for m in METRICS} == set(KINDS)
    assert all(m.meaning and "|" not in f"{m.unit}{m.meaning}{m.good}{m.otherwise}" for m in METRICS)
    assert all(m.otherwise == "" or m.good for m in METRICS)  # what to do when it is not good: then say what is good
