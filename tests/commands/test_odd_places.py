"""Folders that cannot be made, files that are pipes or no text, sizes that no parser takes: one line each."""

import io
import os
import resource
import sys
from pathlib import Path

import pytest
from families import make_family, tokenizer_of
from job import Shelf, refused_line, save_model, whole_run
from made_runs import make_run, results_of, settings_of

from distill.commands.cli import main
from distill.models.export_folder import export
from distill.report.comparison import runs as compared
from distill.runtime.errors import SettingError
from distill.runtime.files import make_folder


@pytest.mark.slow
def test_an_export_onto_a_full_disk_is_a_failure_of_storage(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], request: pytest.FixtureRequest
) -> None:
    """A file that may not grow further is what programs meet on a full disk."""
    pytest.importorskip("onnxscript")
    pytest.importorskip("onnxruntime")
    export(make_family("distilbert"), tokenizer_of("distilbert"), tmp_path / "student", "# The card\n")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    request.addfinalizer(lambda: resource.setrlimit(resource.RLIMIT_FSIZE, limits))
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, limits[1]))
    assert main(["export", f"model={tmp_path}"]) == 74
    assert "make room" in capfd.readouterr().err and not (tmp_path / "student" / "onnx").exists()


def test_a_recipe_with_the_name_of_a_packaged_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe" / "smoke.yaml").write_text("# @package _global_\nseed: 7\n")
    line = refused_line(capsys, "--config-dir", str(tmp_path), "+recipe=smoke")
    assert str(tmp_path / "recipe" / "smoke.yaml") in line and "another name" in line


def test_seeds_and_texts_of_predictions(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = f"model={save_model(tmp_path / 'model')}"
    for seed in (str(2**64), str(-1), "9" * 5000):
        assert "seed=" in refused_line(capsys, "predict", model, "text=a", "sample=true", f"seed={seed}")[:20]
    assert "UTF-8" in refused_line(capsys, "predict", model, "text=caf\udce9")
    for content, lenient in ((b"caf\xe9\n", False), (b"caf\xe9\n", True), (b'"\\ud800"\n', False)):
        errors = "surrogateescape" if lenient else "strict"
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content), encoding="utf-8", errors=errors))
        assert "convert it" in refused_line(capsys, "predict", model)


def test_folders_that_cannot_be_made(shelf: Shelf, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert shelf.run(Path("/proc/x")) == 2
    assert "hydra.run.dir=/proc/x: no folder" in capsys.readouterr().err
    make_run(tmp_path / "run", settings_of(1), results_of({"heldout": 5.0}))
    assert "/proc/x" in refused_line(capsys, "compare", f"run={tmp_path / 'run'}", "output=/proc/x")
    model = f"model={save_model(tmp_path / 'model')}"
    assert "/proc/x" in refused_line(capsys, "predict", model, "text=a", "output=/proc/x.jsonl")
    with pytest.raises(SettingError, match="mine=/proc/a/b: no folder"):
        make_folder(Path("/proc/a/b"), "mine=/proc/a/b")


def test_a_refused_run_leaves_no_folder(
    shelf: Shelf, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise SettingError("student.layers=[9]: too many")

    monkeypatch.setattr(whole_run, "find_caches", refuse)  # the folder is entered before
    (tmp_path / "before").mkdir()
    for name in ("new", "before"):
        assert shelf.run(tmp_path / name) == 2
    assert "student.layers=[9]: too many" in capsys.readouterr().err
    assert not (tmp_path / "new").exists() and (tmp_path / "before").exists()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("config.yaml", None), ("config.yaml", b"\xff\x00"), ("config.yaml", "pipe"), ("metrics.jsonl", "pipe"),
        ("metrics.jsonl", b'{"step": 1, "seconds": "two", "data_wait": 0.0}\n'), ("results.json", "pipe"),
    ],
)  # fmt: skip
def test_a_report_of_a_damaged_run(
    name: str, content: bytes | str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path / "run", settings_of(1), results_of({"heldout": 5.0}))
    (run / name).unlink()
    if content == "pipe":
        os.mkfifo(run / name)
    elif isinstance(content, bytes):
        (run / name).write_bytes(content)
    assert name in refused_line(capsys, "report", f"run={run}")


def test_comparing_a_whole_disk_ends_soon(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compared, "MAX_FOLDERS", 20)
    for number in range(30):
        make_run(tmp_path / "runs" / str(number), settings_of(number), results_of({"heldout": 5.0}))
        (tmp_path / "others" / str(number)).mkdir(parents=True)
    assert "nearer to the runs" in refused_line(capsys, "compare", f"run={tmp_path}")
    assert len(compared.find_runs([str(tmp_path / "runs")])) == 30, "runs do not count"


@pytest.mark.parametrize("settings", ["1: {2: 3}\n", "? [a, b]\n: 1\n", "a: {? 2020-01-01 : {x: 1}}\n", "- a\n"])
def test_settings_of_others_are_compared(settings: str, tmp_path: Path) -> None:
    for number in (1, 2):
        run = make_run(tmp_path / str(number), settings_of(number), results_of({"heldout": 5.0}))
        (run / "config.yaml").write_text(settings + (f"x: {number}\n" if number > 1 and settings[0] != "-" else ""))
    assert main(["compare", f"run={tmp_path}", f"output={tmp_path / 'out'}"]) == 0
