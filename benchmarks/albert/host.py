"""One host of `scaling.py`: a pre-training step of ALBERT through Distill's own loop, with and without exchange.

Started on every host by that script. A job is so many steps of so many micro-batches; where it does not exchange, each
host trains by itself, so that the difference between two jobs is what the exchange costs. Steps are those of the recipe
`albert_aws`: masked n-grams, at most 20 a row, and the order of segments; LAMB; each rank clips its own gradient before
the exchange. Rows are random tokens, whose time is that of any others.
"""

import argparse
import copy
import json
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import AlbertConfig, AlbertForPreTraining

from benchmarks.scaling.cluster import end_rank, ready
from benchmarks.step.step import NoHistory
from distill.config.settings import (
    BackendConfig,
    MaskingConfig,
    ObjectiveConfig,
    OptimizerConfig,
    PrecisionConfig,
    TrainConfig,
)
from distill.data.batches import Batches, StepShape
from distill.data.collate.mlm import MaskedLM
from distill.data.collate.mlm_sop import MaskedLMAndOrder
from distill.data.order import FullShuffle
from distill.distributed import GradientSync, Ranks, gradient_sync, join_ranks
from distill.objective.build import bind_terms, build_objective, make_terms
from distill.objective.objective import Objective
from distill.optim import updates as optim
from distill.optim.schedules.constant import Constant
from distill.runs.checkpoint import Checkpoints, State
from distill.runs.setup import setup_student
from distill.runs.step import Follower, StepResult
from distill.teacher.output import NoTeacher
from distill.train import Learner, Training, train

VOCABULARY = 30000
PAD, UNKNOWN, START, SEPARATOR, MASK, FIRST_WORD = range(6)
MOST_PREDICTIONS = 20  # of a row, as in the published run


class Size(NamedTuple):
    layers: int
    width: int
    heads: int
    embedding: int


SIZES = {
    "base": Size(12, 768, 12, 128),
    "large": Size(24, 1024, 16, 128),
    "tiny": Size(2, 64, 2, 16),  # to try the scripts
}


@dataclass(frozen=True)
class Job:
    """Steps to time on all hosts of a run, each step of `accumulate` micro-batches."""

    exchange: bool  # false: every host by itself
    accumulate: int = 1
    steps: int = 1
    rings: str = "1"  # or what `backend.rings` of the run chose: auto
    compression: str = "none"


@dataclass
class Done(Exception):
    """Enough steps were timed: leaves the loop before it saves."""

    seconds: list[float] = field(default_factory=list)


class Clock(NoHistory, Follower):
    """Follows `distill.train`: it keeps the seconds of each step, and ends the loop after so many."""

    def __init__(self, steps: int) -> None:
        self._steps, self._ends = steps, [0.0]

    def after_step(self, state: State, result: StepResult) -> None:
        self._ends.append(state.seconds)
        if len(self._ends) > self._steps:
            raise Done([end - begin for begin, end in zip(self._ends[:-1], self._ends[1:], strict=True)])


def make_model(shape: str, tokens: int) -> Any:
    """An ALBERT with random weights and without dropout, as the published pre-training had it."""
    size = SIZES[shape]
    torch.manual_seed(0)
    config = AlbertConfig(
        vocab_size=VOCABULARY,
        embedding_size=size.embedding,
        hidden_size=size.width,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        intermediate_size=4 * size.width,
        max_position_embeddings=max(512, tokens),
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        classifier_dropout_prob=0.0,
    )
    return AlbertForPreTraining(config).train()


def make_batches(options: argparse.Namespace, job: Job, rank: int, size: int) -> Batches:
    """Rows of two segments of random tokens for the steps of a job."""
    rows = np.random.default_rng(0).integers(
        FIRST_WORD, VOCABULARY, ((job.steps + 1) * job.accumulate * options.rows * size, options.tokens), np.uint16
    )
    rows[:, 0], rows[:, [options.tokens // 2, -1]] = START, SEPARATOR
    settings = MaskingConfig(smoothing=0.0, whole_words=True, ngrams=3, max_predictions=MOST_PREDICTIONS)
    maskable = np.arange(VOCABULARY) >= FIRST_WORD
    words = MaskedLM(settings, MASK, PAD, maskable, np.ones(VOCABULARY), np.zeros(VOCABULARY, bool))
    collator = MaskedLMAndOrder(words, SEPARATOR, swaps=options.order)
    step_shape = StepShape(options.rows, options.rows * job.accumulate * size, rank, size)
    return Batches(rows, collator, FullShuffle(len(rows), 0), step_shape, seed=0)


class Trainer:
    """What the jobs of a host share: the model with its optimizer, the objective, the connections."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        # Each emulated host is the only rank of its own, yet all share this machine's cores.
        settings = BackendConfig(name=options.engine, device="cpu", threads=1, timeout=600.0, rings=options.rings)
        self.ranks = join_ranks(settings)
        self.precision = PrecisionConfig(student=options.precision)
        model = make_model(options.shape, options.tokens)
        self.objective = self._make_objective(model)
        self.trainable = setup_student(model, self.objective, self.precision, self.ranks)
        self.sync = gradient_sync(self.ranks, self.trainable)
        self.settings = OptimizerConfig(kind="lamb", lr=1e-4, clip=1.0, clip_each_rank=True)
        self.optimizer = optim.build(self.trainable, self.settings)
        self.chosen_rings = self.ranks.rings

    def _make_objective(self, model: Any) -> Objective:
        weights = {"mlm": {"weight": 1.0}, "sop": {"weight": float(self.options.order)}}
        config = ObjectiveConfig(task="mlm_sop", **weights)
        terms = bind_terms(make_terms(config), model, None)
        return build_objective(terms, config, self.precision, VOCABULARY, 1, self.ranks.device)

    def run(self, job: Job) -> list[float]:
        """Seconds of each step of this rank, by the loop of a run, `distill.train.train`."""
        sync = self._sync_for(job)
        ranks = sync.ranks
        learner = Learner(self.trainable, sync, self.optimizer, Constant(), self.settings)
        batches = make_batches(self.options, job, ranks.rank, ranks.size)
        length = TrainConfig(epochs=None, steps=job.steps + 1, save_every=job.steps + 1)
        checkpoints = Checkpoints(self._nowhere, 1, {})
        training = Training(learner, NoTeacher(), batches, ranks, length, State(), checkpoints)
        clock = Clock(job.steps)
        self.ranks.barrier()
        try:
            train(training, self.objective, (clock,), clock)
        except Done as done:
            return done.seconds
        raise AssertionError("the loop ended before its clock")

    def _sync_for(self, job: Job) -> GradientSync:
        """The connections as the job wants them, used once before they are timed; or one host without any."""
        if not job.exchange:
            alone = copy.copy(self.sync)  # the same bucket, exchanging with nobody
            alone.ranks = copy.copy(self.ranks)
            alone.ranks.rank, alone.ranks.size = 0, 1
            return alone
        self.ranks.rings = self.chosen_rings if job.rings == "auto" else int(job.rings)
        self.ranks.settings = self.ranks.settings.changed(compression=job.compression)
        self.sync.zero()
        self.sync.all_reduce_gradients()
        return self.sync

    @property
    def _nowhere(self) -> Path:
        """No job comes to the point of saving."""
        return Path(tempfile.gettempdir()) / "albert_scaling"


def on_all_ranks(values: list[float], ranks: Ranks) -> list[list[float]]:
    """The values of every rank, [size][len(values)]."""
    table = torch.zeros(ranks.size, len(values), dtype=torch.float64)
    table[ranks.rank] = torch.tensor(values, dtype=torch.float64)
    found: list[list[float]] = ranks.sum(table).tolist()
    return found


def results(trainer: Trainer, jobs: list[Job]) -> Iterator[dict[str, Any]]:
    """Of each job: seconds of its steps, and of the processor, by rank."""
    for job in jobs:
        began = time.process_time()
        seconds = trainer.run(job)
        processor = (time.process_time() - began) / job.steps
        yield {
            "job": asdict(job),
            "seconds": on_all_ranks(seconds, trainer.ranks),
            "processor": [value for (value,) in on_all_ranks([processor], trainer.ranks)],
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", default="ddp")
    parser.add_argument("--rings", default="1", help="that are opened; auto: and chosen among")
    parser.add_argument("--shape", default="base", choices=list(SIZES))
    parser.add_argument("--rows", type=int, default=1, help="of a micro-batch")
    parser.add_argument("--tokens", type=int, default=512, help="of a row")
    parser.add_argument("--precision", default="fp32", help="fp32 or bf16")
    parser.add_argument("--words-only", dest="order", action="store_false", help="without the order of segments")
    parser.add_argument("--jobs", required=True, help="a JSON list of jobs")
    options = parser.parse_args()
    trainer = Trainer(options)
    trainer.run(Job(exchange=False))  # the first step of a process is a slow one
    ready()
    found = {
        "parameters": trainer.sync.gradients.numel(),
        "rings": trainer.chosen_rings,
        "jobs": list(results(trainer, [Job(**given) for given in json.loads(options.jobs)])),
    }
    end_rank(trainer.ranks, found)


if __name__ == "__main__":
    main()
