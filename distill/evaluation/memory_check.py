"""Computes whole batches of evaluation before training: a lack of memory shows at the start and not at the end."""

from collections.abc import Callable
from typing import Any

from distill.distributed import Ranks
from distill.evaluation.evaluator import Evaluator
from distill.evaluation.measures import Trial
from distill.evaluation.sets import EvaluationSet
from distill.evaluation.speed import full_sequences, run_forward, speed_sequences
from distill.models.check import available
from distill.models.precision import dtype_of
from distill.runtime.errors import SettingError
from distill.runtime.host import is_out_of_memory


def check_memory(evaluator: Evaluator, models: list[Any], sets: list[EvaluationSet]) -> None:
    """Compute the largest batches of evaluation once by each model, one model after the other.

    These are the batch by which speed is measured, one of the set with the longest sequences, of which every measure
    computes logits in parts, and that of pseudo-perplexity. What two models hold side by side where their agreement is
    scored is not covered, nor are the user's own measures.

    Raises:
        SettingError: the memory of a rank does not suffice; it names the setting to lower.
    """
    if not sets:
        return
    scoring = evaluator.scoring
    first, longest = sets[0], max(sets, key=lambda data: data.sequences.shape[1])
    size, count = scoring.settings.batch_size, speed_sequences(scoring, first)
    least = min(scoring.ranks.gather(count))  # ranks with fewer threads have fewer: all take the same way below
    with evaluator.readers.timed():
        trial = _trial_of_sequences(evaluator, first, count, logits=True)
        _check(evaluator, models, trial, 0 if scoring.heads else scoring.vocab)
        if longest is not first or least < size:
            _check(evaluator, models, _trial_of_sequences(evaluator, longest, size, logits=False))
        for run in evaluator.passes:
            if (of_pass := run.trial(longest)) is not None:
                _check(evaluator, models, of_pass)


def try_once(run: Callable[[], None], least_bytes: int, setting: str, value: int, ranks: Ranks) -> None:
    """Call `run` once on every rank.

    Args:
        run: computes a batch of evaluation.
        least_bytes: that it takes at least. The memory of a processor is promised before it is there, and a process
            that takes it then is killed, so what is sure to be too much is not tried.
        setting, value: what decides how large the batch is, for the message.

    Raises:
        SettingError: on all ranks, where the memory of one does not suffice.
    """
    problem, free = "", available(ranks)
    if free is not None and least_bytes > free:
        problem = f"takes {least_bytes / 1e9:.3g} GB at least, and {free / 1e9:.3g} GB are free"
    problems = ranks.gather(problem)  # a sharded model runs on all ranks, or on none
    if not any(problems):
        try:
            run()
        except (MemoryError, OSError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            problem = "takes more memory than there is"
        problems = ranks.gather(problem)
    if first := next(filter(None, problems), ""):
        raise SettingError(f"{setting}={value}: a batch of evaluation {first}; lower it")


def _trial_of_sequences(evaluator: Evaluator, data: EvaluationSet, count: int, logits: bool) -> Trial:
    """A batch of so many sequences of full length; `logits`: with those over the vocabulary."""
    scoring = evaluator.scoring
    return Trial(
        lambda model: run_forward(model, full_sequences(scoring, data, count), scoring, logits),
        count * data.sequences.shape[1],
        "evaluate.batch_size",
        scoring.settings.batch_size,
    )


def _check(evaluator: Evaluator, models: list[Any], trial: Trial, vocab: int = 0) -> None:
    def run_all() -> None:
        for model in models:
            with evaluator.readers.opened(model) as reader:
                trial.run(reader)

    least = trial.positions * _least_bytes(evaluator, models, vocab)
    try_once(run_all, least, trial.setting, trial.value, evaluator.ranks)


def _least_bytes(evaluator: Evaluator, models: list[Any], vocab: int) -> int:
    """What ids, hidden states and logits of a position take at least."""
    widths = [getattr(getattr(model, "config", None), "hidden_size", None) for model in models]
    widest = max((width for width in widths if isinstance(width, int)), default=0)
    return 8 + dtype_of(evaluator.readers.precision.evaluate).itemsize * (widest + vocab)
