"""The settings of the student: where its weights come from, and which of them are trained.

`student.init` chooses one of these classes, each of which has what it reads.
"""

from typing import Any, Literal

from distill.config.component import Component
from distill.config.model import LocalPath, Settings, setting
from distill.config.unions import Kinds


class AnyStudentConfig(Settings):
    """What every student has."""

    # Another one than the teacher's is for losses that need no pair of tokens, such as `pooled`.
    tokenizer: LocalPath | None = setting(
        None,
        "Folder or Hub name of a tokenizer, or corpus (trained on it); null is a saved student's, else the teacher's.",
    )
    gradient_checkpointing: bool = setting(
        False, "Keep the input of each layer alone for the backward pass, which computes the rest again."
    )


class BuiltInStudentConfig(AnyStudentConfig):
    """What every student has that transformers makes."""

    config: dict[str, Any] = setting(None, "Fields of the transformers configuration.", factory=dict)
    frozen: list[Any] = setting(
        None, "Parts that keep the weights they start with: embeddings, and layers by number, from 0.", factory=list
    )
    dropout: float | None = setting(
        None, "Dropout; null is 0.1, or what a saved model has. A custom student has its own.", ge=0, lt=1
    )


class LayersStudentConfig(BuiltInStudentConfig):
    """A student that starts from layers of the teacher."""

    init: Literal["layers"] = setting("layers", "Weights of layers of the teacher.")
    architecture: str = setting("same", "A transformers model type such as distilbert, or same (as the teacher).")
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


class NewStudentConfig(BuiltInStudentConfig):
    """A student that starts from new weights."""

    # With neighbours the heads of the first layer attend to the tokens beside, `distill.models.initialisation`.
    init: Literal["random", "neighbours"] = setting(
        "random", "New weights: random ones, or with heads in the first layer that attend to the tokens beside."
    )
    architecture: str = setting("same", "A transformers model type such as bert; same is not possible here.")


class SavedStudentConfig(BuiltInStudentConfig):
    """A student that starts from a saved model."""

    init: Literal["pretrained"] = setting("pretrained", "Weights of a saved model.")
    path: LocalPath | None = setting(None, "Folder of a model, folder of a run, or name on the Hub.")
    trust_remote_code: bool = setting(False, "Let transformers run code of the model's repository.")


class CustomStudentConfig(AnyStudentConfig):
    """A student that a callable of the user's makes."""

    init: Literal["custom"] = setting("custom", "Whatever the callable of `_target_` gives.")
    path: LocalPath | None = setting(None, "Folder of weights or folder of a run, for what the callable makes.")
    custom: Component = setting(..., "The callable, with its settings.")


StudentConfig = LayersStudentConfig | NewStudentConfig | SavedStudentConfig | CustomStudentConfig
STUDENTS = Kinds(StudentConfig, "init")
