"""Dropout on the CPU: zeros at the wished rate, independent, and no other weights."""

import pytest
import tiny
import torch
from tiny import hidden_states

from distill.models.kernels.dropout import Dropout, factors, keyed_by_sequence, replace_dropout


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("p", [0.1, 0.5, 0.93])
def test_values_are_dropped_at_random_and_keep_their_mean(p: float, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    found = factors(torch.empty(999, 1001, dtype=dtype), p)
    assert found.dtype == dtype and found.unique().numel() == 2
    kept = (found > 0).float()
    assert kept.mean().item() == pytest.approx(1 - p, abs=4 * (p * (1 - p) / kept.numel()) ** 0.5)
    assert found.max().item() == pytest.approx(1 / (1 - p), rel=5e-3 if dtype == torch.bfloat16 else 2e-4)
    # Four neighbours share a number: neither they nor those of the next row may know of each other.
    flat = kept.flatten() - kept.mean()
    for distance in (1, 2, 3, 4, 1001):
        assert abs((flat[distance:] * flat[:-distance]).mean().item()) < 5 * p * (1 - p) / flat.numel() ** 0.5


def test_a_trained_student_drops_and_an_evaluated_one_does_not() -> None:
    student = tiny.make_model("distilbert", 2, dropout=0.5)
    names = list(student.state_dict())
    replace_dropout(student)
    assert sum(type(module) is Dropout for module in student.modules()) >= 5
    assert not any(type(module) is torch.nn.Dropout for module in student.modules())
    assert list(student.state_dict()) == names
    ids = torch.from_numpy(tiny.make_rows(4)).long()
    student.train()
    assert not torch.equal(hidden_states(student, ids, None), hidden_states(student, ids, None))
    student.eval()
    assert torch.equal(hidden_states(student, ids, None), hidden_states(student, ids, None))


def by_sequence(rows: list[int], p: float = 0.3, calls: int = 2, shape: tuple[int, ...] = (5, 7)) -> list[torch.Tensor]:
    """What several dropouts of one forward multiply the rows of these keys by, [rows, calls, ...]."""
    with keyed_by_sequence(rows):
        drawn = [factors(torch.empty(len(rows), *shape), p) for _ in range(calls)]
    return list(torch.stack(drawn, 1))


def test_a_row_drops_the_same_whatever_stands_beside_it() -> None:
    together = dict(zip([11, 5, 2**63 + 9], by_sequence([11, 5, 2**63 + 9]), strict=True))
    for key, expected in together.items():
        assert torch.equal(by_sequence([key])[0], expected)
    torch.manual_seed(123)  # torch's own stream has no part in it
    assert torch.equal(by_sequence([5, 11])[1], together[11])


def test_rows_and_calls_have_streams_of_their_own() -> None:
    rows = by_sequence(list(range(100, 164)), calls=4, shape=(64, 16))
    kept = (torch.stack(rows).flatten(2) > 0).double()  # [64 rows, 4 calls, 1024 values]
    streams = kept.flatten(0, 1) - kept.mean()
    likeness = streams @ streams.T / (0.3 * 0.7 * 1024)
    others = likeness - torch.eye(len(streams), dtype=torch.float64) * likeness.diagonal()
    assert float(others.abs().max()) < 6 / 1024**0.5, "as unlike as independent draws"
    assert kept.mean().item() == pytest.approx(0.7, abs=4 * (0.21 / kept.numel()) ** 0.5)


def test_outside_of_it_and_for_other_shapes_torchs_stream_is_used() -> None:
    for given in ([], [1, 2, 3]):
        torch.manual_seed(7)
        with keyed_by_sequence(given):
            first = factors(torch.empty(2, 40), 0.5)
        torch.manual_seed(7)
        assert torch.equal(factors(torch.empty(2, 40), 0.5), first)


@pytest.mark.parametrize("family", ["bert", "distilbert", "roberta", "albert", "modernbert"])
def test_every_family_on_the_list_drops_by_row(family: str) -> None:
    """Hidden states of a row do not depend on the rows beside it, with dropout in attention and elsewhere."""
    from distill.models.kernels.attention import use_batched_products

    student = tiny.make_model(family, 2, dropout=0.3).train()
    use_batched_products(student)
    replace_dropout(student)
    ids = torch.from_numpy(tiny.make_rows(4)).long()
    keys = [31, 17, 5, 8]
    with torch.no_grad():
        with keyed_by_sequence(keys):
            whole = hidden_states(student, ids, None)
        with keyed_by_sequence(keys[2:]):
            half = hidden_states(student, ids[2:], None)
        with keyed_by_sequence([1, 2, 3, 4]):
            assert not torch.allclose(hidden_states(student, ids, None), whole)
    torch.testing.assert_close(half, whole[2:], rtol=1e-5, atol=1e-5)
