"""The command `python -m distill.predict`: what a trained model answers to texts, files and pipes."""

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from distill.runtime.errors import SettingError
from distill.runtime.nearest import did_you_mean
from distill.runtime.threads import limit_spinning

if TYPE_CHECKING:
    from distill.models.loaded import LoadedModel
    from distill.runtime.signals import Signals

USAGE = """usage: python -m distill.predict model=RUN [text=TEXT ...] [input=FILE] [output=FILE] [OPTION=VALUE ...]
  model=RUN            a run folder, a milestone, a model folder or a name on the Hub
  text=TEXT            a text; again for a further one (second=TEXT: the other text of a pair)
  question=TEXT context=TEXT   for a model that finds answers
  input=FILE           *.jsonl, *.csv, *.tsv, *.parquet, *.txt (a text a line), or SQuAD's *.json; without it, and
                       without text, standard input: JSON lines, or a text a line
  output=FILE          JSON lines; without it, to standard output. *.json: answers by the id of their question
  output=FILE.tsv|DIR  with input= a test set of GLUE: the file that its server takes (task=NAME where the run of the
                       model does not say it)
options: top_k=N (words for a mask, 5; classes, all; answers, 1)   batch_size=32   device=auto|cpu|cuda
  of continuations: max_new_tokens=30 sample=true temperature=1 top_k=N top_p=1 seed=0
  of fine-tuned models: sequence_length=N (as trained) no_answer=true|false (as trained) max_answer_tokens=30"""
AT_ONCE = 10_000  # inputs that are read before the first of them is answered
BROKEN_PIPE = 141  # 128 + SIGPIPE: whoever reads the output has ended


@dataclass
class Request:
    """What the command line says."""

    model: str | None = None
    texts: list[str] = field(default_factory=list)
    second: str | None = None
    question: str | None = None
    context: str | None = None
    input: str | None = None
    output: str | None = None
    task: str | None = None
    device: str = "auto"
    options: dict[str, Any] = field(default_factory=dict)  # of PredictConfig


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 0 done, 2 bad input, 74 storage, 128 + a signal; else a bug."""
    from distill.__main__ import until_interrupted

    given = sys.argv[1:] if arguments is None else arguments
    if not given or {"-h", "--help"} & set(given):
        print(USAGE)
        return 0 if given else SettingError.status
    limit_spinning()
    return until_interrupted(lambda signals: run_command(given, signals))


def run_command(arguments: list[str], signals: "Signals") -> int:
    """Answer what the command line gives; the exit status."""
    from distill.__main__ import expected, say

    try:
        answer(parse(arguments))
    except BrokenPipeError:
        # Python would fail again when it flushes what is left at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return BROKEN_PIPE
    except Exception as error:
        if (failure := expected(error)) is None:
            raise
        say(failure)
        return int(failure.status)
    return 0


def parse(arguments: list[str]) -> Request:
    """The command line as a request. Raises SettingError for what it does not know, or a value that cannot be."""
    from distill.commands.prediction.settings import PredictConfig

    request = Request()
    options = {each.name: (get_args(each.type) or (each.type,))[0] for each in fields(PredictConfig)}
    plain = [each.name for each in fields(Request) if each.name not in ("texts", "options")]
    for argument in arguments:
        name, separator, value = argument.partition("=")
        if not separator or argument.startswith("-"):
            raise SettingError(f"{argument}: this command takes NAME=VALUE; see python -m distill.predict --help")
        if name == "text":
            request.texts.append(value)
        elif name in plain:
            setattr(request, name, value)
        elif name in options:
            request.options[name] = _value(name, value, options[name])
        else:
            known = [*plain, "text", *options]
            raise SettingError(f"{name} is no setting of this command{did_you_mean(name, known)}: see --help")
    if request.model is None:
        raise SettingError("model is missing: give model=RUN, a run folder, a model folder or a name on the Hub")
    return request


def _value(name: str, value: str, kind: Any) -> Any:
    """The value of an option of this type."""
    wanted = {bool: "true or false", int: "a whole number", float: "a number"}
    try:
        return {"true": True, "false": False}[value.lower()] if kind is bool else kind(value)
    except (KeyError, ValueError):
        raise SettingError(f"{name}={value}: give {wanted[kind]}") from None


def answer(request: Request) -> None:
    """Write what the model answers, where the request says.

    Raises:
        SettingError: inputs that the model does not read, or settings that do not fit each other.
    """
    from distill.commands.prediction.records import write_outcomes
    from distill.commands.prediction.settings import PredictConfig
    from distill.commands.prediction.submission import write_submissions
    from distill.models.loaded import load_model
    from distill.runtime.progress import log

    _check(request)
    settings = PredictConfig(**request.options)
    found = load_model(request.model or "", request.device)
    settings.check(found.kind)
    if is_submission(request.output):
        assert request.output is not None
        if request.input is None:
            raise SettingError(f"output={request.output} is GLUE's form of predictions: give input=, its test set")
        for file, count in write_submissions(found, request.task, request.input, request.output, settings):
            log(f"{count:,} predictions in {file}")
        return
    if request.task is not None:
        raise SettingError(
            f"task={request.task} is for GLUE's form of predictions: give output=FILE.tsv, or leave it out"
        )
    count = write_outcomes(outcomes(found, request, settings), request.output)
    if request.output is not None:
        log(f"{count:,} predictions in {request.output}")


def _check(request: Request) -> None:
    """Raises SettingError for inputs that are given twice."""
    given = {"text": bool(request.texts), "question": request.question is not None, "input": request.input is not None}
    named = [name for name, there in given.items() if there]
    if len(named) > 1:
        raise SettingError(f"{named[0]} and {named[1]} are both given: give the inputs in one of these ways")
    if request.second is not None and len(request.texts) != 1:
        raise SettingError("second= is the other text of one text=: give text= once, or a file of pairs as input=")
    if (request.question is None) != (request.context is None):
        raise SettingError("question= and context= belong together: give both, or a file of them as input=")


def is_submission(output: str | None) -> bool:
    """Whether an output is one of GLUE's files, or a folder for them."""
    return output is not None and (output.lower().endswith(".tsv") or Path(output).expanduser().is_dir())


def outcomes(found: "LoadedModel", request: Request, settings: Any) -> Iterator[dict[str, Any]]:
    """What the model answers to each input, in their order."""
    from distill.commands.prediction.predict import as_record, predict_records

    inputs, before = enumerate(_inputs(found, request), 1), 0
    while some := list(islice(inputs, AT_ONCE)):
        records = [as_record(_renamed(given, found), n, found.kind, f"{place}: input") for n, (place, given) in some]
        try:
            yield from predict_records(found, records, settings)
        except SettingError as error:
            if before:
                raise SettingError(f"of the inputs from {before + 1:,} on: {error}") from None
            raise
        before += len(some)


def _inputs(found: "LoadedModel", request: Request) -> Iterator[tuple[str, Any]]:
    """The inputs, and where each stands."""
    from distill.commands.prediction.predict import ANSWERS
    from distill.commands.prediction.records import read_inputs, read_pipe

    if request.second is not None:
        yield "text", {"text": request.texts[0], "second": request.second}
    elif request.texts:
        yield from (("text", text) for text in request.texts)
    elif request.question is not None:
        yield "question", {"question": request.question, "context": request.context}
    elif request.input is not None and request.input != "-":
        columns = [str(found.corpus.get(name) or name) for name in ANSWERS[found.kind.noun][1]]
        columns += [str(found.corpus["second"])] if found.corpus.get("second") else []
        yield from read_inputs(request.input, tuple(columns))
    elif request.input is None and sys.stdin.isatty():
        raise SettingError("nothing to answer: give text=TEXT or input=FILE, or pipe texts into the command")
    else:
        yield from read_pipe(sys.stdin)


def _renamed(given: Any, found: "LoadedModel") -> Any:
    """A record of a table whose columns are called as in the run that trained the model, with the names used here."""
    if not isinstance(given, dict):
        return given
    named = {name: found.corpus.get(name) for name in ("text", "second")}
    more = {name: given[column] for name, column in named.items() if name not in given and column in given}
    return {**given, **more}
