"""How predictions are made, and which of these options a kind of model reads."""

import math
from dataclasses import dataclass, fields
from typing import TypedDict

from distill.config.model import SEEDS
from distill.models.kind import CAUSAL, CLASSES, MASKED, SPANS, ModelKind
from distill.runtime.errors import SettingError, did_you_mean


class Options(TypedDict, total=False):
    """Those of `PredictConfig` as arguments of `distill.predict`."""

    top_k: int | None
    max_new_tokens: int | None
    sample: bool | None
    temperature: float | None
    top_p: float | None
    seed: int | None
    sequence_length: int | None
    no_answer: bool | None
    max_answer_tokens: int | None
    batch_size: int


@dataclass(frozen=True)
class PredictConfig:
    """Options of a prediction; None: not given, so that what a kind of model does not read can be refused."""

    # How many tokens for a mask (5), classes (all) or answers (1) to return, the most probable first; where a causal
    # model samples: from how many tokens it draws (all).
    top_k: int | None = None
    max_new_tokens: int | None = None  # that a causal model writes (30)
    sample: bool | None = None  # draw each token; else the most probable one is taken
    temperature: float | None = None  # of what is drawn from (1)
    top_p: float | None = None  # draw from the fewest tokens that have so much probability together (1: from all)
    seed: int | None = None  # of what is drawn (0)
    sequence_length: int | None = None  # tokens; None: as in the run that trained the model, else all it reads
    # Whether a question may stay without an answer, as in SQuAD 2.0; None: as in the run that trained the model.
    no_answer: bool | None = None
    max_answer_tokens: int | None = None  # of an answer (30)
    batch_size: int = 32  # sequences per forward pass

    def check(self, kind: ModelKind) -> None:
        """Raises SettingError for values that cannot be, and for options that this kind of model does not read."""
        options = READS.get(kind.noun, ())
        for name in (option.name for option in fields(self)):
            if name != "batch_size" and getattr(self, name) is not None and name not in options:
                raise SettingError(
                    f"{name}={getattr(self, name)}: a {kind.noun} does not read it{did_you_mean(name, list(options))}; "
                    f"leave it out (it reads {', '.join(options)})"
                )
        for name in ("top_k", "max_new_tokens", "sequence_length", "max_answer_tokens", "batch_size"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise SettingError(f"{name}={value}: give 1 or more")
        if self.seed is not None and not 0 <= self.seed <= SEEDS:
            raise SettingError(f"seed={self.seed}: give a number from 0 to {SEEDS:,}")
        if self.temperature is not None and not (0 < self.temperature < math.inf):
            raise SettingError(f"temperature={self.temperature}: give a number above 0")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise SettingError(f"top_p={self.top_p}: give a probability above 0, at most 1")
        for name in DRAWING if kind is CAUSAL and not self.sample else ():
            if getattr(self, name) is not None:
                raise SettingError(f"{name}={getattr(self, name)} is for sampling: set sample=true")


DRAWING = ("top_k", "temperature", "top_p", "seed")
READS = {
    MASKED.noun: ("top_k",),
    CAUSAL.noun: ("max_new_tokens", "sample", *DRAWING),
    CLASSES.noun: ("top_k", "sequence_length"),
    SPANS.noun: ("top_k", "sequence_length", "no_answer", "max_answer_tokens"),
}
