"""The command `distill push`: the student of a finished run on the Hugging Face Hub, with its card and its report."""

import os
import shutil
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from distill.commands.arguments import Arguments, LocalFile, Text, parse
from distill.runtime.errors import SettingError, StorageFailed, first_line

if TYPE_CHECKING:
    from distill.runs.record import Record

HELP = """
usage: distill push run=RUN name=NAME [public=true] [message=TEXT] [overwrite=true]
       distill push RUN NAME [--public]

Upload the student of a finished run to a new, private repository of the Hugging Face Hub: the folder student/ with its
card, and report.html without the paths of this machine and without samples of its text. The token is that of
`hf auth login`, or HF_TOKEN in the environment; it is no argument.

  run=RUN          a run folder with a student and results.json
  name=NAME        the repository: OWNER/NAME, or NAME in your own account
  public=true      make the repository public
  message=TEXT     the commit message (default: what the student is)
  overwrite=true   where there is a repository of that name, add the commit to it; weights, tokenizer and ONNX files of
                   an earlier student, which it does not replace, are deleted

  distill push run=runs/distilbert_gutenberg name=my-name/my-student
"""
LOGIN = "run `hf auth login`, or set HF_TOKEN in the environment"
# By the status of the Hub's answer: what that means here, and the cure.
ANSWERS = {
    401: ("the Hub does not accept the token", LOGIN),
    403: ("this token may not write there", "take a token with the right to write, or a name in your own account"),
    404: ("the Hub has no such owner, or does not show it to this token", "correct the name"),
}


class PushArguments(Arguments):
    """What the command takes."""

    run: LocalFile
    name: str
    public: bool = False
    message: Text | None = None
    overwrite: bool = False


def run(arguments: list[str]) -> None:
    """Upload the student, and print where it is."""
    from distill.models.load import refuse_unfinished
    from distill.runs.results_file import check_student, read_run

    options = parse(PushArguments, by_name(arguments), "push")
    refuse_unfinished("run", str(options.run))
    record = read_run(options.run, "run")
    check_student(options.run, record)
    with TemporaryDirectory() as folder:
        try:
            print(upload(options, record, Path(folder)))
        except SettingError:
            raise
        except Exception as error:  # of huggingface_hub, and of whichever client it is built on
            raise failure_of(error, options.name) from error


def by_name(arguments: list[str]) -> list[str]:
    """RUN NAME --public as run=RUN name=NAME public=true; the folder of a run of a sweep has a = in its name."""
    taken, places = tuple(f"{name}=" for name in PushArguments.model_fields), iter(("run", "name"))
    words = ["public=true" if word == "--public" else word for word in arguments]
    return [word if word.startswith(("-", *taken)) else f"{next(places, 'name')}={word}" for word in words]


def upload(options: PushArguments, record: "Record", folder: Path) -> str:
    """Upload the student, its card and its report; gives the address.

    Args:
        folder: an empty one, for what is uploaded.

    Raises:
        SettingError: no token, no answer of the Hub, or a repository that this may not go to.
    """
    from huggingface_hub import HfApi, get_token

    from distill.models.export_folder import is_of_export
    from distill.report.model_card import title_of_run
    from distill.runtime.hub import is_hub_reached, why_not_reached
    from distill.runtime.redaction import remember

    if (token := get_token()) is None:
        raise SettingError("there is no token of the Hub here", setting="name", value=options.name, cure=LOGIN)
    remember(token)
    if not is_hub_reached():
        raise SettingError(why_not_reached(), setting="name", value=options.name)
    api = HfApi(token=token, library_name="distill")
    name = options.name if "/" in options.name else f"{api.whoami()['name']}/{options.name}"
    address = api.create_repo(name, private=not options.public, exist_ok=True)
    there = api.model_info(name)
    present = {file.rfilename for file in there.siblings or ()}
    if not options.overwrite and present - {".gitattributes"}:  # which is in a new one, or where an upload broke off
        cure = "choose another name, or add a commit to it with overwrite=true"
        raise SettingError("a repository of this name exists", setting="name", value=name, cure=cure)
    if there.private == options.public:
        problem = f"this repository is {'private' if there.private else 'public'}"
        cure = "give another name, or change it in its settings on the Hub" if there.private else "give public=true"
        raise SettingError(problem, setting="name", value=name, cure=cure)
    student, files = (options.run / "student").resolve(), folder / "files"
    shutil.copytree(student, files, copy_function=os.symlink, ignore=shutil.ignore_patterns(".*"))
    write_report(folder, options.run, record).rename(files / "report.html")
    api.upload_folder(
        repo_id=name,
        folder_path=files,
        commit_message=options.message or title_of_run(record),
        # transformers would read some files of an earlier student in place of the new ones.
        delete_patterns=[path for path in present if is_of_export(path) or path.startswith("onnx/")],
    )
    return str(address)


def failure_of(error: Exception, name: str) -> Exception:
    """What the Hub answers, or a connection that is lost, in one line: SettingError where the user can correct it."""
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    if isinstance(error, HFValidationError):
        return SettingError(f"this is no name of a repository ({first_line(error)})", setting="name", value=name)
    if not isinstance(error, HfHubHTTPError):
        answer = f"the upload has ended early ({type(error).__name__}: {first_line(error)})"
        return StorageFailed(f"name={name}: {answer}; repeat the command with overwrite=true")
    status, reason = error.response.status_code, error.server_message or first_line(error)
    if status not in ANSWERS:
        return StorageFailed(f"name={name}: the Hub answers with status {status} ({reason})")
    problem, cure = ANSWERS[status]
    return SettingError(f"{problem} ({reason})", setting="name", value=name, cure=cure)


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
    return folder / "report.html"
