"""One line for what Hydra and OmegaConf refuse: the setting, what is wrong with it, and the names that come nearest."""

import re
from collections.abc import Iterator
from typing import Any

from distill.config.component import Component, built_in, kinds
from distill.config.errors import not_null, unknown_setting
from distill.config.override_text import in_shell
from distill.config.synonyms import suggestion
from distill.runtime.errors import MAX_NAMES, SettingError, did_you_mean
from distill.runtime.version import pip_install

NO_TRIAL = "No trials are completed"  # what Optuna ends a search with where no run gave a number
EXTRAS = {"hydra/sweeper/optuna": "search"}  # options that come with another package, and how to install it


def setting_error(error: Exception) -> SettingError | None:
    """An error of Hydra, of OmegaConf or of a search as one of a setting; None for any other."""
    packages = {base.__module__.partition(".")[0] for base in type(error).__mro__}
    if packages & {"hydra", "omegaconf"}:
        return explain(error)
    if isinstance(error, ValueError) and str(error).startswith(NO_TRIAL):
        return SettingError(
            "no run of the search has given a number to optimize", cure="the lines above and its page say why"
        )
    return None


def explain(error: Exception) -> SettingError:
    """An error of Hydra or OmegaConf: the setting, what is wrong with it, and where to look."""
    if (missing := getattr(error, "missing_cfg_file", None)) is not None:
        return _no_such_option(str(missing), list(getattr(error, "options", None) or []))
    if isinstance(override := getattr(error, "override", None), str):
        return _not_understood(override)
    chain: list[BaseException] = [error]
    while cause := chain[-1].__cause__:
        chain.append(cause)
    # Hydra wraps OmegaConf's error, which says what is wrong with the value.
    inner = next((e for e in reversed(chain) if getattr(e, "full_key", None)), error)
    key = getattr(inner, "full_key", None) or getattr(error, "full_key", None)
    if type(inner).__name__ in ("ConfigKeyError", "ConfigAttributeError") and key:
        return _no_such_setting(str(key), getattr(inner, "parent_node", None))
    return _by_its_first_line(error, inner, str(key or ""))


def _not_understood(override: str) -> SettingError:
    name, _, value = override.partition("=")
    is_nested = value[:1] in ("[", "{", "'", '"')
    example = f"\"{name or 'NAME'}=['a, b', 'c=d']\"" if is_nested else in_shell(name or "NAME", value)
    cure = f"write NAME=VALUE, and texts with special signs in quotes, such as {example}"
    if not name or "=" not in override:
        return SettingError(f"{override} is not understood", cure="write NAME=VALUE")
    return SettingError("not understood", setting=name, value=value, cure=cure)


def _by_its_first_line(error: Exception, inner: BaseException, key: str) -> SettingError:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    what = str(inner).strip().splitlines()[0] if inner is not error else lines[0]
    if inner is error:
        options = [line for line in lines[1:] if not any(word in line for word in ("full_key", "_type="))]
        what = " ".join([what, *options])
    if variable := re.search(r"Environment variable '(\w+)' not found", what):
        problem = f"the environment variable {variable[1]} is not set"
        return SettingError(problem, setting=key, cure=f"set it, or give {key}=VALUE")
    if missing := re.match(r"Missing mandatory value: (\S+)", what):
        return SettingError("missing", setting=key or missing[1], cure="give it a value")
    if absent := re.match(r"Could not delete from config\. '(\S+)' does not exist", what):
        return SettingError(
            "a setting keeps a value", setting=f"~{absent[1]}", cure=f"leave it out, or give {absent[1]}=VALUE"
        )
    if reference := re.match(r"Interpolation key '(\S+)' not found", what):
        return SettingError(f"there is no setting {reference[1]} to refer to", setting=key, cure="correct its name")
    if null := re.match(r"field '(\S+)' is not Optional", what):
        return not_null(null[1])
    return SettingError(what, setting="" if key in what else key)


def _no_such_option(missing: str, options: list[str]) -> SettingError:
    """For an option of a group, such as `teacher/embeded`."""
    group, _, name = missing.rpartition("/")
    if missing in EXTRAS:
        return SettingError("not installed", setting=group, value=name, cure=pip_install(EXTRAS[missing]))
    if group == "hydra/launcher":
        plugin = f"hydra-{name.partition('_')[0]}-launcher"
        problem, cure = "no launcher that is installed", f"pip install {plugin}, or leave it out for one run at a time"
        return SettingError(problem, setting=group, value=name, cure=cure)
    if not options:
        return SettingError(f"{missing}: there is no such group or option", cure="--help shows those that there are")
    problem, cure = f"there is no {missing}{did_you_mean(name, options)}", f"choose one of {', '.join(sorted(options))}"
    return SettingError(problem, setting=group, value=name, cure=cure)


def _no_such_setting(key: str, parent: Any) -> SettingError:
    """For a setting that is not in the schema, such as `train.stepz`, or `steps`, which stands in a group.

    Args:
        parent: the node of OmegaConf that has no such key.
    """
    name = key.rpartition(".")[2]
    nearest = suggestion(key, _names(parent), key.removesuffix(name))
    if not nearest:
        same = [setting for setting in _leaves(_root(parent), "") if setting.rpartition(".")[2] == name]
        nearest = f" (did you mean {' or '.join(same[:3])}?)" if same else ""
    return unknown_setting(key, nearest)


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
