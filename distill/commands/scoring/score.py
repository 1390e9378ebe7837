"""Scores models on evaluation sets without training, by the measures of the task they are for."""

import math
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from transformers.utils import logging as transformers_logging

from distill.commands.api.run import errors_for_programs, output_for_programs
from distill.commands.scoring.groups import TEACHER, Group, groups_of, load_models
from distill.commands.scoring.settings import settings_of
from distill.config.compose import hydra_as_before
from distill.config.settings import Config
from distill.distributed import Ranks, join_ranks
from distill.evaluation.evaluator import Evaluator
from distill.evaluation.memory_check import check_memory
from distill.evaluation.sets import EvaluationSet
from distill.evaluation.significance import ModelLosses, compare_models
from distill.models.kind import output_names
from distill.models.load import saved_config, size
from distill.models.loaded import SETTING
from distill.report.scores import Comparison, ModelScores, Scores, Vocabulary, check_folder
from distill.runs import facts
from distill.runs.describe import environment, measure_facts
from distill.runs.located import Located, locate
from distill.runs.setup import choose_precision
from distill.runtime.errors import SettingError, raising_at_the_call
from distill.runtime.progress import configure_logging
from distill.runtime.redaction import redact
from distill.runtime.signals import handled
from distill.tasks import Task, find_task
from distill.tasks.classes import Classes
from distill.tasks.mlm_sop import MlmSop

UNDEFINED = ("bits_per_byte", "pearson", "spearman")  # measures that may be no numbers for a model that is right


@dataclass(frozen=True)
class GroupScores:
    """What the models of a group scored."""

    models: tuple[ModelScores, ...]
    vocabulary: Vocabulary
    measures: dict[str, facts.Measure]
    comparisons: tuple[Comparison, ...]
    left_out: tuple[str, ...]  # a line for each set that is not available


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
    for name, argument, example in (("models", models, "runs/first"), ("settings", settings, "evaluate.sets=[books]")):
        if isinstance(argument, str | Path):
            raise SettingError(f"{name}={argument} is one string: give a list, such as ['{example}']")
        if not isinstance(argument, Sequence) or not all(isinstance(entry, str | Path) for entry in argument):
            raise SettingError(
                f"{name} is a {type(argument).__name__}, or holds what is no text: give a list such as ['{example}']; "
                "a model in memory is saved first"
            )
    as_of_a_program = errors_for_programs("" if output is None else str(output))
    with as_of_a_program, handled(), output_for_programs(), hydra_as_before():
        return evaluate_models(models, settings, output)


def evaluate_models(
    models: Sequence[str | Path], settings: Sequence[str] = (), output: str | Path | None = None
) -> Scores:
    """`evaluate` in a process whose logging and signals are the command's."""
    configure_logging(0)
    transformers_logging.disable_progress_bar()
    located = locate([str(model) for model in models])
    if output is not None:
        check_folder(output)  # before hours of scoring rather than after them
    config, task_name = settings_of(located, settings)
    with join_ranks(config.backend) as ranks:
        config = config.changed(precision=choose_precision(config.precision, {}, ranks))
        scores = _score(config, _task(task_name, located, config), located, ranks)
    arguments = [f"model={model.name}" for model in located] + ([] if output is None else [f"output={output}"])
    command = shlex.join(["distill", "evaluate", *arguments, *map(redact, settings)])
    scores = replace(scores, command=f"cd {shlex.quote(os.getcwd())} && {command}")
    if output is not None:
        scores.write(Path(output).expanduser())
    return scores


def _task(name: str, models: Sequence[Located], config: Config) -> Task:
    ordered = name == "mlm_sop" and all(model.has_order for model in models)
    task = (MlmSop(order=True) if ordered else find_task(name)).read(config, training=False)
    if isinstance(task, Classes):
        return task.of_model(tuple(output_names(saved_config(SETTING, models[0].path))))
    return task


def _score(config: Config, task: Task, models: Sequence[Located], ranks: Ranks) -> Scores:
    groups = groups_of(config, task.kind, models, ranks)
    scored = [_score_group(config, task, group, number, ranks) for number, group in enumerate(groups)]
    measures = {name: described for result in scored for name, described in result.measures.items()}
    notes = [*dict.fromkeys(line for result in scored for line in result.left_out), *_notes(scored, measures, config)]
    order = [TEACHER, *(model.name for model in models)]
    return Scores(
        config.objective.task,
        tuple(
            sorted((result for part in scored for result in part.models), key=lambda result: order.index(result.name))
        ),
        tuple(result.vocabulary for result in scored),
        measures,
        tuple(comparison for result in scored for comparison in result.comparisons),
        tuple(notes),
        environment=environment(ranks.device),
    )


def _score_group(config: Config, task: Task, group: Group, number: int, ranks: Ranks) -> GroupScores:
    """Score the models of the group; besides the teacher one model at a time is in memory."""
    sets, left_out = task.evaluation_sets(config, group.tokenizer)
    if not sets:
        raise SettingError(
            "evaluate.sets: none of the sets is available; set DISTILL_DATA, hold text out of a corpus "
            "(corpus.path=FOLDER), or name a text as evaluate.sets=[mine] 'evaluate.sources.mine={kind: text, "
            "path: FILE}'"
        )
    evaluator = task.evaluator(config, group.tokenizer, sets, ranks)
    models: list[ModelScores] = []
    losses: dict[str, ModelLosses] = {}
    for name, model in load_models(config, task.kind, group, ranks):
        check_memory(evaluator, [model], sets)
        is_teacher = model is group.teacher
        scores, losses[name] = evaluator.score_by_sequence(model, name, sets, "teacher" if is_teacher else "student")
        _refuse_no_numbers(name, scores, config)
        agreement = None
        if group.teacher is not None and not is_teacher and task.kind.vocabulary:
            agreement = evaluator.agree(model, group.teacher, sets)
        title = group.teacher_name if is_teacher else type(model).__name__
        models.append(ModelScores(name, title, *size(model), number, scores, agreement))
        del model  # before the next one is loaded
    described = {data.name: facts.EvaluationSet(**evaluator.describe(data)) for data in sets}
    return GroupScores(
        tuple(models),
        Vocabulary(len(group.tokenizer), tuple(model.name for model in models), described),
        measure_facts(evaluator.measures),
        tuple(_compare(group, losses, evaluator, sets)),
        tuple(left_out),
    )


def _refuse_no_numbers(name: str, scores: dict[str, dict[str, float]], config: Config) -> None:
    """Raises SettingError for a model with a score that is NaN: its outputs are not finite, and say nothing.

    Measures of the user's may be, and so are correlations with what is constant, and bits for each byte of no text.
    """
    for measure, by_set in scores.items():
        for data, value in by_set.items():
            if math.isnan(value) and measure not in {*config.evaluate.measures, *UNDEFINED}:
                in_fp32 = config.precision.evaluate == "fp32"
                raise SettingError(
                    f"its {measure} on {data} is no number (NaN), as its outputs there are not finite",
                    setting="teacher" if name == TEACHER else "model",
                    value=None if name == TEACHER else name,
                    cure="leave it out, or give another model" if in_fp32 else "set precision.evaluate=fp32",
                )


def _compare(
    group: Group, losses: dict[str, ModelLosses], evaluator: Evaluator, sets: list[EvaluationSet]
) -> Iterator[Comparison]:
    """Every model of the group that was named against the first of them."""
    first, *others = [model.name for model in group.models] or [""]
    for other in others:
        compared = compare_models(losses[other], losses[first], sets, evaluator.scoring)
        for measure, by_set in compared.items():
            for name, bootstrap in by_set.items():
                yield Comparison(other, first, measure, name, bootstrap)


def _notes(scored: Sequence[GroupScores], measures: Mapping[str, facts.Measure], config: Config) -> list[str]:
    """What a reader has to know where vocabularies differ."""
    if len(scored) < 2 or "perplexity" not in measures:
        return []
    listed = "; ".join(
        f"{result.vocabulary.tokens:,} tokens: {', '.join(result.vocabulary.models)}" for result in scored
    )
    cure = "compare bits per byte" if "bits_per_byte" in measures else "score models of one vocabulary to compare them"
    limits = [config.evaluate.max_sequences_of(name) for name in config.evaluate.sets]
    if "bits_per_byte" in measures and set(limits) != {None}:
        cure += ", with evaluate.max_sequences=null, since a limit selects other passages for each vocabulary"
    lines = [
        f"These models have different vocabularies ({listed}). Perplexity is a number per token, so it cannot be "
        f"compared between vocabularies, and no significance test is made: {cure}."
    ]
    if not config.teacher.is_none:
        lines.append("Agreement with the teacher is given for models of its vocabulary alone.")
    return lines
