"""What overrides of the command line mean where Hydra, which only merges them, would make something else of them."""

from collections import defaultdict
from typing import Any

from distill.config.flat_settings import flatten
from distill.config.teacher import BUNDLED

REPLACED = ("student.config", "corpus.sources")  # settings whose dict is replaced as a whole


def apply_overrides(composed: Any, overrides: list[str]) -> None:
    """Change Hydra's configuration in place to what these overrides of the command line, in their order, mean."""
    _replace_dicts(composed, overrides)
    _take_teacher_path(composed, overrides)


def asked_names(overrides: list[str]) -> dict[str, set[str]]:
    """The settings that the command line gives, by group: `teacher.cache.top_k=8` is `cache.top_k` of `teacher`."""
    from hydra.core.override_parser.overrides_parser import OverridesParser

    asked: dict[str, set[str]] = defaultdict(set)
    for override in OverridesParser.create().parse_overrides(overrides):
        if not override.is_delete() and not override.is_sweep_override():
            for name in flatten({override.key_or_group: override.value()}):
                group, _, rest = name.partition(".")
                asked[group].add(rest)
    return asked


def _replace_dicts(composed: Any, overrides: list[str]) -> None:
    """Let `student.config={...}` on the command line replace the group's own entries, which Hydra would add it to.

    They are fields of one architecture's configuration, and would be refused by another's; those of `corpus.sources`
    are the sources of one mixture.

    Args:
        composed: Hydra's configuration, changed in place.
        overrides: of the command line, in their order; those of single entries still hold after such a one.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from omegaconf import OmegaConf

    struct = OmegaConf.is_struct(composed)
    OmegaConf.set_struct(composed, False)
    replaced = set[str]()
    for override in OverridesParser.create().parse_overrides(overrides):
        name = override.key_or_group
        if name in REPLACED and isinstance(override.value(), dict):
            OmegaConf.update(composed, name, override.value(), merge=False)
            replaced.add(name)
        elif name.startswith(tuple(f"{each}." for each in replaced)):
            OmegaConf.update(composed, name, override.value())
    OmegaConf.set_struct(composed, struct)


def _take_teacher_path(composed: Any, overrides: list[str]) -> None:
    """Let `teacher.path=FOLDER` on the command line alone replace an bundled teacher, which would not read it.

    Args:
        composed: Hydra's configuration, changed in place.
        overrides: of the command line.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from omegaconf import OmegaConf

    names = {override.key_or_group for override in OverridesParser.create().parse_overrides(overrides)}
    chosen = OmegaConf.select(composed, "teacher.kind", throw_on_missing=False)
    given = "teacher.path" in names and OmegaConf.select(composed, "teacher.path") is not None
    if given and chosen in BUNDLED and not names & {"teacher", "teacher.kind"}:
        OmegaConf.update(composed, "teacher.kind", "pretrained")
