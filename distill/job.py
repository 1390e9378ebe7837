"""One job from settings to report, each part built in reading order."""

import logging
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from distill import backends, optim
from distill.backends import Backend
from distill.checkpoint import State, export
from distill.checks import check
from distill.config import Config
from distill.data.batches import Batches, num_threads, subsample_rows
from distill.data.collate.mlm import MaskedLM, masked_lm
from distill.data.tokens import Tokens, corpus_text, prepare
from distill.data.wordpiece import corpus_tokenizer
from distill.evaluation.evaluator import Evaluator
from distill.evaluation.sets import MASKING, EvaluationSet, load_sets
from distill.identity import run_identity
from distill.jsonl import read_lines
from distill.kernels import int8
from distill.models.identity import model_digest, saved_digest
from distill.models.load import (
    check_tokenizers,
    check_vocabulary,
    load_pretrained,
    load_teacher,
    load_tokenizer,
    teacher_path,
)
from distill.models.student import make_student, tokenizer_of
from distill.monitor import Monitor
from distill.objective.build import build_objective, fit_terms, make_terms
from distill.objective.objective import Objective
from distill.objective.terms import Term
from distill.progress import configure_logging
from distill.report import report, results, summary
from distill.run_folder import RunFolder
from distill.schedule import total_steps
from distill.setup import choose_precision, setup_models
from distill.teacher.cache import Cache
from distill.teacher.make import find_cache, make_teacher
from distill.train import Training, train

logger = logging.getLogger(__name__)


@dataclass
class Models:
    """The pair of a run, and what both read text with."""

    teacher: Any | None  # frozen, as it was loaded
    teacher_name: str
    student: Any
    tokenizer: PreTrainedTokenizerBase
    digests: dict[str, str | None]  # of the teacher, and of the student where it starts from a model of the user's


@dataclass
class Text:
    """The corpus as rows, and the sets that models are scored on."""

    tokens: Tokens
    batches: Batches
    sets: list[EvaluationSet]
    left_out: list[str]  # a line for each set that is not available


def run(config: Config, path: Path, recipe: str, command: str, resolved: str) -> dict[str, Any]:
    """Train, evaluate and report as `config` says; the outcome lies in the folder `path`.

    Args:
        recipe, command, resolved: name of the recipe, the command line and the resolved configuration, for the report.

    Returns:
        The content of results.json.

    Raises:
        SettingError: bad input, before any earlier work in the folder is touched.
        Diverged, Interrupted: training ended early with a usable last checkpoint.
    """
    check(config)
    transformers_logging.disable_progress_bar()  # its bars would garble the progress line
    twin = results.read(Path(config.evaluate.twin), "evaluate.twin") if config.evaluate.twin else None
    with ExitStack() as held:
        backend = held.enter_context(backends.build(config.backend))
        configure_logging(backend.rank)
        terms = make_terms(config.objective)
        models = load_models(config, terms, backend)
        text = prepare_text(config, models.tokenizer, backend)
        steps = total_steps(config.train, text.batches.steps_per_epoch)
        digests = {**models.digests, "corpus": text.tokens.digest}
        identity = run_identity(config, digests, len(text.batches.rows), text.batches.rows_per_step, steps)
        folder = held.enter_context(RunFolder(path, config.resume, identity, config.train.keep, backend.rank == 0))
        length = {name: getattr(config.train, name) for name in ("epochs", "steps", "minutes")}
        if (finished := folder.finished(steps, length)) is not None:
            logger.info(f"This run is finished and nothing was changed: {path / 'report.html'}")
            return finished

        config.precision = choose_precision(config.precision, folder.recorded_precision(), backend)
        folder.checkpoints.precision = asdict(config.precision)
        objective = make_objective(config, terms, text.batches, steps, len(models.tokenizer), backend)
        cache = find_cache(config, cache_origin(config, models, text, objective), text.batches, objective.positions)
        trainable, frozen = setup_models(models.student, models.teacher, objective, config.precision, backend)
        optimizer = optim.build(trainable, config.optimizer)
        state = folder.begin(trainable, optimizer, resolved)
        notes = [*results.notes(config, text.tokens), *text.left_out]
        announce(config, recipe, models, text, objective, notes, state)
        teacher = make_teacher(
            frozen if objective.needs_teacher else None, cache, text.batches, objective.positions,
            objective.top_k_temperature, config, backend,
        )  # fmt: skip
        notes += [results.cache_note(cache.facts())] if cache else []
        evaluator = make_evaluator(config, models.tokenizer, text.tokens, backend)
        monitor = Monitor(config, folder, recipe, backend, models.student, evaluator, text.sets, steps, state)
        training = Training(
            trainable, teacher, text.batches, objective, optimizer, backend, state, config.train, config.schedule,
            config.optimizer, folder.checkpoints, monitor,
        )  # fmt: skip
        ending = {"ended_by": train(training), "length": length}
        monitor.close()
        content = {"recipe": recipe, "command": command, "notes": notes, "identity": identity}
        content |= results_of(config, models, text, training, ending, monitor, twin, cache)
        if backend.rank == 0:
            write_outputs(folder, content, models, resolved)
        backend.barrier()
        return content


def load_models(config: Config, terms: dict[str, Term], backend: Backend) -> Models:
    """The frozen teacher or none, the student, and the tokenizer: the teacher's, the student's or a new one."""
    if config.precision.teacher == "int8":
        int8.check(backend.device)
    teacher, tokenizer, teacher_name = load_teacher(config.teacher)
    tokenizer = tokenizer or tokenizer_of(config.student)
    if tokenizer is None:
        tokenizer = corpus_tokenizer(config.corpus)
        tokenizer.model_max_length = config.corpus.tokens.sequence_length
    torch.manual_seed(config.seed)
    student = make_student(config.student, teacher, tokenizer, config.corpus.tokens.sequence_length)
    check_vocabulary(teacher, student, tokenizer)
    fit_terms(terms, student, teacher)
    if (path := config.evaluate.twin) is not None:
        check_tokenizers(tokenizer, load_tokenizer("evaluate.twin", path), f"evaluate.twin={path}")
    digests: dict[str, str | None] = {"teacher": None, "student": None}
    if teacher is not None:
        digests["teacher"] = saved_digest(teacher_path(config.teacher), teacher, tokenizer, config.corpus.cache.cache)
    if config.student.kind in ("pretrained", "custom"):
        digests["student"] = model_digest(student)
    return Models(teacher, teacher_name, student, tokenizer, digests)


def prepare_text(config: Config, tokenizer: PreTrainedTokenizerBase, backend: Backend) -> Text:
    """The corpus as rows, this rank's share of them in their order and with their masks, and the evaluation sets."""
    corpus = config.corpus
    tokens = prepare(corpus_text(corpus), tokenizer, corpus.tokens, corpus.cache, "train")
    sets, left_out = load_sets(config, tokenizer)
    batches = Batches(
        subsample_rows(tokens.rows, corpus.rows, "training rows"),
        masked_lm(config.objective.masking, tokenizer, tokens.counts),
        config.train.batch_size,
        config.train.accumulate,
        config.seed,
        backend.rank,
        backend.size,
        num_threads(config.train.workers, backend.local_size),
        config.objective.masking.static,
    )
    return Text(tokens, batches, sets, left_out)


def make_objective(
    config: Config, terms: dict[str, Term], batches: Batches, steps: int, vocab: int, backend: Backend
) -> Objective:
    """The objective of a run of so many steps."""
    num_positions = steps * batches.rows_per_step * batches.rows.shape[1]
    return build_objective(terms, config.objective, config.precision, vocab, num_positions, backend.device)


def cache_origin(config: Config, models: Models, text: Text, objective: Objective) -> dict[str, Any]:
    """Everything that decides what a teacher cache holds; what it was computed on is left out."""
    masks = text.batches.collator
    assert isinstance(masks, MaskedLM)
    return {
        "teacher": models.digests["teacher"],
        "precision": config.precision.teacher,
        "tokens": text.tokens.digest,
        "masks": masks.identity,
        "seed": config.seed,
        "soft_positions": "all" if objective.visits_all_rows else "masked",
        "temperature": objective.top_k_temperature,
        "vocabulary": len(models.tokenizer),
    }


def make_evaluator(config: Config, tokenizer: PreTrainedTokenizerBase, tokens: Tokens, backend: Backend) -> Evaluator:
    """What scores models at the fixed masks of evaluation."""
    masks = masked_lm(MASKING, tokenizer, tokens.counts)
    return Evaluator(config.evaluate, masks, len(tokenizer), config.precision, backend)


def announce(
    config: Config, recipe: str, models: Models, text: Text, objective: Objective, notes: list[str], state: State
) -> None:
    """Say what is about to be trained, on what, and from where."""
    pair = {"teacher": models.teacher, "student": models.student}
    logger.info(results.banner(config, recipe, text.tokens, text.batches, pair, models.teacher_name, notes))
    if state.step:
        logger.info(f"  resuming after step {state.step:,}")
    if compiled := ["the objective"] * objective.compiled + ["both encoders"] * config.precision.compile:
        logger.info(f"  the first step compiles {' and '.join(compiled)}, which can take a minute")


def results_of(
    config: Config,
    models: Models,
    text: Text,
    training: Training,
    ending: dict[str, Any],
    monitor: Monitor,
    twin: dict[str, Any] | None,
    cache: Cache | None,
) -> dict[str, Any]:
    """Everything that results.json records of a training that has ended; all ranks score.

    Args:
        ending: what ended it, and the limits that it had.
    """
    compared = compare_models(config, models, training, monitor, twin)
    if cache is not None:
        compared["teacher"]["cache"] = cache.facts()
    metrics = read_lines(monitor.folder.metrics_path)
    return {
        "scale": config.scale,
        "finished": True,
        "corpus": results.corpus_block(text.tokens, text.batches),
        **compared,
        "objective": results.objective_block(training.objective),
        "measures": results.measures_block(monitor.evaluator.measures),
        "training": results.training_block(training.state, text.batches, monitor.history(), metrics) | ending,
        "precision": asdict(config.precision),
        "backend": results.backend_block(training.backend, config, training.state),
        "environment": results.environment(training.backend.device),
        "history": monitor.history(),
    }


def compare_models(
    config: Config, models: Models, training: Training, monitor: Monitor, twin: dict[str, Any] | None
) -> dict[str, Any]:
    """Teacher, student and, where `evaluate.twin` names its run, the no-teacher twin, side by side."""
    evaluator, sets = monitor.evaluator, monitor.sets
    # A twin only starts from its teacher's layers, and is not compared with it.
    teacher = models.teacher if training.objective.needs_teacher else None
    named = {
        "teacher": (models.teacher_name, teacher),
        "student": (type(models.student).__name__, models.student),
    }
    if twin is not None:
        model = load_pretrained("evaluate.twin", config.evaluate.twin or "").to(training.backend.device)
        named["twin"] = (type(model).__name__, model)
    named = {label: pair for label, pair in named.items() if pair[1] is not None}
    speeds = evaluator.tokens_per_second([model for _, model in named.values()], sets[0]) if sets else [0.0] * 3
    blocks: dict[str, Any] = {"teacher": None, "student": None, "twin": None}
    for (label, (name, model)), speed in zip(named.items(), speeds, strict=False):
        known = monitor.last_scores() if label == "student" else None
        blocks[label] = results.model_block(name, model, known or evaluator.score(model, label, sets), speed)
    if twin is not None:
        steps, history = twin["training"]["steps"], twin["history"]
        blocks["twin"] |= {"folder": config.evaluate.twin, "steps": steps, "history": history}
        blocks["twin"]["objective"] = twin.get("objective")
    return {
        **blocks,
        "agreement": None if teacher is None else evaluator.agree(models.student, teacher, sets),
        "evaluation": {data.name: evaluator.describe(data) for data in sets},
    }


def write_outputs(folder: RunFolder, content: dict[str, Any], models: Models, resolved: str) -> None:
    """Write student, report and, last of all, results.json, which makes the run a finished one."""
    path = folder.path
    export(models.student, models.tokenizer, path / "student", report.model_card(content))
    report.write(path, content, read_lines(folder.metrics_path), resolved)
    folder.write_results(content)
    logger.info(f"{summary.findings(content)}\nReport: {path / 'report.html'}   Student: {path / 'student'}")
