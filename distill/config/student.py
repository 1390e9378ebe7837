"""The settings of the student: where its weights come from, and which of them are trained."""

from typing import Any, Literal

from distill.config.component import Component
from distill.config.model import Settings, setting


class StudentConfig(Settings):
    """The model to train."""

    # With neighbours the heads of the first layer attend to the tokens beside, `distill.models.initialisation`.
    init: Literal["layers", "random", "neighbours", "pretrained", "custom"] = setting(
        "???",
        "Where its weights come from: layers of the teacher, random numbers, a saved model, or a callable of yours.",
    )
    architecture: str = setting("same", "A transformers model type such as distilbert, or same (as the teacher).")
    # `auto` takes those layers that cost least by the untrained student's loss; a list may hold lists, for the mean of
    # their weights; rules are every_second, which is also null, even, first, last, ends and averaged.
    layers: Any = setting(None, "Teacher layers to start from: auto, their numbers, or a rule.")
    num_layers: int | None = setting(None, "Layers that a rule takes; null is half of the teacher's.", ge=1, le=10_000)
    config: dict[str, Any] = setting(None, "Fields of the transformers configuration.", factory=dict)
    frozen: list[Any] = setting(
        None, "Parts that keep the weights they start with: embeddings, and layers by number, from 0.", factory=list
    )
    dropout: float | None = setting(
        None, "Dropout; null is 0.1, or what a saved model says. A custom student has its own.", ge=0, lt=1
    )
    # Another one than the teacher's is for losses that need no pair of token rows, such as `pooled`.
    tokenizer: str | None = setting(
        None, "Folder of a tokenizer or its name on the Hub, or corpus (trained on it); null is the teacher's."
    )
    path: str | None = setting(None, "Folder of a model, folder of a run, or name on the Hub.")
    trust_remote_code: bool = setting(False, "Let transformers run code of the model's repository.")
    custom: Component | None = setting(None, "The callable of init=custom.")
