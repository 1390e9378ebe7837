"""Folders that cannot be made, files of other programs, files that are pipes or no text, sizes that no memory holds."""

import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from job import Shelf, environment, refused_line, save_model, whole_run
from made_runs import make_run, results_of, settings_of
from prediction_models import save_fine_tuned
from transformers import AutoModelForSequenceClassification

from distill.commands import export as onnx
from distill.commands.api.run import RunResults
from distill.commands.chain import run_chain
from distill.commands.cli import main
from distill.config.settings import ChainConfig, StageConfig
from distill.models import load
from distill.models.load import load_pretrained
from distill.report.scores import Scores
from distill.runs.results_file import read_results
from distill.runtime.errors import Damaged, SettingError
from distill.runtime.files import MAX_YAML, make_folder, read_yaml, refuse_overwriting

LAUGHS = "a0: &a0 {x: [1, 2, 3]}\n" + "".join(
    f"a{n}: &a{n} {{x: [{', '.join([f'*a{n - 1}'] * 9)}]}}\n" for n in range(1, 12)
)
MINE = "mine\n"


def written(path: Path) -> Path:
    """A file of another program."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(MINE)
    return path


def files_in(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def made(folder: Path, seed: int = 1) -> Path:
    return make_run(folder, settings_of(seed), results_of({"heldout": 5.0 + seed}))


def test_predictions_replace_neither_their_inputs_nor_other_files(tmp_path: Path, capsys: Any) -> None:
    model = save_fine_tuned(tmp_path / "model", AutoModelForSequenceClassification)
    texts, out, weights = written(tmp_path / "my.txt"), tmp_path / "out.jsonl", (model / "config.json").read_bytes()
    os.link(texts, tmp_path / "hard.jsonl")
    (tmp_path / "soft.jsonl").symlink_to(texts)
    given = ["predict", f"model={model}", f"input={texts}"]
    for name in ("hard.jsonl", "./soft.jsonl", "model/config.json"):
        for more in ([], ["overwrite=true"]):
            assert "this command reads" in refused_line(capsys, *given, f"output={tmp_path}/{name}", *more)
    assert texts.read_text() == MINE and (model / "config.json").read_bytes() == weights
    written(out)
    assert "overwrite=true" in refused_line(capsys, *given, f"output={out}") and out.read_text() == MINE
    assert main([*given, f"output={out}", "overwrite=true"]) == 0 and out.read_text() != MINE
    for overwrite in (False, True):
        with pytest.raises(SettingError, match="a device or a pipe"):
            refuse_overwriting(Path("/dev/null"), "output=/dev/null", overwrite=overwrite)


def test_an_export_keeps_the_files_of_another_program(tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(onnx, "need_packages", lambda: None)
    other = written(tmp_path / "onnx" / "model.onnx")  # as models of the Hub bring it
    assert "overwrite=true" in refused_line(capsys, "export", f"model={tmp_path}") and other.read_text() == MINE
    for name in (onnx.INT8, onnx.REPORT, "tokenizer.json", "config.json"):
        written(tmp_path / "onnx" / name)
    # Its own are replaced, and so it goes further.
    assert "neither a run folder" in refused_line(capsys, "export", f"model={tmp_path}")
    written(tmp_path / "onnx" / "notes.md")
    assert "overwrite=true" in refused_line(capsys, "export", f"model={tmp_path}")


@pytest.mark.parametrize("name", ["compare.html", "compare.csv", "plots/compare.png"])
def test_a_comparison_and_scores_keep_the_files_of_another_program(name: str, tmp_path: Path, capsys: Any) -> None:
    for seed in (1, 2):
        made(tmp_path / "runs" / str(seed), seed)
    given = ["compare", f"run={tmp_path / 'runs'}", f"output={tmp_path / 'out'}"]
    other = written(tmp_path / "out" / name)
    assert "overwrite=true" in refused_line(capsys, *given) and other.read_text() == MINE
    assert files_in(tmp_path / "out") == [other]
    assert main([*given, "overwrite=true"]) == 0
    assert main(given) == 0  # its own of the time before
    written(tmp_path / "scores.md")
    Scores("mlm", (), (), {}).write(tmp_path)
    assert (tmp_path / "earlier-scores.md").read_text() == MINE


@pytest.mark.parametrize("name", ["config.yaml", "report.html", "student/config.json"])
def test_a_run_and_a_chain_keep_the_files_of_another_program(
    name: str, shelf: Shelf, tmp_path: Path, capsys: Any
) -> None:
    other = written(tmp_path / "mine" / name)
    assert shelf.run(tmp_path / "mine") == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert "holds no run" in line and name.split("/")[0] in line
    assert files_in(tmp_path / "mine") == [other] and other.read_text() == MINE
    written(tmp_path / "mine" / "chain.md")
    with pytest.raises(SettingError, match="holds no chain"):
        run_chain(ChainConfig(stages={"first": StageConfig(recipe="smoke", settings=[])}), tmp_path / "mine", [])
    assert len(files_in(tmp_path / "mine")) == 2


def test_a_refused_run_leaves_no_folder(shelf: Shelf, tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    assert shelf.run(Path("/proc/x")) == 2
    assert "hydra.run.dir=/proc/x: no folder" in capsys.readouterr().err
    with pytest.raises(SettingError, match="mine=/proc/a/b: no folder"):
        make_folder(Path("/proc/a/b"), "mine=/proc/a/b")

    def refuse(*_: object) -> None:
        raise SettingError("too many", setting="student.layers")

    monkeypatch.setattr(whole_run, "FrozenTeachers", refuse)  # the folder is entered before
    (tmp_path / "before").mkdir()
    for name in ("new", "before"):
        assert shelf.run(tmp_path / name) == 2
    assert "student.layers" in capsys.readouterr().err
    assert not (tmp_path / "new").exists() and (tmp_path / "before").exists()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("config.yaml", None),
        ("config.yaml", b"\xff\x00"),
        ("config.yaml", "pipe"),
        ("metrics.jsonl", "pipe"),
        ("metrics.jsonl", b'{"step": "two"}\n'),
    ],
)
def test_a_report_of_a_damaged_run(name: str, content: bytes | str | None, tmp_path: Path, capsys: Any) -> None:
    run = made(tmp_path / "run")
    (run / name).unlink()
    if content == "pipe":
        os.mkfifo(run / name)
    elif isinstance(content, bytes):
        (run / name).write_bytes(content)
    assert name in refused_line(capsys, "report", f"run={run}")


@pytest.mark.parametrize("text", [LAUGHS, "a: [" + "1, " * (MAX_YAML // 3) + "1]\n"], ids=["aliases", "long"])
def test_yaml_that_stands_for_more_than_it_holds(text: str, tmp_path: Path, capsys: Any) -> None:
    """Of a run folder, which may be a stranger's."""
    run = made(tmp_path / "runs" / "one")
    made(tmp_path / "runs" / "two", 2)
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


def test_a_saved_model_that_memory_does_not_hold(tmp_path: Path, monkeypatch: Any) -> None:
    """In a folder, and among those that the Hub's client keeps; else transformers makes up what the folder lacks."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(load, "is_hub_reached", lambda: False)
    (written(tmp_path / "models--a--b" / "refs" / "main")).write_text("0" * 40)
    folder = save_model(tmp_path / "models--a--b" / "snapshots" / ("0" * 40), "bert")
    assert load_pretrained("teacher.path", "a/b").config.num_hidden_layers == 4
    fields = json.loads((folder / "config.json").read_text())
    fields |= {"num_hidden_layers": 900, "hidden_size": 16_384, "intermediate_size": 65_536}
    (folder / "config.json").write_text(json.dumps(fields))
    for path in (str(folder), "a/b"):
        with pytest.raises(SettingError, match=rf"teacher\.path={path}: .*take .* GB, and .* are free"):
            load_pretrained("teacher.path", path)
