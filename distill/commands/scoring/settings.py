"""The settings that models are scored with: those of the run that made the first of them, then what is given."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from distill.config.component import PREFIX
from distill.config.compose import composed
from distill.config.corpus import HELDOUT
from distill.config.override_text import as_value
from distill.config.paths import check_paths
from distill.config.rules import check_corpus, check_evaluation
from distill.config.settings import CONF, Config
from distill.evaluation.measures.users import check_measures
from distill.runs.located import Located, formats_of_run, settings_of_run
from distill.runtime.errors import SettingError, did_you_mean
from distill.tasks import find_task

OBJECTIVES = {"mlm": "mlm", "clm": "clm", "mlm_sop": "albert", "spans": "spans", "classes": "classes"}
# The groups of settings that scoring reads; of the rest none would change anything.
READ = ("corpus", "data", "evaluate", "precision", "teacher", "backend", "recipe")
TASK = ("objective", "objective.task")
REFERENCE = re.compile(r"\$\{\s*\.*[^${}:.\s][^${}:\s]*\s*\}")  # to another setting, as ${optimizer.lr}
OF_RUN = "of_the_scored_run"  # the recipe that holds the settings of a run
TEXTS = {"corpus", "corpus.path", "corpus.hub", "corpus.sources"}  # settings that name a corpus
# Of a run's settings these stay where another option of their group is given: another text, or other sets, are named.
STAY = {
    "corpus": ("sequence_length", "cross_documents", "max_unknown"),
    "evaluate": ("baseline", "stride", "max_sequences", "batch_size", "pseudo_perplexity"),
}
USUAL = "[books,wikitext2,imdb]"  # sets that need no corpus, as far as they are on this machine


def settings_of(models: Sequence[Located], overrides: Sequence[str]) -> tuple[Config, str]:
    """The settings to score these models with, and the task whose measures they have, as `objective.task` has it.

    Args:
        overrides: as on the command line of a run, such as `evaluate.sets=[books]`.

    Raises:
        SettingError: settings that scoring does not read or that cannot be, or models of different tasks.
    """
    names = [
        override.partition("=")[0].lstrip("+~")
        for override in overrides
        if not override.startswith("-") and "=" in override
    ]
    for name in names:
        if name.split(".")[0].split("/")[0] not in READ and name not in TASK:
            raise SettingError(
                f"{name} is not read where models are only scored{did_you_mean(name, (*READ, 'model', 'output'))}: "
                f"leave it out; `distill evaluate` reads {', '.join(READ)}, model and output"
            )
    task = models[0].task if set(TASK) & set(names) else _task(models)
    with TemporaryDirectory(prefix="distill-recipe-") as folder:  # of the recipe that the settings of a run are here
        config = composed([*_defaults(models[0], task, names, Path(folder)), *_teacher(overrides)])
    if set(TASK) & set(names):
        task = config.objective.task
    _check(config)
    return config, task


def _task(models: Sequence[Located]) -> str:
    first, *others = models
    for other in others:
        if other.task != first.task:
            raise SettingError(
                f"model={other.name} predicts something else ({other.task}) than model={first.name} ({first.task}), "
                "and their scores cannot be compared: score them in two commands"
            )
    return first.task


def _defaults(first: Located, task: str, names: Sequence[str], folder: Path) -> Iterator[str]:
    """What comes before the settings that are given; an option of a group only where none is given."""
    if not set(TASK) & set(names):
        if task not in OBJECTIVES:
            raise SettingError(f"model={first.name} was trained for objective.task={task}, which is not scored here")
        yield f"objective={OBJECTIVES[task]}"
    if "teacher" not in names:
        yield "teacher=none"
        yield "teacher.path=null"
    if "recipe" in names:
        return
    if first.run is not None:
        yield from _as_recipe(_of_run(first, names), folder)
    elif not find_task(task).kind.vocabulary:
        if task == "classes" and "evaluate.sets" not in names:
            raise SettingError(
                f"model={first.name} gives classes or values of texts: name the labelled ones, as +recipe=glue "
                "corpus.task=sst2, or +recipe=table corpus.path=FOLDER"
            )
        yield from ["+recipe=squad"] if task == "spans" else [*_as_recipe({}, folder), "evaluate=local"]
    else:
        yield from _as_recipe({}, folder)  # the main job, which no recipe means, says how much of a set is scored
        if "evaluate" not in names:
            yield "evaluate=local"
        if "evaluate.sets" not in names:
            yield "evaluate.sets=" + ("[heldout]" if TEXTS & set(names) else USUAL)


def _as_recipe(settings: dict[str, Any], folder: Path) -> Iterator[str]:
    """Write these settings as a recipe into a folder; gives the arguments that name it."""
    file = folder / "recipe" / f"{OF_RUN}.yaml"
    file.parent.mkdir()
    file.write_text(f"# @package _global_\n{json.dumps(settings)}\n", encoding="utf-8")  # YAML reads JSON
    yield from (f"hydra.searchpath=[{as_value(f'file://{folder}')}]", f"+recipe={OF_RUN}")


def _of_run(first: Located, names: Sequence[str]) -> dict[str, Any]:
    """The settings of a run by which its student was scored; of a group of which another option is given, some.

    Raises:
        SettingError: they name code, which the folder of a stranger could have run here.
    """
    assert first.run is not None
    settings = settings_of_run(first.run)
    sections = {name: settings.get(name) or {} for name in ("corpus", "data", "evaluate")}
    sections["evaluate"] = {**sections["evaluate"], "baseline": None}
    for group in {*sections} & {*names}:
        sections[group] = {name: value for name, value in sections[group].items() if name in STAY.get(group, ())}
    if "precision" not in names:
        precision = {**(settings.get("precision") or {}), **formats_of_run(first.run)}
        sections["precision"] = {name: precision[name] for name in ("evaluate", "kernels") if name in precision}
    sections = {**_without_objects(sections)}
    for name, code in _code_in(sections, ""):
        if name in names:
            continue
        raise SettingError(
            f"model={first.name}: the settings of its run name code ({name}={code}), which Distill runs only at your "
            f"request: add {name}={code} if you trust it, or choose other options of the groups corpus and evaluate, "
            "such as evaluate=local"
        )
    for name, value in sections["data"].items():
        if "://" in str(value) and f"data.{name}" not in names:
            raise SettingError(
                f"model={first.name}: its run prepared sequences at data.{name}={value}, where those of this command "
                f"would be written too: add data.{name}={value} if you trust it, or data.{name}=FOLDER"
            )
    for name, value in _references_in(sections, ""):
        if name not in names:
            raise SettingError(
                f"model={first.name}: the settings of its run read the environment or another place ({name}={value}), "
                f"which could reach whoever made it: add {name}=VALUE"
            )
    return sections


def _references_in(settings: Any, name: str) -> Iterator[tuple[str, str]]:
    """The settings that refer to more than another setting, such as `${oc.env:HOME}`."""
    if isinstance(settings, str) and "${" in REFERENCE.sub("", settings):
        yield name.lstrip("."), settings
    elif isinstance(settings, dict):
        for key, value in settings.items():
            yield from _references_in(value, f"{name}.{key}")
    elif isinstance(settings, list):
        for value in settings:
            yield from _references_in(value, name)


def _without_objects(sections: Mapping[str, Any]) -> Mapping[str, Any]:
    """Without the texts that the program of the run held, and without the sets that were of them."""
    corpus, evaluate = sections.get("corpus", {}), {**sections.get("evaluate", {})}
    sources, sets = evaluate.get("sources") or {}, evaluate.get("sets") or []
    held = {name for name, source in sources.items() if _is_object(source)}
    if _is_object(corpus):
        corpus = {name: corpus[name] for name in ("sequence_length", "cross_documents") if name in corpus}
        held |= {name for name, source in sources.items() if (source or {}).get("kind") == HELDOUT}
    if held:
        evaluate["sources"] = {name: source for name, source in sources.items() if name not in held}
        evaluate["sets"] = [name for name in sets if name not in held]
    changed = {"corpus": corpus, "evaluate": evaluate}
    return {name: changed.get(name, section) for name, section in sections.items()}


def _is_object(source: Any) -> bool:
    return isinstance(source, dict) and str(source.get("_target_") or "").startswith(PREFIX)


def _code_in(settings: Any, name: str) -> Iterator[tuple[str, Any]]:
    """The settings that name a callable."""
    if isinstance(settings, dict):
        for key, value in settings.items():
            if key == "_target_" and value is not None:
                yield f"{name}.{key}".lstrip("."), value
            yield from _code_in(value, f"{name}.{key}")
    elif isinstance(settings, list):
        for value in settings:
            yield from _code_in(value, name)


def _teacher(overrides: Sequence[str]) -> Iterator[str]:
    """The settings that are given; of `teacher=` the folder or the name on the Hub will do, too."""
    options = {file.stem for file in (CONF / "teacher").glob("*.yaml")}
    for override in overrides:
        name, _, value = override.partition("=")
        if name == "teacher" and value not in options and value and value[0] not in "{[":
            path = value if value[0] in "'\"" else as_value(value)
            yield f"teacher.path={path}"
        else:
            yield override


def _check(config: Config) -> None:
    """As before a run, but for what concerns training."""
    check_evaluation(config, find_task(config.objective.task).kind.vocabulary)
    check_measures(config.evaluate.own_measures)
    check_corpus(config)
    sources = [config.evaluate.sources.get(name) for name in config.evaluate.sets]
    held_out = any(source is not None and source.target is None and source.kind == HELDOUT for source in sources)
    check_paths(config, corpus=held_out)  # which nothing else reads here
    if config.backend.name != "single":
        raise SettingError(f"backend.name={config.backend.name}: models are scored by one process; leave it out")
    if config.evaluate.baseline is not None:
        raise SettingError(
            f"evaluate.baseline={config.evaluate.baseline} is for runs: name it as another model=, to be compared"
        )
    if config.evaluate.stride is not None and not find_task(config.objective.task).kind.causal:
        raise SettingError(f"evaluate.stride={config.evaluate.stride} is for causal models: set it to null")
