"""The results of a run in short: findings in plain sentences, the few numbers to see first, and the table of models."""

from collections.abc import Callable
from typing import Any

from distill.progress import duration
from distill.report.lookup import label_of, measures_of, models_of, sets_of, usable, value_at
from distill.report.page import MINUS, NONE, TIMES, Table, number, percent, short


def findings(results: dict[str, Any]) -> str:
    """Size and speed, quality against the teacher, and against the twin: one sentence each, where there are numbers."""
    return " ".join(filter(None, [_size(results), _quality(results), _against_twin(results)]))


def setting(results: dict[str, Any]) -> str:
    """Which recipe, scale, corpus and teacher were used, and how long training took."""
    corpus, training = results.get("corpus") or {}, results.get("training") or {}
    scale = results.get("scale")
    sentences = [
        f"This is the recipe {results.get('recipe') or NONE}" + (f" at the scale “{scale}”." if scale else ".")
    ]
    counts = [f"{number(corpus[key])} {key}" for key in ("documents", "tokens") if usable(corpus.get(key))]
    if corpus.get("name"):
        sentences.append(f"Corpus: {corpus['name']}" + (f" ({', '.join(counts)})." if counts else "."))
    if value_at(results, "teacher", "name"):
        sentences.append(f"Teacher: {results['teacher']['name']}.")
    if usable(training.get("steps")):
        epochs = f" ({training['epochs']:.3g} epochs)" if usable(training.get("epochs")) else ""
        time = f" in {duration(training['seconds'])}" if usable(training.get("seconds")) else ""
        device = value_at(results, "environment", "device")
        where = f" on {device}" if device else ""
        sentences.append(f"Training took {number(training['steps'])} steps{epochs}{time}{where}.")
    return " ".join(sentences)


def tiles(results: dict[str, Any]) -> list[tuple[str, str]]:
    """The few numbers to see first, each with its meaning; quality is that of the first evaluation set."""
    student, teacher, twin = (results.get(name) or {} for name in ("student", "teacher", "twin"))
    measure, *others = measures_of(results)
    title = measures_of(results)[measure]["title"].lower()
    first = next(iter(sets_of(results, measure)), "")
    value = value_at(student, measure, first)
    size = _ratio(student.get("parameters"), teacher.get("parameters"))
    speed = _ratio(student.get("tokens_per_second"), teacher.get("tokens_per_second"))
    top1 = value_at(results, "agreement", first, "top1")
    shown = [(percent(size), "of the teacher's parameters")] if size else []
    if not teacher and usable(student.get("parameters")):
        shown = [(short(student["parameters"]), "parameters")]
    shown += [(f"{speed:.2f}{TIMES}", "the teacher's speed")] if speed else []
    shown += [(number(value), f"{title} on {label_of(results, first)}")] if usable(value) else []
    for other in others if not teacher else ():
        own = value_at(student, other, first)
        shown += (
            [(number(own), f"{measures_of(results)[other]['title'].lower()}, the same text")] if usable(own) else []
        )
    for name, model in (("teacher's", teacher), ("twin's (no teacher)", twin)):
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
        given = {name: value for name, value in given.items() if value is not None}
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
    times = f" and is {speed:.2f} times as fast" if speed else ""
    return (
        f"The student has {percent(share)} of its teacher's parameters ({short(student)} of {short(teacher)}){times}."
    )


def _quality(results: dict[str, Any]) -> str:
    """The first measure on every set, against the teacher's where there is one."""
    measure, described = next(iter(measures_of(results).items()))
    title = described["title"].lower()
    relative, alone = [], []
    for key in sets_of(results, measure):
        student, teacher = (value_at(results, name, measure, key) for name in ("student", "teacher"))
        share, where = _ratio(student, teacher), label_of(results, key)
        if share is not None:
            relative.append(f"{_change(share)} on {where} ({number(student)}, teacher {number(teacher)})")
        elif usable(student):
            alone.append(f"{number(student)} on {where}")
    sentences = [f"Against the teacher's, its {title} is {_listed(relative)}."] if relative else []
    sentences += [f"Its {title} is {_listed(alone)}."] if alone else []
    return " ".join(sentences)


def _against_twin(results: dict[str, Any]) -> str:
    measure, described = next(iter(measures_of(results).items()))
    shares = [
        _ratio(value_at(results, "student", measure, key), value_at(results, "twin", measure, key))
        for key in sets_of(results, measure)
    ]
    known = [share for share in shares if share is not None]
    if not known:
        return ""
    steps, twin_steps = value_at(results, "training", "steps"), value_at(results, "twin", "steps")
    if steps == twin_steps:
        after = f"for the same {number(steps)} steps" if usable(steps) else ""
    else:
        after = f"for {number(twin_steps)} steps instead of {number(steps)}"
    better = [share < 1 if described.get("lower_is_better", True) else share > 1 for share in known]
    if all(better):
        verdict = "Learning from the teacher helped"
    elif not any(better):
        verdict = "Learning from the teacher did not help"
    else:
        verdict = "Learning from the teacher helped on some sets only"
    return (
        f"{verdict}: against its twin, the same student trained without a teacher {after}".rstrip()
        + f", its {described['title'].lower()} is {_changes(known)}."
    )


def _ratio(over: Any, under: Any) -> float | None:
    return over / under if usable(over) and usable(under) and under else None


def _change(share: float) -> str:
    """`12.5% higher`, `3.0% lower` or `the same`, for a ratio."""
    difference = round(100 * (share - 1), 1)
    return "the same" if not difference else f"{abs(difference)}% {'higher' if difference > 0 else 'lower'}"


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
