"""Refuses what no run can have before anything heavy starts: makes the light parts of a run, and checks the rules."""

import math
from pathlib import Path

from distill.config.rules import check_paths, check_rules
from distill.config.settings import Config
from distill.distributed.bucket import MAX_STATS
from distill.evaluation.users import check_measures
from distill.models.student import check_student_settings
from distill.objective.build import make_terms
from distill.objective.objective import mixing_temperature
from distill.objective.terms import VocabularyTerm
from distill.optim import updates
from distill.optim.optimizer_state import optimizer_state
from distill.optim.schedule import ENDLESS, length_in_steps, make_schedule
from distill.runs.callbacks import check_observers
from distill.runs.results_file import read_run
from distill.runtime.errors import SettingError
from distill.runtime.signals import ALL
from distill.runtime.users_code import is_users
from distill.tasks import find_task, task_of

MOST_TERMS = (MAX_STATS - 3 - len(ALL)) // 2  # whose sums and counts travel as `StepStats` with the gradients


def check(config: Config, folder: Path | None = None) -> None:
    """Raises SettingError for the first setting that no run can have, or that is at odds with another.

    `folder`: of the run; one that has gone on from the checkpoint that `resume` names may have pruned that.
    """
    terms = make_terms(config.objective)
    task = find_task(config.objective.task, terms.values())
    for name, term in terms.items():
        heads = {*term.student_reads.extra, *term.teacher_reads.extra} - {*task.kind.heads}
        problem, reads_vocabulary = "", term.student_reads.head or term.teacher_reads.head
        if term.task not in ("", *task.labels):
            problem = f"is a term of objective.task={task_of(term.task)}, but"
        elif heads or (not task.kind.vocabulary and (isinstance(term, VocabularyTerm) or reads_vocabulary)):
            problem = f"reads a head {f'for {min(heads)}' if heads else 'over the vocabulary'}, which is not one of"
        if problem:
            raise SettingError(
                f"{problem} objective.task={config.objective.task}",
                setting=f"objective.{name}",
                cure=f"set objective.{name}.weight=0, or choose another objective",
            )
    if len(terms) > MOST_TERMS:
        raise SettingError(
            f"has {len(terms)} losses, and a run takes at most {MOST_TERMS}", setting="objective", cure="leave some out"
        )
    check_rules(config, terms, task)
    if len(config.teacher.members) > 1:
        on_logits = {name: term for name, term in terms.items() if isinstance(term, VocabularyTerm)}
        mixing_temperature(on_logits, {name: config.objective.schedule_of(name) for name in on_logits})
    _check_optimizer(config)
    check_measures(config.evaluate.own_measures)
    check_observers(config.own_observers)
    check_student_settings(config.student)
    has_gone_on = folder is not None and any((folder / "checkpoints").glob("step-*"))
    check_paths(config.changed(resume="auto") if has_gone_on else config)
    if (path := config.evaluate.baseline) is None:
        return
    if not any(term.needs_teacher for term in terms.values()):
        raise SettingError(
            "shows what a teacher is worth, but no term of this objective learns from a teacher",
            setting="evaluate.baseline",
            value=path,
            cure="leave it out (`distill compare` compares any runs)",
        )
    read_run(Path(path), "evaluate.baseline")


def _check_optimizer(config: Config) -> None:
    """Check the schedule, as far as it does not depend on the steps of an epoch, which the corpus decides."""
    settings, train = config.optimizer, config.train
    optimizer_state(*updates.try_out(settings))
    length = length_in_steps(train, ENDLESS)
    peak = settings.lr if settings.scale_lr == "none" else math.inf  # it depends on the ranks
    unknown = {"total_steps"} if length is not None and train.epochs is not None else set[str]()
    unknown |= {"peak_lr"} if math.isinf(peak) else set()
    _, arguments = config.schedule.make.bind(total_steps=length, peak_lr=peak)
    # One of the user's may make a table of so many steps, or divide by such a rate: `make_learner` tries it with the
    # real numbers.
    if not is_users(config.schedule.make.path) or not unknown & arguments.keys():
        make_schedule(config.schedule.make, length, peak)
