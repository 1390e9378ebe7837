"""One line for what Hydra and OmegaConf refuse: the setting, what is wrong with it, and the names that come nearest."""

import re
from collections.abc import Iterator
from typing import Any

from distill.config.component import Component, built_in, kinds
from distill.config.override_text import in_shell
from distill.config.renamed import other_name
from distill.config.synonyms import suggestion
from distill.runtime.errors import SettingError
from distill.runtime.nearest import MAX_NAMES, did_you_mean
from distill.runtime.version import pip_install

NO_TRIAL = "No trials are completed"  # what Optuna ends a search with where no run gave a number
EXTRAS = {"hydra/sweeper/optuna": "search"}  # options that come with another package, and how to install it


def setting_error(error: Exception) -> SettingError | None:
    """An error of Hydra, of OmegaConf or of a search as one of a setting; None for any other."""
    packages = {base.__module__.partition(".")[0] for base in type(error).__mro__}
    if packages & {"hydra", "omegaconf"}:
        return SettingError(explain(error))
    if isinstance(error, ValueError) and str(error).startswith(NO_TRIAL):
        return SettingError("no run of the search has given a number to optimize: the lines above and its page say why")
    return None


def explain(error: Exception) -> str:
    """One line for an error of Hydra or OmegaConf: the key, what is wrong with it, and where to look."""
    if (missing := getattr(error, "missing_cfg_file", None)) is not None:
        return _no_such_option(str(missing), list(getattr(error, "options", None) or []))
    if isinstance(override := getattr(error, "override", None), str):
        name, _, value = override.partition("=")
        opens = value[:1] in ("[", "{", "'", '"')
        cure = f"\"{name or 'NAME'}=['a, b', 'c=d']\"" if opens else in_shell(name or "NAME", value)
        return f"{override} is not understood: write NAME=VALUE, and texts with special signs in quotes, such as {cure}"
    chain: list[BaseException] = [error]
    while cause := chain[-1].__cause__:
        chain.append(cause)
    # Hydra wraps OmegaConf's error, which says what is wrong with the value.
    inner = next((e for e in reversed(chain) if getattr(e, "full_key", None)), error)
    key = getattr(inner, "full_key", None) or getattr(error, "full_key", None)
    if type(inner).__name__ in ("ConfigKeyError", "ConfigAttributeError") and key:
        return _no_such_setting(str(key), getattr(inner, "parent_node", None))
    return _first_sentence(error, inner, key)


def _first_sentence(error: Exception, inner: BaseException, key: Any) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    what = str(inner).strip().splitlines()[0] if inner is not error else lines[0]
    if inner is error:
        options = [line for line in lines[1:] if not any(word in line for word in ("full_key", "_type="))]
        what = " ".join([what, *options])
    if variable := re.search(r"Environment variable '(\w+)' not found", what):
        return f"{key}: the environment variable {variable[1]} is not set: set it, or give {key}=VALUE"
    if null := re.match(r"field '(\S+)' is not Optional", what):
        return f"{null[1]}=null is not possible: give it a value, or leave it out"
    return f"{key}: {what}" if key and str(key) not in what else what


def _no_such_option(missing: str, options: list[str]) -> str:
    """For an option of a group, such as `teacher/embeded`."""
    if missing in EXTRAS:
        return f"{'='.join(missing.rsplit('/', 1))} is not installed: {pip_install(EXTRAS[missing])}"
    group, _, name = missing.rpartition("/")
    if not options:
        return f"{missing}: there is no such group or option; --help shows those that there are"
    names = ", ".join(sorted(options))
    return f"{group}={name}: there is no {missing}{did_you_mean(name, options)}: choose one of {names}"


def _no_such_setting(key: str, parent: Any) -> str:
    """For a setting that is not in the schema, such as `train.stepz`, or `steps`, which stands in a group.

    Args:
        parent: the node of OmegaConf that has no such key.
    """
    if (line := other_name(key)) is not None:
        return line
    name = key.rpartition(".")[2]
    before = key.removesuffix(name)
    nearest = suggestion(key, _names(parent), before)
    if not nearest:
        same = [setting for setting in _leaves(_root(parent), "") if setting.rpartition(".")[2] == name]
        nearest = f" (did you mean {' or '.join(same[:3])}?)" if same else ""
    return f"{key} is not known{nearest}: distill settings shows all that there are"


def takers(package: str, setting: str) -> str:
    """As `did_you_mean`: the setting of this very name that built-in choices take, `objective.jsd.beta` of a `beta`."""
    group, _, name = setting.rpartition(".")
    choices = [kind for kind in kinds(package) if name in Component(setting, built_in(package, kind)).takes()]
    nearest = [f"{group}.{kind}.{name}" for kind in choices[:MAX_NAMES]]
    return f" (did you mean {' or '.join(nearest)}?)" if nearest else ""


def _names(node: Any) -> list[str]:
    try:
        return [str(name) for name in node]
    except Exception:  # what is no mapping, or one that is missing
        return []


def _root(node: Any) -> Any:
    while (above := getattr(node, "_get_parent", lambda: None)()) is not None:
        node = above
    return node


def _leaves(node: Any, path: str) -> Iterator[str]:
    """The dotted names of all settings below a node."""
    for name in _names(node):
        if hasattr(node, "_get_node"):
            inner = node._get_node(name)
            yield f"{path}{name}"
            if hasattr(inner, "keys"):
                yield from _leaves(inner, f"{path}{name}.")
