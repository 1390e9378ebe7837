"""`distill push` against a stand-in of the Hub: what it uploads, to whom it is visible, and what it refuses."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import hub_server
import pytest
from distributed import free_port
from hub_server import OTHERS, OWNER, READER, Hub, Repository
from huggingface_hub import constants, metadata_load
from job import Shelf

from distill.commands.cli import main
from distill.commands.push import by_name, write_report
from distill.models.loaded import load_model
from distill.runs.record import Sample, Samples
from distill.runs.results_file import read_run
from distill.runtime.errors import SettingError
from distill.runtime.hub import is_hub_reached


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    """The Hub of this process, with the token of its owner in the environment."""
    with hub_server.stand_in_hub() as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no_token"))
        monkeypatch.setenv("HF_TOKEN", OWNER)
        monkeypatch.delenv("HUGGING_FACE_HUB_TOKEN", raising=False)
        is_hub_reached.cache_clear()
        yield hub
        is_hub_reached.cache_clear()


def pushed(capfd: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What the command prints; no token is in it."""
    capfd.readouterr()
    assert main(["push", *arguments]) == 0
    shown = capfd.readouterr()
    assert OWNER not in shown.out + shown.err
    return shown.out


def refused(capfd: pytest.CaptureFixture[str], *arguments: str, status: int = 2) -> str:
    capfd.readouterr()
    assert main(["push", *arguments]) == status
    shown = capfd.readouterr()
    line = shown.err.splitlines()[-1]
    assert line.startswith("distill: ") and not shown.out and "Traceback" not in shown.err
    assert OWNER not in shown.err and READER not in shown.err
    return line


def test_the_student_its_card_and_the_report_are_one_commit(
    hub: Hub, done: Path, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    printed = pushed(capfd, f"run={done}", "name=me/student", "message=First of all")
    assert printed == f"{hub.url}/me/student\n"
    repository = hub.repositories["me/student"]
    assert repository.private and repository.messages == ["First of all"]
    student = {path.name: path.read_bytes() for path in (done / "student").iterdir()}
    assert {name: repository.files[name] for name in student} == student and "model.safetensors" in student
    assert set(repository.files) - set(student) == {"report.html"}
    report = repository.files["report.html"].decode()
    assert "Learning curve" in report and str(done.parent) not in report and "Resolved configuration" not in report
    (tmp_path / "README.md").write_bytes(repository.files["README.md"])
    assert metadata_load(tmp_path / "README.md")["library_name"] == "transformers"
    assert sum(request.startswith("POST") and "/commit/" in request for request in hub.requests) == 1


def test_samples_of_the_users_text_stay_here(done: Path, tmp_path: Path) -> None:
    record = read_run(done, "run")
    samples = Samples("heldout", 0.7, 40, [Sample("A private letter", {"student": "that nobody reads"})])
    page = write_report(tmp_path, done, replace(record, samples=samples)).read_text()
    assert "Learning curve" in page and "private letter" not in page and "nobody reads" not in page


def test_a_public_one_in_ones_own_account(hub: Hub, done: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """By the short form, too, and with a message that says what it is."""
    assert pushed(capfd, str(done), "student", "--public").endswith("/me/student\n")
    assert not hub.repositories["me/student"].private
    assert "distilled from" in hub.repositories["me/student"].messages[0]


def test_a_name_that_exists_is_refused_or_gets_a_commit(
    hub: Hub, done: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    hub.repositories |= {"me/private": Repository(True), "me/public": Repository(False)}
    hub.repositories["me/private"].files["config.json"] = b"{}"
    line = refused(capfd, str(done), "me/private")
    assert "name=me/private: a repository of this name exists" in line and "overwrite=true" in line
    pushed(capfd, str(done), "me/private", "overwrite=true")
    assert "config.json" in hub.repositories["me/private"].files
    line = refused(capfd, str(done), "me/public", "overwrite=true")
    assert (
        "name=me/public: this repository is public; give public=true" in line
        and not hub.repositories["me/public"].files
    )


def test_a_repository_that_a_broken_upload_left_empty_is_taken(
    hub: Hub, done: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    hub.repositories["me/student"] = Repository(True, {".gitattributes": b""})
    pushed(capfd, str(done), "me/student")
    assert "model.safetensors" in hub.repositories["me/student"].files


def test_what_the_hub_refuses_is_one_line(
    hub: Hub, done: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "this token may not write there" in refused(capfd, str(done), f"{OTHERS}/student")
    assert "name=me/a name: this is no name of a repository" in refused(capfd, str(done), "me/a name")
    hub.broken = True
    assert "status 500 (" in refused(capfd, str(done), "me/broken", status=74)
    for token, expected in (
        (READER, "this token may not write there"),
        ("hf_old", "the Hub does not accept the token"),
    ):
        monkeypatch.setenv("HF_TOKEN", token)
        assert f"name=me/student: {expected}" in refused(capfd, str(done), "me/student")
    monkeypatch.delenv("HF_TOKEN")
    line = refused(capfd, str(done), "me/student")
    assert "name=me/student: there is no token of the Hub here; run `hf auth login`" in line


def test_without_a_network(
    hub: Hub, done: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{free_port()}")
    line = refused(capfd, str(done), "me/student")
    assert line.endswith("does not answer within 2 s (HF_HUB_ETAG_TIMEOUT): check the network")
    monkeypatch.setenv("HF_ENDPOINT", constants.ENDPOINT)
    assert refused(capfd, str(done), "me/student") == f"{line}, and HF_ENDPOINT, which names it"


def test_a_run_without_a_finished_student(
    hub: Hub, shelf: Shelf, done: Path, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert "is no finished run" in refused(capfd, str(tmp_path), "me/student")
    (tmp_path / "config.yaml").touch()
    (tmp_path / "checkpoints").mkdir()
    assert "is a run that has not finished" in refused(capfd, str(tmp_path), "me/student")
    with pytest.raises(SettingError, match=r"^model=.* is a run that has not finished, so it has no student"):
        load_model(tmp_path)
    (tmp_path / "results.json").write_text((done / "results.json").read_text())
    (tmp_path / "student").mkdir()
    for file in (done / "student").iterdir():
        (tmp_path / "student" / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "student" / "config.json").read_text())
    (tmp_path / "student" / "config.json").write_text(json.dumps(config))
    assert "is damaged (config.json is not as it was written" in refused(capfd, str(tmp_path), "me/student")
    assert "name is missing" in refused(capfd, str(done))
    assert not hub.repositories


def test_a_run_of_a_sweep_stands_without_a_name() -> None:
    """Its folder has a = in its name."""
    assert by_name(["runs/x-sweep/seed=0", "me/mine"]) == ["run=runs/x-sweep/seed=0", "name=me/mine"]
    assert by_name(["run=runs/x", "name=me/mine", "--public"]) == ["run=runs/x", "name=me/mine", "public=true"]


def test_what_an_earlier_student_has_left_is_deleted(hub: Hub, done: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """In the same commit; other files of the user stay."""
    stale = ["model-00001-of-00002.safetensors", "model.safetensors.index.json", "onnx/model.onnx", "spiece.model"]
    stale += ["chat_template.jinja", "vocab.txt", "merges.txt", "added_tokens.json"]
    own = ["notes.md", "plots/mine.png", ".gitattributes", "lora/adapter_model.safetensors", "spm/own.model"]
    hub.repositories["me/mine"] = Repository(True, dict.fromkeys([*stale, *own, "config.json"], b""))
    pushed(capfd, str(done), "me/mine", "overwrite=true")
    student, files = {file.name for file in (done / "student").iterdir()}, hub.repositories["me/mine"].files
    assert set(files) == {*student, *own, "report.html"}
    assert files["config.json"] == (done / "student" / "config.json").read_bytes()
    assert sum(request.startswith("POST") and "/commit/" in request for request in hub.requests) == 1
