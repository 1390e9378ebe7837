"""The settings of what watches a run: tracker, profile and report."""

from typing import Literal, Self

from pydantic import model_validator

from distill.config.model import STEPS, Settings, setting
from distill.runtime.errors import SettingError


class TrackerConfig(Settings):
    """Where metrics go besides metrics.jsonl."""

    kind: Literal["none", "wandb", "tensorboard"] = setting("none", "The tracker.")
    project: str = setting("distill", "Name of the project at the tracker.")
    name: str | None = setting(None, "Name of the run at wandb; null: that of its folder.")
    tags: list[str] = setting(None, "Labels of the run at wandb.", factory=list)
    mode: Literal["offline", "online"] = setting("offline", "Mode of wandb.")


class ProfileConfig(Settings):
    """What is recorded about where the time goes; none of it changes the student."""

    enabled: bool = setting(False, "Record a profile and add a page to the report.")
    trace_steps: int = setting(
        2, "Steps that torch.profiler records operation by operation; 0 is none.", unit="steps", ge=0, le=100
    )
    stop_after: int | None = setting(
        None, "End the run after this many steps with the profile alone, without student, checkpoint or report.",
        unit="steps", ge=1, le=STEPS,
    )  # fmt: skip

    @model_validator(mode="after")
    def _stops_with_a_profile_alone(self) -> Self:
        if self.stop_after is not None and not self.enabled:
            raise SettingError(
                "not read without a profile",
                setting="profile.stop_after",
                value=self.stop_after,
                cure="set profile=on, or leave it out",
            )
        return self


class ReportConfig(Settings):
    """How the report is written while the run goes on."""

    every: float | None = setting(
        15.0, "Time between two pages of a run that is under way; null or 0 writes the report only at the end.",
        unit="seconds", ge=0, le=86_400,
    )  # fmt: skip
