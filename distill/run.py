"""One run from settings to report, each part built in reading order."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from distill import backends, optim, report, results, summary, trackers
from distill.backends import Workers
from distill.batches import Batches, some_rows
from distill.checkpoint import State, export
from distill.checks import check
from distill.config import Config, Tracker
from distill.evaluate import MASKING, EvaluationSet, Evaluator, load_sets
from distill.masking import masker
from distill.models import check_pair, load_pretrained, load_teacher
from distill.objective import Objective
from distill.progress import Progress, say
from distill.run_folder import RunFolder
from distill.student import make_student, tokenizer_of
from distill.tokens import prepare, train_wordpiece
from distill.train import ENDLESS, plan, train


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
    backend = backends.build(config.backend)
    tell = say if backend.rank == 0 else lambda text: None

    teacher, tokenizer, teacher_name = load_teacher(config.teacher)
    tokenizer = (
        tokenizer
        or tokenizer_of(config.student)
        or train_wordpiece(config.corpus, config.corpus.vocab_size, config.corpus.cache, log=tell)
    )
    tokens = prepare(config.corpus, tokenizer, "train", log=tell)
    sets, left_out = load_sets(config, tokenizer)
    torch.manual_seed(config.seed)
    student = make_student(config.student, teacher, tokenizer, config.corpus.sequence_length)
    check_pair(teacher, student, tokenizer, config.objective.cosine.weight > 0)
    batches = Batches(
        some_rows(tokens.rows, config.corpus.rows, "training rows"),
        masker(config.objective.masking, tokenizer, tokens.counts),
        tokenizer.pad_token_id,
        config.train.batch_size,
        config.train.accumulate,
        config.seed,
        backend.rank,
        backend.size,
    )
    identity = results.identity(config, tokens, batches)
    folder = RunFolder(path, config.resume, identity, config.train.keep, writes=backend.rank == 0)
    if (finished := folder.finished()) is not None:
        tell(f"This run is finished and nothing was changed: {path / 'report.html'}")
        return finished

    student.to(backend.device)
    backend.prepare(student)
    if teacher is not None:
        teacher.to(backend.device)
    if config.precision.compile:
        for model in filter(None, (teacher, student)):
            model.base_model.compile()
    objective = Objective(config.objective, config.precision, len(tokenizer))
    optimizer = optim.build(student, config.optimizer)
    state = folder.begin(student, optimizer, resolved)
    notes = [*results.notes(config, tokens, teacher_name), *left_out]
    tell(results.banner(config, recipe, tokens, batches, {"teacher": teacher, "student": student}, notes))
    if state.step:
        tell(f"  going on after step {state.step:,}")
    evaluator = Evaluator(
        config.evaluate,
        masker(MASKING, tokenizer, tokens.counts),
        tokenizer.pad_token_id,
        len(tokenizer),
        config.precision.evaluate,
        backend,
    )
    watch = Watch(config, folder, recipe, backend, batches, student, evaluator, sets, state)
    ended_by = train(
        student,
        teacher if objective.needs_teacher else None,
        batches,
        objective,
        optimizer,
        backend,
        state,
        config.train,
        config.schedule,
        config.optimizer,
        folder.checkpoints,
        watch.log,
        watch.end_of_epoch,
    )
    watch.close()
    content = {
        "recipe": recipe,
        "scale": config.scale,
        "command": command,
        "notes": notes,
        "finished": True,
        "corpus": results.corpus_block(tokens, batches),
        **judge(config, watch, teacher, teacher_name, student),
        "training": results.training_block(state, batches, watch.history(), ended_by),
        "backend": results.backend_block(backend, config, state),
        "environment": results.environment(backend.device),
        "history": watch.history(),
        "identity": identity,
    }
    if backend.rank == 0:
        export(student, tokenizer, path / "student", report.model_card(content))
        report.write(path, content, trackers.read(folder.metrics_path), resolved)
        folder.write_results(content)
        tell(f"{summary.findings(content)}\nReport: {path / 'report.html'}   Student: {path / 'student'}")
    backend.barrier()
    backend.close()
    return content


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

    def close(self) -> None:
        self.progress.close()
        self.tracker.close()


def judge(config: Config, watch: Watch, teacher: Any | None, teacher_name: str, student: Any) -> dict[str, Any]:
    """Teacher, student and, where `evaluate.twin` names its run, the no-teacher twin, side by side."""
    evaluator, sets = watch.evaluator, watch.sets
    models = {"teacher": (teacher_name, teacher), "student": (type(student).__name__, student), "twin": ("", None)}
    twin: dict[str, Any] = {}
    if config.evaluate.twin:
        before = results.read(Path(config.evaluate.twin), "evaluate.twin")
        model = load_pretrained("evaluate.twin", config.evaluate.twin).to(watch.backend.device)
        models["twin"] = (type(model).__name__, model)
        twin = {"folder": config.evaluate.twin, "steps": before["training"]["steps"], "history": before["history"]}
    there = {label: pair for label, pair in models.items() if pair[1] is not None}
    speeds = dict.fromkeys(there, 0.0)
    if sets:
        speeds = dict(zip(there, evaluator.tokens_per_second([m for _, m in there.values()], sets[0]), strict=True))
    last = (watch.history() or [{}])[-1]
    blocks: dict[str, Any] = dict.fromkeys(models)
    for label, (name, model) in there.items():
        known = {measure: last.get(measure) for measure in ("perplexity", "pseudo_perplexity")}
        scores = known if label == "student" and known["perplexity"] else evaluator.score(model, label, sets)
        blocks[label] = results.model_block(name, model, scores, speeds[label])
    if blocks["twin"]:
        blocks["twin"] |= twin
    return {
        **blocks,
        "agreement": evaluator.agree(student, teacher, sets) if teacher is not None else None,
        "evaluation": {
            data.name: {
                "name": data.name,
                "description": data.description,
                "documents": data.documents,
                "rows": data.num_rows,
                "tokens": int((data.rows != evaluator.pad_id).sum()),
                "positions": evaluator.num_positions(data),
                "pseudo_positions": len(evaluator.pseudo_positions(data)),
            }
            for data in sets
        },
    }
