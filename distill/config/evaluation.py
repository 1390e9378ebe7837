"""The settings of the evaluation: which sets models are scored on, how much of each, and when."""

from typing import Annotated

from pydantic import BeforeValidator, field_validator

from distill.config.base import BATCH, ROWS, STEPS, LocalPath, Settings, setting
from distill.config.component import Component, Named, in_group
from distill.config.data import Missing, SourceConfig, are_sources
from distill.runtime.errors import SettingError

SAMPLES = 3  # of text, in the report of a causal model


class SetFraction(Settings):
    """As `PseudoPerplexityConfig`, of one set."""

    fraction: float = setting(
        0.1, "Score this seeded fraction of the positions, 16 where that is none; 1 is all, 0 none.", ge=0, le=1
    )


class PseudoPerplexityConfig(SetFraction):
    """Pseudo-perplexity of masked language models."""

    batch_size: int = setting(
        32, "Masked copies of up to 128 tokens in one forward; fewer of longer sequences, with as many positions.",
        unit="sequences", ge=1, le=BATCH,
    )  # fmt: skip


class SetConfig(Settings):
    """What of one set is scored; what is not given is as for all sets."""

    max_sequences: int | None = setting(
        None, "Score at most this many sequences of this set.", unit="sequences", ge=1, le=ROWS
    )
    pseudo_perplexity: SetFraction = setting(None, "Pseudo-perplexity of this set.", factory=SetFraction)


class CurveConfig(Settings):
    """Perplexity of the student while it trains, on a few sequences of the first set; not with labelled examples."""

    points: int = setting(
        0, "Score at this many points, evenly spread over the run, besides one before the first step; 0 is none.",
        ge=0, le=1000,
    )  # fmt: skip
    sequences: int = setting(64, "Sequences that are scored at each point.", unit="sequences", ge=1, le=ROWS)


class EvaluateConfig(Settings):
    """Which sets models are scored on, and when."""

    sets: list[str] = setting(None, "Names of the sets, of `sources`.", factory=lambda: ["heldout"])
    sources: Annotated[
        dict[str, SourceConfig], BeforeValidator(in_group("evaluate.sources")), BeforeValidator(are_sources)
    ] = setting(None, "Where the text of each set comes from, by its name.", factory=dict)
    missing: Missing = setting(Missing.stop, "Stop where a set is not available, or leave it out with a note.")
    max_sequences: int | None = setting(
        None,
        "Score at most this many sequences of a set, a seeded choice; null is all.",
        unit="sequences",
        ge=1,
        le=ROWS,
    )
    batch_size: int = setting(32, "Sequences in one forward.", unit="sequences", ge=1, le=BATCH)
    every_steps: int | None = setting(
        None, "Score the student after every so many steps, besides the end of the run.", unit="steps", ge=1, le=STEPS
    )
    every_epoch: bool | None = setting(
        None, "Score the student after every epoch; null does so where every_steps is null."
    )
    curve: CurveConfig = setting(None, "Perplexity while the student trains.", factory=CurveConfig)
    stride: int | None = setting(
        None, "Tokens that the window of a causal model's perplexity moves on; null is half a sequence.", unit="tokens",
        ge=1, le=1_048_576,
    )  # fmt: skip
    pseudo_perplexity: PseudoPerplexityConfig = setting(
        None, "Pseudo-perplexity of masked language models.", factory=PseudoPerplexityConfig
    )
    by_set: dict[str, SetConfig] = setting(
        None, "max_sequences and pseudo_perplexity.fraction of one set alone, by its name.", factory=dict
    )
    measures: Annotated[dict[str, Named], BeforeValidator(in_group("evaluate.measures"))] = setting(
        None,
        "Further measures by name: a torchmetrics Metric of logits and targets, as `_target_` and its arguments.",
        factory=dict,
    )
    samples: int | None = setting(
        None,
        "Beginnings of texts of the first set that the models continue for the report; null is 3 of causal models.",
        ge=0,
        le=100,
    )
    baseline: LocalPath | None = setting(
        None, "Run folder of the no-teacher baseline, which the report lays beside the student."
    )

    @field_validator("sets")
    @classmethod
    def _names_each_set_once(cls, sets: list[str]) -> list[str]:
        for name in sets:
            if sets.count(name) > 1:
                raise SettingError(
                    f"names {name} twice", setting="evaluate.sets", value=sets, cure="name each set once"
                )
        return sets

    def max_sequences_of(self, name: str) -> int | None:
        """At most how many sequences of this set are scored; None: all."""
        of_set = self.by_set.get(name)
        is_own = of_set is not None and "max_sequences" in of_set.model_fields_set
        return of_set.max_sequences if of_set is not None and is_own else self.max_sequences

    def fraction_of(self, name: str) -> float:
        """The fraction of the positions of this set that pseudo-perplexity scores."""
        of_set = self.by_set.get(name)
        own = None if of_set is None else of_set.pseudo_perplexity
        is_own = own is not None and "fraction" in own.model_fields_set
        return own.fraction if own is not None and is_own else self.pseudo_perplexity.fraction

    @property
    def own_measures(self) -> dict[str, Component]:
        """What makes each further measure, by its name."""
        return {name: measure.make for name, measure in self.measures.items()}

    def num_samples(self, causal: bool) -> int:
        """How many beginnings the models of a run continue; only causal ones continue a text."""
        return self.samples if self.samples is not None else SAMPLES if causal else 0

    @property
    def scores_singly(self) -> bool:
        """Whether pseudo-perplexity is measured on any set."""
        return any(self.fraction_of(name) > 0 for name in (*self.sets, *self.by_set)) or (
            not self.sets and self.pseudo_perplexity.fraction > 0
        )
