"""Tokens for the masks of a text, from a masked language model.

Shapes: B sequences, S positions, N masks, E input size of the output embedding, V vocabulary.
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


def fill_masks(model: LoadedModel, records: Sequence[Record], settings: PredictConfig) -> list[FilledMasks]:
    """The most probable tokens for every mask of every record's `text`, each mask by itself, as the model was trained.

    Returns:
        For each record its text with the masks filled, and the `top_k` most probable tokens of each.

    Raises:
        SettingError: a text without a mask, or one that is longer than the model reads.
    """
    tokenizer = model.tokenizer
    mask_id, mask = tokenizer.mask_token_id, str(tokenizer.mask_token)
    texts = [MASKS.sub(lambda _: mask, record["text"]) for record in records]
    around = TextEncoder(tokenizer).surroundings(pairs=False)
    encoded = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"] if texts else []
    sequences = [[*around.before, *ids, *around.after] for ids in encoded]
    for number, sequence in enumerate(sequences, 1):
        check_length(model, f"text {number}", len(sequence))
        if mask_id not in sequence:
            raise SettingError(f"text {number} has no mask to fill: write {mask} where a token is missing")
    language_model, outcomes = LanguageModel(model.model), dict[int, FilledMasks]()
    for numbers in in_batches([len(sequence) for sequence in sequences], settings.batch_size):
        width = max(len(sequences[number]) for number in numbers)
        ids = np.full((len(numbers), width), tokenizer.pad_token_id, np.int64)
        valid = np.zeros(ids.shape, bool)
        for line, number in enumerate(numbers):
            ids[line, : len(sequences[number])], valid[line, : len(sequences[number])] = sequences[number], True
        masks = np.flatnonzero(ids == mask_id)
        documents = None if valid.all() else torch.from_numpy(np.where(valid, 0, PADDING)).to(model.device)
        tokens, probabilities = _most_probable(
            language_model, ids, documents, masks, settings.top_k or TOP_K, len(tokenizer)
        )
        for line, number in enumerate(numbers):
            here = np.flatnonzero(masks // width == line)
            outcomes[number] = _filled(model, texts[number], tokens[here], probabilities[here])
    return [outcomes[number] for number in range(len(records))]


@torch.inference_mode()
def _most_probable(
    model: LanguageModel, ids: np.ndarray, documents: torch.Tensor | None, masks: np.ndarray, count: int, vocab: int
) -> tuple[np.ndarray, np.ndarray]:
    """Of ids [B, S] with masks at the flat positions [N]: the best tokens [N, count], and their probabilities."""
    device = next(model.parameters()).device
    spec = OutputSpec(True, torch.from_numpy(masks).to(device))
    head_rows = model({"input_ids": torch.from_numpy(ids).to(device)}, documents, spec).head_rows
    assert head_rows is not None
    best = model.logits(head_rows, vocab).float().softmax(-1).topk(min(count, vocab))
    return best.indices.cpu().numpy(), best.values.cpu().numpy()


def _filled(model: LoadedModel, text: str, tokens: np.ndarray, probabilities: np.ndarray) -> FilledMasks:
    """The outcome for a text whose masks have these tokens [masks, count]."""
    tokens_of_masks = [[_token_text(model, int(token)) for token in row] for row in tokens]
    # One token after the other, from the left: the token of a mask may itself be spelled like a mask.
    parts = text.split(str(model.tokenizer.mask_token))
    filled = parts[0] + "".join(row[0] + part for row, part in zip(tokens_of_masks, parts[1:], strict=True))
    masks = [
        [MaskWord(token=token, probability=float(probability)) for token, probability in zip(*row, strict=True)]
        for row in zip(tokens_of_masks, probabilities, strict=True)
    ]
    return FilledMasks(filled=filled, masks=masks)


def _token_text(model: LoadedModel, token: int) -> str:
    return str(model.tokenizer.decode([token])).strip() or str(model.tokenizer.convert_ids_to_tokens(token))
