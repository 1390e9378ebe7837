"""student.start=fitted: the last layer of a student from layers, fitted to its teacher's last hidden state.

Layers that are taken out of a teacher were followed by others, which the student has not. What these made of the last
state is fitted in closed form: the last feed-forward product is linear in its weights, so the least squares of its
outcome against the teacher's last state, both before their normalisation, is one system of linear equations.

Shapes: N positions, F inner size of the feed-forward part, H hidden size.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from distill.data.batch import Batch
from distill.models.known_layers import known_blocks
from distill.runtime.errors import SettingError

RIDGE = 1e-4  # of the system's mean diagonal: keeps the weights near their start where few positions say little


class Last(NamedTuple):
    """The end of a model's last block: normalised is what this product adds to what goes around it."""

    product: nn.Linear
    norm: nn.LayerNorm


class Fit(NamedTuple):
    """Mean squared distance of the state before its normalisation from the teacher's, before and after the fit."""

    before: float
    after: float
    positions: int


@torch.no_grad()
def fit_last_layer(student: Any, teacher: Any, batches: Iterable[Batch]) -> Fit:
    """Overwrite the student's last feed-forward product and normalisation; both models stay in their modes.

    With g [N, F] what the product gets, a [N, H] what is added to its outcome, t [N, H] the teacher's state before its
    last normalisation, and W0, b0 the weights so far, W and b minimise

        sum of |a + W g + b - t|^2 + r |W - W0|^2 + r |b - b0|^2

    over all positions that are no padding; r is RIDGE times the mean diagonal of the system. The teacher's last
    normalisation is copied.

    Raises:
        SettingError: a family whose last block is not known to the letter.
    """
    own, other = last_of(student), last_of(teacher)
    size, width = own.product.in_features + 1, own.product.out_features
    device = own.product.weight.device
    start = torch.cat([own.product.weight, own.product.bias[:, None]], 1).double()  # [H, F + 1]
    square = torch.zeros(size, size, dtype=torch.float64, device=device)
    mixed, constant, positions = torch.zeros(size, width, dtype=torch.float64, device=device), 0.0, 0
    with _evaluated(student), _evaluated(teacher):
        for batch in batches:
            g, x = _states(student, own, batch)
            _, t = _states(teacher, other, batch)
            g = torch.cat([g, g.new_ones(len(g), 1)], 1)
            wanted = t - (x - g @ start.T)  # of the product
            square += g.T @ g
            mixed += g.T @ wanted
            constant, positions = constant + float(wanted.square().sum()), positions + len(g)
    ridge = RIDGE * float(square.diagonal().mean()) * torch.eye(size, dtype=torch.float64, device=device)
    found = torch.linalg.solve(square + ridge, mixed + ridge @ start.T).T  # [H, F + 1]
    distances = [
        (constant - 2 * float((each.T * mixed).sum()) + float((each.T * (square @ each.T)).sum())) / max(positions, 1)
        for each in (start, found)
    ]
    own.product.weight.copy_(found[:, :-1])
    own.product.bias.copy_(found[:, -1])
    own.norm.load_state_dict(other.norm.state_dict())
    return Fit(distances[0], distances[1], positions)


def last_of(model: Any) -> Last:
    """Where the last block of a model ends.

    Raises:
        SettingError: its family is not known to the letter.
    """
    blocks = known_blocks(model)
    if blocks is None:
        raise SettingError(
            f"student.start=fitted is for BERT, DistilBERT and RoBERTa, not for {type(model).__name__}: use random"
        )
    block: Any = blocks[-1]
    if hasattr(block, "ffn"):
        return Last(block.ffn.lin2, block.output_layer_norm)
    return Last(block.output.dense, block.output.LayerNorm)


def _states(model: Any, last: Last, batch: Batch) -> tuple[Tensor, Tensor]:
    """What the last product gets [N, F], and the state before the last normalisation [N, H], in float64."""
    found: list[Tensor] = []
    handles = [
        module.register_forward_pre_hook(lambda _, arguments: found.append(arguments[0].flatten(0, -2).double()))
        for module in last
    ]
    try:
        attention = None if batch.documents is None else (batch.documents >= 0).long()
        knows_segments = (getattr(model.config, "type_vocab_size", None) or 0) > 1
        inputs = {name: each for name, each in batch.inputs.items() if knows_segments or name != "token_type_ids"}
        model.base_model(**inputs, attention_mask=attention)
    finally:
        for handle in handles:
            handle.remove()
    inner, before = found
    if batch.valid_positions is None:
        return inner, before
    return inner.index_select(0, batch.valid_positions), before.index_select(0, batch.valid_positions)


@contextmanager
def _evaluated(model: Any) -> Iterator[None]:
    """The model without dropout."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)
