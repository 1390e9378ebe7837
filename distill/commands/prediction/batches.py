"""Batches of sequences of similar length, the longest first, so that little of a batch is padding.

Shapes: R sequences, B of a batch, S positions.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from distill.commands.prediction.settings import PredictConfig
from distill.models.language_model import LanguageModel, OutputSpec
from distill.models.loaded import LoadedModel
from distill.runtime.errors import SettingError

LONGEST = 512  # tokens of a sequence, of a model that sets no limit


def in_batches(lengths: Sequence[int], batch_size: int) -> Iterator[list[int]]:
    """The indices of the sequences with these lengths, in batches."""
    order = sorted(range(len(lengths)), key=lambda number: -lengths[number])
    yield from (order[start : start + batch_size] for start in range(0, len(order), batch_size))


def check_length(model: LoadedModel, what: str, length: int, further: str = "") -> None:
    """Raises SettingError where a sequence is longer than the model reads; `further` names what counts besides."""
    if model.longest is not None and length > model.longest:
        raise SettingError(
            f"{what} has {length:,} tokens{further}, and model={model.path} reads {model.longest:,}: shorten it"
        )


def sequence_length(model: LoadedModel, settings: PredictConfig) -> int:
    """Tokens of a sequence: as set, else as in the run that trained the model, else all that the model reads.

    Raises:
        SettingError: more than it reads.
    """
    longest = model.longest or LONGEST
    requested = settings.sequence_length
    if requested is not None and requested > longest:
        raise SettingError(f"sequence_length={requested}: model={model.path} reads {longest:,} tokens; lower it")
    trained = model.corpus.get("sequence_length")
    return requested or min(trained if isinstance(trained, int) else LONGEST, longest)


@torch.inference_mode()
def head_outputs(
    model: LoadedModel, rows: np.ndarray, pad_id: int, collator: Any, head: str, batch_size: int
) -> Iterator[tuple[list[int], np.ndarray]]:
    """A head's outputs of a fine-tuned model for rows [R, S], computed as in training, with the indices of the rows.

    Args:
        collator: of the head's task.
    """
    language_model = LanguageModel(model.model)
    for numbers in in_batches((rows != pad_id).sum(1).tolist(), batch_size):
        ids = rows[numbers].astype(np.int64)
        batch = collator.collate(ids, np.zeros(len(ids), np.uint64), np.array(numbers)).to(model.device)
        outputs = language_model(batch.inputs, batch.documents, OutputSpec(extra=(head,))).extra[head]
        yield numbers, outputs.float().cpu().numpy()
