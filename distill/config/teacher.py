"""The settings of the teacher, of several teachers, and of what is kept of one on disk.

`teacher.kind`, and that of each of several teachers, chooses one of these classes, each of which has what it reads.
"""

from typing import Any, Literal

from pydantic import ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from distill.config.component import Component
from distill.config.model import SEEDS, LocalPath, Settings, setting
from distill.config.unions import Kinds

BUNDLED = ("bundled_deep", "bundled_small")  # kinds of teachers that ship with this package, in folders of these names

MICRO_BATCHES: dict[str, Any] = {"ge": 1, "le": 10_000}


class TeacherCacheConfig(Settings):
    """The teacher's answers on disk, for runs that see the same masked sequences several times."""

    top_k: int | None = setting(
        None, "Keep this many of the teacher's largest probabilities per position; null keeps none of them.", ge=1,
        le=4_000_000,
    )  # fmt: skip
    sampled: int | None = setting(
        None, "Draw this many tokens from all others, without bias; with both null the teacher runs live.", ge=1,
        le=65_536,
    )  # fmt: skip
    # With 0 all tokens would be drawn alike; above 1 weights have no bound.
    exponent: float = setting(
        1.0, "Draw tokens in proportion to their probability to this power, and weight them by the rest.", gt=0, le=1
    )
    seed: int = setting(0, "Seed of the draws.", ge=0, le=SEEDS)
    gigabytes: float = setting(
        8.0, "Largest size on disk; more is refused before the teacher runs.", unit="GB", gt=0, le=1e6
    )

    @field_validator("exponent", "seed")
    @classmethod
    def _is_about_draws(cls, value: float, info: ValidationInfo) -> float:
        default = cls.model_fields[str(info.field_name)].default
        if value != default and "sampled" in info.data and info.data["sampled"] is None:
            cure = f"set {{section}}.sampled to a number, or {{section}}.{info.field_name} back to {default}"
            raise PydanticCustomError("refused", f"for sampled tokens, but {{section}}.sampled=null; {cure}")
        return value

    @property
    def wanted(self) -> bool:
        """Whether a cache is read in place of a teacher that runs."""
        return self.top_k is not None or self.sampled is not None


class BundledConfig(Settings):
    """A model that ships with this package."""

    kind: Literal["bundled_deep", "bundled_small"] = setting("bundled_deep", "A model that ships with this package.")


class FrozenModelConfig(Settings):
    """Where a model of the user's lies."""

    path: LocalPath | None = setting(None, "Folder of a model, folder of a run, or name on the Hub.")
    revision: str | None = setting(None, "Revision of a model on the Hub.")
    trust_remote_code: bool = setting(False, "Let transformers run code of the model's repository.")
    tokenizer: LocalPath | None = setting(
        None, "Folder of the tokenizer or its name on the Hub; null reads it beside the model."
    )


class SavedConfig(FrozenModelConfig):
    """A saved model."""

    kind: Literal["pretrained"] = setting("pretrained", "A saved model.")


class CustomConfig(FrozenModelConfig):
    """A model that a callable of the user's makes."""

    kind: Literal["custom"] = setting("custom", "Whatever the callable of `_target_` gives.")
    custom: Component = setting(..., "The callable, with its settings.")


class RunningConfig(Settings):
    """How the only teacher runs, or all of several that have no such settings of their own."""

    micro_batches: int = setting(
        1, "Micro-batches that one forward of the teacher takes: it keeps nothing for a backward.", **MICRO_BATCHES
    )
    cache: TeacherCacheConfig = setting(
        None, "The teacher's answers on disk, for runs that see the same masked sequences several times.",
        factory=TeacherCacheConfig,
    )  # fmt: skip


class OneOfSeveralConfig(Settings):
    """How one of several teachers runs, and what it counts."""

    weight: float = setting(1.0, "Weight in the mean of all; weights are divided by their sum.", gt=0, le=1e6)
    precision: Literal["fp32", "bf16", "fp16", "int8"] | None = setting(
        None, "Number format of its forward in training; null is precision.teacher."
    )
    micro_batches: int | None = setting(
        None, "Micro-batches that one forward takes; null is teacher.micro_batches.", **MICRO_BATCHES
    )
    cache: TeacherCacheConfig | None = setting(None, "Its answers on disk; null is teacher.cache.")


class BundledMemberConfig(BundledConfig, OneOfSeveralConfig):
    """One of several teachers, a model that ships with this package."""


class SavedMemberConfig(SavedConfig, OneOfSeveralConfig):
    """One of several teachers, a saved model."""


class CustomMemberConfig(CustomConfig, OneOfSeveralConfig):
    """One of several teachers, made by a callable of the user's."""


MemberConfig = BundledMemberConfig | SavedMemberConfig | CustomMemberConfig


class BundledTeacherConfig(BundledConfig, RunningConfig):
    """The only teacher, a model that ships with this package."""


class SavedTeacherConfig(SavedConfig, RunningConfig):
    """The only teacher, a saved model."""


class CustomTeacherConfig(CustomConfig, RunningConfig):
    """The only teacher, made by a callable of the user's."""


class SeveralTeachersConfig(RunningConfig):
    """Several teachers, whose probabilities are averaged."""

    kind: Literal["several"] = setting("several", "Several teachers, whose probabilities are averaged.")
    # Layers and hidden states are those of the first.
    members: dict[str, MemberConfig] = setting(None, "The teachers by name.", factory=dict)


class NoTeacherConfig(Settings):
    """No teacher."""

    kind: Literal["none"] = setting("none", "The student learns from the text alone.")


OneTeacherConfig = BundledTeacherConfig | SavedTeacherConfig | CustomTeacherConfig
TeacherConfig = OneTeacherConfig | SeveralTeachersConfig | NoTeacherConfig
TEACHERS, MEMBERS = Kinds(TeacherConfig, "kind"), Kinds(MemberConfig, "kind")
