"""Words for the masks of a text, from a masked language model.

Shapes: B rows, S positions, N masks, E input size of the output embedding, V vocabulary.
"""

import re
from collections.abc import Sequence
from typing import TypedDict

import numpy as np
import torch

from distill.commands.prediction.batches import check_length, in_batches
from distill.commands.prediction.settings import PredictConfig
from distill.data.batch import PADDING
from distill.data.lines import Record
from distill.data.text_pairs import TextEncoder
from distill.models.language_model import LanguageModel, OutputSpec
from distill.models.loaded import LoadedModel
from distill.runtime.errors import SettingError

TOP_K = 5
MASKS = re.compile(r"\[MASK\]|<mask>")  # as people write them, whatever the model's own mask token is


class MaskWord(TypedDict):
    """A token for a mask."""

    token: str
    probability: float


class FilledMasks(TypedDict):
    """A text and its masks."""

    filled: str  # with the most probable token in place of each mask
    masks: list[list[MaskWord]]  # of each mask the most probable tokens, the first of them first


def fill_masks(found: LoadedModel, records: Sequence[Record], settings: PredictConfig) -> list[FilledMasks]:
    """The most probable tokens for every mask of every record's `text`, each mask by itself, as the model was trained.

    Returns:
        Of each record its text with the masks filled, and the `top_k` most probable tokens of each.

    Raises:
        SettingError: a text without a mask, or one that is longer than the model's rows.
    """
    tokenizer = found.tokenizer
    mask_id, own = tokenizer.mask_token_id, str(tokenizer.mask_token)
    texts = [MASKS.sub(lambda _: own, record["text"]) for record in records]
    around = TextEncoder(tokenizer).surroundings(pairs=False)
    encoded = tokenizer(texts, add_special_tokens=False)["input_ids"] if texts else []
    rows = [[*around.before, *ids, *around.after] for ids in encoded]
    for number, row in enumerate(rows, 1):
        check_length(found, f"text {number}", len(row))
        if mask_id not in row:
            raise SettingError(f"text {number} has no mask to fill: write {own} where a word is wanted")
    model, outcomes = LanguageModel(found.model), dict[int, FilledMasks]()
    for numbers in in_batches([len(row) for row in rows], settings.batch_size):
        width = max(len(rows[number]) for number in numbers)
        ids = np.full((len(numbers), width), tokenizer.pad_token_id, np.int64)
        valid = np.zeros(ids.shape, bool)
        for line, number in enumerate(numbers):
            ids[line, : len(rows[number])], valid[line, : len(rows[number])] = rows[number], True
        masks = np.flatnonzero(ids == mask_id)
        documents = None if valid.all() else torch.from_numpy(np.where(valid, 0, PADDING)).to(found.device)
        tokens, probabilities = _most_probable(model, ids, documents, masks, settings.top_k or TOP_K, len(tokenizer))
        for line, number in enumerate(numbers):
            here = np.flatnonzero(masks // width == line)
            outcomes[number] = _filled(found, texts[number], tokens[here], probabilities[here])
    return [outcomes[number] for number in range(len(records))]


@torch.inference_mode()
def _most_probable(
    model: LanguageModel, ids: np.ndarray, documents: torch.Tensor | None, masks: np.ndarray, count: int, vocab: int
) -> tuple[np.ndarray, np.ndarray]:
    """Of rows ids [B, S] with masks at the flat positions [N]: the best tokens [N, count], and their probabilities."""
    device = next(model.parameters()).device
    spec = OutputSpec(True, torch.from_numpy(masks).to(device))
    rows = model({"input_ids": torch.from_numpy(ids).to(device)}, documents, spec).head_rows
    assert rows is not None
    best = model.logits(rows, vocab).float().softmax(-1).topk(min(count, vocab))
    return best.indices.cpu().numpy(), best.values.cpu().numpy()


def _filled(found: LoadedModel, text: str, tokens: np.ndarray, probabilities: np.ndarray) -> FilledMasks:
    """The outcome for a text whose masks have these tokens [masks, count]."""
    words = [[_word(found, int(token)) for token in row] for row in tokens]
    # One word after the other, from the left: a mask's word may itself be spelled like a mask.
    parts = text.split(str(found.tokenizer.mask_token))
    filled = parts[0] + "".join(row[0] + part for row, part in zip(words, parts[1:], strict=True))
    masks = [
        [MaskWord(token=word, probability=float(share)) for word, share in zip(*row, strict=True)]
        for row in zip(words, probabilities, strict=True)
    ]
    return FilledMasks(filled=filled, masks=masks)


def _word(found: LoadedModel, token: int) -> str:
    return str(found.tokenizer.decode([token])).strip() or str(found.tokenizer.convert_ids_to_tokens(token))
