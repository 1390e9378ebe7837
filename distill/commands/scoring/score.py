"""Loads models one after the other and scores them on evaluation sets, by the measures of the task they are for."""

import logging
import shlex
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from distill.commands.scoring.located import SETTING, Located, locate
from distill.commands.scoring.scores import Comparison, ModelScores, Scores, Vocabulary, check_folder
from distill.commands.scoring.settings import settings_of
from distill.config.settings import Config
from distill.distributed import Ranks, join_ranks
from distill.evaluation.evaluator import Evaluator
from distill.evaluation.memory_check import check_memory
from distill.evaluation.readers import MeanModel
from distill.evaluation.sets import EvaluationSet
from distill.evaluation.significance import ModelLosses, compare_models
from distill.models.check import check_packing, check_vocabulary, longest_row
from distill.models.kind import ModelKind
from distill.models.load import load_pretrained, load_tokenizer, size
from distill.runs.describe import environment, measure_facts
from distill.runs.parts import to_json
from distill.runs.setup import choose_precision
from distill.runtime.errors import SettingError
from distill.runtime.progress import configure_logging
from distill.runtime.redaction import redact
from distill.tasks import Task, find_task
from distill.tasks.mlm_sop import MlmSop
from distill.teacher.members import Member, errors_of, load_members, title_of

TEACHER = "the teacher"  # the name of its column

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Group:
    """Models of one vocabulary: they are scored at the same positions, and their perplexities can be compared."""

    tokenizer: PreTrainedTokenizerBase
    models: tuple[Located, ...]
    teacher: Any | None = None  # where it has this vocabulary
    teacher_name: str = ""


@dataclass(frozen=True)
class GroupScores:
    """What the models of a group scored."""

    models: tuple[ModelScores, ...]
    vocabulary: Vocabulary
    measures: dict[str, dict[str, Any]]
    comparisons: tuple[Comparison, ...]
    left_out: tuple[str, ...]  # a line for each set that is not available


def evaluate_models(
    models: Sequence[str | Path], settings: Sequence[str] = (), output: str | Path | None = None
) -> Scores:
    """`distill.evaluate`, which describes the arguments, in a process whose logging and signals are the command's."""
    configure_logging(0)
    transformers_logging.disable_progress_bar()
    located = locate([str(each) for each in models])
    if output is not None:
        check_folder(output)  # before hours of scoring rather than after them
    config, task_name = settings_of(located, settings)
    with ExitStack() as held:
        ranks = held.enter_context(join_ranks(config.backend))
        config = config.changed(precision=choose_precision(config.precision, {}, ranks))
        scores = _score(config, _task(task_name, located, config), located, ranks)
    given = [f"model={each.name}" for each in located] + ([] if output is None else [f"output={output}"])
    command = shlex.join(["distill", "evaluate", *given, *map(redact, settings)])
    scores = replace(scores, command=command)
    if output is not None:
        scores.write(Path(output).expanduser())
    return scores


def _task(name: str, models: Sequence[Located], config: Config) -> Task:
    ordered = name == "mlm_sop" and all(model.has_order for model in models)
    return (MlmSop(order=True) if ordered else find_task(name)).read(config, training=False)


def _score(config: Config, task: Task, models: Sequence[Located], ranks: Ranks) -> Scores:
    groups = _groups(config, task, models, ranks)
    scored = [_score_group(config, task, group, number, ranks) for number, group in enumerate(groups)]
    measures = {name: described for each in scored for name, described in each.measures.items()}
    notes = [*dict.fromkeys(line for each in scored for line in each.left_out), *_notes(scored, measures, config)]
    order = [TEACHER, *(model.name for model in models)]
    return Scores(
        config.objective.task,
        tuple(sorted((each for part in scored for each in part.models), key=lambda each: order.index(each.name))),
        tuple(each.vocabulary for each in scored),
        measures,
        tuple(comparison for each in scored for comparison in each.comparisons),
        tuple(notes),
        environment=to_json(environment(ranks.device)),
    )


def _groups(config: Config, task: Task, models: Sequence[Located], ranks: Ranks) -> list[Group]:
    """The models by their vocabularies; the teacher, where there is one, belongs to the group with its own."""
    groups: list[Group] = []
    for model in models:
        tokenizer = load_tokenizer(SETTING, model.path, task.kind)
        number = _same_vocabulary(groups, tokenizer)
        if number is None:
            groups.append(Group(tokenizer, (model,)))
        else:
            groups[number] = replace(groups[number], models=(*groups[number].models, model))
    if config.teacher.kind == "none":
        return groups
    members, shared = load_members(config, task.kind, ranks.device)
    assert shared is not None
    _check_members(config, task.kind, members, shared)
    frozen = [member.model.to(ranks.device) for member in members]
    teacher = frozen[0] if len(frozen) == 1 else MeanModel(frozen, [member.weight for member in members])
    number = _same_vocabulary(groups, shared)
    if number is None:
        return [*groups, Group(shared, (), teacher, title_of(members))]
    groups[number] = replace(groups[number], teacher=teacher, teacher_name=title_of(members))
    return groups


def _same_vocabulary(groups: Sequence[Group], tokenizer: PreTrainedTokenizerBase) -> int | None:
    vocabulary = tokenizer.get_vocab()
    return next((n for n, group in enumerate(groups) if group.tokenizer.get_vocab() == vocabulary), None)


def _check_members(
    config: Config, kind: ModelKind, members: Sequence[Member], tokenizer: PreTrainedTokenizerBase
) -> None:
    """Refuse teachers as a run does: they have to know the vocabulary, and to take and keep apart what a row holds."""
    for member in members:
        with errors_of(member.name):
            check_vocabulary(member.model, None, tokenizer)
        _check_rows(config, kind, member.model, member.setting)


def _check_rows(config: Config, kind: ModelKind, model: Any, setting: str) -> None:
    """Refuse a model that is too short for the rows, or mixes up documents that share one.

    Raises:
        SettingError: so it is; it names `setting`.
    """
    length = config.corpus.tokens.sequence_length
    if (limit := longest_row(model)) is not None and length > limit:
        raise SettingError(f"corpus.sequence_length={length} exceeds the {limit} positions of {setting}: lower it")
    if kind.causal and config.corpus.tokens.cross_documents:
        check_packing(model, setting)


def _score_group(config: Config, task: Task, group: Group, number: int, ranks: Ranks) -> GroupScores:
    """Score the models of the group; besides the teacher one model at a time is in memory."""
    sets, left_out = task.evaluation_sets(config, group.tokenizer)
    if not sets:
        raise SettingError(
            "evaluate.sets: none of the sets is there to be scored; set DISTILL_DATA, hold text out of a corpus "
            "(corpus.path=FOLDER), or name a text as evaluate.sets=[mine] 'evaluate.sources.mine={kind: text, "
            "path: FILE}'"
        )
    evaluator = task.evaluator(config, group.tokenizer, sets, ranks)
    models: list[ModelScores] = []
    losses: dict[str, ModelLosses] = {}
    for name, model in _loaded(config, task.kind, group, ranks):
        check_memory(evaluator, [model], sets)
        is_teacher = model is group.teacher
        scores, losses[name] = evaluator.score_by_row(model, name, sets, "teacher" if is_teacher else "student")
        agreement = None
        if group.teacher is not None and not is_teacher and task.kind.vocabulary:
            agreement = evaluator.agree(model, group.teacher, sets)
        title = group.teacher_name if is_teacher else type(model).__name__
        models.append(ModelScores(name, title, *size(model), number, scores, agreement))
        del model  # before the next one is loaded
    described = {data.name: evaluator.describe(data) for data in sets}
    return GroupScores(
        tuple(models),
        Vocabulary(len(group.tokenizer), tuple(each.name for each in models), described),
        to_json(measure_facts(evaluator.measures)),
        tuple(_compare(group, losses, evaluator, sets)),
        tuple(left_out),
    )


def _loaded(config: Config, kind: ModelKind, group: Group, ranks: Ranks) -> Iterator[tuple[str, Any]]:
    """Name and model, the teacher first.

    Raises:
        SettingError: one does not load, does not know all tokens of its tokenizer, takes no rows of this length, or
            does not keep the documents of a row apart.
    """
    if group.teacher is not None:
        yield TEACHER, group.teacher
    for located in group.models:
        model = load_pretrained(SETTING, located.path, kind).requires_grad_(False).eval()
        known = model.get_input_embeddings().weight.shape[0]
        if known < len(group.tokenizer):
            raise SettingError(
                f"model={located.name} knows {known:,} tokens, but its tokenizer has {len(group.tokenizer):,}: save "
                "the tokenizer that it was trained with beside it"
            )
        _check_rows(config, kind, model, f"{SETTING}={located.name}")
        logger.info(f"model={located.name}: {type(model).__name__}, {size(model)[0]:,} parameters")
        yield located.name, model.to(ranks.device)
        del model


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


def _notes(scored: Sequence[GroupScores], measures: dict[str, Any], config: Config) -> list[str]:
    """What a reader has to know where vocabularies differ."""
    if len(scored) < 2 or "perplexity" not in measures:
        return []
    listed = "; ".join(f"{each.vocabulary.tokens:,} tokens: {', '.join(each.vocabulary.models)}" for each in scored)
    cure = "bits per byte can" if "bits_per_byte" in measures else "score models of one vocabulary to compare them"
    lines = [
        f"These models have different vocabularies ({listed}). A perplexity is one of tokens, so perplexities cannot "
        f"be compared between them, and no test is made: {cure}."
    ]
    if config.teacher.kind != "none":
        lines.append("Agreement with the teacher is given for models of its vocabulary alone.")
    return lines
