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
    """Refuse a saved model of another kind, by its configuration: other classes would load, untrained.

    Raises:
        SettingError: it is of the other kind, or a sequence-to-sequence model.
    """
    saved = saved_class(config)
    if getattr(config, "is_encoder_decoder", False):
        raise SettingError(
            f"{setting}: {config.model_type} is a sequence-to-sequence model, which is not supported: choose a "
            f"{kind.noun}"
        )
    if saved and not hasattr(transformers, saved) and not getattr(config, "auto_map", None):
        group = setting.partition(".")[0]
        raise SettingError(
            f"{setting} was saved as a {saved}, which transformers does not have: name what makes it, as "
            f"{group}=custom {group}._target_=package.module.callable"
        )
    if not kind.vocabulary:
        _refuse_unfit(setting, config, kind)
        return
    fits = saved in kind.classes(config.model_type) if saved else bool(kind.classes(config.model_type))
    if kind is ORDERED and not fits:
        weights = "objective.soft_sop.weight=0" if setting.startswith("teacher") else "the weights of both to 0"
        raise SettingError(
            f"{setting} is a {saved or config.model_type}, but objective.sop and objective.soft_sop need a "
            f"{kind.noun}: choose one of {', '.join(kind.mapping.values())}, or set {weights}"
        )
    if kind is MASKED and saved in ORDERED.classes(config.model_type):
        return  # its other head is left out
    for other in {MASKED, CAUSAL} - {kind}:
        if not fits and (saved in other.classes(config.model_type) or (not saved and other.classes(config.model_type))):
            raise SettingError(
                f"{setting} is a {other.noun} ({saved or config.model_type}), and this objective learns from a "
                f"{kind.noun}: choose {other.objective}, or another model"
            )


def _refuse_unfit(setting: str, config: Any, kind: ModelKind) -> None:
    """Refuse to fine-tune a model of a family that has none of this kind, or one with as many classes as do not fit."""
    if not kind.classes(config.model_type):
        raise SettingError(
            f"{setting} is a {config.model_type}, of which transformers has no {kind.noun}: choose another model"
        )
    saved, needed = saved_class(config), len(kind.fields.get("id2label", ()))
    fine_tuned = saved in kind.classes(config.model_type)
    if needed and fine_tuned and getattr(config, "problem_type", None) == "multi_label_classification":
        raise SettingError(
            f"{setting} gives several classes for a text (problem_type=multi_label_classification), and these examples "
            "have one class or value each: choose another model"
        )
    _refuse_other_classes(setting, config, kind, fine_tuned)
    if needed and fine_tuned and config.num_labels != needed:
        raise SettingError(
            f"{setting} gives {config.num_labels} numbers for a text, and these examples need {needed}, one for each "
            "class or value: choose another model, or a pre-trained one that has not been fine-tuned"
        )


def output_names(config: Any) -> list[str]:
    """What a classifier calls its outputs, by their numbers; a file may list them in any order."""
    names = config.id2label or {}
    return [str(names[number]) for number in sorted(names)]


def are_anonymous(names: Sequence[str]) -> bool:
    """Whether they are those that transformers gives outputs that nobody has named."""
    return all(name.startswith("LABEL_") for name in names)


def _refuse_other_classes(setting: str, config: Any, kind: ModelKind, fine_tuned: bool) -> None:
    """Refuse a fine-tuned model whose outputs stand for other classes, or for these in another order."""
    expected = [str(name) for name in kind.fields.get("id2label", {}).values()]
    saved = output_names(config)
    if not fine_tuned or len(saved) != len(expected) or len(expected) < 2:
        return
    if are_anonymous(saved):
        numbered = ", ".join(f"{number}={name}" for number, name in enumerate(expected))
        logger.warning(f"{setting} names no classes: its outputs are taken for {numbered}")
        return
    if [name.lower() for name in saved] != [name.lower() for name in expected]:
        raise SettingError(
            f"{setting} gives its classes as {', '.join(saved)}, and these examples have {', '.join(expected)} in this "
            "order: choose another model, or rename and reorder its head's rows (config.id2label)"
        )
