"""What a model card has of a record: no path of the machine, and the metadata that the Hub reads."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import replace
from pathlib import PurePath
from typing import Any, TypedDict

from distill.report.words import is_number, listed, number
from distill.runs.facts import Published, Student
from distill.runs.record import Record

# An absolute path. Its folders may have spaces in their names, but not behind the end of a sentence, nor before the
# slash of a unit, such as tokens/s; what follows the last slash ends at a space. A URL is none: its slashes follow a
# colon.
WORD = r"""[^\s,;()\]}"'/]+"""
SPACED = rf"""{WORD}(?:(?<![.:!?]) (?!~/){WORD})+/(?=[\w.~][\w.-])"""
ABSOLUTE = re.compile(rf"""(?<![^\s(\[{{="',:])(?:file://)?~?/(?=[\w.~])(?:{WORD}/|{SPACED})*(?:{WORD})?""")
# The Hub's names of metrics by those of measures.
METRICS = {
    "perplexity": "perplexity",
    "exact": "exact_match",
    "f1": "f1",
    "macro_f1": "f1",
    "accuracy": "accuracy",
    "matthews": "matthews_correlation",
    "pearson": "pearsonr",
    "spearman": "spearmanr",
}


def shareable(record: Record) -> Record:
    """The record with the last part alone of every absolute path, which means nothing elsewhere and names people."""
    teacher, student, corpus = record.teacher, record.student, record.corpus
    if teacher is not None:
        teacher = replace(teacher, name=model_name(teacher.name))
    if student is not None:
        origin = student.origin
        if origin is not None and origin.call is not None:
            origin = replace(origin, call=without_paths(origin.call))
        student = replace(
            student, origin=origin, start=replace(student.start, source=model_name(student.start.source) or None)
        )
    return replace(
        record,
        corpus=replace(corpus, name=without_paths(corpus.name or "") or None),
        teacher=teacher,
        student=student,
        command=_command_without_paths(record.command or "") or None,
        notes=[without_paths(note) for note in record.notes],
    )


def model_name(name: str | None) -> str:
    """What a card calls a model: of a path the run or the folder alone, which means something elsewhere too."""
    text = name or ""
    if not text.startswith(("/", ".", "~")) and (text.count("/") < 2 or " " in text):
        return without_paths(text)  # a description, or OWNER/NAME of the Hub
    parts = [part for part in PurePath(text).parts if part not in ("student", "snapshots", "/")]
    if len(parts) > 1 and (step := re.fullmatch(r"step-(\d+)", parts[-1])):
        return f"{parts[-2]} after step {number(int(step[1]))}"
    return parts[-1] if parts else text


def without_paths(text: str) -> str:
    """A text in which of every absolute path the last part is left."""
    return ABSOLUTE.sub(lambda match: match[0].rstrip("/").rpartition("/")[2], text)


def _command_without_paths(command: str) -> str:
    """The same of a command, word by word, as a path in it may hold spaces."""
    try:
        return shlex.join([_word_without_paths(word) for word in shlex.split(command)])
    except ValueError:  # a quotation mark that is never closed
        return without_paths(command)


def _word_without_paths(word: str) -> str:
    name, equals, value = word.partition("=")
    quote = value[:1] if len(value) > 1 and value[0] in "'\"" and value[-1] == value[0] else ""
    text = value.removeprefix(quote).removesuffix(quote)
    if equals and text.startswith(("/", "~/", "file:/")) and (quote or "," not in text):
        return f"{name}={quote}{PurePath(text).name}{quote}"  # whatever signs the path has
    return without_paths(word)


def metadata(record: Record, title: str, task: str) -> dict[str, Any]:
    """What the Hub reads besides library and task: models and data by their names there, licence, metrics, scores.

    A model that is no more than a folder, or a licence that nobody states, has no entry.

    Args:
        title: of the card, the name of the model.
        task: the Hub's name of what the model is for.
    """
    scores = _scores_by_set(record, task)
    scored = [name for name in record.measures if name in METRICS and record.sets_of(name)]
    entries = {
        "base_model": [*dict.fromkeys(source.hub for source in _sources(record) if source.hub)],
        "license": next(iter(licenses(record)), None) if has_license(record) else None,
        "datasets": record.corpus.hub,
        # Of a snapshot, which is saved before it is scored, there is none.
        "metrics": [*dict.fromkeys(METRICS[name] for name in scored)],
        "model-index": [{"name": title, "results": scores}] if scores else [],
        "model_name": title,
    }
    return {name: value for name, value in entries.items() if value}


class Metric(TypedDict):
    """A score in the Hub's `model-index`."""

    type: str
    value: float
    name: str


class Result(TypedDict):
    """The scores on a data set, each with its type and name."""

    task: dict[str, str]
    dataset: dict[str, str]
    metrics: list[Metric]


def _scores_by_set(record: Record, task: str) -> list[Result]:
    student, metrics_by_set = record.student or Student(), dict[str, list[Metric]]()
    for name, measure in record.measures.items():
        for data in record.sets_of(name):
            if is_number(value := student.score(name, data)):
                metric = Metric(type=METRICS.get(name, name), value=value, name=measure.title or name)
                metrics_by_set.setdefault(data, []).append(metric)
    return [
        Result(task={"type": task}, dataset={"name": record.label_of(data), "type": data}, metrics=metrics)
        for data, metrics in metrics_by_set.items()
    ]


def has_license(record: Record) -> bool:
    """Whether every model that this one comes from states the same licence."""
    sources = [*_sources(record)]
    return bool(sources) and all(source.license for source in sources) and len(licenses(record)) == 1


def licenses(record: Record) -> list[str]:
    """Those that the models state which this one comes from."""
    return [*dict.fromkeys(source.license for source in _sources(record) if source.license)]


def before_publishing(record: Record) -> str:
    """What its user adds to the front matter, which no record has."""
    if has_license(record):
        return "Before you publish it, add its languages to the front matter of this card (language)."
    stated = licenses(record)
    why = f"some of its source models state {listed(stated)}" if stated else "no source model states a licence"
    where = "in the front matter of this card (license, language)"
    return f"Before you publish it, set its licence and languages {where}: {why}."


def _sources(record: Record) -> Iterator[Published]:
    """The models that a student comes from: its start, then its teachers."""
    start = (record.student or Student()).start
    if start.source and (start.init != "layers" or record.teacher is None):
        yield start.published
    if record.teacher is not None:
        members = record.teacher.members or {"": record.teacher}
        yield from (member.published for member in members.values())
