"""The command `distill push`: the student of a finished run on the Hugging Face Hub, with its card and its report."""

import os
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from pydantic import Field

from distill.commands.arguments import Arguments, LocalFile, Text, help_of, parse
from distill.runtime.errors import SettingError, StorageFailed, first_line

if TYPE_CHECKING:
    from distill.runs.record import Record


class PushArguments(Arguments):
    """Upload the student of a finished run to a new, private repository of the Hugging Face Hub.

    It is the folder student/ with its card, and report.html without the paths of this machine and without samples of
    its text. The token is that of `hf auth login`, or HF_TOKEN in the environment; it is no argument.

      distill push run=runs/distilbert_gutenberg name=my-name/my-student
    """

    run: LocalFile = Field(title="RUN", description="a run folder with a student and results.json")
    name: str = Field(title="NAME", description="the repository: OWNER/NAME, or NAME in your own account")
    public: bool = Field(False, description="make the repository public")
    message: Text | None = Field(None, title="TEXT", description="the commit message (default: what the student is)")
    overwrite: bool = Field(
        False,
        description="where there is a repository of that name, add the commit to it; weights, tokenizer and ONNX files "
        "of an earlier student, which it does not replace, are deleted",
    )


HELP = help_of(PushArguments, "push")


def run(arguments: list[str]) -> None:
    """Upload the student, and print where it is."""
    from distill.models.load import refuse_unfinished
    from distill.runs.results_file import check_student, read_run

    options = parse(PushArguments, arguments, "push")
    refuse_unfinished("run", str(options.run))
    record = read_run(options.run, "run")
    check_student(options.run, record)
    with TemporaryDirectory() as folder:
        try:
            print(upload(options, record, Path(folder)))
        except SettingError:
            raise
        except Exception as error:  # of huggingface_hub, and of whichever client it is built on
            status = getattr(getattr(error, "response", None), "status_code", 400 * isinstance(error, ValueError))
            reason = getattr(error, "server_message", None) or first_line(error)
            line = f"name={options.name}: the upload has failed ({reason})"
            if 400 <= status < 500:
                raise SettingError(f"{line}; correct it, or `hf auth login` with a token that may write") from error
            raise StorageFailed(f"{line}; repeat the command") from error


def upload(options: PushArguments, record: "Record", folder: Path) -> str:
    """Upload the student, its card and its report in one commit, by way of an empty folder; gives the address."""
    from huggingface_hub import HfApi, get_token

    from distill.models.export_folder import is_of_export
    from distill.report.model_card import title_of_run

    if get_token() is None:
        cure = "run `hf auth login`, or set HF_TOKEN"
        raise SettingError("there is no token of the Hub here", setting="name", value=options.name, cure=cure)
    api = HfApi(library_name="distill")
    address = api.create_repo(options.name, private=not options.public, exist_ok=True)
    there = api.model_info(address.repo_id)
    present = {file.rfilename for file in there.siblings or ()}
    if not options.overwrite and present - {".gitattributes"}:  # which is in a new one, or where an upload broke off
        cure = "choose another name, or add a commit to it with overwrite=true"
        raise SettingError("a repository of this name exists", setting="name", value=options.name, cure=cure)
    if there.private == options.public:
        problem = f"this repository is {'private' if there.private else 'public'}, and public={options.public}"
        raise SettingError(problem, setting="name", value=options.name, cure="change one of them, or the name")
    files = folder / "files"
    student = (options.run / "student").resolve()
    shutil.copytree(student, files, copy_function=os.symlink, ignore=shutil.ignore_patterns(".*"))
    write_report(folder, options.run, record).rename(files / "report.html")
    # transformers would read some files of an earlier student in place of the new ones.
    replaced = [path for path in present if is_of_export(path) or path.startswith("onnx/")]
    message = options.message or title_of_run(record)
    api.upload_folder(repo_id=address.repo_id, folder_path=files, commit_message=message, delete_patterns=replaced)
    return str(address)


def write_report(folder: Path, run_folder: Path, record: "Record") -> Path:
    """Write the report of a run into another folder, without paths of this machine, settings and samples of text."""
    from distill.report import report
    from distill.report.model_card import shareable
    from distill.runtime.jsonl import read_lines

    shared = shareable(record).changed(started_in=None, samples=None)
    report.write(folder, shared, read_lines(run_folder / "metrics.jsonl"), "")
    return folder / "report.html"
