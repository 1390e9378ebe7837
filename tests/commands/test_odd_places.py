"""Folders that cannot be made, files that are pipes or no text, sizes that nothing is to be built of: one line each."""

import io
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from families import make_family, tokenizer_of
from job import Shelf, environment, refused_line, save_model, whole_run
from made_runs import make_run, results_of, settings_of

from distill.commands.api.run import RunResults
from distill.commands.cli import main
from distill.models import load
from distill.models.export_folder import export
from distill.models.load import load_pretrained
from distill.runs.results_file import read_results
from distill.runtime.errors import Damaged, SettingError
from distill.runtime.files import MAX_YAML, make_folder, read_yaml

SECONDS = 120  # of a busy machine; what is refused here took minutes, or more memory than there is
LAUGHS = "a0: &a0 {x: [1, 2, 3]}\n" + "".join(
    f"a{n}: &a{n} {{x: [{', '.join([f'*a{n - 1}'] * 9)}]}}\n" for n in range(1, 12)
)


@pytest.fixture(autouse=True)
def ends_soon() -> Iterator[None]:
    begin = time.monotonic()
    yield
    assert time.monotonic() - begin < SECONDS


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


def test_seeds_and_texts_of_predictions(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = f"model={save_model(tmp_path / 'model')}"
    for seed in (str(2**64), str(-1), "9" * 5000):
        assert "seed=" in refused_line(capsys, "predict", model, "text=a", "sample=true", f"seed={seed}")[:20]
    assert "UTF-8" in refused_line(capsys, "predict", model, "text=caf\udce9")
    for content, lenient in ((b"caf\xe9\n", False), (b"caf\xe9\n", True), (b'{"text": "\\ud800"}\n', False)):
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

    monkeypatch.setattr(whole_run, "FrozenTeachers", refuse)  # the folder is entered before
    (tmp_path / "before").mkdir()
    for name in ("new", "before"):
        assert shelf.run(tmp_path / name) == 2
    assert "student.layers=[9]: too many" in capsys.readouterr().err
    assert not (tmp_path / "new").exists() and (tmp_path / "before").exists()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("config.yaml", None), ("config.yaml", b"\xff\x00"), ("config.yaml", "pipe"), ("metrics.jsonl", "pipe"),
        ("metrics.jsonl", b'{"step": "two"}\n'),
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


@pytest.mark.parametrize("settings", ["1: {2: 3}\n", "? [a, b]\n: 1\n", "a: {? 2020-01-01 : {x: 1}}\n", "- a\n"])
def test_settings_of_others_are_compared(settings: str, tmp_path: Path) -> None:
    for number in (1, 2):
        run = make_run(tmp_path / str(number), settings_of(number), results_of({"heldout": 5.0}))
        (run / "config.yaml").write_text(settings + (f"x: {number}\n" if number > 1 and settings[0] != "-" else ""))
    assert main(["compare", f"run={tmp_path}", f"output={tmp_path / 'out'}"]) == 0


@pytest.mark.parametrize(
    "override",
    ["corpus.path=" + "a" * 30_000, "+" + "a" * 3_000_000 + "=1", "student.layers=[" + ",".join(["1"] * 4000) + "]",
     f"seed={'9' * 100_000}"],
    ids=["text", "name", "list", "digits"],
)  # fmt: skip
def test_a_long_override(override: str, capsys: pytest.CaptureFixture[str]) -> None:
    for command in ([], ["settings"], ["prepare"]):
        assert override[:12].lstrip("+").partition("=")[0] in refused_line(capsys, *command, override)


@pytest.mark.parametrize("text", [LAUGHS, "a: [" + "1, " * (MAX_YAML // 3) + "1]\n"], ids=["aliases", "long"])
def test_yaml_that_stands_for_more_than_it_holds(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a run folder, which may be a stranger's."""
    run = make_run(tmp_path / "runs" / "one", settings_of(1), results_of({"heldout": 5.0}))
    make_run(tmp_path / "runs" / "two", settings_of(2), results_of({"heldout": 6.0}))
    (run / "config.yaml").write_text(text)
    with pytest.raises(ValueError, match=r"^it has"):
        read_yaml(run / "config.yaml")
    assert main(["compare", f"run={tmp_path / 'runs'}", f"output={tmp_path / 'out'}"]) == 0
    assert main(["report", f"run={run}"]) == 0
    with pytest.raises(Damaged, match=r"config\.yaml is damaged"):
        _ = RunResults(run, read_results(run / "results.json")).settings
    save_model(run / "student")
    assert "config.yaml cannot be read: it has" in refused_line(capsys, "evaluate", f"model={run}")


def test_a_limit_on_memory_below_what_torch_takes() -> None:
    """A C library that gets no memory while it is imported ends the process with messages of its own."""
    low: Callable[[], None] = lambda: resource.setrlimit(resource.RLIMIT_AS, (600 << 20, 600 << 20))  # noqa: E731
    command = [sys.executable, "-m", "distill", "evaluate", "model=x"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), preexec_fn=low)
    assert done.returncode == 2 and done.stdout == "" and done.stderr.count("\n") == 1
    assert done.stderr.startswith("distill: not enough memory: `ulimit -v` is 614400 kB")


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        # Else transformers makes up what the folder lacks.
        ({"num_hidden_layers": 900, "hidden_size": 16_384, "intermediate_size": 65_536}, "take .* GB, and .* are free"),
    ],
)
def test_a_saved_model_that_memory_does_not_hold(
    changed: dict[str, int], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a folder, and among those that the Hub's client keeps."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(load, "is_hub_reached", lambda: False)
    (tmp_path / "models--a--b" / "refs").mkdir(parents=True)
    (tmp_path / "models--a--b" / "refs" / "main").write_text("0" * 40)
    folder = save_model(tmp_path / "models--a--b" / "snapshots" / ("0" * 40), "bert")
    assert load_pretrained("teacher.path", "a/b").config.num_hidden_layers == 4
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**fields, **changed}))
    for path in (str(folder), "a/b"):
        with pytest.raises(SettingError, match=rf"teacher\.path={path}: .*{words}"):
            load_pretrained("teacher.path", path)
