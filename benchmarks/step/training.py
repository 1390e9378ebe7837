"""The two loops that are compared: that of a run, `distill.train`, and a plain one with full logits.

The plain loss is a re-implementation of that of the published DistilBERT and DistilGPT2 example. Two of its costs are
left out: targets come aligned with their positions, so no copy of the logits is shifted by one, and GPT-2 makes no
cache for a next token. Documents of one row are kept apart as Distill does it: by position ids, of which transformers
makes a mask.
"""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch.nn.functional import cosine_embedding_loss, cross_entropy, kl_div

from distill.config.objective import OnPolicyConfig
from distill.config.settings import (
    BackendConfig,
    Config,
    ObjectiveConfig,
    OptimizerConfig,
    PrecisionConfig,
    TrainConfig,
)
from distill.data.batch import Batch
from distill.data.batches import Batches
from distill.data.collate.clm import CausalLM
from distill.distributed import gradient_sync
from distill.distributed.single import Single
from distill.models.precision import autocast
from distill.objective.build import bind_terms, build_objective, make_terms
from distill.optim import updates as optim
from distill.optim.schedule import Schedule
from distill.optim.schedules.constant import Constant
from distill.runs.checkpoint import Checkpoints
from distill.runs.facts import HistoryPoint
from distill.runs.learning import Learner
from distill.runs.on_policy import OnPolicy
from distill.runs.run import Run
from distill.runs.setup import setup_student, setup_teacher
from distill.runs.state import State
from distill.runs.step import Callback, StepResult
from distill.teacher.live import LiveTeacher
from distill.train import Training, train

TEMPERATURE = 2.0
WEIGHTS = {"soft": 5.0, "mlm": 2.0, "clm": 2.0, "cosine": 1.0}
NO_TARGET = -100
AfterStep = Callable[[], None]


class Variant(NamedTuple):
    """A way to train on what the plain step trains on."""

    name: str
    rows: str  # that carry soft targets: all, masked or targets
    precision: PrecisionConfig
    plain: bool = False


@dataclass
class CallAfterStep(Callback):
    """Calls something after each step of `distill.train`."""

    call: AfterStep

    def after_step(self, step: StepResult) -> None:
        self.call()


class NoEvaluation:
    """Stands for the evaluations of `distill.train`, and scores nothing."""

    def due(self, step: int) -> bool:
        return False

    def evaluate(self, state: State, losses: dict[str, float]) -> HistoryPoint:
        return HistoryPoint()


class Plan(NamedTuple):
    """What a run trains by."""

    objective: ObjectiveConfig
    precision: PrecisionConfig
    num_positions: int = 10**9  # of the run: where there are many the objective is compiled
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: Schedule = Constant()
    on_policy: OnPolicyConfig | None = None  # of texts that no token ends


def objective_of(rows: str, task: str = "mlm") -> ObjectiveConfig:
    """The settings that give the loss of the plain step."""
    terms: dict[str, Any] = {name: {"weight": WEIGHTS[name]} for name in ("soft", task, "cosine")}
    terms["soft"] |= {"positions": rows, "temperature": TEMPERATURE}
    return ObjectiveConfig(task=task, **terms)


def train_by_plan(source: Batches, pair: tuple[Any, Any], plan: Plan, steps: int, after_step: AfterStep) -> None:
    """The loop of a run, `distill.train.train`, with what a run builds for it."""
    teacher, student = pair
    ranks = Single(BackendConfig(device=str(student.device)))
    terms = bind_terms(make_terms(plan.objective), student, teacher)
    vocabulary, device = student.config.vocab_size, ranks.device
    objective = build_objective(terms, plan.objective, plan.precision, vocabulary, plan.num_positions, device)
    frozen = setup_teacher(teacher, plan.precision, ranks)
    trainable = setup_student(student, objective, plan.precision, ranks)
    sync, optimizer = gradient_sync(ranks, trainable), optim.build(trainable, plan.optimizer)
    with tempfile.TemporaryDirectory() as folder:
        length = TrainConfig(epochs=None, steps=steps + 1, save_every=steps + 1)
        learner = Learner(trainable, sync, optimizer, plan.schedule, plan.optimizer)
        of_folder: Any = SimpleNamespace(checkpoints=Checkpoints(Path(folder), 1, {}, ranks))
        of_data: Any = SimpleNamespace(batches=source)
        nothing: Any = None
        run = Run(Config(train=length), {}, nothing, nothing, of_data, objective, {}, None, of_folder, ranks)
        nowhere: Any = NoEvaluation()
        writer = None
        if plan.on_policy is not None and isinstance(source.collator, CausalLM):
            of_step = source, source.collator, trainable.student
            writer = OnPolicy(plan.on_policy, *of_step, ends=frozenset(), vocab=vocabulary, ranks=ranks)
        train(Training(run, learner, LiveTeacher(frozen), State(), (CallAfterStep(after_step),), nowhere, writer))


def train_variant(source: Batches, pair: tuple[Any, Any], variant: Variant, steps: int, after_step: AfterStep) -> None:
    """By the plain loop, or by that of a run with the same loss."""
    if variant.plain:
        train_plainly(source, pair, variant, steps, after_step)
        return
    task = next(iter(source.window(0)[0].labels))
    plan = Plan(objective_of(variant.rows, task), variant.precision)
    train_by_plan(source, pair, plan._replace(num_positions=0) if "eager" in variant.name else plan, steps, after_step)


def train_plainly(source: Batches, pair: tuple[Any, Any], variant: Variant, steps: int, after_step: AfterStep) -> None:
    """The example's loop."""
    teacher, student = pair
    optimizer = torch.optim.AdamW(student.parameters(), lr=5e-4, eps=1e-6, betas=(0.9, 0.98))
    for window in source.stream(0, steps, student.device):
        for batch in window:
            (plain_loss(student, teacher, batch, variant) / len(window)).backward()
        torch.nn.utils.clip_grad_norm_(student.parameters(), 5.0)
        optimizer.step()
        optimizer.zero_grad()
        after_step()


def plain_loss(student: Any, teacher: Any, batch: Batch, variant: Variant) -> torch.Tensor:
    """The loss of one micro-batch, means over its own positions, which boolean masks select."""
    attended, (task, (positions, values)) = torch.ones_like(batch.ids), next(iter(batch.labels.items()))
    inputs: dict[str, Any] = {name: value for name, value in batch.inputs.items() if name != "document_lengths"}
    inputs["output_hidden_states"] = True
    inputs |= {"use_cache": False} if task == "clm" else {"attention_mask": attended}
    with torch.no_grad(), autocast(variant.precision.teacher, batch.ids.device):
        teacher_output = teacher(**inputs)
    with autocast(variant.precision.student, batch.ids.device):
        student_output = student(**inputs)
    student_logits, teacher_logits = student_output.logits.float(), teacher_output.logits.float()
    vocabulary = student_logits.shape[-1]
    targets = torch.full_like(batch.ids, NO_TARGET).view(-1)
    targets[positions] = values
    chosen = attended.bool() if variant.rows == "all" else (targets.view_as(batch.ids) != NO_TARGET)
    where = chosen[..., None].expand_as(student_logits)
    student_chosen = student_logits.masked_select(where).view(-1, vocabulary)
    teacher_chosen = teacher_logits.masked_select(where).view(-1, vocabulary)
    log_q, p = (student_chosen / TEMPERATURE).log_softmax(-1), (teacher_chosen / TEMPERATURE).softmax(-1)
    soft = kl_div(log_q, p, reduction="batchmean") * TEMPERATURE**2
    hard = cross_entropy(student_logits.view(-1, vocabulary), targets)
    hidden = [output.hidden_states[-1].float() for output in (student_output, teacher_output)]
    rows = [h.masked_select(attended.bool()[..., None].expand_as(h)).view(-1, h.shape[-1]) for h in hidden]
    cosine = cosine_embedding_loss(rows[0], rows[1], torch.ones(len(rows[0]), device=rows[0].device))
    return WEIGHTS["soft"] * soft + WEIGHTS[task] * hard + WEIGHTS["cosine"] * cosine
