"""The settings of the student: where its weights come from, and which of them are trained."""

from typing import Any, Literal, Self

from pydantic import model_validator
from pydantic.json_schema import SkipJsonSchema

from distill.config.component import Component, Part, group_named
from distill.config.errors import shown
from distill.config.model import LocalPath, setting
from distill.runtime.errors import SettingError

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
