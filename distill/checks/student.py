"""Refuses settings of the student that no model can be made of, as far as its family alone says so."""

from typing import Any

from distill.config.settings import StudentConfig
from distill.models.fields import check_fields, family
from distill.models.frozen import EMBEDDINGS
from distill.models.layer_choice import AUTO, RULES, are_layers, flat
from distill.runtime.errors import SettingError
from distill.runtime.nearest import choose

KINDS = ("layers", "config", "pretrained", "custom")


def check_student(settings: StudentConfig) -> None:
    """Raises SettingError for a kind, family, field of its configuration or rule of layers that is not known."""
    choose("student.kind", settings.kind, KINDS)
    choose("student.start", settings.start, ("random", "neighbours"))
    _check_layers(settings.layers)
    for part in settings.frozen:
        if part != EMBEDDINGS and (not isinstance(part, int) or isinstance(part, bool) or part < 0):
            raise SettingError(
                f"student.frozen={settings.frozen}: {part} is neither {EMBEDDINGS} nor the number of a layer, from 0"
            )
    if settings.kind == "pretrained" and settings.path is None:
        raise SettingError("student.path=null with student.kind=pretrained: give a folder or a name on the Hub")
    if settings.kind == "config" and settings.architecture == "same":
        raise SettingError(
            "student.architecture=same with student.kind=config: name a transformers model type, e.g. bert"
        )
    if settings.kind in ("config", "layers") and settings.architecture != "same":
        check_fields(family(settings.architecture), settings.config)


def _check_layers(layers: Any) -> None:
    if layers is None:
        return
    if not isinstance(layers, list):
        choose("student.layers", str(layers), [AUTO, *RULES])
    elif not layers or not are_layers(layers) or any(layer < 0 for layer in flat(layers)):
        raise SettingError(
            f"student.layers={layers} has to be whole numbers, such as [0,2,4], or one of {', '.join([AUTO, *RULES])}"
        )
