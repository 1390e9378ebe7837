"""The settings of the objective: its terms, their weights and temperatures, and how positions are masked."""

from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Discriminator, Tag, model_validator
from pydantic_core import PydanticCustomError

from distill.config.component import Component
from distill.config.model import Settings, setting
from distill.config.weight_schedule import WeightSchedule
from distill.runtime.errors import SettingError


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


class TermConfig(Settings):
    """One loss term: its weight in the total, and what makes it."""

    weight: Weight = setting(1.0, "Weight in the total; it may follow a schedule {start: NUMBER, end: NUMBER}.")
    make: Component = setting(..., "The class of the term, with its settings.")
    temperature: Annotated[WeightSchedule, AfterValidator(Between(0.01, 1000))] | None = setting(
        None, "The schedule of a temperature of its own."
    )


class ObjectiveFlags(Settings):
    """What is set of the objective as a whole."""

    # Plain is readable; fused is one visit without a [rows, vocabulary] tensor that is kept.
    kernel: Literal["auto", "plain", "fused"] = setting(
        "auto", "How losses on logits are computed; auto is fused, and compiled where the run is long."
    )
    task: str = setting("mlm", "What is predicted: a file of `distill/tasks/`, such as mlm or clm.")
    masking: MaskingConfig = setting(None, "How positions are chosen to be predicted.", factory=MaskingConfig)


class ObjectiveConfig(ObjectiveFlags):
    """total = sum over the terms of weight * mean of the term. Weights and temperatures may follow a schedule."""

    # Terms of weight 0 are left out of training.
    terms: dict[str, TermConfig] = setting(None, "Loss terms by name.", factory=dict)
    temperature: Temperature = setting(2.0, "Temperature of the terms that have none of their own.")
