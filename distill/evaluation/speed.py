"""Whole batches of an evaluation set: how fast models compute one, and whether memory holds the largest."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch

from distill.distributed import Ranks
from distill.evaluation.evaluator import Evaluator
from distill.evaluation.sets import EvaluationSet
from distill.models.check import available
from distill.models.precision import dtype_of, in_fp32, wait_for
from distill.runtime.errors import SettingError
from distill.runtime.host import is_out_of_memory

ROUNDS = 5
POSITIONS = 65_536  # of the batch that each round computes, at most ...
POSITIONS_OF_THREAD = 1_024  # ... and on the CPU, where so many keep a thread busy


def tokens_per_second(evaluator: Evaluator, models: list[Any], data: EvaluationSet) -> list[float]:
    """Tokens per second, padding not counted, of the whole forward on one batch.

    The models take turns and the median round counts, so that what else the machine does meets them alike. All are laid
    out as for scoring, and none is compiled: what training has made of the student's kernels gives it no advantage.
    """
    readers, scoring = evaluator.readers, evaluator.scoring
    on_cpu = scoring.ranks.device.type == "cpu"
    max_positions = POSITIONS_OF_THREAD * torch.get_num_threads() if on_cpu else POSITIONS
    count = min(scoring.settings.batch_size, max(1, max_positions // data.sequences.shape[1]))
    batch = scoring.batch(data, scoring.longest_first(data)[:count])
    seconds: list[list[float]] = [[] for _ in models]
    with ExitStack() as entered:
        for model in models:  # once, and not in every round; before it is packed, which copies its buffers
            entered.enter_context(in_fp32(model, scoring.ranks.device))
        packed = [readers.pack(model) for model in models]
        entered.enter_context(uncompiled(packed))
        for _ in range(ROUNDS + 1):
            for model, times in zip(packed, seconds, strict=True):
                with readers.timed(), readers.evaluating(model):
                    wait_for(scoring.ranks.device)
                    began = time.perf_counter()
                    scoring.whole_forward(readers.reader(model), batch)
                    wait_for(scoring.ranks.device)
                    times.append(time.perf_counter() - began)
    return [batch.num_valid / float(np.median(times[1:])) for times in seconds]  # the first round warms up


@contextmanager
def uncompiled(models: Sequence[Any]) -> Iterator[None]:
    """The models without torch.compile, through which training sends the student's forward alone."""
    single = [one for model in models for one in getattr(model, "members", [model])]
    forwards = [(module, vars(module).get("forward")) for model in single for module in model.modules()]
    compiled = [(module, each) for module, each in forwards if hasattr(each, "_torchdynamo_orig_callable")]
    for module, _ in compiled:
        del module.forward
    try:
        yield
    finally:
        for module, forward in compiled:
            module.forward = forward


def check_memory(evaluator: Evaluator, models: list[Any], sets: list[EvaluationSet]) -> None:
    """Compute the largest batch of each kind of pass once by each model, so that a lack of memory shows at the start.

    It is of the set with the longest sequences. What two models hold side by side where their agreement is scored is
    not covered, nor are the user's own measures.
    """
    longest = max(sets, key=lambda data: data.sequences.shape[1], default=None)
    if longest is None:
        return
    settings = evaluator.scoring.settings
    sizes = {"batch_size": settings.batch_size, "pseudo_perplexity.batch_size": settings.pseudo_perplexity.batch_size}
    widths = [getattr(getattr(model, "config", None), "hidden_size", None) for model in models]
    widest = max((width for width in widths if isinstance(width, int)), default=0)
    # What ids and hidden states of a position take at least.
    least_bytes = 8 + dtype_of(evaluator.readers.precision.evaluate).itemsize * widest
    with evaluator.readers.timed():
        for name, run in {run.batch_setting: run for run in evaluator.passes}.items():
            positions, compute = run.largest_batch(longest)

            def compute_all(compute: Callable[[Any], object] = compute) -> None:
                for model in models:
                    with evaluator.readers.opened(model) as reader:
                        compute(reader)

            try_once(compute_all, positions * least_bytes, f"evaluate.{name}={sizes[name]}", evaluator.ranks)


def try_once(run: Callable[[], None], least_bytes: int, setting: str, ranks: Ranks) -> None:
    """Call `run` once on every rank.

    Args:
        run: computes a batch of evaluation.
        least_bytes: that it takes at least. The memory of a processor is promised before it is there, and a process
            that takes it then is killed, so what is sure to be too much is not tried.
        setting: what decides how large the batch is, with its value, for the message.

    Raises:
        SettingError: on all ranks, where the memory of one does not suffice; of ranks that shard a model its own error.
    """
    problem, free = "", available(ranks)
    if free is not None and least_bytes > free:
        problem = f"takes {least_bytes / 1e9:.3g} GB at least, and {free / 1e9:.3g} GB are free"
    problems = ranks.gather(problem)  # a sharded model runs on all ranks, or on none
    if not any(problems):
        try:
            run()
        except (MemoryError, OSError, RuntimeError) as error:
            if not is_out_of_memory(error) or (ranks.shards and ranks.size > 1):  # others wait in the midst of a model
                raise
            problem = "takes more memory than there is"
        problems = ranks.gather(problem)
    if first := next(filter(None, problems), ""):
        raise SettingError(f"{setting}: a batch of evaluation {first}; lower it")
