"""Measures of classes and values, as GLUE (Wang et al. 2018) uses them, in percent.

Shapes: N examples, C classes. What is predicted and what is right are [N] numbers of classes as int64, or values as
float64.
"""

from dataclasses import dataclass

import numpy as np

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

    @property
    def output_shape(self) -> tuple[int, ...]:
        """Of what a model gives for one sequence."""
        return (max(len(self.classes), 1),)

    def measure(self, name: str, predicted: np.ndarray, numbers: np.ndarray | None = None) -> float:
        """A measure of predicted classes or values [N], in percent; `numbers`: of the examples, where not of all."""
        labels = self.labels if numbers is None else self.labels[numbers]
        pair = (1 - predicted, 1 - labels) if self.detects_first else (predicted, labels)
        return 100.0 * MEASURES[name](*pair)

    def predicted(self, outputs: np.ndarray) -> np.ndarray:
        """The class or value of each example, [N], for a model's outputs [N, C]; [N, 1] where values are predicted."""
        return outputs.argmax(1) if self.classes else outputs[:, 0].astype(np.float64)

    def scores(self, outputs: np.ndarray) -> dict[str, float]:
        """Its measures by name, for a model's outputs [N, C] or [N, 1].

        Raises:
            NotFinite: an output is not finite.
        """
        if not np.isfinite(outputs).all():
            raise NotFinite("the model's outputs are not finite: nothing can be read from them")
        predicted = self.predicted(outputs)
        return {name: self.measure(name, predicted) for name in self.measures}

    def impossible_measures(self) -> list[str]:
        """The measures that no model has here, whatever it predicts: even the right labels have no value, or 0.

        So it is with a correlation where all labels are the same, and with F1 where no example is of the class that is
        to be detected. Of one text alone, however often it is there, a model predicts one thing, and that has no
        correlation.
        """
        by_labels = [name for name in self.measures if not self.measure(name, self.labels) > 0]
        is_one_text = bool((self.sequences == self.sequences[0]).all())
        return [name for name in self.measures if name in by_labels or (is_one_text and name in CORRELATIONS)]


def accuracy(predicted: np.ndarray, right: np.ndarray) -> float:
    """The fraction of sequences whose class was predicted."""
    return float((predicted == right).mean())


def f1(predicted: np.ndarray, right: np.ndarray, number: int = 1) -> float:
    """Of class 1, "equivalent" or "duplicate"; 0 where it is neither predicted nor right anywhere."""
    both = ((predicted == number) & (right == number)).sum()
    either = (predicted == number).sum() + (right == number).sum()
    return float(2 * both / either) if either else 0.0


def macro_f1(predicted: np.ndarray, right: np.ndarray) -> float:
    """The mean over the classes that are predicted or right somewhere."""
    return float(np.mean([f1(predicted, right, number) for number in np.union1d(predicted, right)]))


def matthews(predicted: np.ndarray, right: np.ndarray) -> float:
    """Matthews correlation of two classes, which is Pearson's of their indicators; 0 where one of them is constant."""
    return pearson(predicted == 1, right == 1)


def pearson(predicted: np.ndarray, right: np.ndarray) -> float:
    """Pearson's correlation; 0 where one of the two is constant, which tells nothing of the other."""
    if np.all(predicted == predicted[0]) or np.all(right == right[0]):
        return 0.0
    return float(np.corrcoef(predicted, right)[0, 1])


def spearman(predicted: np.ndarray, right: np.ndarray) -> float:
    """Spearman's correlation: Pearson's of ranks, equal values sharing their mean rank."""
    return pearson(_ranks(predicted), _ranks(right))


def _ranks(values: np.ndarray) -> np.ndarray:
    """[N] -> [N] float64, from 1."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[inverse]


MEASURES = {
    ACCURACY: accuracy,
    "f1": f1,
    "macro_f1": macro_f1,
    "matthews": matthews,
    "pearson": pearson,
    "spearman": spearman,
}
