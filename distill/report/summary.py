"""The results of a run in short: findings in plain sentences, the few numbers to see first, and the table of models."""

from collections.abc import Callable, Mapping
from functools import partial
from operator import methodcaller
from typing import Any

from distill.config.component import PREFIX
from distill.report import gap
from distill.report.page import Block, Code, Table
from distill.report.words import MINUS, NONE, TIMES, count_of, is_number, listed, number, percent, ratio, short, time_of
from distill.runs.facts import Backend, Baseline, Measure, Model, Resampled
from distill.runs.record import INHERITED, Record, starts_fine_tuned
from distill.runtime.progress import counted, in_a_sentence

FEWEST_SEQUENCES = 10  # of a set whose scores say something of other text
IN_PERCENT = "in percent"  # in the explanation of measures whose differences are points
NO_RECIPE = "default"  # what records call the lack of one
SAME = "the same"
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
    parts = [_size(record), _quality(record), _kept(record)]
    parts += [against_baseline(record), gap.sentences(record), _resampled(record), _unscored(record), _few(record)]
    return " ".join(filter(None, parts))


def setting(record: Record) -> str:
    """Which recipe, corpus, teacher and start were used, and how long training took."""
    corpus, training = record.corpus, record.training
    recipe, changed = record.recipe, record.changed_groups
    others = f", with other settings of {listed(changed)}" if changed else ""
    sentence = f"Recipe: {recipe}{others}." if recipe and recipe != NO_RECIPE else "No recipe."
    sentences = [sentence]
    amounts = {"documents": corpus.documents, "tokens": corpus.tokens}
    counts = [f"{number(count)} {name}" for name, count in amounts.items() if is_number(count)]
    if corpus.name:
        sentences.append(f"Corpus: {corpus.name}" + (f" ({', '.join(counts)})." if counts else "."))
    if record.teacher and record.teacher.name:
        sentences.append(f"Teacher: {record.teacher.name}.")
    sentences += [_start(record)]
    if is_number(training.steps):
        epochs = f" ({training.epochs:.3g} epoch{'s' * (training.epochs != 1)})" if is_number(training.epochs) else ""
        time = f" in {time_of(training.seconds)}" if is_number(training.seconds) else ""
        hardware = f" on {record.environment.device}" if record.environment.device else ""
        sentences.append(f"Training took {counted(training.steps, 'step')}{epochs}{time}{hardware}.")
    return " ".join(filter(None, sentences))


def reproduced_by(command: str | None) -> list[Block]:
    """The command that gives this run again; of one that a program started with its own objects, what it needs too."""
    if not command:
        return []
    remark = (
        "A Python program started this run by distill.distill() with objects of its own, which this command cannot "
        "name: call that function with the same objects and folder. The command shows the settings:"
    )
    return [*([remark] if PREFIX in command else []), Code(command, language="bash", wrap=True)]


def _start(record: Record) -> str:
    """What the student was before its first step; empty where it is not known."""
    start = record.student.start
    what = "The student" if record.teacher else "The model"
    match start.init:
        case "layers":
            names = [str(layer) for layer in start.layers]
            which = f"layer{'s' * (len(names) > 1)} {listed(names)} of " if names else ""
            without = "" if record.teacher else ", and learned without it"
            knows = ", which was fine-tuned for this task" * starts_fine_tuned(record.identity)
            return f"{what} started from {which}{start.source or 'a teacher'}{knows}{without}."
        case "random" | "neighbours":
            return f"{what} started from new weights."
        case "pretrained":
            return f"{what} started from {start.source or 'a saved model'}."
        case _:
            return ""


def tiles(record: Record) -> list[tuple[str, str]]:
    """The few numbers to see first, each with its meaning; quality is that of the first evaluation set."""
    student, teacher = record.student, record.teacher
    (measure, described), others = record.first_measure, [*record.measures][1:]
    first = next(iter(record.sets_of(measure)), "")
    value, title = student.score(measure, first), in_a_sentence(described.title)
    whose = "teachers'" if teacher and teacher.members else "teacher's"  # several are compared as they are together
    shown: list[tuple[str, str]] = []
    if teacher is None and is_number(student.parameters):
        shown.append((short(student.parameters), "parameters"))
    if teacher and (size := ratio(student.parameters, teacher.parameters)):
        shown.append((percent(size), f"of the {whose} parameters"))
    if teacher and (speed := ratio(student.tokens_per_second, teacher.tokens_per_second)):
        shown.append((f"{speed:.2f}{TIMES}", f"the {whose} speed"))
    if is_number(value):
        shown.append((number(value), f"{title} on {record.label_of(first)}"))
    for other in others if teacher is None else ():
        if is_number(beside := student.score(other, first)):
            shown.append((number(beside), f"{in_a_sentence(record.measures[other].title)}, the same text"))
    for name, model in ((whose, teacher), ("baseline's (no teacher)", record.baseline)):
        if model and (change := _against(described, value, model.score(measure, first))):
            shown.append((change, f"{title} against the {name}"))
    agreement = (record.agreement or {}).get(first)
    if agreement and is_number(agreement.top1) and record.is_scored(first):
        shown.append((percent(agreement.top1), "top-1 agreement with the teacher"))
    return shown


def comparison(record: Record) -> Table:
    """Size, speed and quality of teacher, student and baseline, one column each, then the student against its teacher.

    Behind the teacher that several are together, each of them has a column; a baseline adds what of its gap is closed.
    """
    student, teacher, columns = record.student, record.teacher, _columns(record)
    more = ["Against teacher"] * bool(teacher) + [gap.TITLE] * gap.has_gap(record)
    table = Table(["", *columns, *more], note=gap.NOTE if gap.has_gap(record) else "")

    def add(
        label: str,
        value_of: Callable[[Model], Any],
        form: Callable[[Any], str],
        against: Callable[[float, float], str | None],
        closed: str = "",
    ) -> None:
        values = [value_of(model) for model in columns.values()]
        if any(value is not None for value in values):
            pair = [value_of(student), value_of(teacher)] if teacher else []
            last = [(against(*pair) if all(map(is_number, pair)) else None) or NONE] if pair else []
            table.rows.append([label, *map(form, values), *last, *([closed] * gap.has_gap(record))])

    def as_percent(one: float, other: float) -> str | None:
        change = ratio(one, other)
        return None if change is None else percent(change)

    def as_times(one: float, other: float) -> str | None:
        change = ratio(one, other)
        return None if change is None else f"{change:.2f}{TIMES}"

    add("Parameters", lambda model: model.parameters, number, as_percent)
    add("Weights", lambda model: model.bytes, lambda value: short(value, "B"), as_percent)
    add("Speed (tokens/s)", lambda model: model.tokens_per_second, number, as_times)
    for name, measure in record.measures.items():
        sets = record.sets_of(name)
        table.rows.extend([[measure.title]] if sets else [])
        for key in sets:
            score_of = methodcaller("score", name, key)
            add(record.label_of(key), score_of, number, partial(_against, measure), gap.cell(record, name, key))
    table.rows.extend(_agreement(record, list(columns.values()), len(more)))
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


def _agreement(record: Record, columns: list[Model], more: int) -> list[list[str]]:
    """The rows of agreement with the teacher, with so many empty cells behind those of the models."""
    rows: list[list[str]] = []
    for key, (title, form) in AGREEMENT.items():
        values = {
            name: getattr(values_of_set, key)
            for name, values_of_set in (record.agreement or {}).items()
            if record.is_scored(name)
        }
        values = {name: value for name, value in values.items() if value is not None}
        rows += [[title]] if values else []
        for name, value in values.items():
            cells = [form(value) if model is record.student else "" for model in columns]
            rows.append([record.label_of(name), *cells, *[""] * more])
    return rows


def _size(record: Record) -> str:
    student, teacher = record.student, record.teacher
    fraction = ratio(student.parameters, teacher.parameters) if teacher else None
    if teacher is None or fraction is None:
        name = student.name or "the model"
        what = f"{name[:1].upper()}{name[1:]} has {short(student.parameters)} parameters."
        return what if is_number(student.parameters) else ""
    speed = ratio(student.tokens_per_second, teacher.tokens_per_second)
    whose, than = ("its teachers'", " as all of them together") if teacher.members else ("its teacher's", "")
    times = f" and is {speed:.2f} times as fast{than}" if speed else ""
    sizes = f"{short(student.parameters)} of {short(teacher.parameters)}"
    return f"The student has {percent(fraction)} of {whose} parameters ({sizes}){times}."


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
    best, steps = record.best, record.training.steps
    if best is None or not record.finished or best.measure not in record.measures:
        return ""
    by = f"by {in_a_sentence(record.measures[best.measure].title)} on {record.label_of(best.data)}"
    if best.step is None:
        return f"No evaluation could be compared {by}: the last student was kept."
    if best.step == steps:
        return f"Of the evaluations the last one was the best {by} ({number(best.score)}): its student was kept."
    last = f"{number(best.score)}, and {number(best.last_score)} after the last step"
    return f"The student after step {number(best.step)} of {number(steps)} was kept, the best {by} ({last})."


def against_baseline(record: Record) -> str:
    """The first measure against the baseline's, with a conclusion on the teacher where nothing else differs.

    Differences that round to nothing count as none, and so do those of a set whose interval of the bootstrap holds 1,
    or 0 points: other text of its kind might give the opposite. Where a set has no interval (questions, values, fewer
    than ten sequences), with other steps, or with settings of its own besides the learning rate (`remarks`), a
    baseline shows numbers and no conclusion.
    """
    measure, described = record.first_measure
    student, baseline = record.student, record.baseline
    if baseline is None:
        return ""
    scored = {key: (student.score(measure, key), baseline.score(measure, key)) for key in record.sets_of(measure)}
    pairs = {key: (a, b) for key, (a, b) in scored.items() if is_number(a) and is_number(b)}
    if not pairs:
        return ""
    ratios = [ratio(one, other) for one, other in pairs.values()]
    changes = [change for change in ratios if change is not None]
    is_percent = IN_PERCENT in described.explanation
    words = (
        listed([_points(one, other) for one, other in pairs.values()])
        if is_percent
        else _changes(changes)
        if len(changes) == len(pairs)
        else listed([f"{number(one)} instead of {number(other)}" for one, other in pairs.values()])
    )
    compared = f"its {in_a_sentence(described.title)} is {words}"
    same, after = _steps_beside(record.training.steps, baseline)
    after += f" at its own learning rate ({baseline.learning_rate:g})" if is_number(baseline.learning_rate) else ""
    if not same or baseline.remarks or not all(gap.is_tested(baseline, measure, key) for key in pairs):
        inherited = f" {INHERITED}" * (INHERITED in baseline.remarks)
        return f"Against its baseline, trained without a teacher{after}, {compared}.{inherited}"
    unclear = [baseline.drawn(measure, key).is_unclear for key in pairs]
    conclusion = _conclusion(list(pairs.values()), ratios, unclear, described.lower_is_better)
    return f"{conclusion}: against its baseline, the same student trained without a teacher{after}, {compared}."


def _steps_beside(steps: int | None, baseline: Baseline) -> tuple[bool, str]:
    """Whether a baseline took as many steps, and a phrase with the number."""
    same = is_number(steps) and steps == baseline.steps
    if is_number(steps) and is_number(baseline.steps) and not same:
        return False, f" for {count_of(baseline.steps, 'step')} instead of {number(steps)}"
    return same, f" for the same {count_of(steps, 'step')}" if same else ""


def _conclusion(
    pairs: list[tuple[float, float]], ratios: list[float | None], unclear: list[bool], lower_is_better: bool
) -> str:
    """A conclusion on the teacher from the pairs of scores of student and baseline."""
    alike = [change is not None and _change(change) == SAME for change in ratios]
    if all(alike):
        return "Learning from the teacher made no difference"
    same = [is_same or unsure for is_same, unsure in zip(alike, unclear, strict=True)]
    better = [(student < baseline) == lower_is_better and student != baseline for student, baseline in pairs]
    better = [is_better and not unsure for is_better, unsure in zip(better, same, strict=True)]
    if all(same):
        return "Learning from the teacher made no clear difference"
    if all(better):
        return "Learning from the teacher helped"
    return f"Learning from the teacher {'helped on some sets only' if any(better) else 'did not help'}"


def _resampled(record: Record) -> str:
    """How sure it is that the student is better than its baseline: of the first measure that has a bootstrap."""
    bootstrap = record.baseline.bootstrap if record.baseline else {}
    for name, measure in record.measures.items():
        by_set = {key: drawn for key, drawn in bootstrap.get(name, {}).items() if is_number(drawn.low)}
        if by_set:
            parts = [_resampled_set(record.label_of(key), drawn) for key, drawn in by_set.items()]
            resamples = number(next(iter(by_set.values())).resamples)
            title = in_a_sentence(measure.title)
            better = "lower" if measure.lower_is_better else "higher"
            words = f"the student's {title} is {better} than the baseline's {listed(parts)}"
            return f"In {resamples} paired resamples of each set {words}."
    return ""


def _resampled_set(label: str, drawn: Resampled) -> str:
    units = f"{number(drawn.num_units)} {drawn.units}"
    of = "ratio" if drawn.points is None else "difference"
    held = (
        f"{percent(drawn.confidence)} interval of the {of} {interval(drawn.low, drawn.high, drawn.points is not None)}"
    )
    return f"in {percent(drawn.better, 1)} of them on {label} ({units}; {held})"


def interval(low: float | None, high: float | None, are_points: bool) -> str:
    """`0.812 to 0.845`, the ratios between which the middle of the resamples lies, or `-0.4 to +2.1 points`."""
    if are_points:
        return f"{_signed_tenths(low or 0)} to {_signed_tenths(high or 0)} points"
    return f"{low or 0:.3f} to {high or 0:.3f}"


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


def _against(measure: Measure, one: float | None, other: float | None) -> str | None:
    """How a score differs from another: `+1.2 points` of what is in percent, else `+1.2%`; None where it has none."""
    if IN_PERCENT in measure.explanation and is_number(one) and is_number(other):
        return in_points((one or 0) - (other or 0))
    change = ratio(one, other)
    return None if change is None else _signed(change)


def _signed_tenths(number: float) -> str:
    return f"{round(number, 1) or 0:+.1f}".replace("-", MINUS)


def in_points(difference: float) -> str:
    """`+1.2 points`."""
    return f"{_signed_tenths(difference)} points"


def _points(one: float, other: float) -> str:
    """`1.2 points lower (75.3 instead of 76.5)`, of two scores in percent."""
    difference = round(one - other, 1)
    words = f"{abs(difference)} points {'higher' if difference > 0 else 'lower'}" if difference else SAME
    return f"{words} ({number(one)} instead of {number(other)})"


def _change(change: float) -> str:
    """`12.5% higher`, `3.0% lower` or `the same`, for a ratio."""
    difference = round(100 * (change - 1), 1)
    return SAME if not difference else f"{abs(difference)}% {'higher' if difference > 0 else 'lower'}"


def _changes(changes: list[float]) -> str:
    """`26.2%, 25.3% and 22.9% lower`: the direction once where it is the same for all."""
    words = [_change(change) for change in changes]
    for direction in (" higher", " lower"):
        if all(word.endswith(direction) for word in words):
            return listed([word.removesuffix(direction) for word in words]) + direction
    return listed(words)


def _signed(change: float) -> str:
    return f"{100 * (change - 1):+.1f}%".replace("-", MINUS)


def sequences_of_step(backend: Backend) -> str | None:
    """How many sequences a step has, and how they are made up; None where the record does not have it."""
    size, accumulate, ranks = backend.batch_size, backend.accumulate, backend.ranks
    if size is None or accumulate is None or ranks is None or backend.sequences_per_step is None:
        return None
    in_all = backend.sequences_per_step
    return f"{number(in_all)} ({size} in a micro-batch, {accumulate} accumulated, {counted(ranks, 'rank')})"
