"""Measures of classes and values, as GLUE (Wang et al. 2018) uses them, in percent.

Shapes: N examples, C classes.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from distill.data.tables import LabelledTexts
from distill.data.text_pairs import ClassSequences
from distill.evaluation.sets import EvaluationSet, NotFinite

ACCURACY = "accuracy"
CORRELATIONS = ("matthews", "pearson", "spearman")
OF_TABLES = {True: (ACCURACY, "macro_f1"), False: ("pearson", "spearman")}  # whether it has classes -> its measures


@dataclass(frozen=True, kw_only=True)
class ClassSet(EvaluationSet):
    """An evaluation set of labelled texts: its `sequences`, and what their scores need."""

    labels: np.ndarray  # [N] int64 numbers of classes, or float64 values
    classes: tuple[str, ...]  # none where values are predicted
    measures: tuple[str, ...]
    detects_first: bool = False  # whether F1 is of class 0, as another task or model numbers them, and not of class 1

    def measure(self, name: str, predicted: np.ndarray) -> float:
        """A measure of predicted classes or values [N], in percent."""
        if self.detects_first:
            return measure(name, 1 - predicted, 1 - self.labels)
        return measure(name, predicted, self.labels)

    def scores(self, outputs: np.ndarray) -> dict[str, float]:
        """Its measures by name, for a model's outputs [N, C], or [N] or [N, 1] where values are predicted.

        Raises:
            NotFinite: an output is not finite.
            ValueError: the shapes do not fit.
        """
        if not np.isfinite(outputs).all():
            raise NotFinite("the model's outputs are not finite: nothing can be read from them")
        if len(outputs) != len(self.labels) or (self.classes and outputs.shape[1:] != (len(self.classes),)):
            raise ValueError(
                f"outputs of shape {outputs.shape} for {len(self.labels)} texts of {len(self.classes)} classes"
            )
        predicted = outputs.argmax(1) if self.classes else outputs.reshape(len(self.labels)).astype(np.float64)
        return {name: self.measure(name, predicted) for name in self.measures}


def class_set(name: str, texts: LabelledTexts, sequences: ClassSequences, measures: Sequence[str] = ()) -> ClassSet:
    """The evaluation set of these texts; without `measures` those for tables of the user's."""
    chosen = tuple(measures) or OF_TABLES[bool(texts.classes)]
    return ClassSet(
        name,
        texts.describe(),
        sequences.sequences,
        len(texts),
        labels=texts.labels,
        classes=texts.classes,
        measures=chosen,
    )


def impossible_measures(data: ClassSet) -> list[str]:
    """The measures of a set that no model has there, whatever it predicts: even the right labels have no value, or 0.

    So it is with a correlation where all labels are the same, and with F1 where no example is of the class that is to
    be detected. Of one text alone, however often it is there, a model predicts one thing, and that has no correlation.
    """
    by_labels = [name for name in data.measures if not data.measure(name, data.labels) > 0]
    is_one_text = bool((data.sequences == data.sequences[0]).all())
    return [name for name in data.measures if name in by_labels or (is_one_text and name in CORRELATIONS)]


def measure(name: str, predicted: np.ndarray, right: np.ndarray) -> float:
    """A measure in percent: accuracy, f1 (of class 1), macro_f1 (mean of all classes), matthews, pearson or spearman.

    Args:
        predicted, right: [N] numbers of classes as int64, or values as float64.
    """
    return 100.0 * MEASURES[name](predicted, right)


def accuracy(predicted: np.ndarray, right: np.ndarray) -> float:
    """The fraction of sequences whose class was predicted."""
    return float((predicted == right).mean())


def f1(predicted: np.ndarray, right: np.ndarray) -> float:
    """Of class 1, "equivalent" or "duplicate"; 0 where it is neither predicted nor right anywhere."""
    from torchmetrics.functional.classification import binary_f1_score  # its import takes a second

    return float(
        binary_f1_score(torch.from_numpy((predicted == 1).astype(int)), torch.from_numpy((right == 1).astype(int)))
    )


def macro_f1(predicted: np.ndarray, right: np.ndarray) -> float:
    """The mean over the classes that are predicted or right somewhere."""
    from torchmetrics.functional.classification import multiclass_f1_score

    classes = max(2, int(max(predicted.max(), right.max())) + 1)
    return float(multiclass_f1_score(torch.from_numpy(predicted), torch.from_numpy(right), classes, average="macro"))


def matthews(predicted: np.ndarray, right: np.ndarray) -> float:
    """Matthews correlation of two classes, which is Pearson's of their indicators; 0 where one of them is constant.

    torchmetrics' own gives other values than 0 there.
    """
    value = pearson((predicted == 1).astype(np.float64), (right == 1).astype(np.float64))
    return 0.0 if np.isnan(value) else value


def pearson(predicted: np.ndarray, right: np.ndarray) -> float:
    """Pearson's correlation, in float64; nan where one of the two is constant."""
    from torchmetrics.functional.regression import pearson_corrcoef

    if np.ptp(predicted) == 0 or np.ptp(right) == 0:
        return float("nan")
    return float(pearson_corrcoef(torch.from_numpy(predicted), torch.from_numpy(right)))


def spearman(predicted: np.ndarray, right: np.ndarray) -> float:
    """Spearman's correlation: Pearson's of ranks, equal values sharing their mean rank; nan as for Pearson's.

    torchmetrics' own computes ranks in float32 and adds 1e-6 to the denominator.
    """
    return pearson(_ranks(predicted), _ranks(right))


def _ranks(values: np.ndarray) -> np.ndarray:
    """[N] -> [N] float64, from 1."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return (last - (counts - 1) / 2)[inverse]


MEASURES = {
    ACCURACY: accuracy,
    "f1": f1,
    "macro_f1": macro_f1,
    "matthews": matthews,
    "pearson": pearson,
    "spearman": spearman,
}
