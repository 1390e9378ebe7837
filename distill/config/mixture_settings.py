"""The settings of a corpus of several sources, as they are written under `corpus.sources`."""

import math
from collections.abc import Callable
from typing import Any

from distill.config.component import TABLES, kinds
from distill.runtime.errors import SettingError

HELDOUT = "heldout"  # the kind of an evaluation set that is a part of the corpus
MIXTURE = "mixture"  # the kind of a corpus of several sources
EXAMPLE = "{wiki: {kind: wikitext, path: WIKI, weight: 0.3}, books: {kind: gutenberg, path: BOOKS, weight: 0.7}}"


def mixture(
    entries: Any, beside: dict[str, Any], source_of: Callable[[str, Any], Any]
) -> tuple[dict[str, Any], dict[str, float]]:
    """The sources of a mixture and their weights, by name.

    Args:
        entries: `corpus.sources`.
        beside: what stands beside it in the group `corpus`.
        source_of: a source from its setting's name and its settings.

    Raises:
        SettingError: one has no name or no weight, is no text or cannot be a source.
    """
    if alone := [name for name, value in beside.items() if name != "kind" and value is not None]:
        raise SettingError(
            "each source of a mixture has its own",
            setting=f"corpus.{alone[0]}",
            value=beside[alone[0]],
            cure=f"set corpus.sources.NAME.{alone[0]}",
        )
    if not isinstance(entries, dict):
        raise SettingError(
            "sources have names", setting="corpus.sources", value=entries, cure=f"give corpus.sources='{EXAMPLE}'"
        )
    sources, weights = {}, {}
    for name, source in entries.items():
        setting = f"corpus.sources.{name}"
        if not str(name).isidentifier():
            raise SettingError("no name of a source", setting=setting, cure="take letters, digits and underscores")
        if not isinstance(source, dict):
            raise SettingError(
                "no source of text", setting=setting, value=source, cure="write {kind: text, path: FILE, weight: 1}"
            )
        weight = source.get("weight")
        if not isinstance(weight, int | float) or isinstance(weight, bool) or not 0 < weight < math.inf:
            shown = "null" if weight is None else weight
            raise SettingError(
                "no weight in a mixture", setting=f"{setting}.weight", value=shown, cure="give a number above 0"
            )
        if (kind := source.get("kind")) in (*kinds(TABLES), MIXTURE, HELDOUT):
            raise SettingError(
                "no text that can be mixed",
                setting=f"{setting}.kind",
                value=kind,
                cure="name where its text comes from",
            )
        sources[name] = source_of(setting, {key: value for key, value in source.items() if key != "weight"})
        weights[name] = float(weight)
    return sources, weights
