"""Names that settings had in earlier releases: an old one is refused with the new one, and old runs are read by it."""

import re
from typing import Any

from distill.config.flat_settings import flatten
from distill.runtime.errors import SettingError

# By pattern, with the new name.
SETTINGS = {
    r"corpus\.rows": "corpus.max_sequences",
    r"corpus\.share": "corpus.fraction",
    r"((?:corpus|evaluate)\.sources\.\w+)\.share": r"\1.fraction",
    r"corpus\.max_bad": "corpus.max_invalid",
    r"corpus\.unreadable": "corpus.invalid_files",
    r"corpus\.unknown": "corpus.max_unknown",
    r"corpus\.(cache|tokens|shard_bytes|compression|local|local_bytes|shuffle_bytes|workers)": r"data.\1",
    r"objective\.masking\.share": "objective.masking.mlm_probability",
    r"objective\.masking\.most": "objective.masking.max_predictions",
    r"objective\.(\w+)\.rows": r"objective.\1.positions",
    r"train\.rows_per_step": "train.sequences_per_step",
    r"train\.milestones": "train.snapshots",
    r"train\.milestone_every": "train.snapshot_every",
    r"evaluate\.rows": "evaluate.max_sequences",
    r"evaluate\.by_set\.(\w+)\.rows": r"evaluate.by_set.\1.max_sequences",
    r"evaluate\.pseudo_perplexity\.share": "evaluate.pseudo_perplexity.fraction",
    r"evaluate\.by_set\.(\w+)\.pseudo_perplexity\.share": r"evaluate.by_set.\1.pseudo_perplexity.fraction",
    r"evaluate\.curve\.rows": "evaluate.curve.sequences",
    r"evaluate\.twin": "evaluate.baseline",
    r"student\.kind": "student.init",
    r"student\.start": "student.init",
    r"chain\.stages\.(\w+)\.milestones_of": r"chain.stages.\1.snapshots_of",
    r"corpus\.num_rows": "corpus.num_sequences",  # of an identity alone
}
# What else has changed of a setting that has another name.
VALUES = {
    "student.kind": "config is random now",
    "student.start": "random and neighbours are values of it, in place of student.kind=config",
}
# Teachers that ship with this package, by the old name.
OLD_TEACHERS = {"embedded": "bundled_small", "bundled": "bundled_small", "embedded_deep": "bundled_deep"}
IS_TEACHER = re.compile(r"teacher\.(members\.\w+\.)?kind")
# Options of groups by the old name.
OPTIONS = {
    **{f"teacher/{old}": new for old, new in OLD_TEACHERS.items()},
    "recipe/distilbert_gutenberg_twin": "distilbert_gutenberg_baseline",
    "recipe/distilgpt2_gutenberg_twin": "distilgpt2_gutenberg_baseline",
    "recipe/albert_milestones": "albert_snapshots",
}


# By the `scale` that earlier releases had between defaults and recipe.
RECIPES_OF_SCALES = {
    "bundled": "distilbert_gutenberg",
    "embedded": "distilbert_gutenberg",
    "single_gpu": "distilbert_gpu",
    "paper": "distilbert_paper",
    "albert_small": "albert_pretrain",
    "albert_paper": "albert_paper",
    "aws": "albert_aws",
}


def without_scale(scale: object) -> str:
    """The line about a `scale`."""
    if recipe := RECIPES_OF_SCALES.get(str(scale)):
        return f"scale={scale} is a recipe now: give +recipe={recipe}, or build a recipe of your own on it"
    recipes = ", ".join(dict.fromkeys(RECIPES_OF_SCALES.values()))
    return f"scale is not a setting any more: leave it out, or give the recipe of that size (of {recipes})"


def new_name(setting: str) -> str | None:
    """What a setting of an earlier release is called now; None for one that has no other name."""
    for pattern, name in SETTINGS.items():
        if (match := re.fullmatch(pattern, setting)) is not None:
            return match.expand(name)
    return None


def other_name(setting: str) -> str | None:
    """The line that refuses a setting of an earlier release; None for one that has no other name."""
    if (name := new_name(setting)) is None:
        return None
    values = f" ({VALUES[setting]})" if setting in VALUES else ""
    return f"{setting} has another name now: give {name}{values}"


def refuse_old_teacher(setting: str, name: str) -> None:
    """Raises SettingError where a model is called as an earlier release called a teacher that ships with it."""
    if name in OLD_TEACHERS:
        raise SettingError(f"{setting}={name} has another name now: give {OLD_TEACHERS[name]}")


def renamed(identity: dict[str, Any]) -> dict[str, Any]:
    """Settings by their dotted names, with the names and values of today."""
    kind, start = identity.get("student.kind"), identity.get("student.start", "random")
    settings = {
        new_name(name) or name: OLD_TEACHERS.get(str(value), value) if IS_TEACHER.fullmatch(name) else value
        for name, value in identity.items()
        if name != "student.start"
    }
    return {**settings, "student.init": start} if kind == "config" else settings


def renamed_tree(settings: dict[str, Any]) -> dict[str, Any]:
    """Nested settings, with the names of today."""
    tree: dict[str, Any] = {}
    for name, value in renamed(flatten(settings)).items():
        *groups, last = name.split(".")
        group = tree
        for part in groups:
            group = group.setdefault(part, {})
        group[last] = value
    return tree
