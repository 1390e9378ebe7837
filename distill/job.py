"""One run from settings to report, each part built in reading order."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase
from transformers.utils import logging

from distill import backends, optim, trackers
from distill.backends import Workers
from distill.checkpoint import State, export
from distill.checks import check
from distill.config import Config, Rows, Tracker
from distill.data.batches import Batches, num_workers, some_rows
from distill.data.collate.mlm import masker
from distill.data.tokens import Tokens, prepare, train_wordpiece
from distill.evaluation.evaluate import MASKING, EvaluationSet, Evaluator, load_sets
from distill.kernels import int8
from distill.models.load import check_pair, check_tokenizers, load_pretrained, load_teacher, load_tokenizer
from distill.models.student import make_student, tokenizer_of
from distill.objective.objective import Objective, pays_to_compile
from distill.progress import Progress, say
from distill.report import report, results, summary
from distill.run_folder import RunFolder
from distill.setup import place
from distill.teacher import build_cache as teacher_pass
from distill.teacher import cache as teacher_cache
from distill.train import ENDLESS, plan, train

Tell = Callable[[str], None]


def run(config: Config, path: Path, recipe: str, command: str, resolved: str) -> dict[str, Any]:
    """Train, evaluate and report as `config` says; what comes of it lies in the folder `path`.

    Args:
        recipe, command, resolved: name of the recipe, the command line and the resolved configuration, for the report.

    Returns:
        The content of results.json.

    Raises:
        SettingError: bad input, before any earlier work in the folder is touched.
        Diverged, Interrupted: training ended early with a usable last checkpoint.
    """
    check(config)
    logging.disable_progress_bar()  # transformers' own, which would garble ours
    twin = results.read(Path(config.evaluate.twin), "evaluate.twin") if config.evaluate.twin else None
    with ExitStack() as held:
        backend = held.enter_context(backends.build(config.backend))
        tell = say if backend.rank == 0 else _say_nothing
        if config.precision.teacher == "int8":
            int8.check(backend.device)
        teacher, teacher_name, student, tokenizer = load_models(config, tell)
        check_twin(config.evaluate.twin, tokenizer)
        tokens = prepare(config.corpus, tokenizer, "train", log=tell)
        sets, left_out = load_sets(config, tokenizer, tell)
        batches = make_batches(config, tokens, tokenizer, backend)
        identity = results.identity(config, tokens, batches)
        folder = held.enter_context(RunFolder(path, config.resume, identity, config.train.keep, backend.rank == 0))
        if (finished := folder.finished()) is not None:
            tell(f"This run is finished and nothing was changed: {path / 'report.html'}")
            return finished

        cached = config.teacher.cache.top_k is not None
        cache = teacher_cache.find(config, teacher, tokens, batches, len(tokenizer)) if cached else None
        in_training = place(teacher, student, config.precision, backend)
        optimizer = optim.build(student, config.optimizer)
        state = folder.begin(student, optimizer, resolved)
        notes = [*results.notes(config, tokens), *left_out]
        models = {"teacher": teacher, "student": student}
        tell(results.banner(config, recipe, tokens, batches, models, teacher_name, notes))
        if state.step:
            tell(f"  going on after step {state.step:,}")
        if cache is not None:
            teacher_pass.build(cache, config, in_training, batches, backend)
            batches = replace(batches, taught=cache.read)
            notes.append(results.cache_note(cache.facts()))
            tell(f"  {notes[-1]}")
        objective = make_objective(config, batches, len(tokenizer), backend.device)
        evaluator = make_evaluator(config, tokens, tokenizer, backend)
        watch = Watch(config, folder, recipe, backend, batches, student, evaluator, sets, state)
        asked = teacher if objective.needs_teacher else None  # a twin only starts from its layers
        live = None if cached or asked is None else in_training
        ended_by = train(
            student, live, batches, objective, optimizer, backend, state, config.train,
            config.schedule, config.optimizer, folder.checkpoints, watch.log, watch.end_of_epoch,
        )  # fmt: skip
        watch.close()
        judged = judge(watch, {"teacher": (teacher_name, asked), "student": (type(student).__name__, student)}, twin)
        if cache is not None:
            judged["teacher"]["cache"] = cache.facts()
        metrics = trackers.read(folder.metrics_path) if backend.rank == 0 else []
        content = {
            "recipe": recipe,
            "scale": config.scale,
            "command": command,
            "notes": notes,
            "finished": True,
            "corpus": results.corpus_block(tokens, batches),
            **judged,
            "training": results.training_block(state, batches, watch.history(), metrics, ended_by),
            "backend": results.backend_block(backend, config, state),
            "environment": results.environment(backend.device),
            "history": watch.history(),
            "identity": identity,
        }
        if backend.rank == 0:
            publish(folder, content, student, tokenizer, metrics, resolved)
        backend.barrier()
        return content


def load_models(config: Config, tell: Tell) -> tuple[Any | None, str, Any, PreTrainedTokenizerBase]:
    """The frozen teacher or None, its name, the student; the tokenizer is the teacher's, the student's or a new one."""
    teacher, tokenizer, teacher_name = load_teacher(config.teacher)
    tokenizer = tokenizer or tokenizer_of(config.student)
    if tokenizer is None:
        tokenizer = train_wordpiece(config.corpus, config.corpus.vocab_size, config.corpus.cache, log=tell)
        tokenizer.model_max_length = config.corpus.sequence_length
    torch.manual_seed(config.seed)
    student = make_student(config.student, teacher, tokenizer, config.corpus.sequence_length)
    check_pair(teacher, student, tokenizer, config.objective.cosine.weight > 0)
    return teacher, teacher_name, student, tokenizer


def check_twin(path: str | None, tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse a twin of another vocabulary. Raises SettingError."""
    if path is not None:
        check_tokenizers(tokenizer, load_tokenizer("evaluate.twin", path), f"evaluate.twin={path}")


def make_evaluator(config: Config, tokens: Tokens, tokenizer: PreTrainedTokenizerBase, backend: Workers) -> Evaluator:
    """What scores models at the fixed masks of evaluation."""
    rule = masker(MASKING, tokenizer, tokens.counts)
    pad_id, vocab = tokenizer.pad_token_id, len(tokenizer)
    return Evaluator(config.evaluate, rule, pad_id, vocab, config.precision.evaluate, backend)


def make_batches(config: Config, tokens: Tokens, tokenizer: PreTrainedTokenizerBase, backend: Workers) -> Batches:
    """This rank's share of the training rows, in their order and with their masks."""
    return Batches(
        some_rows(tokens.rows, config.corpus.rows, "training rows"),
        masker(config.objective.masking, tokenizer, tokens.counts),
        tokenizer.pad_token_id,
        config.train.batch_size,
        config.train.accumulate,
        config.seed,
        backend.rank,
        backend.size,
        num_workers(config.train.workers, backend.local_size),
    )


def make_objective(config: Config, batches: Batches, vocab: int, device: torch.device) -> Objective:
    """The objective, compiled where the run is long enough; a resumed run decides as the first one did."""
    positions = plan(config.train, batches.steps_per_epoch) * batches.rows_per_step * batches.rows.shape[1]
    share = config.objective.masking.share if config.objective.soft.rows is Rows.masked else 1.0
    compiled = pays_to_compile(config.objective, config.precision, device, share * positions * vocab)
    return Objective(config.objective, config.precision, vocab, compiled, config.teacher.micro_batches)


class Watch:
    """Follows the training: metrics to file and tracker, a progress line, and the student's scores by epoch."""

    def __init__(
        self,
        config: Config,
        folder: RunFolder,
        recipe: str,
        backend: Workers,
        batches: Batches,
        student: Any,
        evaluator: Evaluator,
        sets: list[EvaluationSet],
        state: State,
    ) -> None:
        self.config, self.folder, self.backend, self.student = config, folder, backend, student
        self.evaluator, self.sets = evaluator, sets
        self.steps = plan(config.train, batches.steps_per_epoch)
        first = backend.rank == 0
        self.tracker = trackers.build(config.tracker if first else Tracker(), folder.path, asdict(config), recipe)
        total = 0 if self.steps == ENDLESS else self.steps
        self.progress = Progress("training", total, "steps", start=state.step, quiet=not first)

    def log(self, metrics: dict[str, float]) -> None:
        if self.backend.rank == 0:
            self.folder.metrics.append(metrics)
            self.tracker.log(metrics, int(metrics["step"]))
            note = f"loss {metrics['loss/total']:.4f}, {metrics['tokens_per_second']:,.0f} tokens/s"
            self.progress.update(metrics["step"], note)

    def end_of_epoch(self, state: State, epochs: float, losses: dict[str, float]) -> None:
        """Score the student, unless that was done before an interruption."""
        if self.backend.broadcast(any(line["step"] == state.step for line in self.history())):
            return
        scores = {}
        if self.config.evaluate.every_epoch or state.step >= self.steps:
            scores = self.evaluator.score(self.student, "student", self.sets)
        if self.backend.rank > 0:
            return
        line = {"epoch": epochs, "step": state.step, "tokens": state.tokens, "seconds": state.seconds, "loss": losses}
        self.folder.history.append(line | scores)
        say(results.epoch_line(line | scores))
        flat = {f"{measure}/{name}": value for measure, values in scores.items() for name, value in values.items()}
        self.tracker.log(flat, state.step)

    def history(self) -> list[dict[str, Any]]:
        return self.folder.history_lines()

    def last_scores(self) -> dict[str, dict[str, float]] | None:
        """The student's scores at the end of the run, when `end_of_epoch` has them."""
        last = self.backend.broadcast(self.history()[-1] if self.backend.rank == 0 else None)
        measures = ("perplexity", "pseudo_perplexity")
        return {measure: last[measure] for measure in measures} if "perplexity" in last else None

    def close(self) -> None:
        self.progress.close()
        self.tracker.close()


def judge(watch: "Watch", pair: dict[str, tuple[str, Any]], twin: dict[str, Any] | None) -> dict[str, Any]:
    """Teacher, student and, where `evaluate.twin` names its run, the no-teacher twin, side by side."""
    evaluator, sets = watch.evaluator, watch.sets
    models = {label: named for label, named in pair.items() if named[1] is not None}
    if twin is not None:
        model = load_pretrained("evaluate.twin", watch.config.evaluate.twin or "").to(watch.backend.device)
        models["twin"] = (type(model).__name__, model)
    speeds = evaluator.tokens_per_second([model for _, model in models.values()], sets[0]) if sets else [0.0] * 3
    blocks: dict[str, Any] = {"teacher": None, "student": None, "twin": None}
    for (label, (name, model)), speed in zip(models.items(), speeds, strict=False):
        known = watch.last_scores() if label == "student" else None
        blocks[label] = results.model_block(name, model, known or evaluator.score(model, label, sets), speed)
    if twin is not None:
        blocks["twin"] |= {
            "folder": watch.config.evaluate.twin,
            "steps": twin["training"]["steps"],
            "history": twin["history"],
        }
    taught = "teacher" in models
    return {
        **blocks,
        "agreement": evaluator.agree(pair["student"][1], pair["teacher"][1], sets) if taught else None,
        "evaluation": {data.name: evaluator.describe(data) for data in sets},
    }


def publish(
    folder: RunFolder,
    content: dict[str, Any],
    student: Any,
    tokenizer: PreTrainedTokenizerBase,
    metrics: list[dict[str, Any]],
    resolved: str,
) -> None:
    """Write student, report and, last of all, results.json, which makes the run a finished one."""
    path = folder.path
    export(student, tokenizer, path / "student", report.model_card(content))
    report.write(path, content, metrics, resolved)
    folder.write_results(content)
    say(f"{summary.findings(content)}\nReport: {path / 'report.html'}   Student: {path / 'student'}")


def _say_nothing(text: str) -> None:
    """What ranks other than 0 say."""
