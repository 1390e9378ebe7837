"""How fast models run: whole batches of an evaluation set, hidden states and heads at every position."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from distill.data.batch import Batch
from distill.evaluation.evaluator import Evaluator
from distill.evaluation.measures import Scoring
from distill.evaluation.sets import EvaluationSet
from distill.models.language_model import LanguageModel, OutputSpec

ROUNDS = 5
POSITIONS = 65_536  # of the batch that each round computes, at most ...
POSITIONS_OF_THREAD = 1_024  # ... and on the CPU, where so many keep a thread busy
LOGITS_BYTES = 4 << 30  # of the logits of a batch on a GPU, which are all there at once


def tokens_per_second(evaluator: Evaluator, models: list[Any], data: EvaluationSet) -> list[float]:
    """Tokens per second, padding not counted, of the whole forward on one batch.

    The models take turns and the median round counts, so that what else the machine does meets them alike. All are laid
    out as for scoring, and none is compiled: what training has made of the student's kernels gives it no advantage.
    """
    readers, scoring = evaluator.readers, evaluator.scoring
    packed = [readers.pack(model) for model in models]
    batch = full_sequences(scoring, data, speed_sequences(scoring, data))
    seconds: list[list[float]] = [[] for _ in models]
    with _uncompiled(packed):
        for _ in range(ROUNDS + 1):
            for model, times in zip(packed, seconds, strict=True):
                with readers.timed(), readers.evaluating(model):
                    _wait(scoring)
                    began = time.perf_counter()
                    run_forward(readers.reader(model), batch, scoring)
                    _wait(scoring)
                    times.append(time.perf_counter() - began)
    return [batch.num_valid / float(np.median(times[1:])) for times in seconds]  # the first round warms up


@contextmanager
def _uncompiled(models: Sequence[Any]) -> Iterator[None]:
    """The models without torch.compile, through which training sends the student's forward alone."""
    single = [one for model in models for one in getattr(model, "members", [model])]
    modules = [module for model in single for module in model.modules()]
    compiled = [(module, vars(module)["forward"]) for module in modules if _is_compiled(vars(module).get("forward"))]
    for module, _ in compiled:
        del module.forward
    try:
        yield
    finally:
        for module, forward in compiled:
            module.forward = forward


def _is_compiled(forward: Any) -> bool:
    return hasattr(forward, "_torchdynamo_orig_callable")


def speed_sequences(scoring: Scoring, data: EvaluationSet) -> int:
    """As many sequences as are scored at once, but no more than it takes to keep a device busy."""
    on_cpu = scoring.ranks.device.type == "cpu"
    max_positions = POSITIONS_OF_THREAD * torch.get_num_threads() if on_cpu else POSITIONS
    if not (on_cpu or scoring.heads):
        max_positions = min(max_positions, LOGITS_BYTES // (4 * scoring.vocab))
    return min(scoring.settings.batch_size, max(1, max_positions // data.sequences.shape[1]))


def full_sequences(scoring: Scoring, data: EvaluationSet, count: int) -> Batch:
    """That many sequences of full length."""
    numbers = np.arange(count) % data.num_sequences
    collator = scoring.collator_of(data)
    return collator.collate(data.sequences[numbers], np.arange(count, dtype=np.uint64), numbers).to(
        scoring.ranks.device
    )


def run_forward(model: LanguageModel, batch: Batch, scoring: Scoring, logits: bool = True) -> None:
    """Everything that a model computes for a batch; without `logits` those over the vocabulary are left out."""
    if scoring.heads:
        model(batch.inputs, batch.documents, OutputSpec(extra=scoring.heads))
        return
    rows = model(batch.inputs, batch.documents, OutputSpec(True)).head_rows
    assert rows is not None
    if logits:
        model.logits(rows, scoring.vocab)


def _wait(scoring: Scoring) -> None:
    if scoring.ranks.device.type == "cuda":
        torch.cuda.synchronize(scoring.ranks.device)
