"""The settings of the objective: its terms, their weights and temperatures, and how positions are masked."""

import math
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Discriminator, Field, Tag, model_validator

from distill.config.base import BATCH, Refusal, Settings, refuse, setting
from distill.config.component import TERMS, Component, Part, in_group, kinds, takers
from distill.config.errors import shown
from distill.config.synonyms import suggestion
from distill.runtime.errors import SettingError, did_you_mean


class WeightSchedule(Settings):
    """A weight or temperature from `start` at the beginning of the run to `end` at its end."""

    start: float = setting(..., "Value at the beginning of the run.")
    end: float = setting(..., "Value at the end of the run.")
    shape: Literal["linear", "cosine"] = setting("linear", "A line, or half a cosine, which is slow at both ends.")

    def __call__(self, progress: float) -> float:
        """Its value at `progress` of the run, from 0 to 1."""
        if self.shape == "cosine":
            progress = 0.5 * (1.0 - math.cos(math.pi * progress))
        return self.start + (self.end - self.start) * progress


def value_at(number: float | WeightSchedule, progress: float) -> float:
    """What a number is at `progress` of the run, scheduled or not."""
    return number(progress) if isinstance(number, WeightSchedule) else number


def is_zero(number: float | WeightSchedule) -> bool:
    """Whether a number is 0 all the time."""
    return value_at(number, 0.0) == value_at(number, 1.0) == 0.0


def _form(value: Any) -> str:
    return "schedule" if isinstance(value, dict | WeightSchedule) else "number"


class Between:
    """Checks that a number, or both ends of one that follows a schedule, lie between two limits."""

    def __init__(self, low: float, high: float) -> None:
        self.low, self.high = low, high

    def __call__(self, value: float | WeightSchedule) -> float | WeightSchedule:
        numbers = {".start": value.start, ".end": value.end} if isinstance(value, WeightSchedule) else {".": value}
        cure = f"give a number from {self.low:g} up to {self.high:,.0f}"
        refuse(
            (part, number, f"too {'small' if number < self.low else 'large'}", cure)
            for part, number in numbers.items()
            if not self.low <= number <= self.high
        )
        return value


Number = Annotated[
    Annotated[float, Tag("number")] | Annotated[WeightSchedule, Tag("schedule")],
    Discriminator(_form),
]
Weight = Annotated[Number, AfterValidator(Between(0, 1e6))]
Fraction = Annotated[Number, AfterValidator(Between(0, 1))]
Seeded = Annotated[Number, AfterValidator(Between(0, 1_048_576))]
Temperature = Annotated[Number, AfterValidator(Between(0.01, 1000))]


class MaskingConfig(Settings):
    """How positions are chosen to be predicted and what replaces them."""

    # Of 1 nothing would be left to predict from.
    mlm_probability: float = setting(0.15, "Predict this fraction of the positions.", gt=0, lt=1)
    mask: float = setting(0.8, "Replace this fraction of them by the mask token.", ge=0, le=1)
    keep: float = setting(0.1, "Leave this fraction of them as they are; the rest get a random token.", ge=0, le=1)
    smoothing: float = setting(0.7, "Choose tokens with p ~ max(count, 1)^-smoothing; 0: all alike.", ge=0, le=100)
    whole_words: bool = setting(False, "Choose whole words.")
    ngrams: int = setting(1, "Choose up to so many whole words in a row, n with p ~ 1/n.", unit="words", ge=1, le=100)
    max_predictions: int | None = setting(None, "Most positions of a sequence; null is no limit.", ge=1, le=1_048_576)
    static: bool = setting(False, "Draw the same masks in every epoch.")

    def refusals(self) -> Iterator[Refusal]:
        if self.mask + self.keep > 1 + 1e-9:
            problem = f"exceeds 1 together with objective.masking.keep={self.keep}"
            yield "objective.masking.mask", self.mask, problem, "lower one"


class SamplingConfig(Settings):
    """How a causal model writes text. The `generation_config` of a model is not read."""

    max_new_tokens: int = setting(
        64, "Most tokens of a completion, and half a sequence at most.", unit="tokens", ge=1, le=1_048_576
    )
    temperature: float = setting(1.0, "Divides the logits before a token is drawn; 0: the likeliest.", ge=0, le=100)
    top_k: int | None = setting(None, "Draw from so many of the likeliest tokens; null: all.", ge=1, le=4_000_000)
    top_p: float = setting(1.0, "Draw from the likeliest tokens that have this probability together.", gt=0, le=1)


class OnPolicyConfig(SamplingConfig):
    """Completions that the student writes itself, in place of those of the text (Agarwal et al. 2024)."""

    fraction: Fraction = setting(0.0, "Steps on the student's own completions; may follow a schedule.")
    prompt_tokens: int = setting(32, "Tokens of a text that are its prompt.", unit="tokens", ge=1, le=1_048_576)
    # At first what the student writes is far from all that its teacher knows.
    seeded_tokens: Seeded = setting(0, "Tokens of a completion that are the text's; may follow a schedule.")
    group_size: int = setting(8, "Prompts that are completed side by side.", unit="sequences", ge=1, le=BATCH)

    @property
    def follows_schedule(self) -> bool:
        return any(isinstance(number, WeightSchedule) for number in (self.fraction, self.seeded_tokens))


class TermConfig(Part):
    """One loss term. Its name is that of a file of `distill/objective/terms/`, unless `kind` is."""

    package: ClassVar[str] = TERMS

    kind: str | None = setting(None, "A file of `distill/objective/terms/`; null is the one of the term's name.")
    weight: Weight = setting(1.0, "Weight in the total; it may follow a schedule {start: NUMBER, end: NUMBER}.")
    temperature: Temperature | None = setting(None, "A number, or a schedule; null is objective.temperature.")

    @property
    def name(self) -> str:
        return self.group.rpartition(".")[2]

    def refusals(self) -> Iterator[Refusal]:
        names = kinds(TERMS)
        cure = f"choose one of {', '.join(names)}, or name a callable of your own as {self.group}._target_"
        if not self.name.isidentifier():
            yield ".", None, "no name of a loss", "take letters, digits and underscores"
        if self.target is None and self.kind is None and self.name not in names:
            yield ".", None, f"no such loss{suggestion(self.group, names, 'objective.')}", cure
        if self.target is None and self.kind is not None and self.kind not in names:
            yield ".kind", self.kind, f"not known{did_you_mean(self.kind, names)}", cure

    def make(self, shared: float | WeightSchedule) -> Component:
        """The class of the term with its arguments; `shared`: the temperature where it has none of its own."""
        temperature = value_at(shared if self.temperature is None else self.temperature, 0.0)
        optional = ("temperature",) if self.temperature is None else ()
        return self.component(self.kind or self.name, {"temperature": temperature}, optional)


class ObjectiveConfig(Settings, extra="allow"):
    """total = sum over the terms of weight * mean of the term. Each further name is a term.

    Weights and temperatures may follow a schedule. Terms of weight 0 are left out of training.
    """

    __pydantic_extra__: dict[str, TermConfig] = Field(init=False)

    kernel: Literal["auto", "fused"] = setting("auto", "auto compiles losses on logits in long runs; fused does not.")
    task: str = setting("mlm", "What is predicted: a file of `distill/tasks/`, such as mlm or clm.")
    masking: MaskingConfig = setting(MaskingConfig, "How positions are chosen to be predicted.")
    temperature: Temperature = setting(2.0, "Temperature of the terms that have none of their own.")
    on_policy: OnPolicyConfig = setting(OnPolicyConfig, "Steps on text that the student writes.")

    @model_validator(mode="before")
    @classmethod
    def _has_terms(cls, values: Any) -> Any:
        """Give each term its name; refuse what is neither a term nor a setting of the objective."""
        if not isinstance(values, dict):
            return values
        names = [*cls.model_fields, *kinds(TERMS)]
        for name, value in values.items():
            if name not in names and not isinstance(value, dict | TermConfig):
                group = f"objective.{name}"
                nearest = takers(TERMS, group) or suggestion(group, names, "objective.")
                losses = f"losses are {', '.join(kinds(TERMS))}, each with a weight such as objective.soft.weight=1"
                problem = f"neither a setting of the objective nor a loss{nearest}"
                raise SettingError(problem, setting=group, value=shown(value), cure="" if nearest else losses)
        terms = {name: value for name, value in values.items() if name not in cls.model_fields}
        return values | in_group("objective")(terms)

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
