"""No command writes over a file that it reads, or over one of another program, unless `overwrite` allows it."""

import os
from pathlib import Path

import pytest
from job import Shelf
from made_runs import make_run, results_of, settings_of
from prediction_models import save_fine_tuned
from transformers import AutoModelForSequenceClassification

from distill.commands import export as onnx
from distill.commands.cli import main
from distill.config.settings import ChainConfig, StageConfig
from distill.runtime.errors import SettingError
from distill.runtime.files import refuse_overwriting

MINE = "mine\n"


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    capsys.readouterr()
    assert main(list(arguments)) == 2
    line = capsys.readouterr().err
    assert line.startswith("distill: ") and line.count("\n") == 1, line
    return line


def written(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(MINE)
    return path


def test_predictions_replace_neither_their_inputs_nor_other_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = save_fine_tuned(tmp_path / "model", AutoModelForSequenceClassification)
    texts, out, weights = written(tmp_path / "my.txt"), tmp_path / "out.jsonl", (model / "config.json").read_bytes()
    os.link(texts, tmp_path / "hard.jsonl")
    (tmp_path / "soft.jsonl").symlink_to(texts)
    given = ["predict", f"model={model}", f"input={texts}"]
    for name in ("hard.jsonl", "./soft.jsonl", "model/config.json"):
        for more in ([], ["overwrite=true"]):
            assert "this command reads" in refused(capsys, *given, f"output={tmp_path}/{name}", *more)
    assert texts.read_text() == MINE and (model / "config.json").read_bytes() == weights
    assert main([*given, f"output={out}"]) == 0
    before = written(out).read_bytes()
    assert "overwrite=true" in refused(capsys, *given, f"output={out}") and out.read_bytes() == before
    assert main([*given, f"output={out}", "overwrite=true"]) == 0 and out.read_bytes() != before


def test_an_output_that_is_a_device_is_refused() -> None:
    for overwrite in (False, True):
        with pytest.raises(SettingError, match="a device or a pipe"):
            refuse_overwriting(Path("/dev/null"), "output=/dev/null", overwrite=overwrite)


def test_an_export_keeps_the_files_of_another_program(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(onnx, "need_packages", lambda: None)
    other = written(tmp_path / "onnx" / "model.onnx")  # as models of the Hub bring it
    assert "overwrite=true" in refused(capsys, "export", f"model={tmp_path}") and other.read_text() == MINE
    for name in (onnx.INT8, onnx.REPORT, "tokenizer.json", "config.json"):
        written(tmp_path / "onnx" / name)
    # Its own are replaced, and so it goes further.
    assert "neither a run folder" in refused(capsys, "export", f"model={tmp_path}")
    written(tmp_path / "onnx" / "notes.md")
    assert "overwrite=true" in refused(capsys, "export", f"model={tmp_path}")


@pytest.mark.parametrize("name", ["compare.html", "compare.csv", "plots/compare.png"])
def test_a_comparison_keeps_the_files_of_another_program(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for seed in (1, 2):
        make_run(tmp_path / "runs" / str(seed), settings_of(seed), results_of({"heldout": 5.0 + seed}))
    given = ["compare", f"run={tmp_path / 'runs'}", f"output={tmp_path / 'out'}"]
    other = written(tmp_path / "out" / name)
    assert "overwrite=true" in refused(capsys, *given) and other.read_text() == MINE
    assert [path for path in (tmp_path / "out").rglob("*") if path.is_file()] == [other]
    assert main([*given, "overwrite=true"]) == 0
    assert main(given) == 0  # its own of the time before


@pytest.mark.parametrize("name", ["config.yaml", "report.html", "student/config.json"])
def test_a_run_keeps_the_files_of_another_program(
    name: str, shelf: Shelf, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = written(tmp_path / "mine" / name)
    assert shelf.run(tmp_path / "mine") == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert "holds no run" in line and name.split("/")[0] in line
    assert [path for path in (tmp_path / "mine").rglob("*") if path.is_file()] == [other]
    assert other.read_text() == MINE


@pytest.mark.parametrize("name", ["chain.md", "report.html"])
def test_a_chain_keeps_the_files_of_another_program(name: str, tmp_path: Path) -> None:
    from distill.commands.chain import run_chain

    other = written(tmp_path / "mine" / name)
    chain = ChainConfig(stages={"first": StageConfig(recipe="smoke", settings=[])})
    with pytest.raises(SettingError, match="holds no chain"):
        run_chain(chain, tmp_path / "mine", [])
    assert other.read_text() == MINE


def test_scores_of_before_are_kept(tmp_path: Path) -> None:
    from distill.report.scores import Scores

    written(tmp_path / "scores.md")
    Scores("mlm", (), (), {}).write(tmp_path)
    assert (tmp_path / "earlier-scores.md").read_text() == MINE
