"""Which runs compile their objective without being asked to."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from job import whole_run

from distill.config.settings import Config
from distill.objective.build import make_terms
from distill.optim.schedule import total_steps


def compiles(**train: Any) -> bool:
    """Whether a run on the CPU does, of 8 sequences of 128 tokens a step and a vocabulary of 6,144."""
    config = Config(objective=tiny.objective_config())
    config = config.changed(train=config.train.changed(**train))
    batches: Any = SimpleNamespace(sequences_per_step=8, sequences=np.zeros((80, 128), np.uint16))
    ranks: Any = SimpleNamespace(device=torch.device("cpu"))
    steps = total_steps(config.train, 10)
    return whole_run.make_objective(config, make_terms(config.objective), batches, steps, 6144, ranks).compiled


@pytest.mark.parametrize(
    ("length", "expected"),
    [
        ({"epochs": None, "minutes": 1.0}, False),
        ({"epochs": None, "minutes": 10.0}, True),
        ({"epochs": 1, "minutes": 60.0}, False),
        ({"epochs": 1}, False),
        ({"epochs": None, "steps": 10_000}, True),
        ({"epochs": None, "steps": 10_000, "minutes": 1.0}, True),
    ],
)
def test_long_runs_are_compiled(length: dict[str, Any], expected: bool) -> None:
    """By their steps, where they have any, and else by the clock."""
    assert compiles(**length) == expected
