"""The steps of a run after which its losses are summed up and its student is scored."""

from dataclasses import dataclass

from distill.config.settings import EvaluateConfig


@dataclass(frozen=True)
class Points:
    """Where the lines of history.jsonl stand; the end of a run is always one, whatever ends it.

    Attributes:
        every_steps: a point after every so many steps; None: none of these.
        epochs: a point after every epoch.
        scored: whether the student is scored at them, or at the end of the run alone.
    """

    every_steps: int | None = None
    epochs: bool = True
    scored: bool = True

    @classmethod
    def of(cls, settings: EvaluateConfig) -> "Points":
        """With `every_steps` the epochs count only where `every_epoch` says so."""
        if settings.every_steps is None:
            return cls(None, True, settings.every_epoch is not False)
        return cls(settings.every_steps, settings.every_epoch is True)

    def after(self, step: int, steps_per_epoch: int) -> bool:
        """Whether there is a point when this many steps are done."""
        by_steps = self.every_steps is not None and step % self.every_steps == 0
        return by_steps or (self.epochs and step % steps_per_epoch == 0)
