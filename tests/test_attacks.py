"""Whole commands on odd tables, damaged sequences, two preparations at once and full disks: right, or refused by name.

A few cases of each subject, or as many as DISTILL_FUZZ says: `DISTILL_FUZZ=1000 pytest -m slow tests/test_attacks.py`
runs them all. A case that should be refused ends in one line that names the place, with a documented status; one that
should not has the student, or the tokens, of a command that nothing happens to.
"""

import csv
import errno
import gzip
import io
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from attacked import CASES, DAMAGES, Ended, damage, distill, end, members, send, some, start, steps_of, student_of
from job import library, save_model
from shards import read_rows, write_text

from distill.data.shards import PARTS

pytestmark = pytest.mark.slow
# A run of a few steps on one thread in a format that every machine has.
SHORT = [
    "corpus.sequence_length=32", "data.workers=1", "precision=fp32", "train.batch_size=4", "train.sequences_per_step=8",
    "train.epochs=null", "train.log_every=1", "evaluate.max_sequences=4", "evaluate.pseudo_perplexity.fraction=0",
]  # fmt: skip
HELD_OUT = ["corpus.heldout=0.2", "evaluate.sets=[heldout]"]
TABLE_NAMES = r"corpus[.:]|evaluate[.:]|train\.(csv|tsv|jsonl|parquet|txt)|validation\.|table"
SEQUENCE_NAMES = r"data\.(tokens|cache)=.*(is damaged|restore that file)|\.bin (is|cannot)"


class Sound(NamedTuple):
    """An undisturbed command, and what it left."""

    arguments: list[str]  # without the places of cache and run
    student: str
    folder: Path  # of its cache, its sequences and its run

    def at(self, folder: Path) -> list[str]:
        """The same command elsewhere."""
        places = [f"data.cache={folder / 'cache'}", f"hydra.run.dir={folder / 'run'}"]
        return [*(word.replace("HERE", str(folder)) for word in self.arguments), *places]


def undisturbed(arguments: list[str], folder: Path, **more: Any) -> Sound:
    """`arguments`: HERE in them stands for the folder of a case."""
    sound = Sound(arguments, "", folder)
    distill(*sound.at(folder), **more).finished()
    return sound._replace(student=student_of(folder / "run"))


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("models") / "bert", "bert", 2)


@pytest.fixture(scope="module")
def distilled(bert: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The command of a short distillation: half of the BERT's layers, on a few made-up books."""
    books = library(tmp_path_factory.mktemp("text") / "books", 3)
    teacher = ["teacher=pretrained", f"teacher.path={bert}", "student.layers=[0]", "objective=masked"]
    return ["+recipe=distilbert_gutenberg", f"corpus.path={books}", *teacher, *SHORT, *HELD_OUT]


# Tables of texts with labels.

TRAIN = [
    ("the cat of and", "yes"), ("the of it", "no"), ("and the cat in", "yes"), ("it was he", "no"),
    ("his with the", "no"), ("of of and", "yes"), ("in that was", "yes"), ("to the and", "no"),
]  # fmt: skip
SCORED = [("the of cat", "yes"), ("he was it", "no"), ("and in the", "no"), ("it that to", "yes")]


def csv_of(rows: Iterable[tuple[Any, ...]], header: tuple[str, ...] = ("text", "label"), delimiter: str = ",") -> bytes:
    file = io.StringIO()
    csv.writer(file, delimiter=delimiter, lineterminator="\n").writerows([header, *rows])
    return file.getvalue().encode("utf-8", "surrogatepass")


def jsonl_of(rows: Iterable[tuple[Any, Any]]) -> bytes:
    return b"".join(json.dumps({"text": text, "label": label}).encode() + b"\n" for text, label in rows)


def parquet_of(rows: list[tuple[Any, Any]]) -> bytes:
    import pandas

    return bytes(pandas.DataFrame(rows, columns=["text", "label"]).to_parquet())


FORMATS: dict[str, Callable[[Any], bytes]] = {
    "csv": csv_of, "tsv": partial(csv_of, delimiter="\t"), "jsonl": jsonl_of, "parquet": parquet_of,
}  # fmt: skip


class Table(NamedTuple):
    """The two files of a table, further settings, and what is to come of it."""

    train: bytes = csv_of(TRAIN)
    scored: bytes = csv_of(SCORED)
    ending: str = "csv"
    scored_ending: str = "csv"
    setting: str = ""
    to_be: str = "either"  # the same student, refused, or either of some student and refused


# Rows that no text or label is in: training leaves them out, scoring refuses them.
BAD_ROWS = {
    "a field less": b"the cat\n", "a field more": b"the,yes,more\n", "no text": b",yes\n", "no label": b"the cat,\n",
    "blank text": b'"  ",yes\n',
}  # fmt: skip
# Whole files that cannot be read as what their names say.
BAD_FILES = {
    "empty": b"", "a header alone": b"text,label\n", "no header": csv_of(TRAIN).partition(b"\n")[2],
    "a NUL first": b"\0" + csv_of(TRAIN), "an open quote": b'text,label\n"the cat,yes\nit,no\n',
    "UTF-16": csv_of(TRAIN).decode().encode("utf-16"), "UTF-32": csv_of(TRAIN).decode().encode("utf-32"),
    "Latin-1": csv_of([*TRAIN, ("caf", "yes")]).replace(b"caf", b"caf\xe9"),
    "other columns": csv_of(TRAIN, ("review", "stars")), "another delimiter": csv_of(TRAIN, delimiter=";"),
    "blank lines": b"\n" * 99, "a picture": b"\x89PNG\r\n\x1a\n" + bytes(range(256)),
    "gzip of another name": gzip.compress(csv_of(TRAIN)), "parquet by name": b"PAR1",
    "a quote in a field": b'text,label\nthe "cat" of,yes\nit,no\n"the" cat,yes\n',
}  # fmt: skip
BAD_TRAINING_FILES = {  # which may be scored on
    "one class": csv_of([(text, "yes") for text, _ in TRAIN]), "no labels": csv_of([(text, "") for text, _ in TRAIN]),
    "fractions": csv_of([(text, n + 0.5) for n, (text, _) in enumerate(TRAIN)]),
}  # fmt: skip
# The sound table in other clothes.
CLOTHES = {
    "carriage returns": csv_of(TRAIN).replace(b"\n", b"\r\n"), "a BOM": b"\xef\xbb\xbf" + csv_of(TRAIN),
    "no last end": csv_of(TRAIN)[:-1], "blank lines": csv_of(TRAIN).replace(b"\n", b"\n\n"),
    "more columns": csv_of([(n, text, label) for n, (text, label) in enumerate(TRAIN)], ("id", "text", "label")),
    "blanks in the header": csv_of(TRAIN, (" text", "label ")),
    "all quoted": b"".join(b'"' + line.replace(b",", b'","') + b'"\n' for line in csv_of(TRAIN).splitlines()),
    "blanks around labels": csv_of([(text, f" {label} ") for text, label in TRAIN]),
}  # fmt: skip
LABELS: dict[str, list[Any]] = {
    "numbers from 5 on": [5, 9], "negative": [-1, 1], "words of case": ["Yes", "yes"], "long": ["a" * 500, "b" * 500],
    "other scripts": ["是", "否"], "quotes": ['"', "'"], "true and false": ["true", "false"], "a mix": ["1", "x"],
    "null as a word": ["null", "none"], "NaN as a word": ["nan", "x"], "lines": ["a\nb", "c"], "paths": ["../x", "/y"],
    "infinite": ["inf", "-inf"], "leading zeros": ["01", "1"], "an escape": ["\x1b[31m", "b"],
    "markup": ["<script>alert(1)</script>", "b"], "a formula": ["=1+1", "@x"], "LABEL_0": ["LABEL_1", "LABEL_0"],
}  # fmt: skip
VALUES: dict[str, list[Any]] = {
    "NaN": ["nan", 1], "infinite": ["inf", 1], "words": ["good", "bad"], "all the same": [1, 1], "tiny": [1e-320, 1],
    "beyond float64": ["1e400", 1], "a comma": ["1,5", "2,5"], "large": [1e30, -1e30],
    "underscores": ["1_000", "2"], "hexadecimal": ["0x10", "1"], "percent": ["5%", "6%"],
    "Arabic digits": ["\u0663", "\u0661"],
}  # fmt: skip
TEXTS = {
    "long": "the cat " * 20_000, "a word of 100,000": "a" * 100_000, "lines": "the\ncat\n\nof", "tabs": "the\tcat",
    "quotes": 'the "cat" of', "special tokens": "[CLS] the [SEP] [MASK] [PAD]", "an escape": "\x1b[2J",
    "other scripts": "猫は猫である", "emoji": "👩‍👩‍👧‍👦", "combining marks": "e\u0301" * 50, "a BOM": "\ufeffthe",
    "zero width": "c\u200bat", "a carriage return": "the\rcat", "line separators": "a\u2028b\u2029c\x0bd\x0ce",
}  # fmt: skip
JSON_ROWS: dict[str, Any] = {
    "text of null": {"text": None, "label": "yes"}, "text that is a number": {"text": 5, "label": "yes"},
    "label that is a list": {"text": "the", "label": ["yes"]}, "label that is a dict": {"text": "the", "label": {}},
    "label that is true": {"text": "the", "label": True}, "label of NaN": {"text": "the", "label": float("nan")},
    "no label": {"text": "the"}, "no text": {"label": "yes"}, "empty": {}, "a list": ["the", "yes"], "a string": "the",
    "deep": {"text": "the", "label": "yes", "x": [[[[[]]]]]}, "half a pair": {"text": "the \ud800", "label": "yes"},
    "a NUL": {"text": "the \0 cat", "label": "yes"}, "a label with half a pair": {"text": "the", "label": "\ud800"},
}  # fmt: skip
TABLE_SETTINGS = [
    "corpus.quotes=false", "corpus.text=nosuch", "corpus.label=nosuch", "corpus.label=text", "corpus.text=label",
    "corpus.second=nosuch", "corpus.second=text", "corpus.regression=true", "corpus.split=nosuch", "corpus.text=''",
    "corpus.sequence_length=1", "corpus.sequence_length=5000", "corpus.max_sequences=0", "corpus.max_sequences=1",
]  # fmt: skip


def labelled(labels: list[Any]) -> list[bytes]:
    return [csv_of([(text, labels[n % 2]) for n, (text, _) in enumerate(rows)]) for rows in (TRAIN, SCORED)]


def tables() -> dict[str, Table]:
    """By name."""
    cases = {f"setting: {setting}": Table(setting=setting) for setting in TABLE_SETTINGS}
    for name, row in BAD_ROWS.items():
        cases[f"training row: {name}"] = Table(csv_of(TRAIN) + row, to_be="same")
        cases[f"scored row: {name}"] = Table(scored=csv_of(SCORED) + row)
    for name, value in JSON_ROWS.items():
        line = json.dumps(value).encode() + b"\n"
        cases[f"JSONL row in training: {name}"] = Table(jsonl_of(TRAIN) + line, ending="jsonl")
        cases[f"JSONL row in scoring: {name}"] = Table(scored=jsonl_of(SCORED) + line, scored_ending="jsonl")
    for name, text in TEXTS.items():
        cases[f"text: {name}"] = Table(csv_of([*TRAIN, (text, "yes")]), csv_of([*SCORED, (text, "no")]))
    for name, labels in LABELS.items():
        cases[f"classes: {name}"] = Table(*labelled(labels))
    for name, labels in VALUES.items():
        cases[f"values: {name}"] = Table(*labelled(labels), setting="corpus.regression=true")
    for name, content in (BAD_FILES | BAD_TRAINING_FILES).items():
        for ending in ("csv", "jsonl", "parquet"):
            cases[f"training file: {name}.{ending}"] = Table(content, ending=ending, to_be="refused")
    for name, content in BAD_FILES.items():
        cases[f"scored file: {name}"] = Table(scored=content, to_be="refused")
    for name, content in CLOTHES.items():
        cases[f"clothes: {name}"] = Table(content, to_be="same")
    for name, written in FORMATS.items():
        cases[f"as {name}"] = Table(written(TRAIN), ending=name, to_be="same")
        for kind in DAMAGES.keys() - {"gone", "longer"}:
            content = DAMAGES[kind](written(TRAIN), random.Random(kind))
            assert content is not None
            cases[f"{name}, {kind}"] = Table(content, ending=name)
        if name != "parquet":
            zipped = gzip.compress(written(TRAIN))
            cases[f"as {name}.gz"] = Table(zipped, ending=f"{name}.gz", to_be="same")
            cases[f"as {name}.gz that is cut"] = Table(zipped[:-9], ending=f"{name}.gz", to_be="refused")
    return cases


def table_command(bert: Path, table: Table, folder: Path) -> list[str]:
    (folder / "table").mkdir(parents=True)
    (folder / "table" / f"train.{table.ending}").write_bytes(table.train)
    (folder / "table" / f"validation.{table.scored_ending}").write_bytes(table.scored)
    text = ["corpus.path=HERE/table", f"student.path={bert}", "corpus.max_unknown=1"]
    return ["+recipe=table", *text, *SHORT, "train.steps=3", "train.save_every=1", *filter(None, [table.setting])]


@pytest.fixture(scope="module")
def sound_table(bert: Path, tmp_path_factory: pytest.TempPathFactory) -> Sound:
    folder = tmp_path_factory.mktemp("sound")
    return undisturbed(table_command(bert, Table(), folder), folder)


@pytest.mark.parametrize("table", some(tables(), 8))
def test_a_table_makes_its_student_or_is_refused_by_name(
    table: Table, sound_table: Sound, bert: Path, tmp_path: Path
) -> None:
    ended = distill(*Sound(table_command(bert, table, tmp_path), "", tmp_path).at(tmp_path))
    if table.to_be == "refused" or (ended.status and table.to_be == "either"):
        ended.refused(TABLE_NAMES)
        assert not (tmp_path / "run").exists()
    else:
        ended.finished()
        student = student_of(tmp_path / "run")
        assert student == sound_table.student if table.to_be == "same" else student


# Prepared sequences that are damaged.


def many_units(slowly: bool = False) -> None:
    """In a preparation: every file is a unit of work; `slowly`: each unit takes a moment."""
    from distill.data import build_tokens
    from distill.data.sources import _files

    _files.SHARD_BYTES = 1
    build_tokens.POLL, build_tokens.FEW_BYTES = 0.1, 0
    if slowly:
        pack: Any = build_tokens.pack
        build_tokens.pack = lambda *work: (time.sleep(0.1), pack(*work))[1]


SHARED = "data.tokens=HERE/shared"
LOCAL = ("data.local=HERE/local", "data.local_bytes=200000", "data.shuffle_bytes=20000")
PLACES: dict[str, list[str]] = {"cache": [], "tokens": [SHARED], "local": [SHARED, *LOCAL]}
OTHER = "that of the other part"
FILES = ("index.json", "train-00000*.bin", "heldout-00000*.bin")


@pytest.fixture(scope="module", params=PLACES)
def stored(request: pytest.FixtureRequest, distilled: list[str], tmp_path_factory: pytest.TempPathFactory) -> Sound:
    """A run, and where its sequences lie."""
    more = ["data.shard_bytes=20000", "train.steps=3", "train.save_every=1", *PLACES[request.param]]
    return undisturbed([*distilled, *more], tmp_path_factory.mktemp("stored"), change=many_units)


@pytest.mark.parametrize(
    "hits", some({f"{file}, {kind}": (file, kind) for file, kind in product(FILES, (*DAMAGES, OTHER))})
)
def test_damaged_sequences_are_refused_by_name(hits: tuple[str, str], stored: Sound, tmp_path: Path) -> None:
    """Where the content had been fetched before, the student is the same."""
    shutil.copytree(stored.folder, tmp_path, dirs_exist_ok=True, ignore=shutil.ignore_patterns("run"))
    file, kind = hits
    (index,) = [*tmp_path.glob("shared/*/index.json")] or tmp_path.glob("cache/tokens/*/index.json")
    (path,) = index.parent.glob(file)
    if kind == OTHER:
        others = "train-00000*.bin" if file.startswith("heldout") else "heldout-00000*.bin"
        shutil.copyfile(next(index.parent.glob(others)), path)
    else:
        damage(path, kind, random.Random(kind))
    ended = distill(*stored.at(tmp_path), change=many_units)
    if hits == ("index.json", "gone"):  # without it, they were never finished
        ended.finished()
    if ended.status:
        ended.refused(SEQUENCE_NAMES, (2, 74))
    else:
        assert student_of(tmp_path / "run") == stored.student


# Two preparations at once.

SIGNALS = {
    "none": (), "KILL": (signal.SIGKILL,), "TERM": (signal.SIGTERM,), "HUP": (signal.SIGHUP,),
    "STOP": (signal.SIGSTOP,), "KILL both": (signal.SIGKILL,) * 2, "TERM and KILL": (signal.SIGTERM, signal.SIGKILL),
    "STOP and KILL": (signal.SIGSTOP, signal.SIGKILL),
}  # fmt: skip
# Whether two hosts fill one folder `data.tokens` from caches of their own, or share the cache; processes of each.
HOSTS = {
    "a cache": (False, 1), "a cache, 2 processes": (False, 2), "tokens": (True, 1), "tokens, 2 processes": (True, 2),
}  # fmt: skip


@pytest.fixture(scope="module")
def prepared(bert: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], list[bytes]]:
    """The command of a preparation, and the sequences of one that nothing happens to."""
    folder = tmp_path_factory.mktemp("prepared")
    text = ["corpus=jsonl", f"corpus.path={write_text(folder / 'text')}", "corpus.max_unknown=1", SHORT[0], *HELD_OUT]
    teacher = ["teacher=pretrained", f"teacher.path={bert}", "data.shard_bytes=4000"]
    command = ["prepare", "+recipe=distilbert_gutenberg", *text, *teacher]
    distill(*command, f"data.cache={folder / 'cache'}").finished()
    return command, rows_in(folder / "cache" / "tokens")


def rows_in(folder: Path) -> list[bytes]:
    """The sequences of each part."""
    (index,) = folder.glob("*/index.json")
    return [read_rows(index.parent, part).tobytes() for part in PARTS]


@pytest.mark.parametrize(
    "attack", some({f"{host}: {name}": (HOSTS[host], SIGNALS[name]) for host, name in product(HOSTS, SIGNALS)})
)
def test_two_preparations_at_once_leave_the_same_sequences(
    attack: tuple[tuple[bool, int], tuple[int, ...]], prepared: tuple[list[str], list[bytes]], tmp_path: Path
) -> None:
    """Signals to the first ones at moments that are drawn; a third preparation then finishes what they left."""
    (shared, workers), numbers = attack
    draw, (command, expected) = random.Random(str(attack) + str(CASES)), prepared
    own = [f"data.workers={workers}", *[f"data.tokens={tmp_path / 'tokens'}"] * shared]

    def words(host: int) -> list[str]:
        return [*command, *own, f"data.cache={tmp_path / (f'cache{host}' * shared or 'cache')}"]

    processes = []
    for host in range(2):
        processes.append(start(*words(host), change=partial(many_units, slowly=workers == 1)))
        time.sleep(draw.uniform(0, 0.3))
    for process, number in zip(processes, numbers, strict=False):
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=draw.uniform(0.1, 1.2))
        alive = members(process.pid) if draw.random() < 0.3 else [process.pid]
        send(alive, number)
        if number == signal.SIGSTOP:
            time.sleep(1.5)
            send(alive, signal.SIGCONT)
    for process, number in zip(processes, (*numbers, 0, 0), strict=False):
        ended = end(process)
        allowed = {0} if number in (0, signal.SIGSTOP) else {0, -number, 128 + number}
        assert ended.status in allowed, ended.errors[-3000:]
    distill(*words(0), change=many_units).finished()
    tokens = tmp_path / ("tokens" if shared else "cache/tokens")
    assert rows_in(tokens) == expected
    (index,) = tokens.glob("*/index.json")
    kept = ("index.json", ".bin", ".counts.npy")
    assert [path for path in index.parent.rglob("*") if path.is_dir() or not path.name.endswith(kept)] == []


# Full disks.

KB, IS_ROOT = 1024, os.geteuid() == 0
ERRORS = {"full": errno.ENOSPC, "quota": errno.EDQUOT, "broken": errno.EIO, "read-only": errno.EROFS}


@pytest.fixture(scope="module")
def whole(distilled: list[str], tmp_path_factory: pytest.TempPathFactory) -> Sound:
    """A run of a few more steps; `stopped` beside it is one that was killed half-way."""
    folder = tmp_path_factory.mktemp("whole")
    sound = undisturbed([*distilled, "train.steps=12", "train.save_every=2"], folder)
    shutil.copytree(folder / "cache", folder / "stopped" / "cache")
    process = start(*sound.at(folder / "stopped"), change=slow_steps)
    wait_for_step(process, folder / "stopped" / "run", 7)
    send([process.pid], signal.SIGKILL)
    end(process)
    assert 0 < steps_of(folder / "stopped" / "run") < 12
    return sound


def slow_steps() -> None:
    """In a run: each step takes some time at least, and things can happen to it."""
    from distill.runs.callbacks import RunLog

    log = RunLog.write
    RunLog.write = lambda *arguments: (time.sleep(0.2), log(*arguments))[1]  # type: ignore[method-assign]


def wait_for_step(process: Any, folder: Path, step: int) -> None:
    while steps_of(folder) < step and process.poll() is None:
        time.sleep(0.005)


def refuse_files(number: int, opened: int, under: str) -> None:
    """In a run: no file below a folder can be opened for writing once so many have been."""
    left = [opened]

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and str(arguments[0]).startswith(under) and arguments[2] & (os.O_WRONLY | os.O_RDWR):
            left[0] -= 1
            if left[0] < 0:
                raise OSError(number, os.strerror(number), arguments[0])

    sys.addaudithook(hook)


def failing(words: list[str], place: Path, kind: str, opened: int) -> Ended:
    return distill(*words, change=partial(refuse_files, ERRORS[kind], opened, str(place)))


def small(words: list[str], place: Path, kilobytes: int) -> Ended:
    """The disk has no more room than this."""
    room = os.statvfs(place.parent)
    used = (room.f_blocks - room.f_bfree) * room.f_frsize
    mount(place.parent, f"remount,size={max(kilobytes * KB + used, 4096)}")
    return distill(*words)


def mount(folder: Path, options: str) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], check=True)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 4 MiB where one can be mounted."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if IS_ROOT:
        mount(folder, f"size={4 * KB * KB}")
    yield folder
    if IS_ROOT:
        subprocess.run(["umount", "-l", folder], check=False)


FAILING = {
    f"{kind} after {n} files": partial(failing, kind=kind, opened=n) for kind, n in product(ERRORS, range(0, 40, 3))
}
SMALL = {f"{size} kB": partial(small, kilobytes=size) for size in (0, 8, 32, 100, 200, 300, 400, 600)}


@pytest.mark.parametrize("attempt", [*some(FAILING), *some(SMALL, 2)])
@pytest.mark.parametrize("state", ["new", "stopped", "cache"])
def test_a_full_disk_ends_a_run_that_then_resumes(
    attempt: Any, state: str, whole: Sound, disk: Path, tmp_path: Path
) -> None:
    """A `new` run, one that was `stopped`, or a new `cache` lies on the disk."""
    if attempt.func is small and not IS_ROOT:
        pytest.skip("mounting a disk needs root")
    place = disk / state
    words = [*whole.at(tmp_path), f"data.cache={place}" if state == "cache" else f"hydra.run.dir={place}"]
    if state == "stopped":
        shutil.copytree(whole.folder / "stopped" / "cache", tmp_path / "cache")
        shutil.copytree(whole.folder / "stopped" / "run", place)
    ended = attempt(words, place)
    if ended.status:
        ended.refused("", (2, 74))
    if IS_ROOT:
        mount(disk, f"remount,size={8 * KB * KB}")
    distill(*words).finished()
    assert student_of(tmp_path / "run" if state == "cache" else place) == whole.student
