"""The kinds of language models: which class of transformers a task wants, and which way its positions look."""

from dataclasses import dataclass
from typing import Any

import transformers
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForPreTraining
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
)

from distill.errors import SettingError


@dataclass(frozen=True, eq=False)
class ModelKind:
    """What a task wants of a model: how transformers loads it, and which way its positions look."""

    noun: str  # in messages
    auto_class: Any
    causal: bool
    objective: str  # a group option that learns from such models, for messages
    mapping: Any  # transformers' names of the classes by model type
    heads: tuple[str, ...] = ()  # beside that over the vocabulary, by their names in `language_model.HEADS`

    def classes(self, model_type: str) -> tuple[str, ...]:
        """The classes of a family that are of this kind; none for a family without."""
        found = self.mapping.get(model_type, ())
        return (found,) if isinstance(found, str) else tuple(found)


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


def refuse_other_kind(setting: str, config: Any, kind: ModelKind) -> None:
    """Refuse a saved model of another kind, by what its configuration says: other classes would load, untrained.

    Raises:
        SettingError: it is of the other kind, or a sequence-to-sequence model.
    """
    saved = (getattr(config, "architectures", None) or [""])[0]
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
    own = saved in kind.classes(config.model_type) if saved else bool(kind.classes(config.model_type))
    if kind is ORDERED and not own:
        weights = "objective.soft_sop.weight=0" if setting.startswith("teacher") else "the weights of both to 0"
        raise SettingError(
            f"{setting} is a {saved or config.model_type}, but objective.sop and objective.soft_sop need a "
            f"{kind.noun}: choose one of {', '.join(kind.mapping.values())}, or set {weights}"
        )
    if kind is MASKED and saved in ORDERED.classes(config.model_type):
        return  # its other head is left out
    for other in {MASKED, CAUSAL} - {kind}:
        if not own and (saved in other.classes(config.model_type) or (not saved and other.classes(config.model_type))):
            raise SettingError(
                f"{setting} is a {other.noun} ({saved or config.model_type}), and this objective learns from a "
                f"{kind.noun}: choose {other.objective}, or another model"
            )
