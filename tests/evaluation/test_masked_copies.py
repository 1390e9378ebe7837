"""Logits at the masks of masked copies, against the model's own forward of every copy."""

from typing import Any

import pytest
import torch
from tiny import MASK, PAD, SPECIAL, VOCAB, make_model
from torch import nn
from transformers import BertModel

from distill.evaluation.masked_copies import Copies, head_rows_at_masks
from distill.models.language_model import LanguageModel

FAMILIES = ["bert", "distilbert", "roberta", "modernbert", "albert"]


def make_copies(count: int, num_rows: int = 3, padded: bool = True, length: int = 14) -> Copies:
    """`count` copies of `num_rows` sequences, some masked at their first or last position; padded to unlike lengths."""
    torch.manual_seed(7)
    rows = torch.randint(len(SPECIAL), VOCAB, (num_rows, length))
    lengths = torch.randint(2, length + 1, (num_rows,)) if padded else torch.full((num_rows,), length)
    valid = torch.arange(length) < lengths[:, None]
    rows[~valid] = PAD
    row = torch.randint(num_rows, (count,))
    column = (torch.rand(count) * lengths[row]).long()
    column[::5], column[1::5] = 0, lengths[row[1::5]] - 1
    return Copies(rows, valid if padded else None, row, column, MASK)


def logits_at_masks(model: Any, copies: Copies) -> torch.Tensor:
    """[B, V]"""
    reader = LanguageModel(model)
    return reader.logits(head_rows_at_masks(reader, copies), VOCAB)


def naive(model: Any, copies: Copies) -> torch.Tensor:
    """The whole forward of each copy by itself, without its padding, in float64."""
    model.double()
    values = []
    for number, column in zip(copies.row.tolist(), copies.column.tolist(), strict=True):
        ids = copies.sequences[number][copies.sequences[number] != PAD].clone()
        ids[column] = copies.mask_id
        values.append(model(input_ids=ids[None]).logits[0, column])
    model.float()
    return torch.stack(values)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("layers", [1, 2, 4])
@pytest.mark.parametrize("padded", [False, True])
@torch.no_grad()
def test_each_copy_has_the_logits_of_its_own_forward(family: str, layers: int, padded: bool) -> None:
    model = make_model(family, layers)
    for count in (1, 7, 64):
        copies = make_copies(count, padded=padded)
        found = logits_at_masks(model, copies)
        torch.testing.assert_close(found, naive(model, copies).float(), rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("family", ["bert", "distilbert"])
@torch.no_grad()
def test_less_is_computed_than_in_the_full_forward(family: str) -> None:
    """The last layer works on one position a copy, the first projects each sequence once."""
    model, copies = make_model(family, 3), make_copies(60, num_rows=2, padded=False)
    seen: dict[nn.Module, int] = {}

    def count(module: nn.Module, inputs: tuple[torch.Tensor, ...], _: torch.Tensor) -> None:
        seen[module] = seen.get(module, 0) + inputs[0].numel() // inputs[0].shape[-1]

    for module in model.base_model.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(count)
    logits_at_masks(model, copies)
    encoder = model.bert.encoder if family == "bert" else model.distilbert.transformer
    first, middle, last = encoder.layer
    positions = 60 * copies.sequences.shape[1]
    assert {seen[m] for m in middle.modules() if m in seen} == {positions}
    assert {seen[m] for m in first.modules() if m in seen} == {positions, copies.sequences.numel() + 60}
    assert {seen[m] for m in last.modules() if m in seen} == {60}


@torch.no_grad()
def test_models_that_are_not_known_to_the_letter_run_in_full() -> None:
    class Doubled(BertModel):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            out = super().forward(*args, **kwargs)
            out.last_hidden_state = 2 * out.last_hidden_state
            return out

    copies = make_copies(9)
    plain = logits_at_masks(make_model("bert", 2), copies)
    model = make_model("bert", 2)
    model.bert.__class__ = Doubled
    found = logits_at_masks(model, copies)
    torch.testing.assert_close(found, naive(model, copies).float(), rtol=1e-5, atol=2e-5)
    assert not torch.allclose(found, plain, atol=1e-2)
