"""The settings of the evaluation: which sets models are scored on, how much of each, and when."""

from collections.abc import Iterator
from typing import Annotated

from pydantic import BeforeValidator

from distill.config.base import BATCH, IN_SEQUENCES, IN_STEPS, LocalPath, Refusal, Settings, setting
from distill.config.component import Component, Named, in_group
from distill.config.data import Missing, SourceConfig

SAMPLES = 3  # of text, in the report of a causal model


class SetFraction(Settings):
    """As `PseudoPerplexityConfig`, of one set."""

    fraction: float = setting(0.1, "Score this seeded fraction of the positions; 1 is all, 0 none.", ge=0, le=1)


class PseudoPerplexityConfig(SetFraction):
    """Pseudo-perplexity of masked language models."""

    batch_size: int = setting(32, "Masked copies of 128 tokens in one forward.", unit="sequences", ge=1, le=BATCH)


class SetConfig(Settings):
    """What of one set is scored; what is not given is as for all sets."""

    max_sequences: int | None = setting(None, "Score at most this many sequences of this set.", **IN_SEQUENCES)
    pseudo_perplexity: SetFraction = setting(SetFraction, "Pseudo-perplexity of this set.")


class OnTheWayConfig(Settings):
    """The evaluations in the course of a training; the student that it ends with is scored on all of each set."""

    sequences: int | None = setting(
        None, "Score the first so many of each set during training; null: all.", **IN_SEQUENCES
    )


class EvaluateConfig(Settings):
    """Which sets models are scored on, and when."""

    sets: list[str] = setting(lambda: ["heldout"], "Names of the sets, of `sources`.")
    sources: Annotated[dict[str, SourceConfig], BeforeValidator(in_group("evaluate.sources"))] = setting(
        dict, "Where the text of each set comes from, by its name."
    )
    missing: Missing = setting(Missing.stop, "Stop where a set is not available, or leave it out with a note.")
    max_sequences: int | None = setting(None, "Score so many of each set, a seeded choice; null: all.", **IN_SEQUENCES)
    batch_size: int = setting(32, "Sequences in one forward.", unit="sequences", ge=1, le=BATCH)
    every_steps: int | None = setting(None, "Score the student after every so many steps, and at the end.", **IN_STEPS)
    every_epoch: bool | None = setting(None, "Score the student after every epoch; null: where every_steps is null.")
    on_the_way: OnTheWayConfig = setting(OnTheWayConfig, "How much is scored while the student trains.")
    stride: int | None = setting(
        None, "Tokens that the window of a causal model's perplexity moves on; null is half a sequence.", unit="tokens",
        ge=1, le=1_048_576,
    )  # fmt: skip
    pseudo_perplexity: PseudoPerplexityConfig = setting(PseudoPerplexityConfig, "Pseudo-perplexity of masked models.")
    by_set: dict[str, SetConfig] = setting(dict, "max_sequences and pseudo_perplexity.fraction of one set, by name.")
    measures: Annotated[dict[str, Named], BeforeValidator(in_group("evaluate.measures"))] = setting(
        dict, "Further measures by name: a torchmetrics Metric of logits and targets, as `_target_` and its arguments."
    )
    samples: int | None = setting(None, "Texts that causal models continue for the report; null is 3.", ge=0, le=100)
    baseline: LocalPath | None = setting(None, "Run folder of the no-teacher baseline, for the report.")

    def refusals(self) -> Iterator[Refusal]:
        if twice := [name for name in self.sets if self.sets.count(name) > 1]:
            yield ".sets", self.sets, f"names {twice[0]} twice", "name each set once"

    def max_sequences_of(self, name: str) -> int | None:
        """At most how many sequences of this set are scored; None: all."""
        own = self.by_set.get(name, self)
        return own.max_sequences if "max_sequences" in own.model_fields_set else self.max_sequences

    def fraction_of(self, name: str) -> float:
        """The fraction of the positions of this set that pseudo-perplexity scores."""
        own = self.by_set[name].pseudo_perplexity if name in self.by_set else self.pseudo_perplexity
        return own.fraction if "fraction" in own.model_fields_set else self.pseudo_perplexity.fraction

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
