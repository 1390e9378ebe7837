"""The results of a run in short: findings in plain sentences, the few numbers to see first, and the table of models."""

from collections.abc import Callable
from typing import Any

from distill.report import significance
from distill.report.lookup import is_scored, label_of, measures_of, models_of, sets_of, usable, value_at
from distill.report.page import MINUS, NONE, TIMES, Table, number, percent, short
from distill.runtime.progress import duration

NO_RECIPE, NO_SCALE = "default", "custom"  # what results call the lack of either
SAME = "the same"
NAMES = ("Matthews", "Pearson", "Spearman")  # first words of titles that keep their capital


def findings(results: dict[str, Any]) -> str:
    """Size and speed, quality against the teacher, and against the twin: one sentence each, where there are numbers."""
    parts = [
        _size(results),
        _quality(results),
        against_twin(results),
        significance.of_twin(results),
        _unscored(results),
    ]
    return " ".join(filter(None, parts))


def setting(results: dict[str, Any]) -> str:
    """Which recipe, scale, corpus, teacher and start were used, and how long training took."""
    corpus, training = results.get("corpus") or {}, results.get("training") or {}
    recipe, scale = results.get("recipe"), results.get("scale")
    named = f"the recipe {recipe}" if recipe and recipe != NO_RECIPE else "a run without a recipe"
    sentences = [f"This is {named}" + (f" at the scale “{scale}”." if scale and scale != NO_SCALE else ".")]
    counts = [f"{number(corpus[key])} {key}" for key in ("documents", "tokens") if usable(corpus.get(key))]
    if corpus.get("name"):
        sentences.append(f"Corpus: {corpus['name']}" + (f" ({', '.join(counts)})." if counts else "."))
    if value_at(results, "teacher", "name"):
        sentences.append(f"Teacher: {results['teacher']['name']}.")
    sentences += [_start(results)]
    if usable(training.get("steps")):
        epochs = f" ({training['epochs']:.3g} epochs)" if usable(training.get("epochs")) else ""
        time = f" in {duration(training['seconds'])}" if usable(training.get("seconds")) else ""
        device = value_at(results, "environment", "device")
        where = f" on {device}" if device else ""
        sentences.append(f"Training took {number(training['steps'])} steps{epochs}{time}{where}.")
    return " ".join(filter(None, sentences))


def _start(results: dict[str, Any]) -> str:
    """What the student was before its first step, where the results say so."""
    start = value_at(results, "student", "start") or {}
    what = "The student" if results.get("teacher") else "The model"
    layers = start.get("layers") or []
    match start.get("kind"):
        case "layers":
            which = f"layer{'s' * (len(layers) > 1)} {_listed([str(layer) for layer in layers])} of " if layers else ""
            without = "" if results.get("teacher") else ", and learned without it"
            return f"{what} started from {which}{start.get('from') or 'a teacher'}{without}."
        case "config":
            return f"{what} started from new weights."
        case "pretrained":
            return f"{what} started from {start.get('from') or 'a saved model'}."
        case _:
            return ""


def tiles(results: dict[str, Any]) -> list[tuple[str, str]]:
    """The few numbers to see first, each with its meaning; quality is that of the first evaluation set."""
    student, teacher, twin = (results.get(name) or {} for name in ("student", "teacher", "twin"))
    measure, *others = measures_of(results)
    title = in_a_sentence(measures_of(results)[measure]["title"])
    first = next(iter(sets_of(results, measure)), "")
    value = value_at(student, measure, first)
    size = _ratio(student.get("parameters"), teacher.get("parameters"))
    speed = _ratio(student.get("tokens_per_second"), teacher.get("tokens_per_second"))
    top1 = value_at(results, "agreement", first, "top1") if is_scored(results, first) else None
    whose = "teachers'" if teacher.get("members") else "teacher's"  # several are compared as they are together
    shown = [(percent(size), f"of the {whose} parameters")] if size else []
    if not teacher and usable(student.get("parameters")):
        shown = [(short(student["parameters"]), "parameters")]
    shown += [(f"{speed:.2f}{TIMES}", f"the {whose} speed")] if speed else []
    shown += [(number(value), f"{title} on {label_of(results, first)}")] if usable(value) else []
    for other in others if not teacher else ():
        own = value_at(student, other, first)
        shown += (
            [(number(own), f"{in_a_sentence(measures_of(results)[other]['title'])}, the same text")]
            if usable(own)
            else []
        )
    for name, model in ((whose, teacher), ("twin's (no teacher)", twin)):
        share = _ratio(value, value_at(model, measure, first))
        shown += [(_signed(share), f"{title} against the {name}")] if share else []
    return shown + ([(percent(top1), "same first choice as the teacher")] if usable(top1) else [])


def comparison(results: dict[str, Any]) -> Table:
    """Size, speed and quality of teacher, student and twin, one column each, then the student against its teacher.

    Behind the teacher that several are together, each of them has a column.
    """
    names = models_of(results)
    both = "teacher" in names and "student" in names
    titles = {"teacher": "Teacher", "student": "Student" if both else "Model", "twin": "Twin (no teacher)"}
    members = value_at(results, "teacher", "members") or {}
    columns: dict[tuple[str, ...], str] = {}
    for model in names:
        columns[(model,)] = "Teachers together" if members and model == "teacher" else titles[model]
        if model == "teacher":
            columns |= {("teacher", "members", name): f"Teacher {name}" for name in members}
    table = Table(["", *columns.values(), *(["Against teacher"] if both else [])])

    def add(label: str, path: tuple[str, ...], form: Callable[[Any], str], against: Callable[[float], str]) -> None:
        values = [value_at(results, *model, *path) for model in columns]
        if any(value is not None for value in values):
            share = _ratio(value_at(results, "student", *path), value_at(results, "teacher", *path))
            last = [against(share) if share is not None else NONE] if both else []
            table.rows.append([label, *map(form, values), *last])

    add("Parameters", ("parameters",), number, percent)
    add("Weights", ("bytes",), lambda value: short(value, "B"), percent)
    add("Speed (tokens/s)", ("tokens_per_second",), number, lambda share: f"{share:.2f}{TIMES}")
    for measure, described in measures_of(results).items():
        sets = sets_of(results, measure)
        table.rows += [[described["title"]]] if sets else []
        for key in sets:
            add(label_of(results, key), (measure, key), number, _signed)
    table.rows += _agreement(results, list(columns), both)
    return table


def _agreement(results: dict[str, Any], columns: list[tuple[str, ...]], both: bool) -> list[list[str]]:
    rows: list[list[str]] = []
    for title, key, form in (
        ("Same first choice as the teacher", "top1", lambda value: percent(value, 1)),
        ("KL divergence from the teacher (nats)", "kl", number),
    ):
        given = {name: (value or {}).get(key) for name, value in (results.get("agreement") or {}).items()}
        given = {name: value for name, value in given.items() if value is not None and is_scored(results, name)}
        rows += [[title]] if given else []
        for name, value in given.items():
            cells = [form(value) if model == ("student",) else "" for model in columns]
            rows.append([label_of(results, name), *cells, *([""] if both else [])])
    return rows


def _size(results: dict[str, Any]) -> str:
    student, teacher = value_at(results, "student", "parameters"), value_at(results, "teacher", "parameters")
    share = _ratio(student, teacher)
    if share is None:
        name = value_at(results, "student", "name") or "the model"
        return f"{name[:1].upper()}{name[1:]} has {short(student)} parameters." if usable(student) else ""
    speed = _ratio(value_at(results, "student", "tokens_per_second"), value_at(results, "teacher", "tokens_per_second"))
    members = value_at(results, "teacher", "members")
    whose, than = ("its teachers'", " as all of them together") if members else ("its teacher's", "")
    times = f" and is {speed:.2f} times as fast{than}" if speed else ""
    return f"The student has {percent(share)} of {whose} parameters ({short(student)} of {short(teacher)}){times}."


def _quality(results: dict[str, Any]) -> str:
    """The first measure on every set, against the teacher's where there is one."""
    measure, described = next(iter(measures_of(results).items()))
    title = in_a_sentence(described["title"])
    relative, alone = [], []
    for key in sets_of(results, measure):
        student, teacher = (value_at(results, name, measure, key) for name in ("student", "teacher"))
        share, where = _ratio(student, teacher), label_of(results, key)
        if share is not None:
            relative.append(f"{_change(share)} on {where} ({number(student)}, teacher {number(teacher)})")
        elif usable(student):
            alone.append(f"{number(student)} on {where}" + (f" (teacher {number(teacher)})" * usable(teacher)))
    whose = "teachers'" if value_at(results, "teacher", "members") else "teacher's"
    sentences = [f"Against the {whose}, its {title} is {_listed(relative)}."] if relative else []
    sentences += [f"Its {title} is {_listed(alone)}."] if alone else []
    return " ".join(sentences)


def against_twin(results: dict[str, Any]) -> str:
    """The first measure against the twin's, and what that says of the teacher, where nothing else differs.

    Differences that round to nothing count as none, and so do those of a set whose interval of the bootstrap holds 1:
    other text of its kind might say the opposite. With other steps, or settings of its own (`remarks`), a twin shows
    numbers and no verdict.
    """
    measure, described = next(iter(measures_of(results).items()))
    scored = {
        key: tuple(value_at(results, name, measure, key) for name in ("student", "twin"))
        for key in sets_of(results, measure)
    }
    scored = {key: pair for key, pair in scored.items() if all(map(usable, pair))}
    known = list(scored.values())
    if not known:
        return ""
    ratios = [_ratio(student, twin) for student, twin in known]
    changes = [share for share in ratios if share is not None]
    title = in_a_sentence(described["title"])
    compared = (
        f"its {title} is {_changes(changes)}"
        if len(changes) == len(known)
        else f"its {title} is {_listed([f'{number(student)} instead of {number(twin)}' for student, twin in known])}"
    )
    steps, twin_steps = value_at(results, "training", "steps"), value_at(results, "twin", "steps")
    same = usable(steps) and steps == twin_steps
    after = f" for the same {number(steps)} steps" if same else ""
    if usable(steps) and usable(twin_steps) and not same:
        after = f" for {number(twin_steps)} steps instead of {number(steps)}"
    if not same or value_at(results, "twin", "remarks"):
        return f"Against its twin, trained without a teacher{after}, {compared}."
    unclear = [_is_unclear(results, measure, key) for key in scored]
    verdict = _verdict(known, ratios, unclear, bool(described.get("lower_is_better", True)))
    return f"{verdict}: against its twin, the same student trained without a teacher{after}, {compared}."


def _is_unclear(results: dict[str, Any], measure: str, key: str) -> bool:
    """Whether the bootstrap of student and twin on a set leaves open which is better; not so where there is none."""
    found = value_at(results, "twin", "bootstrap", measure, key)
    low, high = value_at(found, "low"), value_at(found, "high")
    return usable(low) and usable(high) and bool(low <= 1 <= high)


def _verdict(
    known: list[tuple[Any, ...]], ratios: list[float | None], unclear: list[bool], lower_is_better: bool
) -> str:
    """What the pairs of scores of student and twin say of the teacher."""
    alike = [share is not None and _change(share) == SAME for share in ratios]
    if all(alike):
        return "Learning from the teacher made no difference"
    same = [each or unsure for each, unsure in zip(alike, unclear, strict=True)]
    better = [(student < twin) == lower_is_better and student != twin for student, twin in known]
    better = [each and not unsure for each, unsure in zip(better, same, strict=True)]
    if all(same):
        return "Learning from the teacher made no clear difference"
    if all(better):
        return "Learning from the teacher helped"
    return f"Learning from the teacher {'helped on some sets only' if any(better) else 'did not help'}"


def _unscored(results: dict[str, Any]) -> str:
    """Sets of which no position was scored, so that they have no numbers."""
    empty = [label_of(results, key) for key in results.get("evaluation") or {} if not is_scored(results, key)]
    return f"Nothing was scored on {_listed(empty)}, where no token is to be predicted." if empty else ""


def in_a_sentence(title: str) -> str:
    """The title of a measure inside a sentence: `perplexity`, but `F1` and `Matthews correlation`."""
    first, space, rest = title.partition(" ")
    keeps = first in NAMES or any(each.isupper() or each.isdigit() for each in first[1:])
    return title if keeps else f"{first.lower()}{space}{rest}"


def _ratio(over: Any, under: Any) -> float | None:
    """How many times one number is another; None where one is missing or negative, or the other is 0."""
    return over / under if usable(over) and usable(under) and over >= 0 and under > 0 else None


def _change(share: float) -> str:
    """`12.5% higher`, `3.0% lower` or `the same`, for a ratio."""
    difference = round(100 * (share - 1), 1)
    return SAME if not difference else f"{abs(difference)}% {'higher' if difference > 0 else 'lower'}"


def _changes(shares: list[float]) -> str:
    """`26.2%, 25.3% and 22.9% lower`: the direction once where it is the same for all."""
    words = [_change(share) for share in shares]
    for direction in (" higher", " lower"):
        if all(word.endswith(direction) for word in words):
            return _listed([word.removesuffix(direction) for word in words]) + direction
    return _listed(words)


def _signed(share: float) -> str:
    return f"{100 * (share - 1):+.1f}%".replace("-", MINUS)


def _listed(parts: list[str]) -> str:
    return " and ".join(filter(None, [", ".join(parts[:-1]), parts[-1]]))
