"""How much of a text a vocabulary knows: counted, said, and refused above the limit."""

import logging
from typing import Any

import numpy as np
import pytest
from tiny import VOCAB

from distill.data.unknown_tokens import check_unknown
from distill.runtime.errors import SettingError


def check(tokenizer: Any, unknown: int, known: int) -> None:
    """For tokens of which so many are the unknown one, and so many another."""
    counts = np.zeros(VOCAB, np.int64)
    counts[tokenizer.unk_token_id], counts[20] = unknown, known
    check_unknown(counts, unknown + known, tokenizer, 0.2, "corpus.path=x")


def test_the_fraction_of_unknown_tokens_is_logged(tokenizer: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        check(tokenizer, 0, 90)
        assert not caplog.text
        check(tokenizer, 10, 90)
    assert "corpus.path=x: 10.00% of its tokens are unknown" in caplog.text


@pytest.mark.parametrize(("unknown", "known"), [(30, 70), (100, 0), (0, 0)])
def test_too_much_that_is_unknown_is_refused(tokenizer: Any, unknown: int, known: int) -> None:
    with pytest.raises(SettingError, match=r"corpus\.path=x: .* not in the vocabulary.*\(corpus\.max_unknown=0\.2"):
        check(tokenizer, unknown, known)
