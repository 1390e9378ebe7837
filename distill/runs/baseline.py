"""The baseline of a run, which `evaluate.baseline` names: the same student, trained without a teacher.

What the teacher was worth can be read off the two only where sequences, steps, start and seed are the same. The
identities that results.json keeps are compared for that (`distill/runs/identity.py`).
"""

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distill.config.component import PREFIX
from distill.config.settings import Config
from distill.models.layers import AUTO
from distill.objective.terms import Term
from distill.runs.facts import Baseline, GapClosed, Model, Resampled
from distill.runs.identity import CODE, FROZEN
from distill.runs.record import FAIR_START, INHERITED, Record, starts_fine_tuned
from distill.runs.results_file import read_run
from distill.runtime.errors import SettingError
from distill.runtime.progress import counted

# Parts of a run's identity that a baseline shares with its student, with what they are called; the student's own
# settings and the weights that it starts from come beside these.
SHARED = {
    "corpus.digest": "text",
    "corpus.num_sequences": "number of sequences",
    "corpus.order": "order of sequences",
    "train.sequences_per_step": "sequences a step",
    "seed": "seed",
    "objective.task": "task",
}
# An objective of labels alone, by the task; for the others it has the name of the task.
WITHOUT_TEACHER = {"mlm_sop": "albert"}
# Settings that a baseline may have otherwise; the report names those that differ and concludes nothing. Where only the
# learning rate differs it gives one: each learns best at another, and a baseline at the student's flatters the teacher.
TUNED = ("optimizer.", "schedule.", "objective.masking.")
LEARNING_RATE = "optimizer.lr"
CODE_OF_BOTH = tuple(f"{CODE}{part}" for part in ("optimizer", "schedule", "student"))
KEEP_BEST = "train.keep_best"
# Of a command, what the same run without its teacher does not take; masks are the same for both.
OF_TEACHER = re.compile(
    r"objective(=|\.(?!masking))|evaluate\.baseline=|hydra\.run\.dir=|teacher\.cache|corpus\.unlabelled|resume="
)
MOST_NAMED = 3  # differences in one line


@dataclass(frozen=True)
class BaselineRun:
    """The run of a baseline.

    Attributes:
        remarks: a sentence for the report on each thing that keeps the comparison from being about the teacher alone.
        learning_rate: the baseline's, where the student has another one.
    """

    record: Record
    remarks: list[str]
    learning_rate: float | None = None

    def beside(
        self,
        model: Model,
        folder: str | None,
        bootstrap: dict[str, dict[str, Resampled]],
        gap_closed: dict[str, dict[str, GapClosed]],
    ) -> Baseline:
        """What the record of the student's run keeps of it.

        Args:
            model: with its scores on the sets of that run.
            bootstrap, gap_closed: by measure and set, of the student.
        """
        return Baseline(
            **dict(model),
            folder=folder,
            steps=self.record.training.steps,
            history=self.record.history,
            objective=self.record.objective,
            remarks=self.remarks,
            learning_rate=self.learning_rate,
            bootstrap=bootstrap,
            gap_closed=gap_closed,
        )


def find_baseline(
    config: Config, identity: dict[str, Any], steps: int, terms: Mapping[str, Term]
) -> BaselineRun | None:
    """The run that `evaluate.baseline` names, with the remarks of `check_baseline`; None where it names none.

    Raises:
        SettingError: it is no finished run, or no baseline.
    """
    if config.evaluate.baseline is None:
        return None
    baseline = read_run(Path(config.evaluate.baseline), "evaluate.baseline")
    remarks = check_baseline(config, baseline, identity, steps, terms)
    rate = baseline.identity.get(LEARNING_RATE)
    return BaselineRun(baseline, remarks, rate if rate != identity.get(LEARNING_RATE) else None)


def check_baseline(
    config: Config, baseline: Record, identity: dict[str, Any], steps: int, terms: Mapping[str, Term]
) -> list[str]:
    """Refuse a run that is no baseline of this one; give a sentence for the report on what else differs or is unknown.

    Args:
        config: of this run, with a value in place of every `auto`.
        baseline: its record.
        identity: of this run.
        steps: of this run: one that ends by `train.minutes` or `train.patience` may take any number of them.
        terms: of this run's objective.

    Raises:
        SettingError: that run had a teacher, other sequences, steps or seed, or a student that starts otherwise.
    """
    before = baseline.identity
    learned_from = ", ".join(baseline.objective.terms)
    differences = [f"it learned from a teacher ({learned_from})"] if baseline.teacher else []
    differences += [
        f"its {words} {'are' if words.startswith('sequences') else 'is'} "
        f"{_pair(name, before.get(name), identity.get(name))}"
        for name, words in SHARED.items()
        if before.get(name) != identity.get(name)
    ]
    differences += _other_start(before, identity) + _other_layers(config, baseline)
    taken = baseline.training.steps
    has_fixed_steps = config.train.minutes is None and config.train.patience is None
    if taken is not None and has_fixed_steps and taken != steps:
        differences.append(f"it took {counted(taken, 'step')}, and this run takes {steps:,}")
    if differences:
        more = f" and {len(differences) - MOST_NAMED} more" if len(differences) > MOST_NAMED else ""
        alone = WITHOUT_TEACHER.get(config.objective.task, config.objective.task)
        raise SettingError(
            f"evaluate.baseline={config.evaluate.baseline} is no baseline of this run: "
            f"{'; '.join(differences[:MOST_NAMED])}{more}; name "
            f"a run of these settings with objective={alone} in another folder, or leave evaluate.baseline out"
        )
    remarks = _remarks(before, identity, terms, baseline)
    trained_in, student = baseline.precision.get("student"), config.precision.student
    if trained_in not in (None, student):
        remarks.append(
            f"The baseline was trained in another number format: precision.student was {trained_in} and is {student} "
            "here."
        )
    return remarks


def advice(record: Record, folder: Path) -> str:
    """The command of a fair baseline, for the end of a run in `folder` that has a teacher and none; else nothing.

    A student of a fine-tuned teacher's layers has none: there it is one of a pre-trained model, and so is its student.
    """
    command = record.command or ""
    if record.teacher is None or record.baseline is not None or not command or PREFIX in command:
        return ""
    task = record.identity.get("objective.task", "")
    words, start = [word for word in shlex.split(command) if not OF_TEACHER.match(word)], list[str]()
    if starts_fine_tuned(record.identity):
        words, start = [word for word in words if not word.startswith("student")], FAIR_START
    beside = f"{folder}_baseline"
    command = shlex.join([*words, *start, f"objective={WITHOUT_TEACHER.get(task, task)}", f"hydra.run.dir={beside}"])
    again = shlex.join([*start, f"evaluate.baseline={beside}", f"hydra.run.dir={folder}_beside_baseline"])
    return f"What the teacher is worth: `{command}`, then this command with `{again}`."


def _pair(name: str, before: Any, now: Any) -> str:
    """Two values beside each other; of a digest or an order only that they differ."""
    return "different" if name in ("corpus.digest", "corpus.order") else f"{before}, and here {now}"


def _other_start(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """In what the two students, or the weights that they start from, differ."""
    names = [name for name in sorted({*before, *now}) if name.startswith("student.")]
    names = [name for name in names if name not in ("student.digest", "student.config")]  # the latter stands for {}
    if AUTO in (before.get("student.layers"), now.get("student.layers")):  # `_other_layers` compares what was found
        names = [name for name in names if name not in ("student.layers", "student.num_layers")]
    # A setting that one of two kinds of student does not have is not compared; fields of a configuration are.
    differing = [
        name
        for name in names
        if before.get(name) != now.get(name)
        if name.startswith("student.config") or (name in before and name in now)
    ]
    differences = [
        "other parameters of its student were frozen"
        if name == FROZEN
        else f"{name} was {before.get(name)} and is {now.get(name)} here"
        for name in differing
    ]
    if (start := _start_digest(before)) is not None and start != _start_digest(now):
        differences.append("its student started from other weights")
    return differences


def _other_layers(config: Config, baseline: Record) -> list[str]:
    """That the student of the baseline started from other layers, where `student.layers=auto` has chosen for a run."""
    layers = baseline.student.start.layers
    here = config.student.layers if config.student.from_layers else None
    if AUTO not in (baseline.identity.get("student.layers"), config.compared.get("student", {}).get("layers")):
        return []
    differ = isinstance(here, list) and layers and layers != here
    return [f"its student started from layers {layers}, and this one starts from {here}"] if differ else []


def _start_digest(identity: dict[str, Any]) -> Any:
    """The digest of what a student starts from; None where that is the seed alone."""
    if identity.get("student.init") != "layers":
        return identity.get("student.digest")
    members = identity.get("teacher.members") or []
    return identity.get(f"teacher.members.{members[0]}.digest" if members else "teacher.digest")


def _remarks(before: dict[str, Any], now: dict[str, Any], terms: Mapping[str, Term], baseline: Record) -> list[str]:
    """What keeps the comparison from being about the teacher alone."""
    remarks = []
    differing = [
        f"the code of {name.removeprefix(CODE).partition('.python')[0]} was different"
        if name.startswith(CODE)
        else f"{name} was {before[name]} and is {value} here"
        for name, value in now.items()
        if name.startswith((*TUNED, *CODE_OF_BOTH)) and name != LEARNING_RATE
        if name in before and before[name] != value
    ]
    kept, keeps = before.get(KEEP_BEST), now.get(KEEP_BEST)
    if kept != keeps:
        differing.append(f"{KEEP_BEST} was {kept} and is {keeps} here")
    labels = [name for name, term in terms.items() if not term.needs_teacher]
    names = list(baseline.objective.terms)
    if labels and names and sorted(labels) != sorted(names):
        differing.append(
            f"it learned from {', '.join(names)}, this student from {', '.join(labels)} besides its teacher"
        )
    if starts_fine_tuned(now):
        remarks.append(INHERITED)
    if differing:
        remarks.append(f"The baseline differs in more than its teacher: {'; '.join(differing)}.")
    return remarks
