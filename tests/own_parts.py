"""Parts as a user would write them, for tests that name them by `_target_`."""

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import distill
from distill.data.batch import Batch
from distill.models.language_model import Outputs, OutputSpec
from distill.objective.terms import Term
from distill.teacher.output import TeacherOutput


class ProjectedHidden(Term):
    """Mean squared error of a student's layer, projected to the teacher's width, against a layer of the teacher."""

    title = "Projected hidden state"

    def __init__(self, student_layer: int, teacher_layer: int) -> None:
        self.student_layer, self.teacher_layer = student_layer, teacher_layer
        self.student_reads = OutputSpec(layers=(student_layer,))
        self.teacher_reads = OutputSpec(layers=(teacher_layer,))

    def build(self, student: Any, teacher: Any | None) -> None:
        assert teacher is not None
        self.module = nn.Linear(student.config.hidden_size, teacher.config.hidden_size)

    def count(self, batch: Batch) -> int:
        return batch.num_valid

    def loss_sum(self, student: Outputs, teacher: TeacherOutput, batch: Batch) -> Tensor:
        own = batch.valid(student.hidden[self.student_layer])
        other = batch.valid(teacher.outputs.hidden[self.teacher_layer])
        assert self.module is not None
        return (self.module(own) - other).square().mean(-1).sum()


class Faulty(Term):
    """Fails in the method that is named."""

    def __init__(self, method: str) -> None:
        self.method = method
        self.student_reads = self.teacher_reads = OutputSpec(layers=(1,))

    def build(self, student: Any, teacher: Any | None) -> None:
        if self.method == "build":
            student.no_such_part  # noqa: B018

    def count(self, batch: Batch) -> int:
        return batch.no_such_part if self.method == "count" else batch.num_valid  # type: ignore[attr-defined, no-any-return]

    def loss_sum(self, student: Outputs, teacher: TeacherOutput, batch: Batch) -> Tensor:
        return (student.hidden[1].reshape(-1)[:5] - teacher.outputs.hidden[1].reshape(-1)[:3]).sum()


class Triangle:
    """A learning rate that rises to its peak and falls again."""

    def __init__(self, peak: float = 0.5) -> None:
        self.peak = peak

    def __call__(self, progress: float) -> float:
        return min(progress / self.peak, (1 - progress) / (1 - self.peak))


class Table:
    """A schedule with a number for each step of the run, down to a learning rate of 1e-5."""

    def __init__(self, total_steps: int, peak_lr: float) -> None:
        assert total_steps < 10**6, "a table of so many numbers fills the memory"
        self.fractions = [1 - (1 - 1e-5 / peak_lr) * step / total_steps for step in range(total_steps + 1)]
        assert math.isfinite(peak_lr * self.fractions[-1])

    def __call__(self, progress: float) -> float:
        return self.fractions[round(progress * (len(self.fractions) - 1))]


def triangle(progress: float) -> float:
    """A schedule that is no factory of schedules."""
    return Triangle()(progress)


class Counter(torch.optim.Optimizer):
    """Momentum that is kept in several forms: in float64, as whole numbers, and by group.

    Each step depends on all of them, so that a checkpoint cannot lose one unnoticed.
    """

    def __init__(self, params: Any, lr: float, decay: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "decay": decay, "num_steps": 0, "mean": torch.zeros(())})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["num_steps"] += 1
            group["mean"] = group["mean"] * 0.5 + group["num_steps"]
            for weight in group["params"]:
                state = self.state[weight]
                if not state:
                    state |= {"sum": torch.zeros_like(weight, dtype=torch.float64), "age": 0, "share": 1.0}
                    state["signs"] = torch.zeros_like(weight, dtype=torch.int64)
                state["age"] += 1
                state["share"] *= 1 / 3
                state["sum"] = (group["decay"] * state["sum"] + weight.grad.double() / 3).t().contiguous().t()
                state["signs"] += weight.grad.sign().long() * (2**30 + state["age"])
                step = (
                    state["sum"] + state["share"] + (state["signs"] % 1001) / 1e4 + group["mean"] / state["age"] / 1e3
                )
                weight.sub_((group["lr"] * step).float())


def layerwise(params: Any, lr: float, decay: float = 0.5) -> torch.optim.Optimizer:
    """SGD whose first parameters learn more slowly: each of them has a rate of its own."""
    weights = [weight for group in params for weight in group["params"]]
    groups = [{"params": [weight], "lr": lr * decay**depth} for depth, weight in enumerate(reversed(weights))]
    return torch.optim.SGD(groups, lr=lr, momentum=0.9)


class NoRate(torch.optim.Optimizer):
    """One whose rate no schedule can set."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})


class Needy(torch.optim.SGD):
    """One that wants what no run gives."""

    def step(self, closure: Any) -> None:  # type: ignore[override]
        closure()


class Hoarder(torch.optim.SGD):
    """One whose state no checkpoint can hold."""

    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for weight in group["params"]:
                self.state[weight]["history"] = [weight.clone()]


class Central(torch.optim.SGD):
    """One that keeps state of no parameter."""

    def step(self) -> None:  # type: ignore[override]
        self.state["total"] = 1  # type: ignore[index]


class Tempered(ProjectedHidden):
    """A loss that takes a temperature and does not keep it."""

    def __init__(self, temperature: float) -> None:
        super().__init__(1, 1)


class Broken:
    """An observer that cannot be made."""

    def __init__(self) -> None:
        raise ValueError("no disk for me")

    def after_step(self, step: Any) -> None: ...


class Failing(distill.Observer):
    """Fails in one of its methods."""

    def __init__(self, method: str) -> None:
        self.method = method

    def after_step(self, step: distill.StepResult) -> None:
        self._fail("step")

    def at_evaluation(self, evaluation: distill.HistoryPoint) -> None:
        self._fail("evaluation")

    def at_checkpoint(self, folder: Path) -> None:
        self._fail("checkpoint")

    def _fail(self, method: str) -> None:
        if method == self.method:
            raise ValueError("no more")
