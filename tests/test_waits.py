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
from families import CAUSAL, FAMILIES, make_family, without_dropout
from job import distill
from test_golden import RUNS
from tiny import loop
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, flash_attention_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

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
FLASH = "flash_attention_2"
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


def by_bounds(module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **named: Any) -> Any:
    """As flash attention of documents in one row: a causal one between each two bounds."""
    assert mask is None
    rows = [each.transpose(1, 2).flatten(0, 1).transpose(0, 1) for each in (query, key, value)]  # [heads, B * S, d]
    places = torch.arange(rows[0].shape[1])
    document = (places[:, None] >= named["cu_seq_lens_q"]).sum(-1)
    seen = (document[:, None] == document) & (places[:, None] >= places)
    made = scaled_dot_product_attention(*rows, attn_mask=seen, scale=named.get("scaling"), enable_gqa=True)
    return made.transpose(0, 1).view(len(query), query.shape[2], *made.shape[::2]), None


@pytest.mark.parametrize("family", ["gpt2", "llama", "qwen3", "gpt_neox"])
@pytest.mark.parametrize("rows", ["full", "padded", "packed"])
def test_flash_attention_is_told_the_bounds_of_documents(
    family: str, rows: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of several sequences: transformers finds them itself, on the device, and of one sequence alone."""
    model = without_dropout(family)
    inputs, documents = inputs_of(family, rows)
    lengths = {"full": [12, 12, 12], "padded": [7, 5, 11, 1, 12], "packed": [5, 5, 2, 12, 7, 5]}[rows]
    spec, seen = OutputSpec(layers=(LAST,)), documents is None or documents >= 0
    with torch.no_grad():
        expected = LanguageModel(model)(inputs, documents, spec).hidden[LAST]
        monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, FLASH, by_bounds)
        monkeypatch.setitem(ALL_MASK_ATTENTION_FUNCTIONS._global_mapping, FLASH, flash_attention_mask)  # and back
        model.config._attn_implementation = FLASH
        use_known_masks(model)
        with Waits() as waits, Lists() as lists:
            told = {**inputs, "document_lengths": torch.tensor(lengths)}
            found = LanguageModel(model)(told, documents, spec).hidden[LAST]
    assert not waits.places + lists.places
    torch.testing.assert_close(found[seen], expected[seen], rtol=1e-4, atol=1e-4)
