"""The command `distill push`: the student of a finished run on the Hugging Face Hub, with its card and its report."""

from collections.abc import Container, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from distill.commands.arguments import Text, parse
from distill.runtime.errors import SettingError, StorageFailed, first_line

if TYPE_CHECKING:
    from distill.runs.record import Record

HELP = """
usage: distill push run=RUN name=NAME [public=true] [message=TEXT] [overwrite=true]
       distill push RUN NAME [--public]

Upload the student of a finished run to the Hugging Face Hub, in one commit of a new, private repository: the folder
student/ with its card, and report.html without the paths of this machine and without samples of its text. The token is
that of `hf auth login`, or HF_TOKEN in the environment; it is no argument.

  run=RUN          a run folder with a student and results.json
  name=NAME        the repository: OWNER/NAME, or NAME in your own account
  public=true      make the repository public
  message=TEXT     the commit message (default: what the student is)
  overwrite=true   where there is a repository of that name, add the commit to it; weights, tokenizer and ONNX files of
                   an earlier student, which it does not replace, are deleted

  distill push run=runs/distilbert_gutenberg name=my-name/my-student
"""
PLACES = ("run", "name")  # of the arguments that stand without a name
REPORT = "report.html"
OF_THE_HUB = {".gitattributes"}  # what a new repository holds, such as one whose upload broke off
# By the status of the Hub's answer: what that means here, and the cure.
ANSWERS = {
    401: "the Hub does not accept the token: run `hf auth login` again, or correct HF_TOKEN",
    403: "this token may not write there: take a token with the right to write, or a name in your own account",
    404: "the Hub has no such owner, or does not show it to this token: correct the name",
    409: "a repository of this name exists: choose another name, or add a commit to it with overwrite=true",
}


@dataclass(frozen=True)
class PushArguments:
    """What the command takes."""

    run: Path
    name: str
    public: bool = False
    message: Text | None = None
    overwrite: bool = False


def run(arguments: list[str]) -> None:
    """Upload the student, and print where it is."""
    options = parse(PushArguments, by_name(arguments), "push")
    record = finished_run(options.run)
    api = sign_in(options.name)
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete

    from distill.report.model_card import title_of_run

    with TemporaryDirectory() as folder:
        files = {REPORT: write_report(Path(folder), options.run, record), **student_files(options.run / "student")}
        message = options.message or title_of_run(record)
        with naming_failures(options.name):
            name = options.name if "/" in options.name else f"{api.whoami()['name']}/{options.name}"
            made = api.create_repo(name, private=not options.public, exist_ok=True)
            there = api.repo_info(name)
            present = [file.rfilename for file in there.siblings or ()]
            if not options.overwrite and set(present) - OF_THE_HUB:
                raise SettingError(ANSWERS[409], setting="name", value=name)
            if not options.public and not there.private:
                raise SettingError(f"name={name}: this repository is public: give public=true, or another name")
            if options.public and there.private:
                raise SettingError(
                    f"name={name}: this repository is private, and public=true is for a new one: make it public in its "
                    "settings on the Hub, or give another name"
                )
            changes: list[Any] = [CommitOperationAdd(path, file) for path, file in files.items()]
            changes += [CommitOperationDelete(path) for path in stale_files(present, files)]
            api.create_commit(name, changes, commit_message=message)
    print(made)


def stale_files(paths: Iterable[str], files: Container[str]) -> list[str]:
    """Of the files in a repository (`paths`) those of an earlier student that `files` does not replace.

    transformers would read some of them in place of the new ones.
    """
    from distill.models.export_folder import is_of_export

    return [path for path in paths if path not in files and (is_of_export(path) or path.startswith("onnx/"))]


def by_name(arguments: list[str]) -> list[str]:
    """The arguments with their names: the first two may stand without, and --public is public=true."""
    places, written, names = iter(PLACES), list[str](), [field.name for field in fields(PushArguments)]
    for argument in arguments:
        # The folder of a run of a sweep has a = in its name.
        has_name = argument.partition("=")[0] in names and "=" in argument
        stands_alone = not has_name and not argument.startswith("-")
        place = next(places, None) if stands_alone else None
        written.append("public=true" if argument == "--public" else f"{place}={argument}" if place else argument)
    return written


def finished_run(folder: Path) -> "Record":
    """The record of a run. Raises SettingError where it has not finished, or its student is not as it was written."""
    from distill.models.load import refuse_unfinished
    from distill.runs.results_file import check_student, read_run

    refuse_unfinished("run", str(folder))
    record = read_run(folder, "run")
    if not (folder / "student").is_dir():
        raise SettingError(f"run={folder} has no folder student/: give a run folder as training left it")
    check_student(folder, record)
    return record


def sign_in(name: str) -> Any:
    """The interface of the Hub, by the token of its user. Raises SettingError without a token or an answer."""
    from huggingface_hub import HfApi, get_token
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    from distill.runtime.hub import is_hub_reached, why_not_reached
    from distill.runtime.redaction import remember

    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise SettingError(f"name={name} is no name of a repository: {first_line(error)}") from None
    if (token := get_token()) is None:
        raise SettingError(
            f"name={name}: there is no token of the Hub here: run `hf auth login`, or set HF_TOKEN in the environment"
        )
    remember(token)
    if not is_hub_reached():
        raise SettingError(f"name={name}: {why_not_reached()}")
    return HfApi(token=token, library_name="distill")


@contextmanager
def naming_failures(name: str) -> Iterator[None]:
    """Turn what the Hub answers, and a connection that is lost, into one line.

    Raises:
        SettingError: it refuses token, name or right.
        StorageFailed: anything else.
    """
    from huggingface_hub.errors import HfHubHTTPError

    try:
        yield
    except SettingError:
        raise
    except HfHubHTTPError as error:
        status, reason = error.response.status_code, error.server_message or first_line(error)
        if status in ANSWERS:
            raise SettingError(f"name={name}: {ANSWERS[status]} ({reason})") from error
        raise StorageFailed(f"name={name}: the Hub answers with status {status} ({reason})") from error
    except Exception as error:  # of whichever client huggingface_hub is built on
        raise StorageFailed(
            f"name={name}: the upload has ended early ({type(error).__name__}: {first_line(error)}): give the command "
            "again, with overwrite=true"
        ) from error


def student_files(student: Path) -> dict[str, Path]:
    """The files of a student's folder, by their place in the repository."""
    return {
        str(file.relative_to(student)): file
        for file in sorted(student.rglob("*"))
        if file.is_file() and not any(part.startswith(".") for part in file.relative_to(student).parts)
    }


def write_report(folder: Path, run_folder: Path, record: "Record") -> Path:
    """Write the report of a run into another folder, without paths of this machine, settings and samples of text."""
    from distill.report import report
    from distill.report.card_facts import shareable, without_paths
    from distill.runs.record import Record
    from distill.runtime.jsonl import is_metrics, read_lines
    from distill.runtime.redaction import redacted

    content = replace(shareable(record), started_in=None, samples=None).to_json()
    shared = Record.from_json(redacted(content, without_paths))
    report.write(folder, shared, read_lines(run_folder / "metrics.jsonl", is_metrics), "")
    return folder / REPORT
