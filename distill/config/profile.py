"""The settings of a profile."""

from dataclasses import dataclass


@dataclass
class ProfileConfig:
    """What is recorded about where the time goes; none of it changes the student."""

    enabled: bool = False
    interval: float = 0.5  # seconds between two samples of processors, memory, disk, network and GPU
    trace_steps: int = 2  # steps that torch.profiler records operation by operation; 0: none
    trace_after: int = 4  # steps of this start of the run before those
    # Steps after which the run ends, with the profile and without student, checkpoint or report; null: it goes on.
    stop_after: int | None = None
