"""Fixtures of the tests: quick, offline, one thread, so that sums are made in the same order everywhere."""

from typing import Any

import numpy as np
import pytest
import tiny
import torch

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    return tiny.make_tokenizer()


@pytest.fixture(scope="session")
def teacher() -> Any:
    """A frozen BERT of 4 layers x 32; no test may change it."""
    return tiny.make_model("bert", 4).requires_grad_(False)


@pytest.fixture(scope="session")
def rows() -> np.ndarray:
    """20 rows of 5 to 12 tokens, padded: with 8 rows a step the last step of an epoch has 4."""
    return tiny.make_rows(20, shortest=5)
