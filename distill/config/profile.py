"""The settings of a profile."""

from dataclasses import dataclass


@dataclass
class ProfileConfig:
    """What is recorded about where the time goes; none of it changes the student."""

    enabled: bool = False
    trace_steps: int = 2  # steps that torch.profiler records operation by operation; 0: none
    # Steps after which the run ends, with the profile and without student, checkpoint or report; null: it goes on.
    stop_after: int | None = None
