"""What a profile holds when a run has ended: of each rank its steps, its loader and its samples; and the settings."""

from dataclasses import asdict, dataclass, field
from typing import Any, Self

from distill.runs.profile.loader import LoaderTimes


@dataclass
class RankProfile:
    """One rank.

    Attributes:
        cores: that it may use, of its host, whose ranks share them.
        steps: seconds of each phase of the newest steps, [N][phases], in the order of `PHASES`.
        exchanges: of the same steps: seconds from the start of an exchange to its end, also beside the backward pass.
        left_out: which of them, by their place, say nothing of the others: the first ones, and those that were traced.
        totals: seconds of each phase over all steps, and how many these were.
        samples: by name, over time (`Sampler.series`).
        retries: allocations that found the GPU's memory full.
    """

    rank: int
    host: str
    device: str
    cores: int
    local_ranks: int
    steps: list[list[float]]
    exchanges: list[float] = field(default_factory=list)
    left_out: list[int] = field(default_factory=list)
    totals: dict[str, float] = field(default_factory=dict)
    num_steps: int = 0
    loader: LoaderTimes = field(default_factory=LoaderTimes)
    samples: dict[str, list[float]] = field(default_factory=dict)
    energy: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    retries: int = 0
    host_cores: int = 0  # of the host, of which a process may be bound to a part
    threads: int = 0  # of torch, that compute on processors
    threads_of_core: int = 1  # of the host's processors, that count as cores each

    @classmethod
    def of(cls, content: dict[str, Any]) -> Self:
        """From what `asdict` made."""
        return cls(**{**content, "loader": LoaderTimes(**content["loader"])})


@dataclass
class RunSettings:
    """The settings that the rules read, as they were in force.

    Attributes:
        micro_batches: of a rank in a step.
        workers: train.workers; None where the number of threads was chosen.
    """

    batch_size: int
    micro_batches: int
    accumulate: int
    save_every: int
    workers: int | None = None
    rows_per_step: int | None = None  # where it was given
    sync: str = "window"
    compression: str = "none"
    rings: int = 1
    bytes_exchanged: int = 0  # in a step, by one rank


@dataclass
class RunProfile:
    """All ranks, in their order, with the same steps each."""

    ranks: list[RankProfile]
    settings: RunSettings

    def as_dict(self) -> dict[str, Any]:
        """As JSON holds it."""
        return asdict(self)

    @classmethod
    def of(cls, content: dict[str, Any]) -> Self:
        """From what `as_dict` made."""
        return cls([RankProfile.of(each) for each in content["ranks"]], RunSettings(**content["settings"]))
