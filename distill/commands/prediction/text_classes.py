"""Classes or values of texts, from a model that was fine-tuned for them."""

from collections.abc import Sequence
from typing import TypedDict

import numpy as np
import torch

from distill.commands.prediction.batches import head_outputs, sequence_length
from distill.commands.prediction.settings import PredictConfig
from distill.data.class_sequences import class_sequences
from distill.data.collate.classes import Classes
from distill.data.lines import Record
from distill.data.tables import LabelledTexts
from distill.models.loaded import LoadedModel
from distill.runtime.errors import SettingError


class Value(TypedDict):
    """The prediction of a model of values."""

    value: float


Classified = TypedDict("Classified", {"class": str, "probability": float, "probabilities": dict[str, float]})


def classify(model: LoadedModel, records: Sequence[Record], settings: PredictConfig) -> list[Classified] | list[Value]:
    """The class of each record's `text`, or of its pair `text` and `second`, or its value.

    Texts are cut as in training: what does not fit into a sequence is cut off the end of the longer text.

    Returns:
        For each record `class`, `probability` and `probabilities` by class, the largest first; of a model that gives
        values `value`.

    Raises:
        SettingError: some records are pairs and others are not, or a text has several classes at once.
    """
    names, outputs = class_names(model), class_outputs(model, records, settings)
    if not names:
        return [Value(value=float(row[0])) for row in outputs]
    probabilities_by_class = torch.from_numpy(outputs).softmax(-1).numpy()
    outcome: list[Classified] = []
    for row in probabilities_by_class:
        order = np.argsort(-row, kind="stable")[: settings.top_k]
        probabilities = {names[number]: float(row[number]) for number in order}
        outcome.append({"class": names[order[0]], "probability": float(row[order[0]]), "probabilities": probabilities})
    return outcome


def class_names(model: LoadedModel) -> list[str]:
    """The name of each class by its number; none where the model gives values.

    Raises:
        SettingError: the model was trained to give a text several classes at once, each with a probability of its own.
    """
    config = model.model.config
    if config.problem_type == "multi_label_classification":
        raise SettingError(
            f"model={model.path} gives a text several classes at once (problem_type={config.problem_type}), which "
            "predict does not: choose a model of one class for each text, or of values"
        )
    if config.problem_type == "regression" or config.num_labels == 1:
        return []
    return [str(config.id2label[number]) for number in range(config.num_labels)]


def class_outputs(model: LoadedModel, records: Sequence[Record], settings: PredictConfig) -> np.ndarray:
    """The model's outputs for each record, float64 [records, classes]: logits, or one value."""
    if not records:
        return np.zeros((0, model.model.config.num_labels))
    pairs = ["second" in record for record in records]
    if any(pairs) != all(pairs):
        odd = pairs.index(not pairs[0]) + 1
        raise SettingError(f"record {odd}: some records are pairs of texts and others are not; give one kind at a time")
    seconds = [str(record["second"]) for record in records] if pairs[0] else None
    texts = LabelledTexts("input", [record["text"] for record in records], seconds, np.empty(0), ())
    rows = class_sequences(texts, model.tokenizer, sequence_length(model, settings), "sequence_length")
    batches = list(head_outputs(model, rows.sequences, rows.pad_id, Classes(rows), "class", settings.batch_size))
    outputs = np.zeros((len(records), batches[0][1].shape[1]))
    for numbers, values in batches:
        outputs[numbers] = values
    return outputs
