"""How much of a text a vocabulary knows: counted, said, and refused above the limit."""

import logging
from typing import Any

import numpy as np
import pytest
from tiny import VOCAB

from distill.data.unknown_tokens import check_unknown
from distill.runtime.errors import SettingError


def checked(tokenizer: Any, unknown: int, known: int) -> float:
    """The outcome for tokens of which so many are the unknown one, and so many another."""
    counts = np.zeros(VOCAB, np.int64)
    counts[tokenizer.unk_token_id], counts[20] = unknown, known
    return check_unknown(counts, unknown + known, tokenizer, 0.2, "corpus.path=x")


def test_the_share_is_that_of_all_tokens_but_the_special_ones(tokenizer: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        assert checked(tokenizer, 10, 90) == pytest.approx(0.1)
    assert "corpus.path=x: 10.00% of its tokens are unknown" in caplog.text


def test_nothing_is_said_where_all_is_known(tokenizer: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        assert checked(tokenizer, 0, 90) == 0
    assert not caplog.text


@pytest.mark.parametrize(("unknown", "known"), [(30, 70), (100, 0), (0, 0)])
def test_too_much_that_is_unknown_is_refused(tokenizer: Any, unknown: int, known: int) -> None:
    with pytest.raises(SettingError, match=r"corpus\.path=x: .* not in the vocabulary.*\(corpus\.max_unknown=0\.2"):
        checked(tokenizer, unknown, known)
