"""Tables of texts with labels: formats, quotes, encodings, columns, labels and sizes, in training and in scoring."""

import csv
import gzip
import io
import json
import random
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

from benchmarks.attacks.case import Case, Outcome, either, finished, refused
from benchmarks.attacks.ground import Ground, student_of
from benchmarks.attacks.ingredients import DAMAGES, SHORT, bert, undisturbed

NAMES = r"corpus[.:]|evaluate[.:]|train\.(csv|tsv|jsonl|parquet|txt)|validation\.|table"
TRAIN = [
    ("the cat of and", "yes"), ("the of it", "no"), ("and the cat in", "yes"), ("it was he", "no"),
    ("his with the", "no"), ("of of and", "yes"), ("in that was", "yes"), ("to the and", "no"),
]  # fmt: skip
SCORED = [("the of cat", "yes"), ("he was it", "no"), ("and in the", "no"), ("it that to", "yes")]
Rows = list[tuple[Any, Any]]


def csv_of(rows: Iterable[tuple[Any, ...]], header: tuple[str, ...] = ("text", "label"), delimiter: str = ",") -> bytes:
    file = io.StringIO()
    writer = csv.writer(file, delimiter=delimiter, lineterminator="\n")
    writer.writerows([header, *rows])
    return file.getvalue().encode("utf-8", "surrogatepass")


def tsv_of(rows: Rows) -> bytes:
    return "".join(f"{text}\t{label}\n" for text, label in [("text", "label"), *rows]).encode()


def jsonl_of(rows: Rows) -> bytes:
    return b"".join(json.dumps({"text": text, "label": label}).encode() + b"\n" for text, label in rows)


def parquet_of(rows: Rows) -> bytes:
    import pyarrow
    import pyarrow.parquet

    file = io.BytesIO()
    table = pyarrow.table({"text": [text for text, _ in rows], "label": [label for _, label in rows]})
    pyarrow.parquet.write_table(table, file)
    return file.getvalue()


FORMATS: dict[str, Callable[[Rows], bytes]] = {"csv": csv_of, "tsv": tsv_of, "jsonl": jsonl_of, "parquet": parquet_of}


class Files(NamedTuple):
    """The two files of a table, with the end of each name."""

    train: bytes = csv_of(TRAIN)
    scored: bytes = csv_of(SCORED)
    ending: str = "csv"
    scored_ending: str = "csv"


def command(ground: Ground, files: Files, *more: str) -> list[str]:
    folder = ground.folder / "table"
    folder.mkdir(exist_ok=True)
    (folder / f"train.{files.ending}").write_bytes(files.train)
    (folder / f"validation.{files.scored_ending}").write_bytes(files.scored)
    short = [each for each in SHORT if not each.startswith(("corpus.heldout", "evaluate.sets"))]
    return [
        "+recipe=table", f"corpus.path={folder}", f"student.path={bert(ground)}", "corpus.max_unknown=1", *short,
        f"data.cache={ground.folder / 'cache'}", f"hydra.run.dir={ground.run}", *more,
    ]  # fmt: skip


def sound(ground: Ground) -> str:
    """The student of the undisturbed table."""

    def of(cache: Any, folder: Any) -> list[str]:
        return [*command(ground, Files()), f"data.cache={cache}", f"hydra.run.dir={folder}"]

    return undisturbed(ground, "table", of)[0]


def same(ground: Ground, files: Files, *more: str) -> Outcome:
    """The table is the sound one, however it is written: the student has to be the same."""
    student = sound(ground)
    return finished(ground.distill(*command(ground, files, *more)), lambda: student_of(ground.run) == student)


def must_be_refused(ground: Ground, files: Files, *more: str) -> Outcome:
    return refused(ground.distill(*command(ground, files, *more)), NAMES, ground.run)


def taken_or_refused(ground: Ground, files: Files, *more: str) -> Outcome:
    """The table is of another content: it makes some student, or is refused."""
    ended = ground.distill(*command(ground, files, *more))
    return either(ended, NAMES, ground.run, lambda: bool(student_of(ground.run)))


# Rows that no text or label is in: training leaves them out, scoring refuses them.
BAD_ROWS = {
    "a field less": b"the cat\n", "a field more": b"the,yes,more\n", "no text": b",yes\n", "no label": b"the cat,\n",
    "blank text": b'"  ",yes\n', "no text and no label": b",\n",
}  # fmt: skip
# Whole files that cannot be read as what their names say.
BAD_FILES = {
    "empty": b"", "a header alone": b"text,label\n", "no header": csv_of(TRAIN).partition(b"\n")[2],
    "a NUL first": b"\0" + csv_of(TRAIN), "an open quote": b'text,label\n"the cat,yes\nit,no\n',
    "UTF-16": csv_of(TRAIN).decode().encode("utf-16"),
    "UTF-32": csv_of(TRAIN).decode().encode("utf-32"),
    "Latin-1": csv_of([*TRAIN, ("caf", "yes")]).replace(b"caf", b"caf\xe9"),
    "one class": csv_of([(text, "yes") for text, _ in TRAIN]),
    "fractions": csv_of([(text, n + 0.5) for n, (text, _) in enumerate(TRAIN)]),
    "other columns": csv_of(TRAIN, ("review", "stars")), "another delimiter": csv_of(TRAIN, delimiter=";"),
    "blank lines": b"\n" * 99,
    "a picture": b"\x89PNG\r\n\x1a\n" + bytes(range(256)), "gzip of another name": gzip.compress(csv_of(TRAIN)),
    "a quote in a field": b'text,label\nthe "cat" of,yes\nit,no\n"the" cat,yes\n',
    "columns in capitals": csv_of(TRAIN, ("Text", "Label")),
    "parquet by name": b"PAR1", "comments": b"# a comment\n" + csv_of(TRAIN),
    "no labels": csv_of([(text, "") for text, _ in TRAIN]),
}  # fmt: skip
# The sound table in other clothes.
CLOTHES: dict[str, bytes] = {
    "carriage returns": csv_of(TRAIN).replace(b"\n", b"\r\n"), "a BOM": b"\xef\xbb\xbf" + csv_of(TRAIN),
    "no last end": csv_of(TRAIN)[:-1],
    "blank lines": csv_of(TRAIN).replace(b"\n", b"\n\n"),
    "more columns": csv_of([(n, text, label) for n, (text, label) in enumerate(TRAIN)], ("id", "text", "label")),
    "columns turned": csv_of([(label, text) for text, label in TRAIN], ("label", "text")),
    "blanks in the header": csv_of(TRAIN, (" text", "label ")),
    "all quoted": b"".join(b'"' + line.replace(b",", b'","') + b'"\n' for line in csv_of(TRAIN).splitlines()),
    "blanks around labels": csv_of([(text, f" {label} ") for text, label in TRAIN]),
}  # fmt: skip
LABELS: dict[str, list[Any]] = {
    "numbers": [0, 1], "numbers from 5 on": [5, 9], "negative": [-1, 1], "words of case": ["Yes", "yes"],
    "long": ["a" * 500, "b" * 500],
    "other scripts": ["是", "否"], "a quote": ['"', "'"], "true and false": ["true", "false"],
    "null as a word": ["null", "none"], "NaN as a word": ["nan", "x"],
    "lines": ["a\nb", "c"], "a path": ["../x", "/y"], "infinite": ["inf", "-inf"], "leading zeros": ["01", "1"],
    "huge": [10**40, 1], "an escape": ["\x1b[31m", "b"],
    "markup": ["<script>alert(1)</script>", "b"], "a formula": ["=1+1", "@x"], "an emoji": ["👍", "👎"],
    "LABEL_0": ["LABEL_1", "LABEL_0"], "a mix": ["1", "x"],
}  # fmt: skip
VALUES: dict[str, list[Any]] = {
    "NaN": ["nan", 1], "infinite": ["inf", 1], "words": ["good", "bad"], "all the same": [1, 1],
    "beyond float32": [1e300, 1], "tiny": [1e-320, 1],
    "beyond float64": ["1e400", 1], "a comma": ["1,5", "2,5"], "underscores": ["1_000", "2"],
    "hexadecimal": ["0x10", "1"], "negative": [-3, 2],
    "Arabic digits": ["\u0663", "\u0661"], "percent": ["5%", "6%"], "blanks": [" 1 ", "2"], "large": [1e30, -1e30],
}  # fmt: skip
TEXTS = {
    "long": "the cat " * 20_000, "a word of 100,000": "a" * 100_000, "lines": "the\ncat\n\nof",
    "quotes": 'the "cat" of', "commas": "the, cat, of",
    "tabs": "the\tcat", "special tokens": "[CLS] the [SEP] [MASK] [PAD]", "an escape": "\x1b[2J",
    "other scripts": "猫は猫である", "emoji": "👩‍👩‍👧‍👦",
    "combining marks": "e\u0301" * 50, "a BOM": "\ufeffthe", "a soft hyphen": "c\u00adat", "zero width": "c\u200bat",
    "a carriage return": "the\rcat",
    "a form feed": "the\x0ccat", "a vertical tab": "a\x0bb", "line separators": "a\u2028b\u2029c",
    "markup": "<b>the</b>", "a formula": "=SUM(A1)",
}  # fmt: skip
JSON_ROWS = {
    "text of null": {"text": None, "label": "yes"}, "text that is a number": {"text": 5, "label": "yes"},
    "text that is a list": {"text": ["the"], "label": "yes"},
    "label of null": {"text": "the", "label": None}, "label that is a list": {"text": "the", "label": ["yes"]},
    "label that is a dict": {"text": "the", "label": {"a": 1}},
    "label that is true": {"text": "the", "label": True}, "label of NaN": {"text": "the", "label": float("nan")},
    "no label": {"text": "the"}, "no text": {"label": "yes"},
    "empty": {}, "a list": ["the", "yes"], "a string": "the", "a fraction": {"text": "the", "label": 1.5},
    "deep": {"text": "the", "label": "yes", "x": [[[[[]]]]]},
    "half a pair": {"text": "the \ud800", "label": "yes"}, "a NUL": {"text": "the \0 cat", "label": "yes"},
    "a label with half a pair": {"text": "the", "label": "\ud800"},
}  # fmt: skip
SETTINGS = {
    "quotes off": "corpus.quotes=false", "another text column": "corpus.text=nosuch",
    "another label column": "corpus.label=nosuch",
    "the text as the label": "corpus.label=text", "the label as the text": "corpus.text=label",
    "a second column": "corpus.second=nosuch",
    "the text twice": "corpus.second=text", "values": "corpus.regression=true", "a split": "corpus.split=nosuch",
    "no length": "corpus.sequence_length=1",
    "a length beyond the model": "corpus.sequence_length=5000", "no examples": "corpus.max_sequences=0",
    "one example": "corpus.max_sequences=1", "an empty column": "corpus.text=''",
}  # fmt: skip


def of_rows(cases: dict[str, Callable[[Ground], Outcome]]) -> None:
    """Bad rows and odd ones, in training and in scoring."""
    for name, row in BAD_ROWS.items():
        cases[f"training row: {name}"] = partial(same, files=Files(train=csv_of(TRAIN) + row))
        cases[f"scored row: {name}"] = partial(taken_or_refused, files=Files(scored=csv_of(SCORED) + row))
    for name, row in JSON_ROWS.items():
        line = json.dumps(row).encode() + b"\n"
        files = Files(train=jsonl_of(TRAIN) + line, ending="jsonl")
        cases[f"JSONL row in training: {name}"] = partial(taken_or_refused, files=files)
        cases[f"JSONL row alone: {name}"] = partial(taken_or_refused, files=Files(train=line, ending="jsonl"))
        files = Files(scored=jsonl_of(SCORED) + line, scored_ending="jsonl")
        cases[f"JSONL row in scoring: {name}"] = partial(taken_or_refused, files=files)
    for name, text in TEXTS.items():
        files = Files(csv_of([*TRAIN, (text, "yes")]), csv_of([*SCORED, (text, "no")]))
        cases[f"text: {name}"] = partial(taken_or_refused, files=files)


def of_labels(cases: dict[str, Callable[[Ground], Outcome]]) -> None:
    """Odd classes and values."""
    for name, labels in LABELS.items():
        train, scored = ([(text, labels[n % 2]) for n, (text, _) in enumerate(rows)] for rows in (TRAIN, SCORED))
        cases[f"classes: {name}"] = partial(taken_or_refused, files=Files(csv_of(train), csv_of(scored)))
    for name, labels in VALUES.items():
        train, scored = ([(text, labels[n % 2]) for n, (text, _) in enumerate(rows)] for rows in (TRAIN, SCORED))
        attack = lambda ground, files: taken_or_refused(ground, files, "corpus.regression=true")  # noqa: E731
        cases[f"values: {name}"] = partial(attack, files=Files(csv_of(train), csv_of(scored)))
    unknown = Files(scored=csv_of([*SCORED, ("the", "maybe")]))
    cases["a class that training has not"] = partial(must_be_refused, files=unknown)
    many = Files(csv_of([(text, n) for n, (text, _) in enumerate(TRAIN * 40)]), csv_of([("the", 3)]))
    cases["a class for each row"] = partial(taken_or_refused, files=many)
    cases["scored on one row"] = partial(taken_or_refused, files=Files(scored=csv_of(SCORED[:1])))
    cases["scored on what is trained on"] = partial(taken_or_refused, files=Files(scored=csv_of(TRAIN)))


def of_files(cases: dict[str, Callable[[Ground], Outcome]], draw: random.Random) -> None:
    """Whole files: formats, encodings, damage."""
    for name, content in BAD_FILES.items():
        cases[f"training file: {name}"] = partial(must_be_refused, files=Files(train=content))
        if name not in ("one class", "fractions", "no labels"):
            cases[f"scored file: {name}"] = partial(must_be_refused, files=Files(scored=content))
        cases[f"{name}, called .jsonl"] = partial(must_be_refused, files=Files(train=content, ending="jsonl"))
        cases[f"{name}, called .parquet"] = partial(must_be_refused, files=Files(train=content, ending="parquet"))
    for name, content in CLOTHES.items():
        cases[f"clothes: {name}"] = partial(same, files=Files(train=content))
    for name, written in FORMATS.items():
        cases[f"as {name}"] = partial(same, files=Files(train=written(TRAIN), ending=name))
        if name != "parquet":
            zipped = gzip.compress(written(TRAIN))
            cases[f"as {name}.gz"] = partial(same, files=Files(train=zipped, ending=f"{name}.gz"))
            cut = Files(train=zipped[:-9], ending=f"{name}.gz")
            cases[f"as {name}.gz that is cut"] = partial(must_be_refused, files=cut)
        for number in range(3):
            damage = draw.choice([each for each in DAMAGES if each not in ("gone", "longer")])
            content = DAMAGES[damage](written(TRAIN), draw)
            assert content is not None
            files = Files(train=content, ending=name)
            cases[f"{name} damaged {number}: {damage}"] = partial(taken_or_refused, files=files)
    for name, setting in SETTINGS.items():
        attack = lambda ground, more: taken_or_refused(ground, Files(), more)  # noqa: E731
        cases[f"setting: {name}"] = partial(attack, more=setting)


def cases(draw: random.Random) -> list[Case]:
    """Those of this subject."""
    attacks: dict[str, Callable[[Ground], Outcome]] = {}
    of_rows(attacks)
    of_labels(attacks)
    of_files(attacks, draw)
    return [Case("tables", name, attack) for name, attack in attacks.items()]
