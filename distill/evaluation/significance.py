"""Whether one model is better than another on a text or on examples, or only on this sample of them: paired bootstrap.

As Koehn (2004, "Statistical significance tests for machine translation evaluation") compares systems: the text is drawn
anew many times, with replacement, unit by unit; both models are scored on the same draw, and it is counted how often
one is better. A unit is a document, since tokens of one document depend on each other, or a labelled example.

Shapes: U units, R sequences, D draws.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from distill.data.batches import Collator
from distill.data.collate.clm import CausalLM
from distill.data.collate.mlm import MaskedLM
from distill.data.sequence_store import LARGE, outer_ids, sequence_bytes
from distill.evaluation.classes import ACCURACY, ClassSet
from distill.evaluation.measures import Scoring, SequenceLosses
from distill.evaluation.sets import EvaluationSet

RESAMPLES = 10_000
CONFIDENCE = 0.95
TAILS = ((1 - CONFIDENCE) / 2, 1 - (1 - CONFIDENCE) / 2)
FEWEST = 20  # documents that a bootstrap over documents takes; of fewer, stretches of sequences are drawn
LEAST = 10  # units of any kind: draws of fewer are too much alike to prove anything
STRETCH = 16  # consecutive sequences of the text that are drawn together then
# Units where only some sequences of the text are scored.
SAMPLED = f"groups of sequences, those of a stretch of {STRETCH} together"
AT_ONCE = 4 << 20  # drawn units that are in memory at a time
READ_SEQUENCES = 1 << 16  # sequences that are looked at together
ModelLosses = Mapping[tuple[str, str], SequenceLosses]  # of one model, by measure and set


@dataclass(frozen=True)
class Units:
    """What is drawn: numbers of sequences that belong together."""

    name: str  # what it is called behind their number, such as `documents`
    of_row: np.ndarray  # [R] int64, the unit of each sequence of the set, from 0


@dataclass(frozen=True)
class Bootstrap:
    """The resampled ratio of two perplexities, or the resampled difference of two accuracies."""

    ratio: float | None  # of perplexities on the whole set; below 1 the first model is better
    low: float  # of the interval that holds the ratios or the differences of `confidence` of all draws
    high: float
    better: float  # fraction of the draws in which the first model is better; a tie counts half
    confidence: float
    resamples: int
    units: str  # what was drawn
    num_units: int
    points: float | None = None  # of accuracy, in percent; above 0 the first model is better


@dataclass(frozen=True)
class GapInterval:
    """The resampled fraction of the gap between a baseline and a teacher that a student closes."""

    low: float | None  # of the interval that holds the fractions of `CONFIDENCE` of all draws; None: some have no gap
    high: float | None
    without_gap: int  # draws in which the baseline is no worse than the teacher, so that there is no such fraction


def paired_bootstrap(
    first: np.ndarray,
    second: np.ndarray,
    counts: np.ndarray,
    units: str = "documents",
    *,
    in_points: bool = False,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> Bootstrap:
    """The ratio of two perplexities, exp(sum of losses / sum of counts), over draws of U units out of U.

    Args:
        first, second: [U] sums of the losses of each unit's tokens by either model, in nats; or of its errors.
        counts: [U] how many tokens or examples these are; units without one are left out.
        in_points: whether the losses are errors, and their difference is one of accuracies, in points.

    Raises:
        ValueError: fewer than two units have tokens, or a loss is not finite.
    """
    is_scored = counts > 0
    difference, counts = (first - second)[is_scored].astype(np.float64), counts[is_scored].astype(np.float64)
    if len(counts) < 2 or not np.isfinite(difference).all():
        raise ValueError(f"{len(counts)} units with finite losses: two are needed to draw from")
    losses, tokens = _drawn_sums([difference, counts], resamples, seed)
    drawn, whole = losses / tokens, difference.sum() / counts.sum()
    low, high = np.quantile(drawn, TAILS)
    better = float((drawn < 0).mean() + (drawn == 0).mean() / 2)
    shared = (better, CONFIDENCE, resamples, units, len(counts))
    if in_points:
        return Bootstrap(None, float(-100 * high), float(-100 * low), *shared, points=float(-100 * whole))
    return Bootstrap(float(np.exp(whole)), float(np.exp(low)), float(np.exp(high)), *shared)


def bootstrap_gap(
    student: np.ndarray, baseline: np.ndarray, teacher: np.ndarray, resamples: int = RESAMPLES, seed: int = 0
) -> GapInterval:
    """(baseline - student) / (baseline - teacher) in log perplexity or errors, over the draws of `paired_bootstrap`.

    All three models are scored on the same draw, whose count of tokens cancels. A draw without a gap has no fraction,
    and one with hardly any has a huge one of either sign: quantiles over such draws would be no interval.

    Args:
        student, baseline, teacher: [U] finite sums of the losses of each unit's tokens, in nats, or of its errors; each
            unit has tokens.
    """
    closed, gap = _drawn_sums([baseline - student, baseline - teacher], resamples, seed)
    if without_gap := int((gap <= 0).sum()):
        return GapInterval(None, None, without_gap)
    low, high = np.quantile(closed / gap, TAILS)
    return GapInterval(float(low), float(high), 0)


def _drawn_sums(parts: Sequence[np.ndarray], resamples: int, seed: int) -> np.ndarray:
    """[parts, D] the sums of values [U] of units over the same draws of as many units, with replacement.

    scipy's `bootstrap` draws the same, and takes statistics of one number, of which it tells no fraction below 1.
    """
    draw, num_units = np.random.default_rng(seed), len(parts[0])
    sums, at_once = np.empty((len(parts), resamples)), max(1, AT_ONCE // num_units)
    for start in range(0, resamples, at_once):
        numbers = draw.integers(num_units, size=(min(at_once, resamples - start), num_units))
        sums[:, start : start + len(numbers)] = [part[numbers].sum(1) for part in parts]
    return sums


def compare_models(
    first: ModelLosses, second: ModelLosses, sets: Sequence[EvaluationSet], scoring: Scoring
) -> dict[str, dict[str, Bootstrap]]:
    """By measure and set the bootstrap of two models, as far as both have losses by sequence and enough units.

    Args:
        first, second: what `Evaluator.score_by_sequence` gave of each of them.
    """
    by_measure: dict[str, dict[str, Bootstrap]] = {}
    for measure, name, units, (one, other, counts) in _shared_sums([first, second], sets, scoring):
        drawn = paired_bootstrap(one, other, counts, units.name, in_points=measure == ACCURACY)
        by_measure.setdefault(measure, {})[name] = drawn
    return by_measure


def compare_gaps(
    student: ModelLosses, baseline: ModelLosses, teacher: ModelLosses, sets: Sequence[EvaluationSet], scoring: Scoring
) -> dict[str, dict[str, GapInterval]]:
    """By measure and set how much of the gap a student closes, where `compare_models` has its bootstrap."""
    by_measure: dict[str, dict[str, GapInterval]] = {}
    for measure, name, _, (one, other, best, _) in _shared_sums([student, baseline, teacher], sets, scoring):
        by_measure.setdefault(measure, {})[name] = bootstrap_gap(one, other, best)
    return by_measure


def _shared_sums(
    models: Sequence[ModelLosses], sets: Sequence[EvaluationSet], scoring: Scoring
) -> Iterator[tuple[str, str, Units, list[np.ndarray]]]:
    """Measure, set, units, and the losses of each model by unit [U], then their counts.

    Wherever all models have finite losses by sequence, in ten units at least; one without a scored token is left out.
    """
    for data in sets:
        units = units_of(data, scoring.collator_of(data))
        for measure, name in models[0]:
            if name != data.name or not all((measure, name) in model for model in models):
                continue
            of_models = [model[measure, name] for model in models]
            parts = [*(each.losses for each in of_models), of_models[0].counts]
            sums = [np.bincount(units.of_row, part) for part in parts]
            is_scored = sums[-1] > 0
            if is_scored.sum() >= LEAST and all(np.isfinite(part).all() for part in sums):
                yield measure, name, units, [part[is_scored] for part in sums]


def units_of(data: EvaluationSet, collator: Collator) -> Units:
    """The labelled examples of a set, or the documents of its sequences.

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
