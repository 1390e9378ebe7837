"""The kinds of language models: which class of transformers a task needs, and which way its positions look."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import transformers
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForPreTraining,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
)

from distill.runtime.errors import SettingError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class ModelKind:
    """What a task needs of a model: how transformers loads it, and which way its positions look."""

    noun: str  # in messages
    auto_class: Any
    causal: bool
    objective: str  # a group option that learns from such models, for messages
    mapping: Any  # transformers' names of the classes by model type
    heads: tuple[str, ...] = ()  # beside that over the vocabulary, by their names in `language_model.HEADS`
    vocabulary: bool = True  # whether it has that one; else it is fine-tuned from models that have
    fields: Mapping[str, Any] = field(default_factory=dict)  # of its configuration, such as the number of classes

    def classes(self, model_type: str) -> tuple[str, ...]:
        """The classes of a family that are of this kind; none for a family without."""
        names = self.mapping.get(model_type, ())
        return (names,) if isinstance(names, str) else tuple(names)


MASKED = ModelKind(
    "masked language model", AutoModelForMaskedLM, False, "objective=distilbert", MODEL_FOR_MASKED_LM_MAPPING_NAMES
)
CAUSAL = ModelKind(
    "causal language model", AutoModelForCausalLM, True, "objective=distilgpt2", MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
)
# transformers has such heads in a few more families, which nothing here has tried.
ORDERED = ModelKind(
    "masked language model with a head for the order of segments",
    AutoModelForPreTraining,
    False,
    "objective=albert",
    {"albert": "AlbertForPreTraining", "bert": "BertForPreTraining"},
    ("sop",),
)
SPANS = ModelKind(
    "question answering model",
    AutoModelForQuestionAnswering,
    False,
    "objective=spans",
    MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES,
    ("span",),
    vocabulary=False,
)
CLASSES = ModelKind(
    "model for classes of texts",
    AutoModelForSequenceClassification,
    False,
    "objective=classes",
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    ("class",),
    vocabulary=False,
)


KINDS = (SPANS, CLASSES, CAUSAL, MASKED, ORDERED)


def kind_in_memory(model: Any) -> ModelKind | None:
    """The kind of a model of transformers by its class, or by one that it is derived from; None of any other."""
    family = getattr(getattr(model, "config", None), "model_type", "")
    names = {cls.__name__ for cls in type(model).__mro__}
    kind = next((kind for kind in KINDS if names & {*kind.classes(family)}), None)
    return MASKED if kind is ORDERED else kind


def saved_class(config: Any) -> str:
    """The class that a model was saved as, by its configuration; empty where that names none."""
    return str((getattr(config, "architectures", None) or [""])[0])


def refuse_other_kind(setting: str, config: Any, kind: ModelKind) -> None:
    """Refuse a saved model of which there is none of this kind, by its configuration, and other classes than expected.

    Whether one that loads is of the kind that its class says shows when it is checked.
    """
    saved, family = saved_class(config), config.model_type
    if getattr(config, "is_encoder_decoder", False):
        raise SettingError(f"{setting}: a sequence-to-sequence model ({family}) is not supported: choose a {kind.noun}")
    has_code = bool(getattr(config, "auto_map", None))
    if saved and not hasattr(transformers, saved) and not has_code:
        group = setting.partition(".")[0]
        raise SettingError(
            f"{setting} was saved as a {saved}, which transformers does not have: name what makes it, as "
            f"{group}=custom {group}._target_=package.module.callable"
        )
    if not kind.classes(family) and not has_code:
        others = [other.objective for other in (MASKED, CAUSAL) if kind.vocabulary and other.classes(family)]
        raise SettingError(
            f"{setting} is a {saved or family}, and this objective needs a {kind.noun}: choose "
            f"{' or '.join([*others, 'another model'])}"
        )
    if kind.fields.get("id2label") and saved in kind.classes(family):
        _refuse_other_classes(setting, config, [str(name) for name in kind.fields["id2label"].values()])


def _refuse_other_classes(setting: str, config: Any, expected: list[str]) -> None:
    """Refuse a fine-tuned model whose outputs stand for other classes, or for these in another order."""
    saved, problem = output_names(config), ""
    if getattr(config, "problem_type", None) == "multi_label_classification":
        problem = "gives several classes for a text (multi_label_classification), and these examples have one each"
    elif config.num_labels != len(expected):
        problem = f"gives {config.num_labels} numbers for a text, and these examples need {len(expected)}"
    elif are_anonymous(saved) and len(expected) > 1:
        numbered = ", ".join(f"{number}={name}" for number, name in enumerate(expected))
        logger.warning(f"{setting} names no classes: its outputs are taken for {numbered}")
    elif len(expected) > 1 and [name.lower() for name in saved] != [name.lower() for name in expected]:
        problem = (
            f"gives its classes as {', '.join(saved)}, and these examples have {', '.join(expected)} in this order"
        )
    if problem:
        raise SettingError(f"{setting} {problem}: choose another model, or one that has not been fine-tuned")


def output_names(config: Any) -> list[str]:
    """What a classifier calls its outputs, by their numbers; a file may list them in any order."""
    names = config.id2label or {}
    return [str(names[number]) for number in sorted(names)]


def are_anonymous(names: Sequence[str]) -> bool:
    """Whether they are those that transformers gives outputs that nobody has named."""
    return all(name.startswith("LABEL_") for name in names)
