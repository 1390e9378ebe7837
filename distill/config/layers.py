"""The layers of a composition, file by file, and what the command line means by the options and settings that it names.

Hydra merges the files of a composition in the order of its defaults list, in which a recipe comes last, and then the
settings of the command line. Here an option of a group that the command line names wins over the recipe.
"""

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distill.config.flat_settings import flatten
from distill.config.folders import RECIPES
from distill.config.override_text import parse_override
from distill.config.teacher import BUNDLED

REPLACED = ("student.config", "corpus.sources")  # settings whose dict is replaced as a whole
RECIPE, SCHEMA = "recipe", "schema"  # the group of recipes; the name of the defaults of all settings
HYDRA = ("hydra/", "hydra.")
MADE = ("layers", "random", "neighbours")  # values of student.init that read no path


@dataclass(frozen=True)
class Layer:
    """One file of a composition.

    Attributes:
        option: as the defaults list names it, such as optimizer/lamb or recipe/smoke.
        parent: the option whose defaults list names it.
        file: None of what is no file, such as the defaults of all settings.
        settings: what it sets, nested by the names of the command line; an OmegaConf DictConfig.
    """

    option: str
    parent: str
    file: Path | None
    settings: Any


def layers_of(hydra: Any) -> list[Layer]:
    """The files of a composition in the order in which they were merged, while Hydra is still set up.

    Args:
        hydra: its own part of the composition.
    """
    from hydra.core.global_hydra import GlobalHydra
    from hydra.types import RunMode

    overrides = [*overrides_of(hydra, "hydra"), *overrides_of(hydra, "task")]
    loader = GlobalHydra.instance().config_loader()
    defaults = loader.compute_defaults_list(hydra.job.config_name, overrides, RunMode.RUN).defaults
    layers = []
    for default in defaults:
        option = str(default.config_path)
        if not option.startswith(HYDRA):
            file, settings = _load(option, hydra.runtime.config_sources)
            layers.append(Layer(option, str(default.parent), file, _nested(settings, default.package or "")))
    return layers


def overrides_of(hydra: Any, part: str) -> list[str]:
    """The overrides of the settings, `task`, or of Hydra itself, as they were given: nothing in them is resolved.

    Args:
        hydra: its own part of the composition.
    """
    from omegaconf import OmegaConf

    overrides = OmegaConf.to_container(hydra.overrides[part], resolve=False)
    assert isinstance(overrides, list)
    return [str(override) for override in overrides]


def _load(option: str, sources: Any) -> tuple[Path | None, Any]:
    """An option from the first source that has it: a folder, or the ConfigStore, which holds schema and recipes."""
    from hydra.core.config_store import ConfigStore
    from omegaconf import OmegaConf

    for source in sources:
        if source.schema == "file" and (file := Path(source.path) / f"{option}.yaml").is_file():
            return file, OmegaConf.load(file)
    file = RECIPES / f"{option.removeprefix(f'{RECIPE}/')}.yaml"
    return file if file.is_file() else None, ConfigStore.instance().load(f"{option}.yaml").node


def _nested(settings: Any, package: str) -> Any:
    """The settings of a file below its package, such as `optimizer`, without its defaults list and Hydra's own part."""
    from omegaconf import OmegaConf

    content = OmegaConf.masked_copy(settings, [name for name in settings if name not in ("defaults", "hydra")])
    OmegaConf.set_struct(content, False)
    for part in reversed(package.split(".") if package else []):
        content = OmegaConf.create({part: content})
    return content


def named_layers(layers: list[Layer], overrides: list[str]) -> list[Layer]:
    """The layers that the command line names by `group=option`, with those that their own defaults lists name."""
    names = set(_options(overrides))
    parents = {layer.option: layer.parent for layer in layers}

    def is_named(option: str) -> bool:
        return option in names or (option in parents and is_named(parents[option]))

    return [layer for layer in layers if is_named(layer.option)]


def _options(overrides: list[str]) -> Iterator[str]:
    """What may be an option of a group among these overrides: `optimizer=lamb` is optimizer/lamb."""
    for override in _parsed(overrides):
        group, value = override.key_or_group, override.value()
        if override.is_delete() or group == RECIPE or "." in group or group.startswith(HYDRA):
            continue
        for option in value if isinstance(value, list) else [value]:
            if isinstance(option, str):
                yield f"{group}/{option}"


def apply_overrides(settings: Any, overrides: list[str], hydra: Any) -> None:
    """Change Hydra's configuration in place to what the overrides of the command line, in their order, mean.

    Args:
        hydra: its own part of the composition; Hydra is still set up.
    """
    from omegaconf import OmegaConf

    struct = OmegaConf.is_struct(settings)
    OmegaConf.set_struct(settings, False)
    if any(_options(overrides)) and (chosen_layers := named_layers(layers := layers_of(hydra), overrides)):
        _merge_again(settings, chosen_layers)
        _set_again(settings, overrides, {layer.option.rpartition("/")[0] for layer in layers})
    _replace_dicts(settings, overrides)
    take_paths(settings, overrides)
    OmegaConf.set_struct(settings, struct)


def named_settings(overrides: Sequence[str], given: Mapping[str, Any]) -> dict[str, set[str]]:
    """The settings that a command line or a program names, by group: `teacher.path=A` is `path` of `teacher`.

    Args:
        given: the values of a program by dotted names.
    """
    named: dict[str, set[str]] = defaultdict(set)
    parsed = [one for one in _parsed(overrides) if not one.is_delete() and not one.is_sweep_override()]
    for key, value in [*((one.key_or_group, one.value()) for one in parsed), *given.items()]:
        for name in flatten({key: value}):
            group, _, rest = name.partition(".")
            named[group].add(rest)
    return named


def _merge_again(settings: Any, chosen_layers: list[Layer]) -> None:
    """Let the options that the command line names win over the recipe; what they do not set stays as it is there."""
    from omegaconf import OmegaConf

    options = OmegaConf.merge(*(layer.settings for layer in chosen_layers))
    for name in REPLACED:
        if OmegaConf.select(options, name, throw_on_missing=False):
            OmegaConf.update(settings, name, {}, merge=False)
    settings.merge_with(options)


def _set_again(settings: Any, overrides: list[str], groups: set[str]) -> None:
    """Let the settings of the command line win over the options of groups that it names."""
    from omegaconf import OmegaConf

    for override in _parsed(overrides):
        name, value = override.key_or_group, override.value()
        if name.startswith(HYDRA) or (name in groups and isinstance(value, str | list)):
            continue
        group, _, last = name.rpartition(".")
        if not override.is_delete():
            OmegaConf.update(settings, name, value, merge=True)
        elif group:  # `~tracker` takes an option out of the defaults list
            OmegaConf.select(settings, group).pop(last, None)


def _replace_dicts(settings: Any, overrides: list[str]) -> None:
    """Let `student.config={...}` on the command line replace the group's own entries, which Hydra would add it to.

    They are fields of one architecture's configuration, and would be refused by another's; those of `corpus.sources`
    are the sources of one mixture. Overrides of single entries still hold after such a one.
    """
    from omegaconf import OmegaConf

    replaced = set[str]()
    for override in _parsed(overrides):
        name = override.key_or_group
        if name in REPLACED and isinstance(override.value(), dict):
            OmegaConf.update(settings, name, override.value(), merge=False)
            replaced.add(name)
        elif name.startswith(tuple(f"{prefix}." for prefix in replaced)):
            OmegaConf.update(settings, name, override.value())


def take_paths(settings: Any, overrides: Sequence[str], given: Collection[str] = ()) -> None:
    """Let `teacher.path=FOLDER` on the command line alone replace a bundled teacher, which would not read it.

    And `student.path=FOLDER` a student that is made, unless a callable of the user's makes it.

    Args:
        given: names of settings that a program gives besides.
    """
    from omegaconf import OmegaConf

    names = {*given, *(override.key_or_group for override in _parsed(overrides))}
    for group, chooser, without_path in (("teacher", "kind", BUNDLED), ("student", "init", MADE)):
        section = settings.get(group)
        has_path = f"{group}.path" in names and OmegaConf.select(section, "path", throw_on_missing=False) is not None
        is_free = not names & {group, f"{group}.{chooser}", f"{group}._target_"} and "_target_" not in section
        if has_path and is_free and section.get(chooser) in without_path:
            OmegaConf.update(settings, f"{group}.{chooser}", "pretrained")


def _parsed(overrides: Sequence[str]) -> list[Any]:
    return [parse_override(override) for override in overrides]
