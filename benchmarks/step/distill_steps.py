"""Distill's own step on the pair of `peers.py`: the loop of a run with the forward divergence as its only term."""

from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from benchmarks.step.step import Plan, train_by_plan
from benchmarks.step.turns import SEQUENCES, STUDENT, TEACHER, Job, Over, Turns
from distill.config.settings import ObjectiveConfig, OptimizerConfig, PrecisionConfig
from distill.data.batches import Batches, StepShape
from distill.data.collate.clm import CausalLM
from distill.data.order import FullShuffle
from distill.data.sequence_format import SequenceFormat
from distill.optim.schedules.constant import Constant

AS_TRL = {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}


class InOrder(FullShuffle):
    """Sequences in the order in which they lie."""

    def numbers(self, epoch: int, positions: np.ndarray) -> np.ndarray:
        return positions


def plan_of(job: Job) -> Plan:
    """The settings of a job as those of a run; AdamW as TRL has it, at a learning rate that stays as it is."""
    soft = {"weight": 1.0, "positions": "targets", "temperature": 1.0}
    precision = PrecisionConfig(student=job.format, teacher=job.format)
    optimizer = OptimizerConfig(lr=job.lr, clip=job.clip, **AS_TRL)
    objective = ObjectiveConfig(task="clm", soft=soft)
    return Plan(objective, precision, optimizer=optimizer, schedule=Constant(warmup=0.0))


def pair_of(folder: Path) -> tuple[Any, Any]:
    """Teacher and student, fp32."""
    teacher, student = (
        AutoModelForCausalLM.from_pretrained(folder / name, dtype=torch.float32) for name in (TEACHER, STUDENT)
    )
    return teacher.eval().requires_grad_(False), student.train()


def batches_of(job: Job, vocabulary: int) -> Batches:
    """Micro-batches of one step each: sequences without padding, every token but the first a target."""
    rows = np.load(job.folder / SEQUENCES)
    collator = CausalLM(SequenceFormat(None, None, None, None, None, vocabulary, 1), packed=False)
    step_shape = StepShape(job.batch_size, job.batch_size)
    return Batches(rows, collator, InOrder(len(rows), 0), step_shape, seed=0)


def train(job: Job, turns: Turns) -> Any:
    """Train until `turns` ends it; the student."""
    torch.set_num_threads(job.threads)
    disable_progress_bar()
    pair = pair_of(job.folder)
    source = batches_of(job, pair[1].config.vocab_size)
    with suppress(Over):
        train_by_plan(source, pair, plan_of(job), source.steps_per_epoch, turns.after_step)
    return pair[1]
