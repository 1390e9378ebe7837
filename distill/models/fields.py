"""The families of transformers and the fields of their configurations, as the user may name and change them."""

import re
from typing import Any

from transformers import CONFIG_MAPPING, AutoConfig

from distill.runtime.errors import SettingError, did_you_mean

MAX_SIZE = 10**8  # of one size, such as the width of a layer or the length of a vocabulary
# Numbers of what is made one by one, in Python: blocks, and names of classes. The deepest published models have 1,000.
BLOCKS, MAX_BLOCKS = re.compile(r"(?:layers?|groups?|group_num|experts)$"), 1000
LABELS, MAX_LABELS = "num_labels", 1_000_000
# Endings of whole numbers that are no sizes, and a size that may be 0.
NO_SIZES = ("_id", "_ids", "type_vocab_size")


def family(architecture: str) -> Any:
    """The configuration of a family of transformers with its defaults. Raises SettingError where there is none."""
    if architecture not in CONFIG_MAPPING:
        raise SettingError(
            f"student.architecture={architecture} is not a transformers model type"
            f"{did_you_mean(architecture, CONFIG_MAPPING)}: name one such as bert, distilbert, albert or gpt2"
        )
    return AutoConfig.for_model(architecture)


def field_names(config: Any) -> set[str]:
    """The fields of a configuration: what it is saved as, and other names by which it can be set."""
    kind = type(config)
    settable = {name for name in dir(kind) if getattr(getattr(kind, name), "fset", None) is not None}
    return {*config.to_dict(), *config.attribute_map, *settable}


def max_size(name: str) -> int:
    """The largest size that a field of this name may have."""
    return MAX_LABELS if name == LABELS else MAX_BLOCKS if BLOCKS.search(name) else MAX_SIZE


def check_fields(config: Any, changes: dict[str, Any]) -> None:
    """Refuse changes of a configuration that has no such field, or numbers that no model can have there.

    A field whose usual value is a whole number above 0 is a size (a width, a number of layers), unless its name is
    that of a token's id.

    Args:
        config: the one that is to be changed.
        changes: `student.config`.

    Raises:
        SettingError: it names the field, its value and the cure.
    """
    for name, value in changes.items():
        setting = f"student.config.{name}"
        if name not in (names := field_names(config)):
            raise SettingError(
                f"{setting} is not a field of the {config.model_type} configuration{did_you_mean(name, names)}: "
                "correct it or leave it out"
            )
        usual = getattr(config, name, None)
        if value is None or isinstance(usual, bool) or not isinstance(usual, int | float) or name.endswith(NO_SIZES):
            continue
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise SettingError(f"{setting}={value} is not a number: give one such as {usual}")
        limit = max_size(name)
        if isinstance(usual, int) and usual > 0 and (not isinstance(value, int) or not 1 <= value <= limit):
            raise SettingError(f"{setting}={value} is not a size of a model: give a whole number from 1 to {limit:,}")
        if "dropout" in name and not 0 <= value < 1:
            raise SettingError(f"{setting}={value} is not a probability: give a number from 0 to below 1")
