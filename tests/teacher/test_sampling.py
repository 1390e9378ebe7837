"""Draws of a teacher's distribution: without bias in value and gradient, in float64, against the whole distribution."""

import numpy as np
import pytest
import torch
from torch import Tensor

from distill.objective import losses
from distill.teacher import cache
from distill.teacher.cache import Layout
from distill.teacher.distributions import Samples, top_k_log_probs
from distill.teacher.sampling import as_samples, kept_entries, offsets_of, stored

VOCAB, POSITIONS, TIMES, TEMPERATURE = 31, 3, 20_000, 2.0


def layout(top_k: int = 0, sampled: int = 6, vocabulary: int = VOCAB) -> Layout:
    return Layout(top_k, sampled, vocabulary)


def logits(seed: int, rows: int = POSITIONS) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, VOCAB, generator=generator, dtype=torch.float64)


def uniform(count: int, seed: int = 0) -> Tensor:
    return torch.rand(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def kept(teacher: Tensor, of: Layout, offsets: Tensor, temperature: float = TEMPERATURE) -> dict[str, Tensor]:
    return kept_entries(teacher, of.top_k, of.sampled, temperature, offsets)


def drawn(teacher: Tensor, of: Layout, offsets: Tensor) -> Samples:
    """Without the rounding of what is stored."""
    return as_samples(kept(teacher, of, offsets))


def read(records: np.ndarray) -> Samples:
    return as_samples({name: cache._tensor(records[name]) for name in records.dtype.names or ()})


def estimate(samples: Samples, vocabulary: int = VOCAB) -> Tensor:
    """The estimated distribution, [n, vocabulary]."""
    whole = torch.zeros(len(samples.ids), vocabulary, dtype=torch.float64)
    return whole.scatter_add_(1, samples.ids, samples.weights.double())


def values_and_gradients(student: Tensor, samples: Samples) -> Tensor:
    """For each position the loss and its gradient, [n, 1 + VOCAB]."""
    student = student.detach().requires_grad_()
    values = losses.soft_sampled(student, *samples, TEMPERATURE)
    (gradient,) = torch.autograd.grad(values.sum(), student)
    return torch.cat([values.detach()[:, None], gradient], 1)


def exact_values_and_gradients(student: Tensor, teacher: Tensor) -> Tensor:
    student = student.detach().requires_grad_()
    values = losses.soft(student, teacher, TEMPERATURE)
    (gradient,) = torch.autograd.grad(values.sum(), student)
    return torch.cat([values.detach()[:, None], gradient], 1)


def deviations(student: Tensor, teacher: Tensor, samples: Samples) -> Tensor:
    """How many standard errors the means over TIMES draws are from the exact loss and gradient, [POSITIONS, 1 + V]."""
    found = values_and_gradients(student.repeat(TIMES, 1), samples).view(TIMES, POSITIONS, -1)
    error = found.std(0) / TIMES**0.5
    return (found.mean(0) - exact_values_and_gradients(student, teacher)).abs() / (error + 1e-5)


@pytest.mark.parametrize(("top_k", "sampled"), [(0, 1), (0, 6), (3, 1), (3, 6), (VOCAB - 1, 2)])
def test_value_and_gradient_have_the_exact_mean(top_k: int, sampled: int) -> None:
    teacher, student = logits(1), logits(2)
    samples = drawn(teacher.repeat(TIMES, 1), layout(top_k, sampled), uniform(TIMES * POSITIONS))
    assert samples.ids.shape == samples.weights.shape == (TIMES * POSITIONS, top_k + sampled)
    assert float(deviations(student, teacher, samples).max()) < 4.5


def test_what_is_biased_is_found_out() -> None:
    """The same bound fails for all the probability on the largest entries."""
    teacher, student = 3 * logits(1), logits(2)
    samples = drawn(teacher.repeat(TIMES, 1), layout(2, 2), uniform(TIMES * POSITIONS))
    heads = samples._replace(ids=samples.ids[:, :2], weights=samples.weights[:, :2])
    normalised = heads._replace(weights=heads.weights / heads.weights.sum(1, keepdim=True))
    assert float(deviations(student, teacher, normalised).max()) > 10


def test_a_token_is_drawn_as_often_as_it_should_be_to_within_one() -> None:
    """And over all offsets on average exactly so often."""
    grid, (top_k, sampled) = 4000, (2, 9)
    teacher = logits(3, 1).repeat(grid, 1)
    offsets = (torch.arange(grid, dtype=torch.float64) + 0.5) / grid
    found = kept(teacher, layout(top_k, sampled), offsets)
    counts = torch.nn.functional.one_hot(found["draws"], VOCAB).sum(1).double()
    rest = (teacher[0] / TEMPERATURE).softmax(0)
    rest[found["ids"][0]] = 0
    wanted = sampled * rest / rest.sum()
    assert (counts - wanted).abs().max() < 1
    assert (counts.mean(0) - wanted).abs().max() <= 2 / grid
    assert not (found["draws"][:, :, None] == found["ids"][:, None]).any(), "what is kept exactly is not drawn"


def test_the_largest_entries_are_exact_and_the_entropy_is_that_of_all() -> None:
    teacher = logits(4)
    found = kept(teacher, layout(5, 8), uniform(POSITIONS))
    ids, log_probs = top_k_log_probs(teacher, 5, TEMPERATURE)
    assert torch.equal(found["ids"], ids) and torch.equal(found["log_probs"], log_probs)
    p = (teacher / TEMPERATURE).softmax(-1)
    torch.testing.assert_close(found["neg_entropy"][:, 0], (p * p.log()).sum(-1))
    samples = as_samples(found)
    torch.testing.assert_close(samples.weights[:, :5].double(), p.gather(1, ids), rtol=1e-6, atol=0)
    torch.testing.assert_close(samples.weights.sum(1), torch.ones(POSITIONS))


@pytest.mark.parametrize("top_k", [0, 2])
def test_extreme_teachers_give_finite_entries(top_k: int) -> None:
    """A sure one, one that knows two tokens alone, and one without any preference; both ends of the offsets."""
    teacher = torch.zeros(6, VOCAB)
    teacher[0:2, 7], teacher[2:4, VOCAB - 2 :] = 3e4, 3e4
    offsets = torch.tensor([2.0**-53, 1 - 2.0**-53] * 3, dtype=torch.float64)
    of = layout(top_k, 5)
    samples = read(stored(kept(teacher, of, offsets, 1.0), of.record))
    assert int(samples.ids.min()) >= 0 and int(samples.ids.max()) < VOCAB
    assert all(each.isfinite().all() for each in (samples.weights, samples.neg_entropy))
    wanted = teacher.double().softmax(-1)
    torch.testing.assert_close(samples.weights.sum(1), torch.ones(6), rtol=2e-3, atol=0)
    torch.testing.assert_close(estimate(samples)[:4], wanted[:4], rtol=0, atol=0.11)  # a fifth more or less of a half
    assert (estimate(samples)[:4][wanted[:4] == 0] == 0).all(), "nothing without probability is drawn"


def test_offsets_belong_to_the_row_and_the_place_in_it() -> None:
    rows, counts = np.array([3, 9, 4]), np.array([2, 0, 5])
    found = offsets_of(rows, counts, "one")
    assert found.shape == (7,) and ((found > 0) & (found < 1)).all() and len(set(found)) == 7
    apart = [offsets_of(rows[i : i + 1], counts[i : i + 1], "one") for i in range(3)]
    assert np.array_equal(found, np.concatenate(apart))
    assert not set(found) & set(offsets_of(rows, counts, "another"))
    many = offsets_of(np.arange(2000), np.full(2000, 5), "one")
    assert abs(many.mean() - 0.5) < 0.015 and abs(many.std() - 12**-0.5) < 0.01


@pytest.mark.parametrize(
    ("of", "num_bytes"),
    [
        (Layout(64, 0, 30_000), 64 * 4 + 2),
        (Layout(0, 63, 30_000), 63 * 2 + 2),
        (Layout(8, 46, 30_000), 8 * 4 + 2 + 46 * 2 + 2),
        (Layout(8, 46, 65_536), 8 * 4 + 2 + 46 * 2 + 2),
        (Layout(8, 46, 65_537), 8 * 6 + 2 + 46 * 4 + 2),
    ],
)
def test_bytes_of_a_position(of: Layout, num_bytes: int) -> None:
    assert of.record.itemsize == num_bytes
