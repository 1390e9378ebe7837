"""Losses between the inside of two models against loops over single rows without padding: value and gradient."""

from collections.abc import Callable
from typing import Any

import tiny
import torch
from tiny import assert_close, loss_of, make_masks, make_objective, make_rows, make_tokenizer, objective_config
from torch import Tensor

from distill.data.batch import Batch

COUNT = 5  # rows, of 4 to 12 tokens
# The mean of a loss, from a model pair's rows [1, length] and the projections by name.
Definition = Callable[[list[Tensor], dict[str, Tensor]], Tensor]


def window(batch_size: int, shortest: int | None = 4) -> list[Batch]:
    """The same rows with the same masks for every size of a micro-batch."""
    rows = make_rows(COUNT, shortest=shortest)
    masks = make_masks(make_tokenizer(), rows, mlm_probability=0.3)
    return tiny.make_batches(rows, masks, batch_size, -(-COUNT // batch_size), 0).window(0)


def single_rows(batches: list[Batch]) -> list[Tensor]:
    """Each row on its own, without its padding: [1, length]."""
    found = []
    for batch in batches:
        for row, ids in enumerate(batch.ids):
            length = len(ids) if batch.documents is None else int((batch.documents[row] >= 0).sum())
            found.append(ids[None, :length])
    return found


def assert_agrees(name: str, settings: dict[str, Any], student: Any, teacher: Any, definition: Definition) -> None:
    """The term's value and gradient are those of the definition, and the same for every split into micro-batches."""
    student, teacher = student.double(), teacher.double().requires_grad_(False)
    objective = make_objective(objective_config(0.0, 0.0, 0.0, **{name: {"weight": 0.7, **settings}}), student, teacher)
    own = torch.nn.ModuleDict({"student": student, **objective.modules()}).double()
    for shortest in (4, None):
        own.zero_grad()
        projections = dict(own[name].named_parameters()) if name in own else {}
        expected = 0.7 * definition(single_rows(window(COUNT, shortest)), projections)
        expected.backward()
        gradient = _gradient(own)
        assert max(float(each.abs().max()) for each in gradient.values()) > 1e-3
        assert all(each.grad is not None and float(each.grad.abs().max()) > 1e-6 for each in projections.values())
        for batch_size in (1, 2, COUNT):
            own.zero_grad()
            loss, sums = loss_of(objective, student, teacher, window(batch_size, shortest))
            loss.backward()
            torch.testing.assert_close(loss.detach(), expected.detach(), rtol=1e-6, atol=0)
            # Norms and rotary embeddings of a Llama are in fp32 whatever its weights are.
            assert_close(_gradient(own), gradient, rtol=1e-5, atol=1e-7)
            assert sums[name] > 0


def _gradient(module: torch.nn.Module) -> dict[str, Tensor]:
    own = module.named_parameters()
    return {name: torch.zeros_like(each) if each.grad is None else each.grad.clone() for name, each in own}
