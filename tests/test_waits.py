"""A step waits for its device in one place, whatever is trained: nothing else in it asks for a value.

On a GPU each such question waits for everything before it. A dispatch mode sees them on any device.
"""

import copy
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from families import CAUSAL, FAMILIES, make_family
from job import distill
from test_golden import RUNS
from tiny import loop
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from distill.models.kernels.masks import NAME, use_known_masks
from distill.models.language_model import LAST, LanguageModel, OutputSpec

ASKING = {"_local_scalar_dense", "is_nonzero", "equal", "nonzero", "masked_select", "_unique2"}
LISTS = (torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.cpu, torch.Tensor.item)  # some are not dispatched
# Of a processor alone, which waits for nothing: `Tiling.leaves_out_rows`, LAMB in pieces, a block at some positions.
ON_CPUS = {("chunked.py", "_arrange"), ("chunked.py", "backward"), ("lamb.py", "_step_in_pieces")}
ON_CPUS |= {("known_layers.py", "last_block_at")}
# The one wait, with the losses and counts that were exchanged; counts that lie on the processor wherever the run is.
EXPECTED = {("train.py", "step"): 1 + 1, ("step.py", "pack"): 1}
RUNS_OF = (
    "distilbert",
    "intermediate",
    "causal",
    "chat",
    "albert",
    "albert_lamb",
    "classes",
    "spans",
    "cache",
    "several",
)
OTHERWISE = ("deberta-v2", "gemma2", "mpnet")  # attend without SDPA, in ways of their own


def place() -> tuple[str, str]:
    """File and function that called, outside of torch and of this test."""
    frames = [
        each for each in traceback.extract_stack() if "/torch/" not in each.filename and each.filename != __file__
    ]
    return Path(frames[-1].filename).name, frames[-1].name


class Waits(TorchDispatchMode):
    """Counts the places that ask a tensor for its values."""

    def __init__(self) -> None:
        super().__init__()
        self.places: Counter[tuple[str, str]] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        if function._schema.name.partition("::")[2] in ASKING:
            self.places[place()] += 1
        return function(*arguments, **(keywords or {}))


class Lists(TorchFunctionMode):
    """The same by methods of LISTS."""

    def __init__(self) -> None:
        super().__init__()
        self.places: Counter[tuple[str, str]] = Counter()

    def __torch_function__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        if function in LISTS:
            self.places[place()] += 1
        return function(*arguments, **(keywords or {}))


@pytest.mark.parametrize("name", RUNS_OF)
def test_a_step_waits_once(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, seen = loop.step, []

    def watched(*arguments: Any) -> Any:
        with Waits() as waits, Lists() as lists:
            result = made(*arguments)
        both = waits.places + lists.places
        seen.append({place: number for place, number in both.items() if place not in ON_CPUS})
        return result

    monkeypatch.setattr(loop, "step", watched)
    folders = [f"data.cache={tmp_path / 'cache'}", f"hydra.run.dir={tmp_path / 'run'}"]
    assert distill(*RUNS[name](tmp_path), *folders, "train.steps=3", "evaluate.sets=[]") == 0
    assert seen == [EXPECTED] * 3


def inputs_of(family: str, rows: str) -> tuple[dict[str, torch.Tensor], torch.Tensor | None]:
    """Three sequences of 12 tokens; two of them are padded, or hold several documents."""
    ids = torch.randint(5, 40, (3, 12), generator=torch.Generator().manual_seed(0))
    if rows == "packed":
        return {
            "input_ids": ids,
            "position_ids": torch.stack([torch.arange(12) % length for length in (5, 12, 7)]),
        }, None
    documents = torch.zeros(3, 12, dtype=torch.long)
    documents[0, 7:] = documents[1, 11:] = -1
    return {"input_ids": ids}, documents if rows == "padded" else None


@pytest.mark.parametrize(
    ("family", "rows"),
    [
        (family, rows)
        for family in FAMILIES
        if family not in OTHERWISE
        for rows in ("full", "padded", "packed")[: 3 if family in CAUSAL else 2]
    ],
)
def test_known_masks_hide_what_those_of_transformers_hide(family: str, rows: str) -> None:
    model = make_family(family)
    known = copy.deepcopy(model)
    use_known_masks(known)
    assert known.config._attn_implementation == NAME
    inputs, documents = inputs_of(family, rows)
    spec = OutputSpec(head=True, layers=(LAST,))
    with torch.no_grad():
        expected = LanguageModel(model)(inputs, documents, spec)
        with Waits() as waits:
            found = LanguageModel(known)(inputs, documents, spec)
    assert not waits.places
    seen = torch.ones(36, dtype=torch.bool) if documents is None else documents.flatten() >= 0
    torch.testing.assert_close(found.head_rows[seen], expected.head_rows[seen], rtol=1e-5, atol=1e-5)
