"""The command `distill predict`: predictions of a trained model for texts, conversations, files and pipes."""

import csv
import json
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import nullcontext, suppress
from itertools import chain, islice
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from pydantic import Field

from distill.commands.arguments import Arguments, Text, help_of, parse, split
from distill.config.base import LocalPath
from distill.runtime.errors import SettingError, first_line

if TYPE_CHECKING:
    from distill.data.readers import Record

TABLES = {".csv": ",", ".tsv": "\t", ".parquet": ""}  # and what separates their fields
OUTPUTS = (".jsonl", *TABLES, ".json")
AT_ONCE = 10_000  # inputs that are read before the first of them is answered
INVALID = (ValueError, KeyError, TypeError, RecursionError, csv.Error, EOFError)  # raised by files of another form


class Request(Arguments):
    """Predict with a trained model: tokens for [MASK], a continuation, classes or values, or answers to questions.

    Further arguments: batch_size=32, the sequences of a forward pass; top_k=N, the tokens for a mask (5), classes (all)
    or answers (1); for continuations max_new_tokens=30 sample=true temperature=1 top_k=N top_p=1 seed=0; for fine-tuned
    models sequence_length=N (as trained) no_answer=true|false (as trained) max_answer_tokens=30.

      distill predict model=runs/distilbert_gutenberg text="It was a dark and stormy [MASK]."
      distill predict model=runs/squad input=dev-v1.1.json output=answers.json
    """

    model: LocalPath = Field(title="MODEL", description="a run folder, a snapshot, a model folder or a name on the Hub")
    text: list[Text] = Field(default_factory=list, title="TEXT", description="a text; repeat for more texts")
    second: Text | None = Field(None, title="TEXT", description="the other text of a pair")
    question: Text | None = Field(None, title="TEXT", description="for a model that finds answers")
    context: Text | None = Field(None, title="TEXT", description="where it finds them")
    input: LocalPath | None = Field(
        None,
        title="FILE",
        description="*.jsonl, *.csv, *.tsv, *.parquet, *.txt (a text a line), or SQuAD's *.json; without it, and "
        "without text, standard input: JSON lines, or a text a line. A record with messages is a conversation",
    )
    output: LocalPath | None = Field(
        None,
        title="FILE",
        description="*.jsonl, *.csv, *.tsv, *.parquet, or *.json: answers by the id of their question; without it, "
        "JSON lines to standard output",
    )
    overwrite: bool = Field(False, description="replace an output that exists")
    device: str = Field("auto", title="DEVICE", description="auto, cpu or cuda")


HELP = help_of(Request, "predict")


def run(arguments: list[str]) -> None:
    """Write the predictions for the inputs of the command line."""
    from distill.commands.prediction import PredictOptions, predict_named
    from distill.models.loaded import load_model
    from distill.runtime.files import atomic
    from distill.runtime.progress import log

    request, rest = split(Request, arguments, "predict")
    options = parse(PredictOptions, rest, "predict", besides=Request)
    _check(request)
    model = load_model(request.model, request.device)
    options.check(model.kind)
    inputs = read(request, model.corpus.get("quotes"))
    chunks = iter(lambda: list(islice(inputs, AT_ONCE)), [])
    outcomes = chain.from_iterable(predict_named(chunk, model, options) for chunk in chunks)
    if request.output is None:
        _write_lines(outcomes, sys.stdout)
        return
    try:
        with atomic(Path(request.output)) as new:
            count = _write(outcomes, new, Path(request.output).suffix.lower())
    except FileNotFoundError:  # as in /proc
        raise SettingError(f"output={request.output}: no file can be made there; give another") from None
    log(f"{count:,} predictions in {request.output}")


def _check(request: Request) -> None:
    """Raises SettingError for inputs that are given twice, and for an output that cannot be written."""
    from distill.models.load import model_folder
    from distill.runtime.files import refuse_overwriting

    if len(given := {"text", "question", "input"} & request.model_fields_set) > 1:
        raise SettingError(f"{' and '.join(sorted(given))} are both set: give one of them")
    if request.second is not None and len(request.text) != 1:
        raise SettingError("second= is the other text of one text=: give text= once, or a file of pairs as input=")
    if (request.question is None) != (request.context is None):
        raise SettingError("question= and context= belong together: give both, or a file of them as input=")
    if request.output is not None:
        path, folder = Path(request.output), Path(model_folder(request.model))
        if path.suffix.lower() not in OUTPUTS or path.is_dir() or not os.access(path.absolute().parent, os.W_OK):
            cure = f"give FILE{', FILE'.join(OUTPUTS)} in a folder"
            raise SettingError("no file that can be written", setting="output", value=path, cure=cure)
        reads = [*folder.glob("*"), *([Path(request.input)] if request.input else [])]
        refuse_overwriting(path, f"output={path}", reads, request.overwrite)


def read(request: Request, quotes: bool | None) -> Iterator[tuple[str, Any]]:
    """What messages call each input, and the input, a text or an object. Raises SettingError for an unreadable file.

    Args:
        quotes: whether fields of CSV and TSV files may be in quotation marks; None: in CSV, not in TSV.
    """
    import fsspec

    if request.text:
        pair = {"text": request.text[0], "second": request.second}
        texts = request.text if request.second is None else [pair]
        yield from ((f"text {number}", text) for number, text in enumerate(texts, 1))
        return
    if request.question is not None:
        yield "question", {"question": request.question, "context": request.context}
        return
    if request.input is None and sys.stdin.isatty():
        raise SettingError("nothing to answer: give text=TEXT or input=FILE, or pipe texts into the command")
    path = Path(request.input or "-")
    kind = Path(path.name.lower().removesuffix(".gz")).suffix
    if path.name == "-":
        name, opened = "standard input", nullcontext(sys.stdin)
    elif path.is_file() and kind in (*OUTPUTS, ".txt"):
        mode = "rb" if kind == ".parquet" else "rt"
        name, opened = path.name, fsspec.open(str(path), mode, "infer", encoding="utf-8-sig", newline="")
    else:
        cure = "give *.jsonl, *.csv, *.tsv, *.parquet, *.txt or SQuAD's *.json"
        raise SettingError("no such file, or none that is read", setting="input", value=path, cure=cure)
    number, unit = 0, "row" if kind in TABLES else "line"
    try:
        with opened as stream:
            for number, row in enumerate(_rows(stream, kind, quotes), 1):
                if row is not None:
                    yield f"{name}, {unit} {number}", row
    except INVALID as error:
        problem = f"{name}, {unit} {number + 1} cannot be read ({type(error).__name__}: {first_line(error)})"
        raise SettingError(f"{problem}: correct it, or if it is not UTF-8 convert it") from None


def _rows(stream: IO[Any], kind: str, quotes: bool | None) -> "Iterator[Record | str | None]":
    """The rows of a table, lines of text or JSON, of which blank ones are None, or the questions in SQuAD's form.

    `datasets` reads these, too, but makes a text such as NA null, and shifts the fields of a row that has too many.
    """
    if kind == ".parquet":
        import pyarrow.parquet

        yield from chain.from_iterable(b.to_pylist() for b in pyarrow.parquet.ParquetFile(stream).iter_batches(AT_ONCE))
    elif kind in TABLES:
        csv.field_size_limit(sys.maxsize)
        quoting: Any = csv.QUOTE_MINIMAL if (kind == ".csv" if quotes is None else quotes) else csv.QUOTE_NONE
        for row in csv.DictReader(stream, delimiter=TABLES[kind], quoting=quoting, strict=True):
            if None in row or None in row.values():
                raise ValueError("another number of fields than the header")
            yield row
    elif kind == ".json":
        for paragraph in chain.from_iterable(article["paragraphs"] for article in json.load(stream)["data"]):
            for each in paragraph["qas"]:
                yield {"id": each["id"], "question": each["question"], "context": paragraph["context"]}
    else:
        for line in stream:
            text = line.rstrip("\r\n").removeprefix("\ufeff")
            if text.strip():  # the first one tells what standard input is
                kind = kind or (".jsonl" if text.startswith("{") else ".txt")
            yield None if not text.strip() else json.loads(text) if kind == ".jsonl" else text


def _write(outcomes: "Iterable[Record]", path: Path, kind: str) -> int:
    """Write outcomes into a new file, in the form of names with this ending; gives their number."""
    import pyarrow.csv
    import pyarrow.parquet

    if kind == ".jsonl":
        with path.open("w", encoding="utf-8") as stream:
            return _write_lines(outcomes, stream)
    rows = list(outcomes)
    if kind == ".json":  # SQuAD's form of predictions
        if not all({"id", "answer"} <= row.keys() for row in rows):
            problem = "a *.json has an answer for every question id, and an input lacks one of the two"
            raise SettingError(problem, setting="output", cure="give output=FILE.jsonl")
        path.write_text(_json({str(row["id"]): row["answer"] for row in rows}), "utf-8")
        return len(rows)
    names = dict.fromkeys(chain.from_iterable(rows))
    table = pyarrow.table({name: _column([row.get(name) for row in rows]) for name in names})
    if kind == ".parquet":
        pyarrow.parquet.write_table(table, path)
    else:
        pyarrow.csv.write_csv(table, path, pyarrow.csv.WriteOptions(delimiter=TABLES[kind]))
    return len(rows)


def _write_lines(outcomes: "Iterable[Record]", stream: IO[str]) -> int:
    count = 0
    for outcome in outcomes:
        stream.write(_json(outcome) + "\n")
        stream.flush()
        count += 1
    return count


def _column(values: list[Any]) -> Any:
    """An array of the values; lists, dicts, and values of several types become texts of JSON."""
    import pyarrow

    with suppress(pyarrow.ArrowException, OverflowError):
        if not any(isinstance(value, list | dict) for value in values):
            return pyarrow.array(values)
    return pyarrow.array([value if value is None or isinstance(value, str) else _json(value) for value in values])


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)
