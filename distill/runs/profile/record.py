"""What a profile holds when a run has ended: of each rank its steps, its loader and its samples; and the settings."""

from dataclasses import dataclass, field
from typing import Any, Self

from distill.runs.profile.loader import LoaderTimes


@dataclass
class RankProfile:
    """One rank.

    Attributes:
        steps: seconds of each phase of the newest steps, [N][phases], in the order of `PHASES`.
        left_out: which of them, by their place, are not typical: the first ones, and those that were traced.
        totals: seconds of each phase over all steps, and how many these were.
        samples: by name, over time (`Sampler.series`).
    """

    rank: int
    host: str
    steps: list[list[float]]
    left_out: list[int] = field(default_factory=list)
    totals: dict[str, float] = field(default_factory=dict)
    num_steps: int = 0
    loader: LoaderTimes = field(default_factory=LoaderTimes)
    samples: dict[str, list[float]] = field(default_factory=dict)

    @classmethod
    def of(cls, content: dict[str, Any]) -> Self:
        """From what `asdict` made."""
        return cls(**{**content, "loader": LoaderTimes(**content["loader"])})


@dataclass
class RunSettings:
    """The settings that the rules read, as they were in force; `micro_batches` of a rank in a step."""

    batch_size: int
    micro_batches: int
    save_every: int
    sync: str = "window"
    compression: str = "none"


@dataclass
class RunProfile:
    """All ranks, in their order, with the same steps each."""

    ranks: list[RankProfile]
    settings: RunSettings
