"""`distill push` against a stand-in of the Hub: what it uploads, to whom it is visible, and what it refuses."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hub_server
import pytest
from distributed import free_port
from hub_server import BROKEN, OTHERS, OWNER, READER, Hub, Repository
from huggingface_hub import constants, metadata_load

from distill.commands.cli import main
from distill.commands.push import write_report
from distill.models.loaded import load_model
from distill.runs.facts import Sample, Samples
from distill.runs.results_file import read_run
from distill.runtime.errors import SettingError


@pytest.fixture
def hub(monkeypatch: Any, tmp_path: Path) -> Iterator[Hub]:
    """The Hub of this process, with the token of its owner in the environment."""
    with hub_server.stand_in_hub() as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no_token"))
        monkeypatch.setenv("HF_TOKEN", OWNER)
        monkeypatch.delenv("HUGGING_FACE_HUB_TOKEN", raising=False)
        yield hub


def pushed(capfd: Any, run: Path, *arguments: str, status: int = 0) -> str:
    """The last line that the command prints; no token is in any."""
    capfd.readouterr()
    assert main(["push", f"run={run}", *arguments]) == status
    shown = capfd.readouterr()
    assert OWNER not in shown.out + shown.err and READER not in shown.err and "Traceback" not in shown.err
    assert bool(shown.out) == (status == 0)
    return (shown.out or shown.err).splitlines()[-1]


def test_the_student_its_card_and_the_report_are_one_commit(hub: Hub, done: Path, capfd: Any, tmp_path: Path) -> None:
    """What an earlier student has left is deleted in the same commit; other files of the user stay."""
    stale = ["model-00001-of-00002.safetensors", "model.safetensors.index.json", "onnx/model.onnx", "spiece.model"]
    own = ["notes.md", "plots/mine.png", ".gitattributes", "lora/adapter_model.safetensors", "spm/own.model"]
    hub.repositories["me/mine"] = Repository(True, dict.fromkeys([*stale, *own, "config.json"], b""))
    given = ("name=me/mine", "message=First of all")
    assert "name=me/mine: a repository of this name exists" in pushed(capfd, done, *given, status=2)
    assert pushed(capfd, done, *given, "overwrite=true") == f"{hub.url}/me/mine"
    repository, student = hub.repositories["me/mine"], {path.name: path for path in (done / "student").iterdir()}
    assert set(repository.files) == {*student, *own, "report.html"} and "model.safetensors" in student
    assert all(repository.files[name] == path.read_bytes() for name, path in student.items())
    assert repository.private and repository.messages == ["First of all"]
    assert sum(request.startswith("POST") and "/commit/" in request for request in hub.requests) == 1
    report = repository.files["report.html"].decode()
    assert "Learning curve" in report and str(done.parent) not in report and "Resolved configuration" not in report
    (tmp_path / "README.md").write_bytes(repository.files["README.md"])
    assert metadata_load(tmp_path / "README.md")["library_name"] == "transformers"


def test_samples_of_the_users_text_stay_here(done: Path, tmp_path: Path) -> None:
    record = read_run(done, "run")
    samples = Samples(
        data="heldout", texts=[Sample(prompt="A private letter", continuations={"student": "that nobody reads"})]
    )
    page = write_report(tmp_path, done, record.changed(samples=samples)).read_text()
    assert "Learning curve" in page and "private letter" not in page and "nobody reads" not in page


def test_visibility(hub: Hub, done: Path, capfd: Any) -> None:
    """A repository that a broken upload left empty is taken, and none of another visibility than was asked for."""
    hub.repositories |= {"me/empty": Repository(True, {".gitattributes": b""}), "me/public": Repository(False)}
    assert pushed(capfd, done, "name=student", "public=true").endswith("/me/student")
    assert not hub.repositories["me/student"].private and "distilled from" in hub.repositories["me/student"].messages[0]
    pushed(capfd, done, "name=me/empty")
    assert hub.repositories["me/empty"].private and "model.safetensors" in hub.repositories["me/empty"].files
    line = pushed(capfd, done, "name=me/public", "overwrite=true", status=2)
    assert "name=me/public: this repository is public" in line and not hub.repositories["me/public"].files


@pytest.mark.parametrize(
    ("token", "name", "words"),
    [
        (OWNER, f"{OTHERS}/student", "You don't have the rights"),
        (OWNER, "me/a name", "Repo id must use alphanumeric chars"),
        (READER, "me/student", "You don't have the rights"),
        ("hf_old", "me/student", "Invalid username or password.); correct it, or `hf auth login` with a token"),
        ("", "me/student", "`hf auth login`"),
    ],
)
def test_what_the_hub_refuses_is_one_line(
    hub: Hub, done: Path, capfd: Any, monkeypatch: Any, token: str, name: str, words: str
) -> None:
    monkeypatch.setenv("HF_TOKEN", token)
    line = pushed(capfd, done, f"name={name}", status=2)
    assert line.startswith(f"distill: name={name}: ") and words in line


def test_a_hub_that_fails_and_runs_without_a_student(
    hub: Hub, done: Path, capfd: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    assert "the storage is away); repeat the command" in pushed(capfd, done, f"name={BROKEN}", status=74)
    assert "is no finished run" in pushed(capfd, tmp_path, "name=me/student", status=2)
    (tmp_path / "config.yaml").touch()
    (tmp_path / "checkpoints").mkdir()
    assert "is a run that has not finished" in pushed(capfd, tmp_path, "name=me/student", status=2)
    with pytest.raises(SettingError, match=r"^model=.* is a run that has not finished, so it has no student"):
        load_model(tmp_path)
    shutil.copytree(done / "student", tmp_path / "student")
    shutil.copyfile(done / "results.json", tmp_path / "results.json")
    (tmp_path / "student" / "config.json").write_text("{}")
    line = pushed(capfd, tmp_path, "name=me/student", status=2)
    assert "is damaged (config.json is not as it was written" in line and "me/student" not in hub.repositories
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{free_port()}")
    assert "Connection refused" in pushed(capfd, done, "name=me/student", status=74)
