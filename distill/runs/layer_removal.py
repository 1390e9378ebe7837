"""Which layers of a deep model may go: those without which an untrained student has the lowest loss.

One pass of the whole model gives the influence of each layer (Men et al. 2024, "ShortGPT") and of each run of layers
(Gromov et al. 2024, "The Unreasonable Ineffectiveness of the Deeper Layers"). Layers are then taken away one after
another: of the few with the least influence that one without which the loss is lowest. Then layers are exchanged, one
that is gone for one that is left, until no exchange lowers the loss.
"""

import math
import time
from collections.abc import Callable, Iterable

from distill.runs.layer_losses import Losses
from distill.runtime.errors import SettingError
from distill.runtime.progress import Progress

SHORTLIST = 8  # removals that are scored; all 30 of SmolLM2 led to the same ten layers, in 2.5 times the time
RETURNS = 3  # layers of which each comes back, the best ones, before an exchange is given up
PART = 0.6  # of a pass that scoring a choice takes, as its first layers are recorded

Choice = tuple[int, ...]


class Removal:
    """The choices of `count` of `available` layers that were scored, and what led to them.

    Attributes:
        losses: of all choices that were scored, with more layers too; infinite where they do not go into the student.
    """

    def __init__(
        self,
        available: int,
        count: int,
        score: Losses,
        deadline: float = math.inf,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.available, self.count, self.score = available, count, score
        self.losses = dict[Choice, float]()
        self._deadline, self._clock, self._influence = deadline, clock, list[float]()
        self._shortlist, self._pass = SHORTLIST, 0.0  # seconds of a pass of the whole model

    @property
    def is_over(self) -> bool:
        """Whether the time is up."""
        return self._clock() > self._deadline

    def begin(self) -> float:
        """Record the whole model; gives its loss."""
        everything, began = tuple(range(self.available)), self._clock()
        self._influence = self.score.record(everything)
        whole = self.score(everything)
        self._pass = self._clock() - began
        return whole

    def estimate(self) -> float:
        """About how many seconds `run` takes without a deadline."""
        exchange = PART * (self.available - self.count) + RETURNS * (PART * SHORTLIST + 1)
        return self._removals(SHORTLIST) + 2 * self._pass * exchange * self.count / self.available

    def _removals(self, shortlist: int) -> float:
        """About how many seconds it takes to take the layers away."""
        depths = range(self.count + 1, self.available + 1)
        return self._pass * sum((PART * min(shortlist, depth) + 1) * depth / self.available for depth in depths)

    def run(self) -> None:
        """Score choices until the time is up or nothing lowers the loss."""
        everything, gone = tuple(range(self.available)), self.available - self.count
        self._loss(_without(everything, sorted(everything, key=self._influence.__getitem__)[:gone]))
        if runs := self.score.influence_of_runs(gone):
            start = 1 + min(range(len(runs)), key=runs.__getitem__)
            self._loss(_without(everything, range(start, start + gone)))
        left = self._deadline - self._clock()
        self._shortlist = next((size for size in range(SHORTLIST, 1, -1) if self._removals(size) <= left), 2)
        with Progress("layers taken away", gone, "layers") as progress:
            layers = self._reduce(everything, progress)
        with Progress("layers exchanged", 0, "choices", start=len(self.losses)) as progress:
            self._shortlist = SHORTLIST
            self._exchange(layers, progress)

    def _reduce(self, layers: Choice, progress: Progress | None = None) -> Choice:
        """Take one layer after another away. When the time is up all that are too many go at once, by influence."""
        while (excess := len(layers) - self.count) > 0:
            influence = dict(zip(layers, self.score.record(layers), strict=True))
            order = sorted(layers, key=influence.__getitem__)
            if self.is_over:
                layers = _without(layers, order[:excess])
                self._loss(layers)
                return layers
            layers = self._best(_without(layers, [layer]) for layer in order)
            if progress:
                progress.update(self.available - len(layers))
        return layers

    def _exchange(self, layers: Choice, progress: Progress) -> None:
        """Let a layer come back and another one go, as long as that lowers the loss and there is time."""
        improved = True
        while improved and not self.is_over:
            improved = False
            self.score.record(layers)
            larger = [tuple(sorted({*layers, layer})) for layer in range(self.available) if layer not in layers]
            larger = [choice for choice in larger if not self.is_over and math.isfinite(self._loss(choice))]
            for choice in sorted(larger, key=self._loss)[:RETURNS]:
                other = self._reduce(choice)
                progress.update(len(self.losses))
                if self._loss(other) < self._loss(layers):
                    layers, improved = other, True
                    break

    def _best(self, choices: Iterable[Choice]) -> Choice:
        """The best of the first few that go into the student. Raises SettingError where none does."""
        fitting = list[Choice]()
        for choice in choices:
            if len(fitting) == self._shortlist or (fitting and self.is_over):
                break
            if math.isfinite(self._loss(choice)):
                fitting.append(choice)
        if not fitting:
            no_loss = "no choice of layers has a finite loss: check the teacher, or set precision=fp32"
            raise SettingError(f"student.layers=auto: {self.score.refusal or no_loss}")
        return min(fitting, key=self._loss)

    def _loss(self, choice: Choice) -> float:
        if choice not in self.losses:
            self.losses[choice] = self.score(choice)
        return self.losses[choice]


def _without(layers: Choice, gone: Iterable[int]) -> Choice:
    removed = set(gone)
    return tuple(layer for layer in layers if layer not in removed)
