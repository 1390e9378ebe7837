"""Names of weights that a wrapper was saved with: torch.compile, data parallel modules, PEFT, a trainer's `model`."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import safe_open

from distill.runtime.errors import SettingError

# What wrappers put into names: anywhere, where parts of a model can be wrapped, or before all of them.
ANYWHERE = re.compile(r"(?<![^.])(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
ADAPTERS = re.compile(r"\.(?:lora_[AB]|lora_embedding_[AB]|base_layer)\.")


def without_wrappers(model: Any, folder: Path) -> dict[str, str]:
    """The names of weights in a folder's files that have a wrapper's prefix, with those that the model has for them.

    Empty where no prefix brings more of the model's weights back, or where two weights would have one name.

    Raises:
        SettingError: the weights have adapters of PEFT beside them, which are not merged.
    """
    names = [*_names_in(folder)]
    if adapters := next(filter(ADAPTERS.search, names), None):
        raise SettingError(
            f"its weights have adapters of PEFT beside them ({adapters})",
            setting="model.safetensors",
            cure="save what merge_and_unload() of the PeftModel gives",
        )
    base = f"{model.base_model_prefix}."
    expected = {*model.state_dict()}
    expected |= {name.removeprefix(base) for name in expected}  # an encoder alone was saved without it
    plain = {name: ANYWHERE.sub("", name) for name in names}
    prefixes = ["", *_common_prefixes(list(plain.values()))]
    best = max(prefixes, key=lambda prefix: len({name.removeprefix(prefix) for name in plain.values()} & expected))
    renamed = {name: inner.removeprefix(best) for name, inner in plain.items()}
    if len({*renamed.values()}) < len(names) or len(expected.intersection(renamed.values())) <= len(
        expected.intersection(names)
    ):
        return {}
    return {old: new for old, new in renamed.items() if old != new}


def described(renamed: dict[str, str]) -> str:
    """In words, what names were changed to."""
    old, new = next(iter(renamed.items()))
    return f"its weights have names of a wrapper around the model; {old} is read as {new}"


def _common_prefixes(names: list[str]) -> Iterator[str]:
    """What all names begin with, up to each of the dots in it."""
    first, last = min(names, default=""), max(names, default="")
    common = next((i for i, (one, other) in enumerate(zip(first, last, strict=False)) if one != other), len(first))
    yield from (first[: dot.end()] for dot in re.finditer(r"\.", first[:common]))


def _names_in(folder: Path) -> Iterator[str]:
    for file in sorted(folder.glob("model*.safetensors")):
        with safe_open(file, "pt") as tensors:
            yield from tensors.keys()
