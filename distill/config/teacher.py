"""Settings of the teacher, of several teachers, and of what is kept of one on disk."""

from dataclasses import dataclass, field
from typing import Any

from distill.config.component import Component

MISSING: Any = "???"  # OmegaConf's mark of a value that has to be given

EMBEDDED = ("embedded", "embedded_deep")  # kinds of teachers that ship with this package, in folders of these names


@dataclass
class TeacherCacheConfig:
    """The teacher's answers on disk, for runs that see the same masked rows several times."""

    top_k: int | None = None  # keep this many of its largest probabilities per position; null: none of them
    sampled: int | None = None  # draw so many tokens from all others, without bias; both null: the teacher runs live
    exponent: float = 1.0  # tokens are drawn in proportion to their probability to this power, and weighted by the rest
    seed: int = 0  # of the draws
    gigabytes: float = 8.0  # largest size on disk; more is refused before the teacher runs

    @property
    def wanted(self) -> bool:
        """Whether a cache is read in place of a teacher that runs."""
        return self.top_k is not None or self.sampled is not None

    @property
    def setting(self) -> str:
        """What decides the size of a position, as error lines call it."""
        found = {"top_k": self.top_k, "sampled": self.sampled}
        return " with ".join(f"teacher.cache.{name}={value}" for name, value in found.items() if value is not None)


@dataclass
class MemberConfig:
    """One of several teachers. `kind`: embedded, embedded_deep, pretrained, or custom (by a callable of the user's)."""

    kind: str = "pretrained"
    path: str | None = None  # folder, run folder, or name on the Hub
    revision: str | None = None
    trust_remote_code: bool = False
    tokenizer: str | None = None  # folder or name on the Hub; null: it lies beside the model
    custom: Component | None = None  # of kind=custom
    weight: float = 1.0  # in the mean of all; they are divided by their sum
    precision: str | None = None  # of its forward in training: fp32, bf16, fp16 or int8; null: precision.teacher
    micro_batches: int | None = None  # null: teacher.micro_batches
    cache: TeacherCacheConfig | None = None  # null: teacher.cache


@dataclass
class TeacherConfig:
    """The frozen model to learn from.

    `kind`: embedded or embedded_deep (those that ship with this package), pretrained, none, several (the mean of the
    members), or custom (by a callable of the user's).
    """

    kind: str = MISSING
    path: str | None = None  # folder, run folder, or name on the Hub
    revision: str | None = None
    trust_remote_code: bool = False
    tokenizer: str | None = None  # folder or name on the Hub; null: it lies beside the model
    custom: Component | None = None  # of kind=custom
    micro_batches: int = 1  # that one forward of the teacher takes: it keeps nothing for a backward
    cache: TeacherCacheConfig = field(default_factory=TeacherCacheConfig)
    # Of kind=several, by name; values are MemberConfig. OmegaConf takes no new entry of a typed dict from the command
    # line. Layers and hidden states are those of the first.
    members: dict[str, Any] = field(default_factory=dict)
