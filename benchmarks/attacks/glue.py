"""GLUE's tasks from its own files: labels, columns, headers, quotes, folders and damage."""

import gzip
import random
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from job import NOUNS

from benchmarks.attacks.case import Case, Outcome, either, finished, refused
from benchmarks.attacks.ground import Ground, student_of
from benchmarks.attacks.ingredients import DAMAGES, SHORT, bert, undisturbed
from distill.data.tables.glue import TASKS, GlueTask

NAMES = r"corpus[.:]|evaluate[.:]|\.tsv|GLUE|glue"


class Table(NamedTuple):
    """Two files of a task."""

    task: str
    train: bytes
    dev: bytes

    @property
    def about(self) -> GlueTask:
        return TASKS[self.task]


def tsv(task: str, count: int, seed: int) -> bytes:
    """A file of the task as GLUE has it, of made-up sentences."""
    draw, about = random.Random(seed), TASKS[task]
    texts = about.tsv_texts or about.texts
    header = list(about.tsv_header) or ["index", *texts, about.tsv_label]
    lines = [] if about.tsv_header else ["\t".join(header)]
    for number in range(count):
        label = str(number % 6 - 0.5) if not about.classes else _label(task, number)
        row = {text: f"the old {draw.choice(NOUNS)} of {draw.choice(NOUNS)}" for text in texts}
        row |= {about.tsv_label: label}
        lines.append("\t".join(row.get(name, str(number)) for name in header))
    return ("\n".join(lines) + "\n").encode()


def _label(task: str, number: int) -> str:
    classes = TASKS[task].classes
    return classes[number % len(classes)] if task in ("mnli", "rte", "qnli") else str(number % len(classes))


def table_of(task: str) -> Table:
    return Table(task, tsv(task, 16, 0), tsv(task, 4, 1))


def command(ground: Ground, table: Table, *more: str) -> list[str]:
    folder = ground.folder / "GLUE" / table.about.folder
    folder.mkdir(parents=True, exist_ok=True)
    dev = "dev_matched.tsv" if table.task == "mnli" else "dev.tsv"
    (folder / "train.tsv").write_bytes(table.train)
    (folder / dev).write_bytes(table.dev)
    short = [each for each in SHORT if not each.startswith(("corpus.heldout", "evaluate.sets"))]
    sets = ["evaluate.sets=[matched]"] if table.task == "mnli" else []
    return [
        "+recipe=glue", f"corpus.task={table.task}", f"corpus.path={folder.parent}", f"student.path={bert(ground)}",
        *short,
        "corpus.max_unknown=1", f"data.cache={ground.folder / 'cache'}", f"hydra.run.dir={ground.run}", *sets, *more,
    ]  # fmt: skip


def sound(ground: Ground, task: str) -> str:
    """The student of the undisturbed task."""

    def of(cache: object, folder: object) -> list[str]:
        return [*command(ground, table_of(task)), f"data.cache={cache}", f"hydra.run.dir={folder}"]

    return undisturbed(ground, f"glue {task}", of)[0]


def same(ground: Ground, table: Table) -> Outcome:
    student = sound(ground, table.task)
    return finished(ground.distill(*command(ground, table)), lambda: student_of(ground.run) == student)


def must_be_refused(ground: Ground, table: Table, *more: str) -> Outcome:
    return refused(ground.distill(*command(ground, table, *more)), NAMES, ground.run)


def taken_or_refused(ground: Ground, table: Table, *more: str) -> Outcome:
    ended = ground.distill(*command(ground, table, *more))
    return either(ended, NAMES, ground.run, lambda: bool(student_of(ground.run)))


def with_label(table: Table, label: str) -> bytes:
    """The training file, with another label in its last row."""
    *rows, last = table.train.decode().splitlines()
    fields, about = last.split("\t"), table.about
    header = list(about.tsv_header) or rows[0].split("\t")
    fields[header.index(about.tsv_label)] = label
    return "\n".join([*rows, "\t".join(fields), ""]).encode()


LABELS = ("", "-1", "2", "99", "yes", "1.0", " 1 ", "nan", "hidden", "NEGATIVE", "1e0", "٣", "\0", "null", "0x1", "-0")
FILES: dict[str, Callable[[bytes], bytes]] = {
    "carriage returns": lambda content: content.replace(b"\n", b"\r\n"),
    "a BOM": lambda content: b"\xef\xbb\xbf" + content,
    "blank lines": lambda content: content.replace(b"\n", b"\n\n"), "no last end": lambda content: content[:-1],
}  # fmt: skip
BAD: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda content: b"", "a NUL": lambda content: b"\0" + content,
    "UTF-16": lambda content: content.decode().encode("utf-16"),
    "commas": lambda content: content.replace(b"\t", b","), "gzip": gzip.compress,
    "Latin-1": lambda content: content + b"caf\xe9\t1\n",
    "a header alone": lambda content: content.partition(b"\n")[0] + b"\n",
    "JSON": lambda content: b'[{"sentence": "a", "label": 1}]',
    "a picture": lambda content: b"\x89PNG\r\n\x1a\n" + bytes(range(256)),
}  # fmt: skip


def cases(draw: random.Random) -> list[Case]:
    """Those of this subject."""
    attacks: dict[str, Callable[[Ground], Outcome]] = {}
    for task in TASKS:
        sound_table = table_of(task)
        row = b"one\tfield\tmore\tthan\tall\tthe\tothers\thave\n"
        attacks[f"{task}: a row of other fields"] = partial(
            same, table=sound_table._replace(train=sound_table.train + row)
        )
        attacks[f"{task}: a short row"] = partial(same, table=sound_table._replace(train=sound_table.train + b"one\n"))
        scored = sound_table._replace(dev=sound_table.dev + b"one\n")
        attacks[f"{task}: a short row is scored"] = partial(must_be_refused, table=scored)
        other = table_of(draw.choice([name for name in TASKS if name != task]))
        mistaken = sound_table._replace(train=other.train)
        attacks[f"{task}: files of another task"] = partial(taken_or_refused, table=mistaken)
        damage = draw.choice([name for name in DAMAGES if name not in ("gone", "longer")])
        content = DAMAGES[damage](sound_table.train, draw)
        assert content is not None
        attacks[f"{task}: {damage}"] = partial(taken_or_refused, table=sound_table._replace(train=content))
    for task in ("sst2", "cola", "stsb"):
        for label in LABELS:
            table = table_of(task)
            table = table._replace(train=with_label(table, label))
            attacks[f"{task}: label {label!r}"] = partial(taken_or_refused, table=table)
    for name, changed in FILES.items():
        for task in ("sst2", "cola"):
            table = table_of(task)
            attacks[f"{task}: {name}"] = partial(same, table=table._replace(train=changed(table.train)))
    for name, changed in BAD.items():
        for task in ("sst2", "cola"):
            table = table_of(task)
            # A file of CoLA has no header, so what would be one alone is an example.
            expected = taken_or_refused if (task, name) == ("cola", "a header alone") else must_be_refused
            attacks[f"{task}: {name}"] = partial(expected, table=table._replace(train=changed(table.train)))
            dev = table._replace(dev=changed(table.dev))
            attacks[f"{task}: scored on {name}"] = partial(must_be_refused, table=dev)
    for name, more in {"no such task": "corpus.task=wnli", "mnli without its sets": "corpus.task=mnli"}.items():
        attacks[name] = partial(lambda ground, more: must_be_refused(ground, table_of("sst2"), more), more=more)
    return [Case("glue", name, attack) for name, attack in attacks.items()]
