"""The mask token: who decides, what is refused, and that no id lacks an embedding row."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest

from forebay.errors import ConfigError, DataError
from forebay.models.mask_token import choose_mask_token, token_counts
from tiny import EOS, MASK_ID, ROWS, TK1_SIZE, toy_tokenizer


@dataclass
class Store:
    rows: list[list[int]] = field(default_factory=lambda: [[5, 6, 7], [8, 9]])
    ids: tuple[str, ...] = ("a", "b")

    def __len__(self) -> int:
        return len(self.rows)

    def tokens(self, row: int) -> np.ndarray:
        return np.asarray(self.rows[row], np.int32)


def choose(tokenizer=None, store=None, **options):
    store = store or Store()
    return choose_mask_token(
        tokenizer or toy_tokenizer(),
        embedding_rows=ROWS,
        counts=token_counts(store, ROWS),
        store=store,
        **options,
    )


def test_without_a_mask_token_a_spare_row_is_taken_and_named():
    """C25."""
    choice = choose()
    assert 301 <= choice.id <= 319
    assert str(choice) == f"mask token {choice.id} (from the spare row)"


def test_a_spare_row_that_the_data_uses_is_passed_over():
    assert choose(store=Store([[301, 302], [5]])).id == 303


def test_without_a_spare_row_the_error_names_three_ways_out():
    """C26."""
    with pytest.raises(ConfigError) as error:
        choose(toy_tokenizer(TK1_SIZE), eos_token_ids=(1, 2))
    message = str(error.value)
    assert "all 320 embedding rows are taken" in message
    assert "(1) choose a reserved id" in message and "drafter.mask_token_id" in message
    assert "(2) ship a mask embedding" in message
    assert "(3) take one of the unused special tokens: 3 '<|im_start|>'" in message


def test_the_configuration_goes_before_the_draft_config_before_the_tokenizer():
    tokenizer = toy_tokenizer()
    tokenizer.mask_token = "<|im_start|>"
    assert (c := choose(tokenizer)).id == 3 and c.source == "tokenizer"
    assert (c := choose(tokenizer, draft=305)).id == 305 and c.source == "draft config"
    assert (c := choose(tokenizer, draft=305, requested=MASK_ID)).id == MASK_ID and c.source == "configuration"


@pytest.mark.parametrize(("token", "role"), [(EOS, "eos"), (0, "pad"), (2, "eos"), (7, "bos")])
def test_pad_eos_and_bos_are_refused(token, role):
    """C27: also where only the model's generation config knows the role."""
    with pytest.raises(ConfigError, match=f"mask token {token} .* is the {role} token"):
        choose(requested=token, eos_token_ids=(1, 2), bos_token_id=7)


def test_pad_equal_to_eos_is_refused():
    """C27."""
    tokenizer = toy_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    with pytest.raises(ConfigError, match="mask token 1"):
        choose(tokenizer, requested=1)


@pytest.mark.parametrize("token", [320, 5000, -1])
def test_an_id_without_an_embedding_row_is_refused(token):
    with pytest.raises(ConfigError, match=r"has no embedding row, valid 0\.\.319"):
        choose(requested=token)


def test_an_id_that_occurs_in_the_data_is_refused_with_row_and_count():
    """C29."""
    with pytest.raises(ConfigError, match=r"mask token 310 .* occurs 2 times in the data in 1 rows .first: row 'b'"):
        choose(store=Store([[5], [310, 8, 310]]), requested=310)


def test_a_bad_choice_is_refused_rather_than_replaced_by_the_next_source():
    with pytest.raises(ConfigError, match="from the draft config"):
        choose(draft=EOS)


def test_data_of_another_tokenizer_is_an_error_on_the_host():
    """C35."""
    with pytest.raises(DataError, match="row 'a' token 5000 >= 320 embedding rows"):
        token_counts(Store([[4, 5000], [5]]), ROWS)
    assert token_counts(Store([[4, 4], [5]]), ROWS)[[4, 5, 6]].tolist() == [2, 1, 0]
