"""The command `distill predict`: predictions of a trained model for texts, conversations, files and pipes."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distill.commands.arguments import Text, parse, split
from distill.runtime.errors import SettingError

if TYPE_CHECKING:
    from distill.commands.prediction.settings import PredictConfig
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
  output=FILE.tsv|FOLDER   of a model for a task of GLUE, with input= its test set: the file that its server takes
                   (task=NAME for a model of another run)
  device=auto      auto, cpu or cuda
  batch_size=32    sequences per forward pass
  top_k=N          tokens for a mask (5), classes (all), or answers (1)

of continuations: max_new_tokens=30 sample=true temperature=1 top_k=N top_p=1 seed=0
of fine-tuned models: sequence_length=N (as trained) no_answer=true|false (as trained) max_answer_tokens=30

  distill predict model=runs/distilbert_gutenberg text="It was a dark and stormy [MASK]."
  distill predict model=runs/squad input=dev-v1.1.json output=answers.json
"""
OTHER_FORMATS = (".gz", ".zip", ".xls", ".xlsx", ".yaml", ".yml")  # of outputs, by their names
AT_ONCE = 10_000  # inputs that are read before the first of them is answered


@dataclass(frozen=True)
class Request:
    """What the command takes besides the options of `PredictConfig`."""

    model: str
    text: list[Text] = field(default_factory=list)
    second: Text | None = None
    question: Text | None = None
    context: Text | None = None
    input: str | None = None
    output: str | None = None
    overwrite: bool = False
    task: str | None = None
    device: str = "auto"


def run(arguments: list[str]) -> None:
    """Predict for the inputs of the command line."""
    from distill.commands.prediction.settings import PredictConfig

    request, options = split(Request, arguments, "predict")
    answer(request, parse(PredictConfig, options, "predict", besides=Request))


def answer(request: Request, settings: "PredictConfig") -> None:
    """Write the predictions to the output of the request.

    Raises:
        SettingError: inputs that the model does not read, or settings that do not fit each other.
    """
    from distill.commands.prediction.records import files_read, write_outcomes
    from distill.commands.prediction.submission import write_submissions
    from distill.models.loaded import load_model
    from distill.runtime.files import refuse_overwriting
    from distill.runtime.progress import log

    _check(request)
    names_files = request.task is not None or Path(request.output or "").expanduser().is_dir()  # GLUE's, by the task
    if request.output is not None and not names_files:
        files = files_read(request.model, [] if request.input is None else [Path(request.input).expanduser()])
        target = Path(request.output).expanduser()
        refuse_overwriting(target, f"output={request.output}", files, request.overwrite)
    model = load_model(request.model, request.device)
    settings.check(model.kind)
    if is_submission(request, model):
        assert request.output is not None
        if request.input is None:
            raise SettingError(
                f"output={request.output} is for predictions in GLUE's form: give the test set as input=PATH"
            )
        task, overwrite = request.task, request.overwrite
        for file, count in write_submissions(model, task, request.input, request.output, settings, overwrite):
            log(f"{count:,} predictions in {file}")
        return
    if request.task is not None:
        raise SettingError(
            f"task={request.task} is for GLUE's form of predictions: give output=FILE.tsv, or leave it out"
        )
    count = write_outcomes(outcomes(model, request, settings), request.output)
    if request.output is not None:
        log(f"{count:,} predictions in {request.output}")


def _check(request: Request) -> None:
    """Raises SettingError for inputs that are given twice, and for an output in a format that is not written."""
    inputs = {"text": bool(request.text), "question": request.question is not None, "input": request.input is not None}
    present = [name for name, is_set in inputs.items() if is_set]
    if len(present) > 1:
        raise SettingError(f"{present[0]} and {present[1]} are both set: give one of them")
    if request.output is not None and (suffix := Path(request.output).suffix.lower()) in OTHER_FORMATS:
        raise SettingError(
            f"output={request.output}: predictions are not written as {suffix}: give output=FILE.jsonl, FILE.csv, "
            "FILE.tsv or FILE.parquet"
        )
    if request.second is not None and len(request.text) != 1:
        raise SettingError("second= is the other text of one text=: give text= once, or a file of pairs as input=")
    if (request.question is None) != (request.context is None):
        raise SettingError("question= and context= belong together: give both, or a file of them as input=")


def is_submission(request: Request, model: "LoadedModel") -> bool:
    """Whether the output is one of GLUE's files, or a folder for them; any other *.tsv is a table."""
    if request.output is None:
        return False
    of_task = request.task is not None or model.corpus.get("kind") == "glue"
    return Path(request.output).expanduser().is_dir() or (of_task and request.output.lower().endswith(".tsv"))


def outcomes(model: "LoadedModel", request: Request, settings: "PredictConfig") -> "Iterator[Record]":
    """The predictions for all inputs, in their order."""
    from distill.commands.prediction.predict import as_record, predict_records

    inputs, before = enumerate(_inputs(model, request), 1), 0
    while chunk := list(islice(inputs, AT_ONCE)):
        records = [as_record(_renamed(record, model), n, model.kind, f"{place}: input") for n, (place, record) in chunk]
        as_read = (record for _, (_, record) in chunk)
        try:
            yield from map(partial(_with_columns, model), as_read, predict_records(model, records, settings))
        except SettingError as error:
            if before:
                raise SettingError(f"in the inputs from number {before + 1:,} on, counted from 1: {error}") from None
            raise
        before += len(chunk)


def _inputs(model: "LoadedModel", request: Request) -> Iterator[tuple[str, Any]]:
    """The inputs, and where each stands."""
    from distill.commands.prediction.predict import ANSWERS
    from distill.commands.prediction.records import read_inputs, read_pipe
    from distill.data.chat_template import COLUMNS
    from distill.models.kind import CAUSAL

    if request.second is not None:
        yield "text", {"text": request.text[0], "second": request.second}
    elif request.text:
        yield from (("text", text) for text in request.text)
    elif request.question is not None:
        yield "question", {"question": request.question, "context": request.context}
    elif request.input is not None and request.input != "-":
        columns = [str(model.corpus.get(name) or name) for name in ANSWERS[model.kind.noun][1]]
        columns += [str(model.corpus["second"])] if model.corpus.get("second") else []
        instead = COLUMNS if model.kind is CAUSAL else ()
        yield from read_inputs(request.input, tuple(columns), instead, model.corpus.get("quotes"))
    elif request.input is None and sys.stdin.isatty():
        raise SettingError("nothing to answer: give text=TEXT or input=FILE, or pipe texts into the command")
    else:
        yield from read_pipe(sys.stdin)


def _with_columns(model: "LoadedModel", record: Any, outcome: "Record") -> "Record":
    """A prediction with the columns of its table as they were, without the names used here."""
    if not isinstance(record, dict):
        return outcome
    renamed = {name for name in ("text", "second") if (model.corpus.get(name) or name) in {*record} - {name}}
    return {**record, **{name: value for name, value in outcome.items() if name not in renamed}} if renamed else outcome


def _renamed(record: Any, model: "LoadedModel") -> Any:
    """A record of a table whose columns are called as in the run that trained the model, with the names used here.

    A column of that run stands for the text also where another one is called `text`.
    """
    if not isinstance(record, dict):
        return record
    columns = {name: model.corpus.get(name) for name in ("text", "second")}
    return {**record, **{name: record[column] for name, column in columns.items() if column in record}}
