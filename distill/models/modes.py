"""Evaluation mode for a while: no dropout, and afterwards every module as it was."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def in_evaluation_mode(model: Any) -> Iterator[Any]:
    """Gives the model in evaluation mode; each of its modules goes back into the mode that it was in by itself."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield model
    finally:
        for module, training in modes:
            module.train(training)  # and those in it, which come later here
