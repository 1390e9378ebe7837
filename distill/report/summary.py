"""The results of a run in short: findings in plain sentences, the few numbers to see first, and the table of models."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from distill.config.component import PREFIX
from distill.evaluation.conclusion import DID_NOT, HELPED, UNCLEAR, in_points
from distill.report.page import Block, Code, Table, prose
from distill.report.words import MINUS, NONE, TIMES, count_of, is_number, listed, number, percent, ratio, short, time_of
from distill.runs.facts import Backend, Baseline, Conclusion, GapClosed, Measure, Model
from distill.runs.record import Record
from distill.runtime.progress import counted, in_a_sentence

FEWEST_SEQUENCES = 10  # of a set whose scores say something of other text
IN_PERCENT = "in percent"  # in the explanation of measures whose differences are points
IN_A_SENTENCE = {
    HELPED: "Learning from the teacher helped",
    DID_NOT: "Learning from the teacher did not help",
    UNCLEAR: "Whether learning from the teacher helped is unclear",
}
GAP_CLOSED = "Gap closed"
AGREEMENT: dict[str, tuple[str, Callable[[Any], str]]] = {
    "top1": ("Top-1 agreement with the teacher", lambda value: percent(value, 1)),
    "kl": ("KL divergence from the teacher (nats)", number),
}


def explained(measures: Mapping[str, Measure]) -> str:
    """A sentence for each measure on what it is, and which way it is better."""
    return " ".join(
        f"{measure.title} is {measure.explanation}; {'lower' if measure.lower_is_better else 'higher'} is better."
        for measure in measures.values()
        if measure.explanation
    )


def findings(record: Record) -> str:
    """Size and speed, quality against teacher and baseline: one sentence each, where there are numbers."""
    parts = [prose("size", record.student, record.teacher), _quality(record), _kept(record), _caches(record)]
    parts += [against_baseline(record), _gap_closed(record), _unscored(record), _few(record)]
    return " ".join(filter(None, parts))


def setting(record: Record) -> str:
    """Which recipe, corpus, teacher and start were used, and how long training took."""
    return prose("setting", record, record.starts_fine_tuned)


def reproduced_by(command: str | None) -> list[Block]:
    """The command that gives this run again; of one that a program started with its own objects, what it needs too."""
    if not command:
        return []
    remark = [prose("of_program")] if PREFIX in command else []
    return [*remark, Code(command, language="bash", wrap=True)]


def tiles(record: Record) -> list[tuple[str, str]]:
    """The few numbers to see first, each with its meaning; quality is that of the first evaluation set."""
    student, teacher = record.student, record.teacher
    (measure, described), others = record.first_measure, [*record.measures][1:]
    first = next(iter(record.sets_of(measure)), "")
    value, title = student.score(measure, first), in_a_sentence(described.title)
    whose = "teachers'" if teacher and teacher.members else "teacher's"  # several are compared as they are together
    of_teacher = teacher or Model()
    agreement = (record.agreement or {}).get(first) if record.is_scored(first) else None
    shown = [
        (short(student.parameters) if teacher is None else NONE, "parameters"),
        (_fraction(student.parameters, of_teacher.parameters), f"of the {whose} parameters"),
        (_times(student.tokens_per_second, of_teacher.tokens_per_second), f"the {whose} speed"),
        (number(value) if is_number(value) else NONE, f"{title} on {record.label_of(first)}"),
    ]
    for other in others if teacher is None else ():
        beside = in_a_sentence(record.measures[other].title)
        shown.append((number(student.score(other, first)), f"{beside}, the same text"))
    for name, model in ((whose, of_teacher), ("baseline's (no teacher)", record.baseline or Model())):
        shown.append((_against(described, value, model.score(measure, first)), f"{title} against the {name}"))
    shown.append((percent(agreement.top1) if agreement else NONE, "top-1 agreement with the teacher"))
    return [(number, text) for number, text in shown if number not in (None, NONE)]


def comparison(record: Record) -> Table:
    """Size, speed and quality of teacher, student and baseline, one column each, then the student against its teacher.

    Behind the teacher that several are together, each of them has a column; a baseline adds what of its gap is closed.
    """
    student, teacher, columns = record.student, record.teacher, _columns(record)
    gaps = has_gap(record)
    more = ["Against teacher"] * bool(teacher) + [GAP_CLOSED] * gaps
    table = Table(["", *columns, *more], note=prose("gap") if gaps else "")

    def add(
        label: str, values: list[Any], form: Callable[[Any], str], beside: Callable[..., str], closed: str = ""
    ) -> None:
        if all(value is None for value in values):
            return
        pair = (values[[*columns].index("Student" if teacher else "Model")], values[0])
        against = beside(*pair) if all(map(is_number, pair)) else NONE
        table.rows.append([label, *map(form, values), *[against] * bool(teacher), *[closed] * gaps])

    models = columns.values()
    add("Parameters", [model.parameters for model in models], number, _fraction)
    add("Weights", [model.bytes for model in models], partial(short, unit="B"), _fraction)
    add("Speed (tokens/s)", [model.tokens_per_second for model in models], number, _times)
    for name, measure in record.measures.items():
        sets = record.sets_of(name)
        table.rows += [[measure.title]] if sets else []
        for key in sets:
            values = [model.score(name, key) for model in models]
            add(record.label_of(key), values, number, partial(_against, measure), _gap_cell(record, name, key))
    for key, (title, form) in AGREEMENT.items():
        agreement = {name: getattr(of, key) for name, of in (record.agreement or {}).items() if record.is_scored(name)}
        agreement = {name: value for name, value in agreement.items() if value is not None}
        table.rows += [[title]] if agreement else []
        for name, value in agreement.items():
            cells = [form(value) if model is student else "" for model in models]
            table.rows.append([record.label_of(name), *cells, *[""] * len(more)])
    return table


def _columns(record: Record) -> dict[str, Model]:
    """The models by the headings of their columns."""
    columns: dict[str, Model] = {}
    if (teacher := record.teacher) is not None:
        columns["Teachers together" if teacher.members else "Teacher"] = teacher
        columns |= {f"Teacher {name}": member for name, member in teacher.members.items()}
    columns["Student" if teacher else "Model"] = record.student
    if record.baseline is not None:
        columns["Baseline (no teacher)"] = record.baseline
    return columns


def _quality(record: Record) -> str:
    """The first measure on every set, against the teacher's where there is one."""
    measure, described = record.first_measure
    title = in_a_sentence(described.title)
    whose = "its teachers'" if record.teacher and record.teacher.members else "its teacher's"
    relative, alone = list[str](), list[str]()
    for key in record.sets_of(measure):
        student = record.student.score(measure, key)
        teacher = record.teacher.score(measure, key) if record.teacher else None
        change, label = ratio(student, teacher), record.label_of(key)
        if change is not None:
            times = f"{change:.2f} times {whose}" if not relative else f"{change:.2f} times"
            relative.append(f"{times} on {label} (student {number(student)}, teacher {number(teacher)})")
        elif is_number(student):
            alone.append(f"{number(student)} on {label}" + (f" (teacher {number(teacher)})" * is_number(teacher)))
    sentences = [f"Its {title} is {listed(relative)}."] if relative else []
    sentences += [f"Its {title} is {listed(alone)}."] if alone else []
    return " ".join(sentences)


def _kept(record: Record) -> str:
    """Which evaluation's student is published, where `train.keep_best` chooses it."""
    best = record.best
    if best is None or not record.finished or best.measure not in record.measures:
        return ""
    by = f"by {in_a_sentence(record.measures[best.measure].title)} on {record.label_of(best.data)}"
    return prose("kept", best, record.training.steps, by)


def against_baseline(record: Record) -> str:
    """What learning from the teacher was worth by the first measure, on its first set and then on each other one."""
    described, baseline = record.first_measure[1], record.baseline
    concluded = conclusions(record)
    if baseline is None or not concluded:
        return ""
    (first, conclusion), *others = concluded.items()
    title, after = in_a_sentence(described.title), _steps_beside(record.training.steps, baseline)
    after += f" at its own learning rate ({baseline.learning_rate:g})" if is_number(baseline.learning_rate) else ""
    if is_number(baseline.sequences_per_step):
        after += f" in steps of {count_of(baseline.sequences_per_step, 'sequence')}"
    by = f"{title} on {record.label_of(first)}, against its baseline, trained without a teacher{after}"
    lines = [f"{IN_A_SENTENCE[conclusion.word]}: {conclusion.reason} ({by})."]
    lines += [f"On {record.label_of(key)}: {other.word} ({other.reason})." for key, other in others]
    return " ".join(lines)


def conclusions(record: Record) -> dict[str, Conclusion]:
    """Those on the teacher by the first measure, by set; the first is that of the run. Empty without a baseline."""
    measure, baseline = record.first_measure[0], record.baseline or Model()
    scored = [key for key in record.sets_of(measure) if is_number(baseline.score(measure, key))]
    found = record.baseline.conclusions.get(measure, {}) if record.baseline else {}
    return {key: found.get(key) or Conclusion(reason="there is no interval") for key in scored}


def _steps_beside(steps: int | None, baseline: Baseline) -> str:
    """A phrase with the steps of a baseline."""
    if is_number(steps) and is_number(baseline.steps) and steps != baseline.steps:
        return f" for {count_of(baseline.steps, 'step')} instead of {number(steps)}"
    return f" for the same {count_of(steps, 'step')}" if is_number(steps) and steps == baseline.steps else ""


def has_gap(record: Record) -> bool:
    """Whether a baseline shows how much of the gap the student closes."""
    return record.baseline is not None and bool(record.baseline.gap_closed)


def closed_of(record: Record, measure: str, data: str) -> GapClosed | None:
    """What the record has of a measure on a set."""
    return record.baseline.gap_closed.get(measure, {}).get(data) if record.baseline else None


def _gap_cell(record: Record, measure: str, data: str) -> str:
    """`34% (29 to 40)`, `34%` without an interval, or `no gap`; a dash where a model has no score."""
    closed = closed_of(record, measure, data)
    if closed is None or not is_number(closed.fraction):
        return NONE if closed is None else "no gap"
    return _closed(closed, "")


def _closed(closed: GapClosed, of: str) -> str:
    """`34% (95% interval 29 to 40)`; `of`: what stands before the interval."""
    fraction, low, high = (
        str(round(100 * (of or 0))).replace("-", MINUS) for of in (closed.fraction, closed.low, closed.high)
    )
    return f"{fraction}% ({of}{low} to {high})" if is_number(closed.low) else f"{fraction}%"


def _gap_closed(record: Record) -> str:
    """The fraction of the first measure on every set, the sets without a gap, and why an interval is missing."""
    baseline, (measure, described) = record.baseline, record.first_measure
    closed = {key: entry for key in record.sets_of(measure) if (entry := closed_of(record, measure, key))}
    if baseline is None or not closed:
        return ""
    models = f"between baseline and teacher{'s' * bool(record.teacher and record.teacher.members)}"
    with_gap = {key: entry for key, entry in closed.items() if is_number(entry.fraction)}
    parts: list[str] = []
    if with_gap:
        (first, of_first), *others = [
            (_closed(entry, "95% interval "), record.label_of(key)) for key, entry in with_gap.items()
        ]
        closes = [f"{first} of the gap {models} on {of_first}", *(f"{shown} on {label}" for shown, label in others)]
        parts.append(f"The student closes {listed(closes)}, by {in_a_sentence(described.title)}.")
    if without := [record.label_of(key) for key in closed if key not in with_gap]:
        parts.append(f"There is no gap {models} on {listed(without)}: the baseline is no worse there.")
    parts += [
        f"The gap closed on {record.label_of(key)} has no interval: in {number(entry.without_gap)} draws the baseline "
        "is no worse than the teacher."
        for key, entry in with_gap.items()
        if entry.without_gap  # draws without a gap leave none
    ]
    return " ".join(parts)


def _unscored(record: Record) -> str:
    """Sets of which no position was scored, so that they have no numbers."""
    empty = [record.label_of(key) for key in record.evaluation if not record.is_scored(key)]
    return f"Nothing was scored on {listed(empty)}: there is no token to predict." if empty else ""


def _few(record: Record) -> str:
    """Sets that are so small that their scores say little."""
    sizes = {record.label_of(key): data.sequences for key, data in record.evaluation.items() if record.is_scored(key)}
    few = {label: size for label, size in sizes.items() if is_number(size) and size < FEWEST_SEQUENCES}
    if not few:
        return ""
    shown = listed([f"{label} ({counted(int(size), 'sequence')})" for label, size in few.items()])
    return f"Too little text is scored on {shown} to say anything of other text: hold more out."


def _caches(record: Record) -> str:
    """What it cost to keep something of the teachers, and how often training read it."""
    teachers = [record.teacher, *record.teacher.members.values()] if record.teacher else []
    caches, epochs = [teacher.cache for teacher in teachers if teacher.cache], record.training.epochs
    if not caches or not is_number(epochs):
        return ""
    seconds, size = sum(cache.seconds or 0.0 for cache in caches), short(sum(cache.bytes for cache in caches), "B")
    which = "The teacher's cache" if len(caches) == 1 else f"The {len(caches)} teachers' caches"
    return f"{which} took {time_of(seconds)} and {size}, once; training read all positions {epochs:.3g} times."


def _fraction(one: Any, other: Any) -> str:
    return percent(ratio(one, other))


def _times(one: Any, other: Any) -> str:
    change = ratio(one, other)
    return NONE if change is None else f"{change:.2f}{TIMES}"


def _against(measure: Measure, one: float | None, other: float | None) -> str:
    """How a score differs from another: `+1.2 points` of what is in percent, else `+1.2%`; a dash where it has none."""
    if IN_PERCENT in measure.explanation and is_number(one) and is_number(other):
        return f"{in_points((one or 0) - (other or 0))} points"
    change = ratio(one, other)
    return NONE if change is None else f"{100 * (change - 1):+.1f}%".replace("-", MINUS)


def sequences_of_step(backend: Backend) -> str | None:
    """How many sequences a step has, and how they are made up; None where the record does not have it."""
    size, accumulate, ranks = backend.batch_size, backend.accumulate, backend.ranks
    if size is None or accumulate is None or ranks is None or backend.sequences_per_step is None:
        return None
    in_all = backend.sequences_per_step
    return f"{number(in_all)} ({size} in a micro-batch, {accumulate} accumulated, {counted(ranks, 'rank')})"
