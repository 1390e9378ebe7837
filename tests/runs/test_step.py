"""The numbers of a step: those that ride in the exchange keep their names, and when a step counts as finite."""

import math
from dataclasses import replace

import pytest
import torch

from distill.runs.step import StepResult, StepStats
from distill.runtime.signals import ALL

RESULT = StepResult(
    step=3,
    epoch=1.5,
    tokens=60,
    sums={"soft": 3.0, "mlm": 4.0},
    counts={"soft": 2.0, "mlm": 1.0, "tokens": 20.0},
    weights={"soft": 5.0, "mlm": 2.0},
    rank_sums=torch.tensor([[1.0, 4.0], [2.0, 0.0]]),
    lr=1e-3,
    grad_norm=1.5,
    loss_scale=None,
    seconds=0.5,
    data_wait=0.1,
    over=False,
    stop=None,
    save_requested=False,
)


@pytest.mark.parametrize("num_terms", [1, 3])
def test_the_sum_of_what_the_ranks_pack_has_the_sums_of_all_by_name(num_terms: int) -> None:
    counts = torch.arange(num_terms + 1, dtype=torch.float64) * 1000 + 16_000_001.0 / 2
    requests = [float(number) for number in range(len(ALL))]
    ranks = [
        StepStats.pack(torch.full((num_terms,), 0.25 * rank), counts, requests, clock)
        for rank, clock in enumerate((12.5, 0.0))
    ]
    assert ranks[0].dtype == torch.float32 and ranks[0].shape == (2 * num_terms + 1 + len(ALL) + 1,)
    stats = StepStats.unpack((ranks[0] + ranks[1]).tolist(), num_terms)
    assert stats.sums == [0.25] * num_terms
    assert stats.next_counts == (2 * counts.float()).tolist()
    assert stats.requests == [2 * number for number in requests] and stats.clock == 12.5


def test_a_step_is_finite_where_its_loss_and_its_gradient_are() -> None:
    assert not RESULT.skipped and RESULT.loss_is_finite
    for norm in (math.nan, math.inf):
        overflowed = replace(RESULT, grad_norm=norm)
        assert overflowed.loss_is_finite and overflowed.skipped
    for value in (math.nan, math.inf, -math.inf):
        broken = replace(RESULT, sums={"soft": 3.0, "mlm": value})
        assert not broken.loss_is_finite and broken.skipped


def test_losses_are_means_over_positions_and_their_weighted_sum() -> None:
    assert RESULT.losses == {"total": 5 * 1.5 + 2 * 4.0, "soft": 1.5, "mlm": 4.0}
    without = replace(RESULT, sums={"soft": 3.0, "mlm": 0.0}, counts={"soft": 2.0, "mlm": 0.0, "tokens": 20.0}).losses
    assert without["total"] == 7.5 and math.isnan(without["mlm"])
