"""The baseline of a run, which `evaluate.baseline` names: the same student, trained without a teacher.

What the teacher was worth can be read off the two only where sequences, steps, start and seed are the same. The
identities that results.json keeps are compared for that (`distill/runs/identity.py`).
"""

import re
import shlex
from collections.abc import Mapping
from pathlib import Path

from distill.config.component import PREFIX
from distill.config.settings import Config
from distill.models.layers import AUTO
from distill.objective.terms import Term
from distill.runs.facts import Baseline, Model
from distill.runs.identity import CODE, Identity, difference, listed
from distill.runs.record import FAIR_TEACHER, INHERITED, Record
from distill.runs.results_file import read_run
from distill.runtime.errors import SettingError
from distill.runtime.progress import counted

# What a baseline shares with its student; settings of the student, and what it starts from, come beside these.
SHARED = ("corpus.digest", "corpus.num_sequences", "corpus.order", "seed", "objective.task")
# Where both end after the same minutes, steps of another size may suit labels, as another learning rate may.
STEP = "train.sequences_per_step"
# An objective of labels alone, by the task; for the others it has the name of the task.
WITHOUT_TEACHER = {"mlm_sop": "albert"}
# Settings that a baseline may have otherwise; the report names those that differ and concludes nothing. Where only the
# learning rate differs it gives one: each learns best at another, and a baseline at the student's flatters the teacher.
KEEP_BEST = "train.keep_best"
REFIT = "student.refit"  # made of the teacher's states, so that it is a part of what the teacher is worth
REFITTED = f"The baseline has seen the teacher: its start was fitted to it ({REFIT}=false leaves that out)."
# Remarks on baselines that have seen the teacher, and how.
SEEN = {INHERITED: "from whose layers it started", REFITTED: "to which its start was fitted"}
TUNED = (
    "optimizer.",
    "schedule.",
    "objective.masking.",
    *(f"{CODE}{of}" for of in ("optimizer", "schedule", "student")),
)
LEARNING_RATE = "optimizer.lr"
# Of a command, what the same run without its teacher does not take; masks are the same for both.
OF_TEACHER = re.compile(
    r"objective(=|\.(?!masking))|evaluate\.baseline=|hydra\.run\.dir=|teacher\.cache|corpus\.unlabelled|resume=|"
    r"student\.refit="
)


def find_baseline(config: Config, identity: Identity, steps: int, terms: Mapping[str, Term]) -> Baseline | None:
    """The run that `evaluate.baseline` names, without scores; None where it names none.

    Raises:
        SettingError: it is no finished run, or no baseline.
    """
    if config.evaluate.baseline is None:
        return None
    record = read_run(Path(config.evaluate.baseline), "evaluate.baseline")
    rate, step = record.identity.get(LEARNING_RATE), record.identity.get(STEP)
    return Baseline(
        folder=config.evaluate.baseline,
        steps=record.training.steps,
        history=record.history,
        objective=record.objective,
        remarks=check_baseline(config, record, identity, steps, terms),
        same_limits=record.training.length == config.train.length,
        learning_rate=rate if rate != identity.get(LEARNING_RATE) else None,
        sequences_per_step=step if step != identity.get(STEP) else None,
        started_from=record.student.start.source if record.student.start.new_head else None,
    )


def doubt(baseline: Baseline, student: Model, steps: int) -> str:
    """Why a baseline does not show what the teacher alone was worth, in half a sentence; empty where it does.

    Args:
        steps: that the student was trained for.
    """
    if seen := next((how for remark, how in SEEN.items() if remark in baseline.remarks), ""):
        return f"the baseline has seen the teacher, {seen}"
    if baseline.remarks:
        return "the baseline differs in more than its teacher"
    if baseline.parameters != student.parameters:
        return f"the baseline has {baseline.parameters:,} parameters and the student {student.parameters:,}"
    if baseline.steps != steps and not baseline.same_limits:
        return f"the baseline took {counted(baseline.steps or 0, 'step')} and the student {steps:,}"
    return ""


def check_baseline(
    config: Config, baseline: Record, identity: Identity, steps: int, terms: Mapping[str, Term]
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
    found = [f"it learned from a teacher ({', '.join(baseline.objective.terms)})"] if baseline.teacher else []
    before, now = _comparable(baseline.identity), _comparable(identity)
    names = [name for name in sorted({*before, *now}) if name.startswith("student.") and name != REFIT]
    if AUTO in (before.get("student.layers"), config.compared.get("student", {}).get("layers")):
        # The numbers count, which this run knows only if none has searched for its own.
        names = [name for name in names if name not in ("student.layers", "student.num_layers")]
        layers, here = baseline.student.start.layers, config.student.layers if config.student.from_layers else None
        if isinstance(here, list) and layers and layers != here:
            found.append(f"its student started from layers {layers}, and this one starts from {here}")
    # A setting that one of two kinds of student does not have is not compared; fields of a configuration are.
    shapes = ("student.config", "student.intermediate_size")
    names = [name for name in names if name.startswith(shapes) or (name in before and name in now)]
    if baseline.student.start.new_head and identity.get("student.init") == "layers":
        names = [name for name in names if name != "student.digest"]  # the layers before they were fine-tuned
    same_minutes = config.train.minutes is not None and baseline.training.length == config.train.length
    names += SHARED if same_minutes else (*SHARED, STEP)
    found += filter(None, (difference(name, before, now) for name in names))
    taken, has_fixed_steps = baseline.training.steps, config.train.minutes is None and config.train.patience is None
    if taken is not None and has_fixed_steps and taken != steps:
        found.append(f"it took {counted(taken, 'step')}, and this run takes {steps:,}")
    if found:
        alone = WITHOUT_TEACHER.get(config.objective.task, config.objective.task)
        raise SettingError(
            f"evaluate.baseline={config.evaluate.baseline} is no baseline of this run: {listed(found)}; name a run of "
            f"these settings with objective={alone} in another folder, or leave evaluate.baseline out"
        )
    return _remarks(config, baseline, identity, terms)


def _comparable(identity: Identity) -> Identity:
    """An identity in which student.digest is that of the weights that the student starts from, its teacher's too."""
    left = {name: value for name, value in identity.items() if name not in ("student.digest", "student.config")}
    start = identity.get("student.digest")  # None where the seed decides
    if identity.get("student.init") == "layers":
        members = identity.get("teacher.members") or []
        start = identity.get(f"teacher.members.{members[0]}.digest" if members else "teacher.digest")
    return left if start is None else left | {"student.digest": start}


def _remarks(config: Config, baseline: Record, now: Identity, terms: Mapping[str, Term]) -> list[str]:
    """What keeps the comparison from being about the teacher alone."""
    before = baseline.identity
    tuned = [name for name in now if name.startswith(TUNED) and name in before and name != LEARNING_RATE]
    differing = [text for name in (*tuned, KEEP_BEST) if (text := difference(name, before, now))]
    labels, names = [name for name, term in terms.items() if not term.needs_teacher], list(baseline.objective.terms)
    if labels and names and sorted(labels) != sorted(names):
        differing.append(
            f"it learned from {', '.join(names)}, this student from {', '.join(labels)} besides its teacher"
        )
    remarks = [INHERITED] * baseline.starts_fine_tuned + [REFITTED] * (baseline.student.start.refit is not None)
    if differing:
        remarks.append(f"The baseline differs in more than its teacher: {'; '.join(differing)}.")
    trained_in, student = baseline.precision.get("student"), config.precision.student
    if trained_in not in (None, student):
        remarks.append(
            f"The baseline was trained in another number format: precision.student was {trained_in} and is {student} "
            "here."
        )
    return remarks


def advice(record: Record, folder: Path) -> str:
    """The command of a fair baseline, for the end of a run in `folder` that has a teacher and none; else nothing.

    Of a student of a fine-tuned teacher's layers it starts from the same layers of the model that this was made of.
    """
    command = record.command or ""
    if record.teacher is None or record.baseline is not None or not command or PREFIX in command:
        return ""
    task = record.identity.get("objective.task", "")
    words, of_model = [word for word in shlex.split(command) if not OF_TEACHER.match(word.lstrip("+~"))], ""
    if record.starts_fine_tuned:
        found = record.identity.get("student.layers") == AUTO  # by the predictions of a head, which MODEL lacks
        of_search = ("student.layers=", "student.num_layers=", "student.search_seconds=") if found else ()
        words = [word for word in words if not word.lstrip("+~").startswith(("teacher", *of_search))] + FAIR_TEACHER
        words += [f"student.layers={record.student.start.layers}".replace(" ", "")] * found
        of_model = " (MODEL: what the teacher was fine-tuned from)"
    if record.student.start.refit is not None:
        words.append("student.refit=false")
    if (kept := record.teacher.cache) is not None and kept.hidden_states and "teacher.cache" not in command:
        words.append("teacher.cache.hidden_states=false")  # which the recipe has set
    beside = f"{folder}_baseline"
    command = shlex.join([*words, f"objective={WITHOUT_TEACHER.get(task, task)}", f"hydra.run.dir={beside}"])
    again = shlex.join([f"evaluate.baseline={beside}", f"hydra.run.dir={folder}_beside_baseline"])
    return f"What the teacher is worth: `{command}`{of_model}, then this command with `{again}`."
