"""Distill's own step on the pair of `peers.py`: the loop of a run with the forward divergence as its only term."""

from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.autograd.profiler_util import FunctionEvent
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from benchmarks.step.models import AfterStep
from benchmarks.step.profile_step import profiled
from benchmarks.step.step import Plan, train_by_plan
from benchmarks.step.turns import SEQUENCES, STUDENT, TEACHER, WARM_UP, Job, Over, Turns
from distill.config.settings import ObjectiveConfig, OptimizerConfig, PrecisionConfig
from distill.data.batches import Batches, StepShape
from distill.data.collate.clm import CausalLM
from distill.data.order import At, FullShuffle
from distill.data.sequence_format import SequenceFormat
from distill.optim.schedules.constant import Constant

AS_TRL = {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
# The first kind whose rule holds for an operator; sizes are those of its inputs.
ATTENTION = ("bmm", "softmax", "scaled_dot_product")
CASTS = ("aten::copy_", "aten::_to_copy", "aten::to")
NORMS = ("aten::pow", "aten::mean", "aten::rsqrt", "rms_norm")
PRODUCTS = ("aten::mm", "aten::addmm", "linear")
OPTIMIZER = ("adamw", "vector_norm", "_foreach")
IN_PLACE = ("aten::add_", "aten::mul_", "aten::fill_")
UPDATE = "AdamW, clipping, sums of gradients"
KINDS = (
    "head",
    "other products",
    "attention",
    "norms",
    "SiLU and gates",
    "casts and copies",
    UPDATE,
    "everything else",
)


class InOrder(FullShuffle):
    """Sequences in the order in which they lie."""

    def numbers(self, epoch: int, positions: np.ndarray) -> np.ndarray:
        return positions

    def upcoming(self, at: At, rank: int, size: int) -> np.ndarray:
        return np.zeros(0, np.int64)


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


def profile(job: Job) -> tuple[dict[str, float], float]:
    """Seconds of each kind of operator in one step, and of the step, under torch's profiler."""
    torch.set_num_threads(job.threads)
    pair = pair_of(job.folder)
    vocabulary, width = pair[1].config.vocab_size, pair[1].config.hidden_size

    def train_for(after_step: AfterStep) -> None:
        train_by_plan(batches_of(job, vocabulary), pair, plan_of(job), WARM_UP + 1, after_step)

    events, seconds = profiled(train_for, shapes=True)
    found = dict.fromkeys(KINDS, 0.0)
    for event in events:
        found[kind_of(event, vocabulary, width)] += event.self_cpu_time_total / 1e6
    return found, seconds


def kind_of(event: FunctionEvent, vocabulary: int, width: int) -> str:
    """By the operator's name and the sizes of its inputs; rotary positions and heads of queries count as attention."""
    shapes = [shape for shape in event.input_shapes or [] if shape and not isinstance(shape[0], list)]
    largest = max(shapes, key=len, default=[])

    def named(names: tuple[str, ...]) -> bool:
        return any(name in event.name for name in names)

    if named(OPTIMIZER) or (event.name in IN_PLACE and len(largest) <= 2):  # of weights: activations are [B, S, H]
        return UPDATE
    if any(vocabulary in shape for shape in shapes) or named(("CompiledFxGraph", "Torch-Compiled")):
        return "head"
    if named(ATTENTION) or len(largest) >= 4:
        return "attention"
    if named(NORMS) or (event.name in ("aten::mul", "aten::sum") and largest[-1:] == [width]):
        return "norms"
    if named(("aten::silu",)) or event.name == "aten::mul":
        return "SiLU and gates"
    if named(CASTS):
        return "casts and copies"
    return "other products" if named(PRODUCTS) else "everything else"
