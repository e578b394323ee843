"""The short form of tests/fuzz_prepare.py."""

from fuzz_prepare import run


def test_mutated_files_give_no_traceback_and_every_row_is_kept_or_counted():
    run(1_000_000, 150, at_once=50, say=lambda text: None)
