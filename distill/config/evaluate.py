"""Settings of the evaluation: which sets models are scored on, how much of each, and when."""

from dataclasses import dataclass, field
from enum import Enum
from typing import Any


class Missing(Enum):
    """What to do when a corpus or an evaluation set is not available."""

    stop = "stop"
    skip = "skip"


@dataclass
class PseudoPerplexityConfig:
    share: float = 0.1  # seeded share of the positions that are scored; 1: all, 0: none
    batch_size: int = 32  # masked copies in one forward; of rows longer than 128 as many as have that many positions


@dataclass
class SetShare:
    """As `PseudoPerplexityConfig`, of one set."""

    share: float = 0.1


@dataclass
class SetConfig:
    """What of one set is scored, in place of the settings of the same names for all sets."""

    rows: int | None = None
    pseudo_perplexity: SetShare = field(default_factory=SetShare)


@dataclass
class CurveConfig:
    """Perplexity of the student while it trains, on a few rows of the first set; not of tasks on labelled examples."""

    points: int = 0  # on the way, evenly spread over the steps of the run, besides one before the first step; 0: none
    rows: int = 64  # scored at each of them


@dataclass
class EvaluateConfig:
    sets: list[str] = field(default_factory=lambda: ["heldout"])
    # Values are SourceConfig or Component; OmegaConf takes no new entry of a typed dict from the command line.
    sources: dict[str, Any] = field(default_factory=dict)
    missing: Missing = Missing.stop  # a set that is not available: stop, or leave it out and say so
    rows: int | None = None  # at most this many rows of a set, a seeded choice
    batch_size: int = 32
    # The student is scored at the end of the run, after every so many steps, and after every epoch; every_epoch null:
    # after every epoch where every_steps is null.
    every_steps: int | None = None
    every_epoch: bool | None = None
    curve: CurveConfig = field(default_factory=CurveConfig)
    stride: int | None = None  # of causal models: tokens that the window of perplexity moves on; null: half a row
    pseudo_perplexity: PseudoPerplexityConfig = field(default_factory=PseudoPerplexityConfig)
    # By set: rows and pseudo_perplexity.share of that set alone; values are SetConfig.
    by_set: dict[str, Any] = field(default_factory=dict)
    measures: dict[str, Any] = field(default_factory=dict)  # of the user's: Component by name
    twin: str | None = None  # run folder of the no-teacher twin, to stand beside the student

    def rows_of(self, name: str) -> int | None:
        """At most how many rows of this set are scored; None: all."""
        own = self.by_set.get(name)
        return self.rows if own is None else own.rows

    def share_of(self, name: str) -> float:
        """The share of the positions of this set that pseudo-perplexity scores."""
        own = self.by_set.get(name)
        return float(self.pseudo_perplexity.share if own is None else own.pseudo_perplexity.share)

    @property
    def scores_singly(self) -> bool:
        """Whether pseudo-perplexity is measured on any set."""
        return any(self.share_of(name) > 0 for name in (*self.sets, *self.by_set)) or (
            not self.sets and self.pseudo_perplexity.share > 0
        )
