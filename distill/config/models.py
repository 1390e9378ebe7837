"""The settings of the models: the teacher or several, what is kept of its answers on disk, and the student."""

from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, ValidationInfo, field_validator, model_validator
from pydantic.json_schema import SkipJsonSchema
from pydantic_core import PydanticCustomError

from distill.config.base import SEEDS, LocalPath, Settings, setting
from distill.config.component import TARGET, Component, Part, group_named, in_group
from distill.config.errors import shown
from distill.runtime.errors import SettingError

BUNDLED = ("bundled_deep", "bundled_small")  # teachers that ship with this package, in folders of these names
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


class FrozenModelConfig(Part):
    """Where a teacher comes from: a saved model, or a callable of the user's."""

    path: LocalPath | None = setting(
        None,
        "Folder of a model, folder of a run, name on the Hub, GGUF file, or bundled_deep, bundled_small, smollm2, "
        "minilm; null is none.",
    )
    revision: str | None = setting(None, "Revision of a model on the Hub.")
    trust_remote_code: bool = setting(False, "Let transformers run code of the model's repository.")
    tokenizer: LocalPath | None = setting(
        None, "Folder of the tokenizer or its name on the Hub; null reads it beside the model."
    )

    @property
    def bundled(self) -> bool:
        """Whether it ships with this package."""
        return self.target is None and self.path in BUNDLED

    @property
    def saved(self) -> bool:
        """Whether it is a saved model of the user's or of the Hub."""
        return self.target is None and self.path is not None and not self.bundled

    @property
    def custom(self) -> Component | None:
        """What makes it, where that is a callable of the user's."""
        if self.target is None:
            return None
        given = {name: getattr(self, name) for name in ("path", "revision", "trust_remote_code")}
        return self.component("", given, tuple(given))

    @model_validator(mode="after")
    def _reads_what_is_given(self) -> Self:
        if self.target is not None:
            return self
        self.refuse_arguments()
        for name in ("revision", "trust_remote_code", "tokenizer"):
            value = getattr(self, name)
            if not self.saved and value != FrozenModelConfig.model_fields[name].default:
                cure = "give the path of a saved model, or leave it out"
                shown = str(value).lower() if isinstance(value, bool) else value
                problem = f"not read with {self.group}.path={'null' if self.path is None else self.path}"
                raise SettingError(problem, setting=f".{name}", value=shown, cure=cure)
        return self


class MemberConfig(FrozenModelConfig):
    """One of several teachers: what it is, how it runs, and what it counts."""

    weight: float = setting(1.0, "Weight in the mean of all; weights are divided by their sum.", gt=0, le=1e6)
    precision: Literal["fp32", "bf16", "fp16", "int8"] | None = setting(
        None, "Number format of its forward in training; null is precision.teacher."
    )
    micro_batches: int | None = setting(
        None, "Micro-batches that one forward takes; null is teacher.micro_batches.", **MICRO_BATCHES
    )
    cache: TeacherCacheConfig | None = setting(None, "Its answers on disk; null is teacher.cache.")

    @model_validator(mode="after")
    def _is_a_model(self) -> Self:
        if self.target is None and self.path is None:
            raise SettingError("names no model", setting=".path", value="null", cure="give a path, or bundled_deep")
        return self


def _as_members(values: Any) -> Any:
    """A text in place of a member's settings is refused with what it has to be."""
    for name, value in values.items() if isinstance(values, dict) else ():
        if not isinstance(value, dict | MemberConfig):
            setting, cure = f"teacher.members.{name}", f"write {{path: {shown(value)}}}"
            raise SettingError("no teacher", setting=setting, value=shown(value), cure=cure)
    return values


class TeacherConfig(FrozenModelConfig):
    """The only teacher, several whose probabilities are averaged, or none."""

    group: SkipJsonSchema[str] = group_named("teacher")
    micro_batches: int = setting(
        1, "Micro-batches that one forward of the teacher takes: it keeps nothing for a backward.", **MICRO_BATCHES
    )
    cache: TeacherCacheConfig = setting(
        None, "The teacher's answers on disk, for runs that see the same masked sequences several times.",
        factory=TeacherCacheConfig,
    )  # fmt: skip
    # Layers and hidden states are those of the first.
    members: Annotated[
        dict[str, MemberConfig], BeforeValidator(in_group("teacher.members")), BeforeValidator(_as_members)
    ] = setting(None, "Several teachers by name, in place of one: their probabilities are averaged.", factory=dict)

    @property
    def is_none(self) -> bool:
        """Whether there is no teacher: the student learns from the text, or from the labels, alone."""
        return self.target is None and self.path is None and not self.members

    @model_validator(mode="after")
    def _is_one_or_several(self) -> Self:
        running = {
            "micro_batches": self.micro_batches,
            "cache.top_k": self.cache.top_k,
            "cache.sampled": self.cache.sampled,
        }
        for name, value in running.items():
            if self.is_none and value != (1 if name == "micro_batches" else None):
                cure = "choose a teacher, or leave it out"
                raise SettingError("not read with teacher.path=null", setting=f".{name}", value=value, cure=cure)
        for name, is_given in (("path", self.path is not None), (TARGET, self.target is not None)):
            if self.members and is_given:
                given = self.path if name == "path" else self.target
                cure = f"set it to null, or name this teacher as teacher.members.NAME.{name}"
                raise SettingError("beside teacher.members", setting=f".{name}", value=given, cure=cure)
        return self


NEW = ("random", "neighbours")
# The values of `init` that read a setting; all others read it, too.
READ_BY: dict[str, tuple[str, ...]] = {
    "architecture": ("layers", *NEW),
    **dict.fromkeys(("layers", "num_layers", "search_seconds"), ("layers",)),
    **dict.fromkeys(("path", "trust_remote_code"), ("pretrained",)),
}


class StudentConfig(Part):
    """The model to train. `init` says where its weights come from, unless a callable of the user's makes it."""

    group: SkipJsonSchema[str] = group_named("student")
    # With neighbours the heads of the first layer attend to the tokens beside, `distill.models.initialisation`.
    init: Literal["layers", "random", "neighbours", "pretrained"] = setting(
        "layers",
        "Its weights at the start: layers of the teacher, random ones, random ones that attend to neighbours, or saved "
        "ones.",
    )
    architecture: str = setting(
        "same", "A transformers model type such as distilbert, or same (as the teacher), which new weights cannot be."
    )
    # `auto` takes those layers that cost least by the untrained student's loss; of a bundled teacher they are known,
    # and searched for where num_layers is given. A list may hold lists, for the mean of their weights; rules are
    # every_second, which is also null, even, first, last, ends and averaged.
    layers: Any = setting(None, "Teacher layers to start from: auto, their numbers, or a rule.")
    num_layers: int | None = setting(
        None, "Layers that a rule takes; null is half, or with auto those known of a bundled teacher.", ge=1, le=10_000
    )
    # With it the layers depend on how fast the machine is; the same settings find the same ones without.
    search_seconds: float | None = setting(
        None, "The longest search of layers=auto; null: as long as it finds better ones.", unit="seconds", ge=1, le=1e6
    )
    path: LocalPath | None = setting(
        None, "Folder of a model, folder of a run, or name on the Hub; of a callable's student, the weights to read."
    )
    trust_remote_code: bool = setting(False, "Let transformers run code of the model's repository.")
    config: dict[str, Any] = setting(None, "Fields of the transformers configuration.", factory=dict)
    frozen: list[Any] = setting(
        None, "Parts that keep the weights they start with: embeddings, and layers by number, from 0.", factory=list
    )
    dropout: float | None = setting(
        None, "Dropout; null is 0.1, or what a saved model has. A custom student has its own.", ge=0, lt=1
    )
    # Another one than the teacher's is for losses that need no pair of tokens, such as `pooled`.
    tokenizer: LocalPath | None = setting(
        None,
        "Folder or Hub name of a tokenizer, or corpus (trained on it); null is a saved student's, else the teacher's.",
    )
    gradient_checkpointing: bool = setting(
        False, "Keep the input of each layer alone for the backward pass, which computes the rest again."
    )

    @property
    def custom(self) -> Component | None:
        """What makes it, where that is a callable of the user's."""
        if self.target is None:
            return None
        given = {name: getattr(self, name) for name in ("path", *READ_BY, "config", "frozen", "dropout")}
        defaults = {name: type(self).model_fields[name].get_default(call_default_factory=True) for name in given}
        given = {name: value for name, value in given.items() if name == "path" or value != defaults[name]}
        return self.component("", given, tuple(given))

    @property
    def from_layers(self) -> bool:
        """Whether it starts from layers of the teacher."""
        return self.target is None and self.init == "layers"

    @property
    def is_new(self) -> bool:
        """Whether it starts from new weights of a transformers model."""
        return self.target is None and self.init in NEW

    @property
    def is_saved(self) -> bool:
        """Whether it starts from a saved model."""
        return self.target is None and self.init == "pretrained"

    @model_validator(mode="after")
    def _reads_what_is_given(self) -> Self:
        if self.target is not None:
            return self
        self.refuse_arguments()
        for name, readers in READ_BY.items():
            value = getattr(self, name)
            if self.init not in readers and value != type(self).model_fields[name].default:
                null = shown(type(self).model_fields[name].default)
                raise SettingError(
                    f"not read with student.init={self.init}",
                    setting=f".{name}",
                    value=str(value).lower() if isinstance(value, bool) else shown(value),
                    cure=f"choose student={readers[0]}, or set it to {null}",
                )
        return self


class LayersStudentConfig(StudentConfig):
    """A student that starts from layers of the teacher, for programs."""


class NewStudentConfig(StudentConfig):
    """A student that starts from new weights, for programs."""

    init: Literal["random", "neighbours"] = setting("random", "New weights.")


class SavedStudentConfig(StudentConfig):
    """A student that starts from a saved model, for programs."""

    init: Literal["pretrained"] = setting("pretrained", "Weights of a saved model.")
