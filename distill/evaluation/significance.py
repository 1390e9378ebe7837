"""Whether one model is better than another on a set, or only on this sample of it: one conclusion, in three words.

As Koehn (2004, "Statistical significance tests for machine translation evaluation") compares systems: the set is drawn
anew many times, with replacement, unit by unit, and both models are scored on the same draw (paired bootstrap). A unit
is a document, since tokens of one document depend on each other, or a labelled example. Of accuracies McNemar's test
finds nearly the same, and says nothing in points; where few examples differ the bootstrap finds too much, so six have
to: of five, all can favour one of two equal models with a probability of 6 %.

Shapes: M models, U units, R sequences, D draws.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from distill.data.batches import Collator
from distill.data.collate.clm import CausalLM
from distill.data.collate.mlm import MaskedLM
from distill.data.sequence_store import LARGE, outer_ids, sequence_bytes
from distill.evaluation.classes import ClassSet
from distill.evaluation.conclusion import UNCLEAR, Conclusion, in_points, word_of
from distill.evaluation.measures import Scoring, SequenceLosses, exp
from distill.evaluation.questions import SquadSet
from distill.evaluation.sets import EvaluationSet

RATIO, POINTS = "ratio", "points"
RESAMPLES = 10_000
FEWER_RESAMPLES = 1_000  # of measures that are computed anew for each draw
TAILS = (0.025, 0.975)
FEWEST = 20  # documents that a bootstrap over documents takes; of fewer, stretches of sequences are drawn
LEAST = 10  # units of any kind: draws of fewer are too much alike to prove anything
LEAST_DIFFERING = 6  # of these, on which the two models do not score alike
STRETCH = 16  # consecutive sequences of the text that are drawn together then
# Units where only some sequences of the text are scored.
SAMPLED = f"groups of sequences, those of a stretch of {STRETCH} together"
AT_ONCE = 4 << 20  # drawn units that are in memory at a time
READ_SEQUENCES = 1 << 16  # sequences that are looked at together
# Of one model, by measure and set: its losses, or of a measure that is no mean over sequences what it predicts, [R].
ModelLosses = Mapping[tuple[str, str], SequenceLosses | np.ndarray]


@dataclass(frozen=True)
class Units:
    """What is drawn: numbers of sequences that belong together."""

    name: str  # what it is called behind their number, such as `documents`
    of_row: np.ndarray  # [R] int64, the unit of each sequence of the set, from 0


@dataclass(frozen=True)
class GapInterval:
    """The resampled fraction of the gap between a baseline and a teacher that a student closes."""

    low: float | None  # of the interval that holds the fractions of 95 % of the draws; None: some have no gap
    high: float | None
    without_gap: int  # draws in which the baseline is no worse than the teacher, so that there is no such fraction


@dataclass(frozen=True)
class Paired:
    """Models that are scored on the same units of a set, by one measure.

    Attributes:
        values: [M, U] the losses of each model by unit, or what it predicts.
        score: of one model, given [draws, U] of these and the numbers of the units: [draws], higher is better; minus
            nats a token, or a fraction.
        unit: of a difference, as `Conclusion` has it.
        units: what is drawn.
    """

    values: np.ndarray
    score: Callable[[np.ndarray, np.ndarray], np.ndarray]
    unit: str
    units: str = "documents"
    resamples: int = RESAMPLES

    @property
    def is_enough(self) -> bool:
        """Whether there are units and numbers that a bootstrap can read."""
        return self.values.shape[1] >= LEAST and bool(np.isfinite(self.values).all())

    def drawn(self, seed: int = 0) -> np.ndarray:
        """[D + 1, M] the scores on the whole set, and on draws of as many units with replacement.

        scipy's `bootstrap` draws the same, takes statistics of one number, and is no dependency of this package.
        """
        draw, num_units = np.random.default_rng(seed), self.values.shape[1]
        scores, at_once = [self._scores(np.arange(num_units)[None])], max(1, AT_ONCE // num_units)
        for start in range(0, self.resamples, at_once):
            size = (min(at_once, self.resamples - start), num_units)
            scores.append(self._scores(draw.integers(num_units, size=size)))
        return np.concatenate(scores)

    def _scores(self, numbers: np.ndarray) -> np.ndarray:
        return np.stack([self.score(of_model[numbers], numbers) for of_model in self.values], 1)


def paired_losses(losses: Sequence[np.ndarray], counts: np.ndarray, unit: str, units: str = "documents") -> Paired:
    """Models by their losses.

    Args:
        losses: of each model [U] sums over each unit's tokens, in nats; or its errors.
        counts: [U] how many tokens or examples these are; units without one are left out.
    """
    scored = counts > 0
    values, counts = np.stack(losses)[:, scored], counts[scored]
    return Paired(values, lambda drawn, numbers: -drawn.sum(1) / counts[numbers].sum(1), unit, units)


def paired_predictions(predicted: Sequence[np.ndarray], data: ClassSet, measure: str) -> Paired:
    """Models by what each of them predicts for the examples of a set, [N]."""

    def score(drawn: np.ndarray, numbers: np.ndarray) -> np.ndarray:
        return np.array([data.measure(measure, *pair) / 100 for pair in zip(drawn, numbers, strict=True)])

    return Paired(np.stack(predicted), score, POINTS, "examples", FEWER_RESAMPLES)


def conclude(paired: Paired, seed: int = 0) -> Conclusion:
    """What the draws say of the first model against the second."""
    n, differing = paired.values.shape[1], int((paired.values[0] != paired.values[1]).sum())
    scores = paired.drawn(seed) if paired.is_enough else np.full((1, 2), np.nan)
    gains = scores[:, 0] - scores[:, 1]
    if not np.isfinite(gains).all():
        few = f"too few {paired.units}, {n} of the {LEAST} that are needed"
        reason = few if n < LEAST else "a model has no finite score on the set, or on some draws of it"
        return Conclusion(UNCLEAR, reason, None, None, None, paired.unit, n, paired.units)
    low, high = np.quantile(gains[1:], TAILS)
    word = UNCLEAR if differing < LEAST_DIFFERING else word_of(low, high)
    is_ratio = paired.unit == RATIO
    ends = (gains[0], high, low) if is_ratio else (gains[0], low, high)
    whole, low, high = (exp(-gain) if is_ratio else 100 * float(gain) for gain in ends)
    shown = [f"{number:.3f}" if is_ratio else in_points(number) for number in (whole, low, high)]
    of = "times the perplexity" if is_ratio else "points"
    reason = f"{shown[0]} {of}, 95 % from {shown[1]} to {shown[2]}, on {n:,} {paired.units}"
    if differing < LEAST_DIFFERING:
        reason += f", {differing or 'none'} of which {'differs' if differing < 2 else 'differ'}"
    return Conclusion(word, reason, whole, low, high, paired.unit, n, paired.units)


def bootstrap_gap(paired: Paired, seed: int = 0) -> GapInterval:
    """(baseline - student) / (baseline - teacher) of losses, over the draws of `conclude`; of these three models.

    A draw without a gap has no fraction, and one with hardly any has a huge one of either sign: quantiles over such
    draws would be no interval.

    Args:
        paired: student, baseline and teacher.
    """
    student, baseline, teacher = paired.drawn(seed)[1:].T
    if without_gap := int((~(teacher > baseline) | np.isnan(student)).sum()):
        return GapInterval(None, None, without_gap)
    low, high = np.quantile((student - baseline) / (teacher - baseline), TAILS)
    return GapInterval(float(low), float(high), 0)


def compare_models(
    first: ModelLosses, second: ModelLosses, sets: Sequence[EvaluationSet], scoring: Scoring
) -> dict[str, dict[str, Conclusion]]:
    """By measure and set the conclusion on two models, as far as both have losses or predictions by sequence.

    Args:
        first, second: what `Evaluator.score_by_sequence` gave of each of them.
    """
    by_measure: dict[str, dict[str, Conclusion]] = {}
    for measure, name, paired in _paired([first, second], sets, scoring):
        by_measure.setdefault(measure, {})[name] = conclude(paired)
    return by_measure


def compare_gaps(
    student: ModelLosses, baseline: ModelLosses, teacher: ModelLosses, sets: Sequence[EvaluationSet], scoring: Scoring
) -> dict[str, dict[str, GapInterval]]:
    """By measure and set how much of the gap a student closes, where there is enough to draw from."""
    by_measure: dict[str, dict[str, GapInterval]] = {}
    for measure, name, paired in _paired([student, baseline, teacher], sets, scoring):
        if paired.is_enough:
            by_measure.setdefault(measure, {})[name] = bootstrap_gap(paired)
    return by_measure


def _paired(
    models: Sequence[ModelLosses], sets: Sequence[EvaluationSet], scoring: Scoring
) -> Iterator[tuple[str, str, Paired]]:
    """Measure, set and models, wherever all of these have losses or predictions."""
    for data in sets:
        units = units_of(data, scoring.collator_of(data))
        for measure, name in models[0]:
            if name != data.name or not all((measure, name) in model for model in models):
                continue
            found = [model[measure, name] for model in models]
            predicted = [each for each in found if isinstance(each, np.ndarray)]
            losses = [each for each in found if isinstance(each, SequenceLosses)]
            if predicted:
                assert isinstance(data, ClassSet)
                yield measure, name, paired_predictions(predicted, data, measure)
                continue
            sums = [np.bincount(units.of_row, part) for part in (*(each.losses for each in losses), losses[0].counts)]
            unit = POINTS if isinstance(data, ClassSet | SquadSet) else RATIO
            yield measure, name, paired_losses(sums[:-1], sums[-1], unit, units.name)


def units_of(data: EvaluationSet, collator: Collator) -> Units:
    """The labelled examples or questions of a set, or the documents of its sequences.

    Of fewer than 20 documents stretches of sequences are the units, of a short text single sequences. An interval over
    stretches shows how much hangs on the choice of passages, and nothing of other documents. Where a document ends
    follows from the sequences: after one that is not full, or, of causal models, that ends in the mark of a document's
    end. Two documents count as one where the first fills its last sequence or ends in fewer tokens than make a
    sequence, so that intervals are wider rather than narrower than they should be. Sequences of pairs of segments, and
    sequences that run over the end of a document or hold several, do not show where it is. Of sequences that are a
    sample of the text a stretch may have few or one.
    """
    if isinstance(data, ClassSet):
        return Units("examples", np.arange(data.num_sequences))
    if isinstance(data, SquadSet):
        return Units("questions", np.arange(len(data.questions)))
    documents = _documents(data, collator) if data.documents >= FEWEST else None
    if documents is not None and len(np.unique(documents)) >= FEWEST:
        return Units("documents", np.unique(documents, return_inverse=True)[1])
    numbers = np.arange(data.num_sequences) if data.numbers is None else data.numbers
    stretches = np.unique(numbers // STRETCH, return_inverse=True)[1]
    count = int(stretches.max()) + 1
    if count >= FEWEST:
        whole = count * STRETCH <= data.num_sequences + STRETCH
        return Units(f"stretches of {STRETCH} sequences" if whole else SAMPLED, stretches)
    return Units("sequences", np.arange(data.num_sequences))


def _documents(data: EvaluationSet, collator: Collator) -> np.ndarray | None:
    """[R] the number in the text of the document that each sequence belongs to; None where sequences do not show it."""
    text = data.sequences if data.text is None else data.text
    if not isinstance(collator, CausalLM | MaskedLM) or len(text) * sequence_bytes(text) > LARGE:
        return None
    if isinstance(collator, CausalLM) and collator.packed:
        return None
    ends = [np.zeros(1, bool)]  # whether a document ends with the sequence before
    for start in range(0, len(text), READ_SEQUENCES):
        ends.append(_ends(text[np.arange(start, min(start + READ_SEQUENCES, len(text)))], collator))
    of_text = np.cumsum(np.concatenate(ends)[:-1])
    return of_text if data.numbers is None else of_text[data.numbers]


def _ends(sequences: np.ndarray, collator: CausalLM | MaskedLM) -> np.ndarray:
    """Whether a document ends with each of these sequences, [n] bool."""
    ids = outer_ids(sequences)
    filled = ids != collator.pad_id
    if isinstance(collator, MaskedLM):
        return ~filled.all(1)
    ends: np.ndarray = ids[np.arange(len(ids)), np.maximum(filled.sum(1) - 1, 0)] == collator.format.document_end
    return ends
