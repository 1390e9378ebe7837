"""Sequences as a student reads them, with their targets marked, for people who want to know which tokens count."""

from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np

from distill.data.batch import Batch

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LEGEND = (
    "In [[ ]]: what the student is to predict. Where it sees another token than [MASK] there, that follows <-. "
    "Terms with positions: all learn from the other tokens, too."
)
ORDERS = ("in their order", "swapped")  # of the two segments of a sequence


def shown(batch: Batch, tokenizer: "PreTrainedTokenizerBase", classes: Sequence[str] = ()) -> list[str]:
    """The text of each of B sequences without its padding, its targets in [[ ]], its label in a line behind it.

    Args:
        classes: the names of the classes, where labels are these.
    """
    (count, length), seen = batch.ids.shape, batch.ids.numpy().reshape(-1)
    ids, target, valid = seen.copy(), np.zeros(seen.shape, bool), np.ones(seen.shape, bool)
    if batch.valid_positions is not None:
        valid[:] = False
        valid[batch.valid_positions.numpy()] = True
    notes: list[list[str]] = [[] for _ in range(count)]
    labels = {name: (each.positions.numpy(), each.targets.numpy()) for name, each in batch.labels.items()}
    for name, (positions, targets) in labels.items():
        if name == "clm":
            target[positions + 1] = True
        elif name == "mlm":
            ids[positions], target[positions] = targets, True
        elif name == "span_start":
            for row, start, end in zip(positions, targets, labels["span_end"][1], strict=True):
                target[row * length + start : row * length + end + 1] = end > 0
                notes[row] += ["no answer"] * int(end == 0)
        elif name != "span_end":
            names = ORDERS if name == "sop" else classes
            for row, value in zip(positions, targets, strict=True):
                notes[row].append(f"{name}: {names[value] if names else value}")
    texts = []
    for row in range(count):
        here = row * length + np.flatnonzero(valid[row * length : (row + 1) * length])
        texts.append("\n".join([_marked(ids[here], seen[here], target[here], tokenizer), *notes[row]]))
    return texts


def _marked(ids: np.ndarray, seen: np.ndarray, target: np.ndarray, tokenizer: "PreTrainedTokenizerBase") -> str:
    """The text of a sequence, its targets in [[ ]], parted by blanks where the tokenizer would join its pieces."""

    def text_of(some: np.ndarray) -> str:
        return str(tokenizer.decode(some.tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    other = target & (seen != tokenizer.mask_token_id) & bool((seen != ids).any())
    keys = [(bool(is_target), place if other[place] else -1) for place, is_target in enumerate(target)]
    texts, marked = list[str](), list[str]()
    for (is_target, replaced), places in groupby(range(len(ids)), lambda place: keys[place]):
        texts.append(text_of(ids[[*places]]))
        instead = f" <- {text_of(seen[[replaced]])}" if replaced >= 0 else ""
        marked.append(f"[[{texts[-1]}{instead}]]" if is_target else texts[-1])
    return ("" if "".join(texts) == text_of(ids) else " ").join(marked)
