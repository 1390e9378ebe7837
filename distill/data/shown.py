"""Sequences as a student reads them, with their targets marked, for people who want to know which tokens count."""

from collections.abc import Iterator, Sequence
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
    (count, length), ids = batch.ids.shape, batch.ids.numpy().reshape(-1).copy()
    seen, valid, target = ids.copy(), np.ones(count * length, bool), np.zeros(count * length, bool)
    if batch.valid_positions is not None:
        valid[:] = False
        valid[batch.valid_positions.numpy()] = True
    notes: list[list[str]] = [[] for _ in range(count)]
    spans = []
    for name, labels in batch.labels.items():
        positions, targets = labels.positions.numpy(), labels.targets.numpy()
        if name == "clm":
            target[positions + 1] = True
        elif name == "mlm":
            ids[positions], target[positions] = targets, True
        elif name in ("span_start", "span_end"):
            spans.append(targets)
        else:
            for row, value in zip(positions, targets, strict=True):
                names = ORDERS if name == "sop" else classes
                notes[row].append(f"{name}: {names[value] if names else value}")
    if spans:
        for row, start, end in zip(positions, *spans, strict=True):
            target[row * length + start : row * length + end + 1] = end > 0
            notes[row] += ["no answer"] * int(end == 0)
    texts = []
    for row in range(count):
        here = slice(row * length, (row + 1) * length)
        kept = valid[here]
        marked = _marked(ids[here][kept], seen[here][kept], target[here][kept], tokenizer)
        texts.append("\n".join(["".join(marked), *notes[row]]))
    return texts


def _marked(
    ids: np.ndarray, seen: np.ndarray, target: np.ndarray, tokenizer: "PreTrainedTokenizerBase"
) -> Iterator[str]:
    """The text of a sequence in pieces. What is seen in place of a token stands behind it where that is not [MASK]."""
    other = target & (seen != tokenizer.mask_token_id) if (seen != ids).any() else np.zeros_like(target)
    keys = [(bool(is_target), place if other[place] else -1) for place, is_target in enumerate(target)]
    begin, before = 0, ""
    for (is_target, place), alike in groupby(keys):
        begin += len([*alike])
        text = _text(ids[:begin], tokenizer)
        # Of half a character, or where a tokenizer joins words, the text up to here does not begin with that before.
        piece = text[len(before) :] if text.startswith(before) else text[len(_common(before, text)) :]
        before = text
        blank = piece[: len(piece) - len(piece.lstrip(" "))] if is_target else ""
        instead = f" <- {_text(seen[place : place + 1], tokenizer).strip()}" if place >= 0 else ""
        yield f"{blank}[[{piece[len(blank) :]}{instead}]]" if is_target else piece


def _text(ids: np.ndarray, tokenizer: "PreTrainedTokenizerBase") -> str:
    return str(tokenizer.decode(ids.tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False))


def _common(first: str, second: str) -> str:
    """What both texts begin with."""
    length = next((at for at, pair in enumerate(zip(first, second, strict=False)) if pair[0] != pair[1]), len(second))
    return second[: min(length, len(first))]
