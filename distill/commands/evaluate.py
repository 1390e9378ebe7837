"""Scores models that exist on evaluation sets, without training: `distill.evaluate` and `distill evaluate`."""

import json
import logging
import math
import os
import re
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from distill.commands.api.run import errors_for_programs, output_for_programs
from distill.config.base import flatten
from distill.config.command_line import options_of
from distill.config.component import PREFIX, TARGET
from distill.config.compose import composed, hydra_as_before
from distill.config.data import HELDOUT
from distill.config.override_text import as_value
from distill.config.rules import check_evaluation, check_paths
from distill.config.settings import Config
from distill.distributed import Ranks, join_ranks
from distill.evaluation.readers import MeanModel
from distill.evaluation.significance import ModelLosses, compare_models
from distill.evaluation.speed import check_memory
from distill.evaluation.users import check_measures
from distill.models.check import (
    check_packing,
    check_positions,
    check_vocabulary,
    check_vocabulary_size,
    set_padding,
)
from distill.models.kind import ModelKind, output_names
from distill.models.load import load_pretrained, load_tokenizer, saved_config
from distill.models.loaded import SETTING
from distill.models.weights import size
from distill.report.scores import Comparison, ModelScores, Scores, Vocabulary
from distill.runs import facts
from distill.runs.describe import environment, measure_facts
from distill.runs.identity import digest_of
from distill.runs.located import Located, formats_of_run, locate, settings_of_run
from distill.runs.setup import choose_precision
from distill.runtime.errors import SettingError, did_you_mean, raising_at_the_call
from distill.runtime.files import make_folder
from distill.runtime.progress import configure_logging
from distill.runtime.redaction import redact
from distill.runtime.signals import handled
from distill.tasks import Task, find_task
from distill.tasks.classes import Classes
from distill.tasks.mlm_sop import MlmSop
from distill.teacher.members import load_members, settings_by_member, title_of

TEACHER = "the teacher"  # the name of its column
UNDEFINED = "bits_per_byte"  # a measure that may be no number for a model that is right: of no text
OBJECTIVES = {"mlm": "mlm", "clm": "clm", "mlm_sop": "albert", "spans": "spans", "classes": "classes"}
# The groups of settings that scoring reads; of the rest none would change anything.
READ = ("corpus", "data", "evaluate", "precision", "teacher", "backend", "recipe")
TASK = {"objective", "objective.task"}
REFERENCE = re.compile(r"\$\{[^${}:\s]+\}")  # to another setting, as ${optimizer.lr}
OF_RUN = "of_the_scored_run"  # the recipe that holds the settings of a run
TEXTS = {"corpus", "corpus.path", "corpus.hub", "corpus.sources"}  # settings that name a corpus
# Of a run's settings these stay where another option of their group is given: another text, or other sets, are named.
STAY = {
    "corpus": ("sequence_length", "cross_documents", "max_unknown"),
    "evaluate": ("baseline", "stride", "max_sequences", "batch_size", "pseudo_perplexity"),
}
QUOTES = ("'", '"')
USUAL = "[books,wikitext2,imdb]"  # sets that need no corpus, as far as they are on this machine

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Group:
    """Models of one vocabulary: they are scored at the same positions, and their perplexities can be compared."""

    tokenizer: PreTrainedTokenizerBase
    teacher: Any = None  # where it has this vocabulary
    teacher_title: str = ""
    located: list[Located] = field(default_factory=list)


@raising_at_the_call
def evaluate(models: Sequence[str | Path], settings: Sequence[str] = (), output: str | Path | None = None) -> Scores:
    """Score models on evaluation sets, as `distill evaluate` does.

    Args:
        models: run folders, students, snapshots or other model folders, names on the Hub, `bundled_small`
            or `bundled_deep`.
        settings: as on the command line of a run, of corpus, data, evaluate, precision, teacher and backend. What
            is not given is as in the run that made the first model; of a model from elsewhere the books, WikiText-2 and
            IMDB under $DISTILL_DATA are scored, or, with a corpus, what is held out of it.
        output: folder that gets scores.json and scores.md; None: nothing is written.

    Raises:
        SettingError: bad input: models that do not load or are of different tasks, settings or sets that cannot be.
        StorageFailed: a disk or a store has failed.
        Interrupted: a signal ended it, which is a KeyboardInterrupt.
    """
    for name, given in (("models", models), ("settings", settings)):
        if not isinstance(given, list | tuple) or not all(isinstance(each, str | Path) for each in given):
            cure = "give a list of folders or texts; a model in memory is saved first"
            raise SettingError("is no list of strings", setting=name, value=given, cure=cure)
    with errors_for_programs(str(output or "")), handled(), output_for_programs(), hydra_as_before():
        return evaluate_models(models, settings, output)


def evaluate_models(
    models: Sequence[str | Path], settings: Sequence[str] = (), output: str | Path | None = None
) -> Scores:
    """`evaluate` in a process whose logging and signals are the command's."""
    configure_logging(0)
    transformers_logging.disable_progress_bar()
    located = locate([str(model) for model in models])
    config, task_name = settings_of(located, settings)
    with kept_if_scored(output), join_ranks(config.backend) as ranks:
        config = config.changed(precision=choose_precision(config.precision, {}, ranks))
        scores = _score(config, _task(task_name, located, config), located, ranks)
    arguments = [f"model={model.name}" for model in located] + ([] if output is None else [f"output={output}"])
    command = shlex.join(["distill", "evaluate", *arguments, *map(redact, settings)])
    scores = replace(scores, command=f"cd {shlex.quote(os.getcwd())} && {command}")
    if output is not None:
        scores.write(Path(output).expanduser())
    return scores


@contextmanager
def kept_if_scored(output: str | Path | None) -> Iterator[None]:
    """Make the folder `output` now; where the scoring fails it goes again. Raises SettingError where none can be."""
    if output == "":  # Path would take it for the working folder
        raise SettingError("is empty", setting="output", value="", cure="give a folder, or None for none")
    folder = Path("." if output is None else output).expanduser()
    is_new = not folder.exists()
    if output is not None:
        make_folder(folder, f"output={output}")
    try:
        yield
    except BaseException:
        if is_new:
            with suppress(OSError):  # something else is in it
                folder.rmdir()
        raise


def _task(name: str, models: Sequence[Located], config: Config) -> Task:
    ordered = name == "mlm_sop" and all(model.has_order for model in models)
    task = (MlmSop(order=True) if ordered else find_task(name)).read(config, training=False)
    if isinstance(task, Classes):
        return task.of_model(tuple(output_names(saved_config(SETTING, models[0].path))))
    return task


def _score(config: Config, task: Task, located: Sequence[Located], ranks: Ranks) -> Scores:
    """Score group by group; besides the teacher one model at a time is in memory."""
    scored, vocabularies, comparisons = list[ModelScores](), list[Vocabulary](), list[Comparison]()
    measures, notes = dict[str, facts.Measure](), list[str]()
    for number, group in enumerate(groups_of(config, task.kind, located, ranks)):
        sets, left_out = task.evaluation_sets(config, group.tokenizer)
        if not sets:
            cure = "set DISTILL_DATA, hold text out of a corpus (corpus.path=FOLDER), or name a text as "
            cure += "evaluate.sets=[mine] 'evaluate.sources.mine={kind: text, path: FILE}'"
            raise SettingError("none of the sets is available", setting="evaluate.sets", cure=cure)
        evaluator = task.evaluator(config, group.tokenizer, sets, ranks)
        losses: dict[str, ModelLosses] = {}
        for name, title, model in load_models(config, task.kind, group, ranks):
            check_memory(evaluator, [model], sets)
            scores, losses[name] = evaluator.score_by_sequence(model, name, sets)
            _refuse_no_numbers(name, scores, config)
            agrees = group.teacher is not None and name != TEACHER and task.kind.vocabulary
            agreement = evaluator.agree(model, group.teacher, sets) if agrees else None
            scored.append(ModelScores(name, title, *size(model), number, scores, agreement))
            del model  # before the next one is loaded
        described = {
            data.name: facts.EvaluationSet(**evaluator.describe(data), digest=digest_of(data)) for data in sets
        }
        vocabularies.append(Vocabulary(len(group.tokenizer), tuple(losses), described))
        measures |= measure_facts(evaluator.measures)
        notes += left_out
        first, *others = [model.name for model in group.located] or [""]
        comparisons += [
            Comparison(other, first, measure, name, conclusion)
            for other in others
            for measure, by_set in compare_models(losses[other], losses[first], sets, evaluator.scoring).items()
            for name, conclusion in by_set.items()
        ]
    notes = [*dict.fromkeys(notes), *_notes(vocabularies, "bits_per_byte" in measures, config)]
    order = [TEACHER, *(model.name for model in located)]
    scored.sort(key=lambda model: order.index(model.name))
    return Scores(
        config.objective.task, tuple(scored), tuple(vocabularies), measures, tuple(comparisons), tuple(notes),
        environment=environment(ranks.device),
    )  # fmt: skip


def groups_of(config: Config, kind: ModelKind, models: Sequence[Located], ranks: Ranks) -> list[Group]:
    """The models by their vocabularies; the teacher, where there is one, belongs to the group with its own."""
    groups: dict[frozenset[tuple[str, int]], Group] = {}
    if not config.teacher.is_none:
        members, shared = load_members(config, kind)
        assert shared is not None
        for member in members:  # as a run does
            _check_model(config, kind, member.model, shared, member.setting, f"{member.setting} ({member.title})")
        frozen = [member.model.to(ranks.device) for member in members]
        teacher = frozen[0] if len(frozen) == 1 else MeanModel(frozen, [member.weight for member in members])
        groups[_vocabulary(shared)] = Group(shared, teacher, title_of(members))
    for model in models:
        tokenizer = load_tokenizer(SETTING, model.path, kind)
        size_by_config = getattr(saved_config(SETTING, model.path), "vocab_size", None)
        if isinstance(size_by_config, int):  # before any text is prepared
            check_vocabulary_size(size_by_config, f"{SETTING}={model.name}", tokenizer)
        groups.setdefault(_vocabulary(tokenizer), Group(tokenizer)).located.append(model)
    return list(groups.values())


def _vocabulary(tokenizer: PreTrainedTokenizerBase) -> frozenset[tuple[str, int]]:
    return frozenset(tokenizer.get_vocab().items())


def load_models(config: Config, kind: ModelKind, group: Group, ranks: Ranks) -> Iterator[tuple[str, str, Any]]:
    """Name, title and model, the teacher first. Raises SettingError as `load_pretrained` and `_check_model`."""
    if group.teacher is not None:
        yield TEACHER, group.teacher_title, group.teacher
    for located in group.located:
        model, setting = load_pretrained(SETTING, located.path, kind), f"{SETTING}={located.name}"
        _check_model(config, kind, model, group.tokenizer, setting, setting)
        logger.info(f"{setting}: {type(model).__name__}, {size(model)[0]:,} parameters")
        yield located.name, type(model).__name__, model.requires_grad_(False).eval().to(ranks.device)
        del model


def _check_model(
    config: Config, kind: ModelKind, model: Any, tokenizer: PreTrainedTokenizerBase, setting: str, title: str
) -> None:
    """Set the padding of a model that reads these sequences.

    Raises:
        SettingError: it does not know all tokens of its tokenizer, is too short for the sequences, or mixes up
            documents that share one; it names `setting`, or `title` where the files of the model are at fault.
    """
    check_vocabulary(model, title, tokenizer)
    set_padding(model, tokenizer)
    check_positions(model, setting, config.corpus.sequence_length)
    if kind.causal and config.corpus.cross_documents:
        check_packing(model, setting)


def _refuse_no_numbers(name: str, scores: dict[str, dict[str, float]], config: Config) -> None:
    """Raises SettingError for a model with a score that is NaN: its outputs are not finite, and say nothing.

    Measures of the user's may be, and so are bits for each byte of no text.
    """
    certain = scores.keys() - {*config.evaluate.measures, UNDEFINED}
    bad = [(measure, data) for measure in certain for data, value in scores[measure].items() if math.isnan(value)]
    if bad:
        problem = f"its {bad[0][0]} on {bad[0][1]} is no number (NaN), as its outputs there are not finite"
        setting, value = ("teacher", None) if name == TEACHER else (SETTING, name)
        in_fp32 = config.precision.evaluate == "fp32"
        cure = "leave it out, or give another model" if in_fp32 else "set precision.evaluate=fp32"
        raise SettingError(problem, setting=setting, value=value, cure=cure)


def _notes(vocabularies: Sequence[Vocabulary], has_bits: bool, config: Config) -> list[str]:
    """What a reader has to know where vocabularies differ; `has_bits`: whether bits per byte were measured."""
    if len(vocabularies) < 2 or not find_task(config.objective.task).kind.vocabulary:
        return []
    listed = "; ".join(f"{each.tokens:,} tokens: {', '.join(each.models)}" for each in vocabularies)
    cure = "compare bits per byte" if has_bits else "score models of one vocabulary to compare them"
    if has_bits and any(config.evaluate.max_sequences_of(name) is not None for name in config.evaluate.sets):
        cure += ", with evaluate.max_sequences=null, since a limit selects other passages for each vocabulary"
    note = f"These models have different vocabularies ({listed}). Perplexity is a number per token, so it cannot be "
    note += f"compared between vocabularies, and no significance test is made: {cure}."
    of_teacher = "Agreement with the teacher is given for models of its vocabulary alone."
    return [note] if config.teacher.is_none else [note, of_teacher]


# --- settings ------------------------------------------------------------------------------------------------------


def settings_of(models: Sequence[Located], overrides: Sequence[str]) -> tuple[Config, str]:
    """The settings to score these models with, and the task whose measures they have, as `objective.task` has it.

    Args:
        overrides: as on the command line of a run, such as `evaluate.sets=[books]`.

    Raises:
        SettingError: settings that scoring does not read or that cannot be, or models of different tasks.
    """
    named = [text.partition("=")[0].lstrip("+~") for text in overrides if "=" in text and not text.startswith("-")]
    for name in named:
        if re.split(r"[./]", name)[0] not in READ and name not in TASK:
            near = did_you_mean(name, (*READ, "model", "output"))
            cure = f"leave it out; `distill evaluate` reads {', '.join(READ)}, model and output"
            raise SettingError(f"{name} is not read where models are only scored{near}: {cure}")
    names, first = {*named}, models[0]
    other = next((model for model in models if model.task != first.task), None)
    if other is not None and not TASK & names:
        problem = f"predicts something else ({other.task}) than model={first.name} ({first.task})"
        raise SettingError(problem, setting=SETTING, value=other.name, cure="score them in two commands")
    with TemporaryDirectory(prefix="distill-recipe-") as folder:
        config = composed([*_defaults(first, names, Path(folder)), *map(_with_teacher, overrides)])
    _check_settings(config)
    return config, config.objective.task if TASK & names else first.task


def _defaults(first: Located, names: set[str], folder: Path) -> Iterator[str]:
    """What comes before the settings that are given; an option of a group only where none is given.

    Args:
        folder: gets the settings of the run as a recipe: they win over options of groups, and the command line over
            them.
    """
    if not TASK & names:
        if first.task not in OBJECTIVES:
            problem = f"trained for objective.task={first.task}, which is not scored here"
            raise SettingError(problem, setting=SETTING, value=first.name)
        yield f"objective={OBJECTIVES[first.task]}"
    if "teacher" not in names:
        yield from ("teacher=none", "teacher.path=null")
    if "recipe" in names:
        return
    if first.run is not None:
        file = folder / "recipe" / f"{OF_RUN}.yaml"
        file.parent.mkdir()
        settings = json.dumps(_of_run(first, first.run, names))  # YAML reads JSON
        file.write_text(f"# @package _global_\n{settings}\n", encoding="utf-8")
        yield from (f"hydra.searchpath=[{as_value(f'file://{folder}')}]", f"+recipe={OF_RUN}")
    elif first.task == "spans":
        yield "+recipe=squad"
    else:
        yield from ["~recipe", "evaluate=local"] if "evaluate" not in names else ["~recipe"]
        if "evaluate.sets" in names:
            return
        if first.task == "classes":
            cure = "name the labelled ones, as +recipe=glue corpus.task=sst2, or +recipe=table corpus.path=FOLDER"
            raise SettingError("gives classes or values of texts", setting=SETTING, value=first.name, cure=cure)
        yield "evaluate.sets=" + ("[heldout]" if TEXTS & names else USUAL)


def _of_run(first: Located, run: Path, names: set[str]) -> dict[str, Any]:
    """The settings of a run by which its student was scored; of a group of which another option is given, some.

    Raises:
        SettingError: they reach further than the folder of a stranger may: they name code, the environment or a store.
    """
    settings = settings_of_run(run)
    sections: dict[str, Any] = {name: settings.get(name) or {} for name in ("corpus", "data", "evaluate")}
    sections["evaluate"] = {**sections["evaluate"], "baseline": None}
    for group in {*sections} & names:
        sections[group] = {name: value for name, value in sections[group].items() if name in STAY.get(group, ())}
    if "precision" not in names:
        precision = {**(settings.get("precision") or {}), **formats_of_run(run)}
        sections["precision"] = {name: precision[name] for name in ("evaluate", "kernels") if name in precision}
    _leave_objects_out(sections)
    for name, value in flatten(sections).items():
        if name in names or value is None:
            continue
        if name.endswith(TARGET) or f"'{TARGET}'" in str(value):
            problem = "name code"
        elif "${" in REFERENCE.sub("", str(value)):
            problem = "read the environment"
        elif name.startswith("data.") and "://" in str(value):
            problem = "write prepared sequences elsewhere"
        else:
            continue
        problem = f"the settings of its run {problem} ({name}={value}), which Distill does only at your request"
        cure = f"add {name}={value} if you trust it, or choose other options of corpus and evaluate, as evaluate=local"
        raise SettingError(problem, setting=SETTING, value=first.name, cure=cure)
    return sections


def _leave_objects_out(sections: dict[str, Any]) -> None:
    """Leave out the texts that the program of the run held, and the sets that were of them."""
    corpus, evaluate = sections["corpus"], sections["evaluate"]
    sources = evaluate.get("sources") or {}
    held = {name for name, source in sources.items() if _is_object(source)}
    if _is_object(corpus):
        sections["corpus"] = {name: corpus[name] for name in ("sequence_length", "cross_documents") if name in corpus}
        held |= {name for name, source in sources.items() if (source or {}).get("kind") == HELDOUT}
    if held:
        kept = {name: source for name, source in sources.items() if name not in held}
        sets = [name for name in evaluate.get("sets") or [] if name not in held]
        sections["evaluate"] = {**evaluate, "sources": kept, "sets": sets}


def _is_object(source: Any) -> bool:
    return isinstance(source, dict) and str(source.get(TARGET) or "").startswith(PREFIX)


def _with_teacher(override: str) -> str:
    """The setting as it is given; of `teacher=` the folder or the name on the Hub will do, too."""
    name, _, value = override.partition("=")
    if name != "teacher" or value.startswith(("{", "[")) or value in ("", *options_of("teacher")):
        return override
    return f"teacher.path={value if value.startswith(QUOTES) else as_value(value)}"


def _check_settings(config: Config) -> None:
    """As before a run, but for what concerns training."""
    task, evaluate = find_task(config.objective.task), config.evaluate
    check_evaluation(config, task.kind.vocabulary)
    check_measures(evaluate.own_measures)
    sources = [evaluate.sources.get(name) for name in evaluate.sets]
    held_out = any(source is not None and source.target is None and source.kind == HELDOUT for source in sources)
    check_paths(config, corpus=held_out)  # which nothing else reads here
    causal, backend = task.kind.causal, config.backend.name
    for setting, value, refused, problem, cure in (
        ("backend.name", backend, backend != "single", "models are scored by one process", "leave it out"),
        ("evaluate.baseline", evaluate.baseline, True, "for runs", "name it as another model=, to be compared"),
        ("evaluate.stride", evaluate.stride, not causal, "for causal models", "set it to null"),
    ):
        if refused and value is not None:
            raise SettingError(problem, setting=setting, value=value, cure=cure)
    for each in settings_by_member(config).values():
        if each.model.served:
            problem, setting = "a teacher on a server is not scored", f"{each.setting}.url"
            raise SettingError(problem, setting=setting, value=each.model.url, cure="leave it out")
