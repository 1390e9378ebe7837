"""The settings of what is minimised and how: the objective and its terms, the optimizer, and the learning rate."""

import math
from collections.abc import Collection
from enum import Enum
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, Discriminator, Field, Tag, model_validator
from pydantic.json_schema import SkipJsonSchema
from pydantic_core import PydanticCustomError

from distill.config.base import Settings, setting
from distill.config.component import (
    GROUP,
    OPTIMIZERS,
    SCHEDULES,
    TERMS,
    Chosen,
    Component,
    Part,
    group_named,
    kinds,
    takers,
)
from distill.config.errors import shown
from distill.config.synonyms import suggestion
from distill.runtime.errors import SettingError, did_you_mean


class Shape(Enum):
    """How a number goes from its start to its end."""

    linear = "linear"
    cosine = "cosine"  # half a cosine: slow at both ends


class WeightSchedule(Settings):
    """From `start` at the beginning of the run to `end` at its end; every value lies between the two."""

    start: float = setting(..., "Value at the beginning of the run.")
    end: float = setting(..., "Value at the end of the run.")
    shape: Shape = setting(Shape.linear, "A straight line, or half a cosine, which is slow at both ends.")

    def __call__(self, progress: float) -> float:
        """Its value at `progress` of the run, from 0 to 1."""
        if self.shape is Shape.cosine:
            progress = 0.5 * (1.0 - math.cos(math.pi * progress))
        return self.start + (self.end - self.start) * progress


def value_at(number: float | WeightSchedule, progress: float) -> float:
    """What a number is at `progress` of the run, scheduled or not."""
    return number(progress) if isinstance(number, WeightSchedule) else number


def ends_of(number: float | WeightSchedule) -> tuple[float, float]:
    """What a number is at the beginning and at the end of the run."""
    return (number.start, number.end) if isinstance(number, WeightSchedule) else (number, number)


def is_zero(number: float | WeightSchedule) -> bool:
    """Whether a number is 0 all the time."""
    return ends_of(number) == (0.0, 0.0)


class Between:
    """Checks that a number, or both ends of one that follows a schedule, lie between two limits."""

    def __init__(self, low: float, high: float) -> None:
        self.low, self.high = low, high

    def __call__(self, value: float | WeightSchedule) -> float | WeightSchedule:
        numbers = {".start": value.start, ".end": value.end} if isinstance(value, WeightSchedule) else {"": value}
        for part, number in numbers.items():
            if not self.low <= number <= self.high:
                limits = {"part": part, "number": number, "ge": self.low, "le": self.high}
                raise PydanticCustomError("out_of_range", "a number out of its range", limits)
        return value


def _form(value: Any) -> str:
    return "schedule" if isinstance(value, dict | WeightSchedule) else "number"


Number = Annotated[
    Annotated[float, Tag("number")] | Annotated[WeightSchedule, Tag("schedule")],
    Discriminator(_form),
]
Weight = Annotated[Number, AfterValidator(Between(0, 1e6))]
Temperature = Annotated[Number, AfterValidator(Between(0.01, 1000))]


class MaskingConfig(Settings):
    """How positions are chosen to be predicted and what replaces them."""

    # Of 1 nothing would be left to predict from.
    mlm_probability: float = setting(0.15, "Predict this fraction of the positions.", gt=0, lt=1)
    mask: float = setting(0.8, "Replace this fraction of them by the mask token.", ge=0, le=1)
    keep: float = setting(0.1, "Leave this fraction of them as they are; the rest get a random token.", ge=0, le=1)
    smoothing: float = setting(
        0.7, "Choose tokens with p ~ max(count, 1)^-smoothing; 0 chooses all alike.", ge=0, le=100
    )
    whole_words: bool = setting(False, "Choose whole words.")
    ngrams: int = setting(
        1, "Choose up to so many whole words in a row together, n of them with p ~ 1/n.", unit="words", ge=1, le=100
    )
    max_predictions: int | None = setting(
        None, "Predict at most this many positions of a sequence, whatever `mlm_probability` is; null is no limit.",
        ge=1, le=1_048_576,
    )  # fmt: skip
    static: bool = setting(False, "Draw the same masks in every epoch.")

    @model_validator(mode="after")
    def _replaces_no_more_than_all(self) -> Self:
        if self.mask + self.keep > 1 + 1e-9:
            raise SettingError(
                f"exceeds 1 together with objective.masking.keep={self.keep}",
                setting="objective.masking.mask",
                value=self.mask,
                cure="lower one",
            )
        return self


class TermConfig(Part):
    """One loss term. Its name is that of a file of `distill/objective/terms/`, unless `kind` is."""

    package: ClassVar[str] = TERMS

    kind: str | None = setting(None, "A file of `distill/objective/terms/`; null is the one of the term's name.")
    weight: Weight = setting(1.0, "Weight in the total; it may follow a schedule {start: NUMBER, end: NUMBER}.")
    temperature: Temperature | None = setting(
        None, "Its temperature, which may follow a schedule; null is objective.temperature."
    )

    @property
    def name(self) -> str:
        return self.group.rpartition(".")[2]

    @model_validator(mode="after")
    def _is_a_loss(self) -> Self:
        if not self.name.isidentifier():
            raise SettingError("no name of a loss", setting=".", cure="take letters, digits and underscores")
        if self.target is None and (self.kind or self.name) not in (names := kinds(TERMS)):
            problem = f"no such loss{suggestion(self.group, names, 'objective.')}"
            setting, value = ".", None
            if self.kind is not None:
                problem, setting, value = f"not known{did_you_mean(self.kind, names)}", ".kind", self.kind
            own = f"name a callable of your own as {self.group}._target_"
            raise SettingError(
                problem, setting=setting, value=value, cure=f"choose one of {', '.join(names)}, or {own}"
            )
        return self

    def make(self, shared: float | WeightSchedule) -> Component:
        """The class of the term with its arguments; `shared`: the temperature where it has none of its own."""
        temperature = shared if self.temperature is None else self.temperature
        if isinstance(temperature, WeightSchedule):
            temperature = temperature.start
        optional = ("temperature",) if self.temperature is None else ()
        return self.component(self.kind or self.name, {"temperature": temperature}, optional)


def _as_term(name: str, value: Any, flags: Collection[str]) -> Any:
    """Give a term its name; refuse what stands in the objective and is neither one of its settings nor a term."""
    setting = f"objective.{name}"
    if isinstance(value, TermConfig):
        return value
    if isinstance(value, dict):
        return value | {GROUP: setting}
    if name in kinds(TERMS):
        cure = f"give {setting}.weight=NUMBER"
        raise SettingError("a loss is a group of settings", setting=setting, value=shown(value), cure=cure)
    nearest = takers(TERMS, setting) or suggestion(setting, [*flags, *kinds(TERMS)], "objective.")
    of_all = f"losses are {', '.join(kinds(TERMS))}, each with a weight such as objective.soft.weight=1"
    problem = f"neither a setting of the objective nor a loss{nearest}"
    cure = "give that in its place" if nearest else of_all
    raise SettingError(problem, setting=setting, value=shown(value), cure=cure)


class ObjectiveConfig(Settings, extra="allow"):
    """total = sum over the terms of weight * mean of the term. Each further name is a term.

    Weights and temperatures may follow a schedule. Terms of weight 0 are left out of training.
    """

    __pydantic_extra__: dict[str, TermConfig] = Field(init=False)

    # Plain is readable; fused is one visit without a [rows, vocabulary] tensor that is kept.
    kernel: Literal["auto", "plain", "fused"] = setting(
        "auto", "How losses on logits are computed; auto is fused, and compiled where the run is long."
    )
    task: str = setting("mlm", "What is predicted: a file of `distill/tasks/`, such as mlm or clm.")
    masking: MaskingConfig = setting(None, "How positions are chosen to be predicted.", factory=MaskingConfig)
    temperature: Temperature = setting(2.0, "Temperature of the terms that have none of their own.")

    @model_validator(mode="before")
    @classmethod
    def _has_terms(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        flags = cls.model_fields
        return {str(name): one if name in flags else _as_term(str(name), one, flags) for name, one in values.items()}

    @property
    def terms(self) -> dict[str, TermConfig]:
        """The loss terms by name."""
        return dict(self.__pydantic_extra__)

    def component(self, name: str) -> Component:
        """The class of a term, with its arguments."""
        return self.terms[name].make(self.temperature)

    def schedule_of(self, name: str) -> WeightSchedule | None:
        """The schedule of a term's temperature; None where it is one number, or none that the term reads."""
        own = self.terms[name].temperature
        schedule = self.temperature if own is None else own
        if not isinstance(schedule, WeightSchedule):
            return None
        return schedule if own is not None or "temperature" in self.component(name).takes() else None


class OptimizerConfig(Chosen):
    """What moves the weights; its further settings are arguments of the optimizer."""

    package: ClassVar[str] = OPTIMIZERS

    group: SkipJsonSchema[str] = group_named("optimizer")
    kind: str = setting("adamw", "A file of `distill/optim/optimizers/`.")
    lr: float = setting(5e-4, "Learning rate at its highest.", ge=1e-12, le=1e6)
    scale_lr: Literal["none", "linear", "sqrt"] = setting(
        "none", "How lr grows with the sequences of a step over base_batch: linearly, by the square root, or not."
    )
    base_batch: int | None = setting(
        None, "Sequences a step, of all ranks together, that lr is meant for.", unit="sequences", ge=1, le=10**9
    )
    clip: float | None = setting(5.0, "Largest norm of the whole gradient; null does not clip.", ge=1e-9, le=1e9)
    clip_each_rank: bool = setting(
        False, "Let each rank clip the gradient of its own sequences before the exchange, which then cannot overlap."
    )


class ScheduleConfig(Chosen):
    """The learning rate over the run; its further settings are arguments of the schedule."""

    package: ClassVar[str] = SCHEDULES

    group: SkipJsonSchema[str] = group_named("schedule")
    kind: str = setting("linear", "A file of `distill/optim/schedules/`.")
