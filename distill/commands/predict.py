"""The command `distill predict`: predictions of a trained model for texts, conversations, files and pipes."""

import csv
import json
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import chain, islice
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from pydantic import Field

from distill.commands.arguments import Arguments, Text, parse, split
from distill.config.model import LocalPath
from distill.runtime.errors import SettingError, first_line

if TYPE_CHECKING:
    from distill.commands.prediction import PredictOptions
    from distill.data.lines import Record
    from distill.models.loaded import LoadedModel

HELP = """
usage: distill predict model=MODEL [text=TEXT ...] [input=FILE] [output=FILE] [OPTION=VALUE ...]

Predict with a trained model: tokens for [MASK], a continuation, classes or values, or answers to questions.

  model=MODEL      a run folder, a snapshot, a model folder or a name on the Hub
  text=TEXT        a text; repeat for more texts (second=TEXT: the other text of a pair)
  question=TEXT context=TEXT   for a model that finds answers
  input=FILE       *.jsonl, *.csv, *.tsv, *.parquet, *.txt (a text a line), or SQuAD's *.json; without it, and without
                   text, standard input: JSON lines, or a text a line. A record with messages is a conversation
  output=FILE      JSON lines, or a table as *.csv, *.tsv or *.parquet; *.json: answers by the id of their question.
                   Without it, JSON lines to standard output
  overwrite=true   replace an output that exists
  device=auto      auto, cpu or cuda
  batch_size=32    sequences per forward pass
  top_k=N          tokens for a mask (5), classes (all), or answers (1)

of continuations: max_new_tokens=30 sample=true temperature=1 top_k=N top_p=1 seed=0
of fine-tuned models: sequence_length=N (as trained) no_answer=true|false (as trained) max_answer_tokens=30

  distill predict model=runs/distilbert_gutenberg text="It was a dark and stormy [MASK]."
  distill predict model=runs/squad input=dev-v1.1.json output=answers.json
"""
TABLES = ("csv", "tsv", "parquet")
OTHER_FORMATS = (".gz", ".zip", ".xls", ".xlsx", ".yaml", ".yml")  # of outputs, by their names
AT_ONCE = 10_000  # inputs that are read before the first of them is answered


class Request(Arguments):
    """What the command takes besides the options of `PredictOptions`."""

    model: LocalPath
    text: list[Text] = Field(default_factory=list)
    second: Text | None = None
    question: Text | None = None
    context: Text | None = None
    input: LocalPath | None = None
    output: LocalPath | None = None
    overwrite: bool = False
    device: str = "auto"


def run(arguments: list[str]) -> None:
    """Write the predictions for the inputs of the command line.

    Raises:
        SettingError: inputs that the model does not read, or settings that do not fit each other.
    """
    from distill.commands.prediction import PredictOptions
    from distill.models.load import model_folder
    from distill.models.loaded import load_model
    from distill.runtime.files import refuse_overwriting
    from distill.runtime.progress import log

    request, rest = split(Request, arguments, "predict")
    options = parse(PredictOptions, rest, "predict", besides=Request)
    _check(request)
    if request.output is not None:
        place = Path(request.output)
        if place.is_dir() or not place.absolute().parent.is_dir():
            raise SettingError("no file in an existing folder", setting="output", value=place, cure="give one")
        folder = Path(model_folder(request.model))
        reads = [*([Path(request.input)] if request.input else []), *(folder.iterdir() if folder.is_dir() else [])]
        refuse_overwriting(place, f"output={place}", reads, request.overwrite)
    model = load_model(request.model, request.device)
    options.check(model.kind)
    count = write(outcomes(model, _inputs(request, model.corpus.get("quotes")), options), request.output)
    if request.output is not None:
        log(f"{count:,} predictions in {request.output}")


def _check(request: Request) -> None:
    """Raises SettingError for inputs that are given twice, and for an output in a format that is not written."""
    inputs = {"text": bool(request.text), "question": request.question is not None, "input": request.input is not None}
    present = [name for name, is_set in inputs.items() if is_set]
    if len(present) > 1:
        raise SettingError(f"{present[0]} and {present[1]} are both set: give one of them")
    if request.output is not None and (suffix := Path(request.output).suffix.lower()) in OTHER_FORMATS:
        cure = "give FILE.jsonl, FILE.csv, FILE.tsv or FILE.parquet"
        raise SettingError(f"{suffix} is not written", setting="output", value=request.output, cure=cure)
    if request.second is not None and len(request.text) != 1:
        raise SettingError("second= is the other text of one text=: give text= once, or a file of pairs as input=")
    if (request.question is None) != (request.context is None):
        raise SettingError("question= and context= belong together: give both, or a file of them as input=")


def outcomes(model: "LoadedModel", inputs: Iterable[tuple[str, Any]], options: "PredictOptions") -> "Iterator[Record]":
    """The predictions for inputs, each with where it stands, in their order and with all that a record holds.

    The columns of a table may be called as in the run that trained the model.
    """
    from distill.commands.prediction import as_record, beside, predict_records

    columns = {column: name for name in ("text", "second") if (column := model.corpus.get(name))}
    numbered, before = enumerate(inputs, 1), 0
    while chunk := list(islice(numbered, AT_ONCE)):
        records = [
            as_record(_renamed(item, columns), f"{place}: input {number}", model.kind)
            for number, (place, item) in chunk
        ]
        try:
            answers = predict_records(model, records, options)
        except SettingError as error:
            if before:
                raise SettingError(f"in the inputs from number {before + 1:,} on, counted from 1: {error}") from None
            raise
        for (_, (_, item)), record, answer in zip(chunk, records, answers, strict=True):
            yield beside(item if isinstance(item, dict) else record, answer)
        before += len(chunk)


def _renamed(item: Any, columns: dict[str, str]) -> Any:
    """A record with the names used here; a column of the training is the text also where another is called `text`."""
    if not isinstance(item, dict):
        return item
    return item | {name: item[column] for column, name in columns.items() if column in item}


def _inputs(request: Request, quotes: bool | None) -> Iterator[tuple[str, Any]]:
    """The inputs, a text or an object each, and where each stands."""
    if request.second is not None:
        yield "text", {"text": request.text[0], "second": request.second}
    elif request.text:
        yield from (("text", text) for text in request.text)
    elif request.question is not None:
        yield "question", {"question": request.question, "context": request.context}
    elif request.input is not None and request.input != "-":
        yield from read_file(request.input, quotes)
    elif request.input is None and sys.stdin.isatty():
        raise SettingError("nothing to answer: give text=TEXT or input=FILE, or pipe texts into the command")
    else:
        try:
            yield from read_lines(sys.stdin, "standard input")
        except UnicodeDecodeError as error:
            problem = f"standard input is not {error.encoding} ({error.reason})"
            raise SettingError(f"{problem}: convert it to UTF-8, such as with iconv") from None


def read_file(path: str, quotes: bool | None = None) -> Iterator[tuple[str, Any]]:
    """The inputs of a file: JSON lines, CSV or TSV with a header, Parquet, plain text of one a line, or SQuAD's JSON.

    Args:
        quotes: whether fields of CSV and TSV files may be in quotation marks; None: in CSV, not in TSV.

    Raises:
        SettingError: it cannot be read; the message names `input`.
    """
    from distill.data import readers
    from distill.data.lines import LONGEST
    from distill.data.tables._rows import kind_of, read_files
    from distill.data.tables.squad import of_json

    file = Path(path)
    if not file.is_file():
        raise SettingError("no such file", setting="input", value=path, cure="correct the path")
    kind = kind_of(file)
    try:
        if kind == "json":
            for place, record in of_json(file, "input"):
                yield place, {name: record[name] for name in ("id", "question", "context")}
        elif kind in ("jsonl", "txt"):
            lines = readers.lines(file, limit=LONGEST, whole_lines=True)
            yield from read_lines(lines, file.name, json_lines=kind == "jsonl")
        elif kind in TABLES:
            names = readers.column_names(file) if kind == "parquet" else []
            for row in read_files([file], "input", {name: name for name in names}, quotes=quotes):
                if row.values is None:
                    raise SettingError(f"input={path}: {row.place} has another number of fields than the header")
                yield row.place, {name: value for name, value in row.values.items() if value is not None}
        else:
            cure = "give *.jsonl, *.csv, *.tsv, *.parquet, *.txt"
            raise SettingError("unknown file type", setting="input", value=path, cure=cure)
    except readers.InvalidFile as error:
        raise SettingError(str(error), setting="input", value=path, cure="correct or remove it") from error


def read_lines(lines: Iterable[str], name: str, json_lines: bool | None = None) -> Iterator[tuple[str, Any]]:
    """The lines that are not blank, each a text, or JSON where `json_lines`; None: where the first one is JSON.

    A first line in quotation marks is JSON as well, unless it goes on behind them, as dialogue does.
    """
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        if json_lines is None:
            json_lines = line.lstrip().startswith("{") or _is_json_text(line)
        place = f"{name}, line {number}"
        try:
            yield place, json.loads(line) if json_lines else line.rstrip("\r\n")
        except (ValueError, RecursionError) as error:
            raise SettingError(f"{place} is not JSON ({first_line(error)}); correct that line") from None


def _is_json_text(line: str) -> bool:
    try:
        return isinstance(json.loads(line), str)
    except ValueError:
        return False


def write(outcomes: "Iterable[Record]", path: str | None) -> int:
    """Write outcomes as JSON lines, to standard output as they come, or to a file that appears once it is whole.

    A file called *.csv, *.tsv or *.parquet becomes a table. Into a file called *.json goes SQuAD's form of predictions,
    the answer by the question's id.

    Returns:
        How many there were.
    """
    from distill.data.tables._rows import kind_of
    from distill.runtime.files import atomic

    if path is None:
        return _write_lines(outcomes, sys.stdout)
    try:
        with atomic(Path(path)) as new:
            if (kind := kind_of(Path(path))) in TABLES:
                return _write_table(list(outcomes), kind, new)
            with new.open("w", encoding="utf-8") as stream:
                return _write_answers(outcomes, stream) if kind == "json" else _write_lines(outcomes, stream)
    except FileNotFoundError:
        raise SettingError("no file can be made there", setting="output", value=path, cure="give another") from None


def _write_lines(outcomes: "Iterable[Record]", stream: IO[str]) -> int:
    count = 0
    for outcome in outcomes:
        count += 1
        stream.write(_json(outcome) + "\n")
        stream.flush()
    return count


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)


def _write_answers(outcomes: "Iterable[Record]", stream: IO[str]) -> int:
    answers: dict[str, str] = {}
    for number, outcome in enumerate(outcomes, 1):
        if "id" not in outcome or "answer" not in outcome:
            problem = f"a *.json has an answer for every question id, and input {number} lacks one of the two"
            raise SettingError(problem, setting="output", cure="give output=FILE.jsonl")
        answers[str(outcome["id"])] = outcome["answer"]
    stream.write(json.dumps(answers, ensure_ascii=False, indent=1))
    return len(answers)


def _write_table(outcomes: "list[Record]", kind: str, path: Path) -> int:
    """A column for every entry, of numbers in Parquet where it holds nothing else; lists and dicts are JSON."""
    import pyarrow
    import pyarrow.parquet

    columns = {name: [each.get(name) for each in outcomes] for name in dict.fromkeys(chain.from_iterable(outcomes))}
    if kind == "parquet":
        pyarrow.parquet.write_table(pyarrow.table({name: _array(column) for name, column in columns.items()}), path)
    else:
        with path.open("w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file, delimiter="\t" if kind == "tsv" else ",", lineterminator="\n")
            writer.writerow(columns)
            writer.writerows([_field(value) for value in row] for row in zip(*columns.values(), strict=True))
    return len(outcomes)


def _field(value: Any) -> str | None:
    return value if value is None or isinstance(value, str) else _json(value)


def _array(column: list[Any]) -> Any:
    import pyarrow

    types = {type(value) for value in column if value is not None}
    with suppress(OverflowError):  # an integer of more than 64 bits
        if types <= {bool} or types <= {int, float}:
            return pyarrow.array(column, pyarrow.float64() if float in types else None)
    return pyarrow.array(map(_field, column), pyarrow.string())
