"""Bad input to the commands: one line with setting, value and cure; exit status 2; nothing on disk harmed."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from job import Shelf, command, distill, library, metrics, refused_line
from made_runs import make_run, results_of, settings_of
from prediction_models import save_fine_tuned
from transformers import AutoModelForSequenceClassification

TABLE = yaml.load((Path(__file__).parent / "refusals.yaml").read_text(), Loader=yaml.BaseLoader)  # texts alone


def rows(name: str) -> Any:
    return [pytest.param(*row, id=" ".join(row[0])[:80]) for row in TABLE[name]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: Any) -> Path:
    return save_fine_tuned(tmp_path_factory.mktemp("classifier") / "model", AutoModelForSequenceClassification)


def files_in(folder: Path) -> set[Path]:
    return {*folder.rglob("*")}


@pytest.mark.parametrize(("words", "piece"), rows("commands"))
def test_a_command_refuses_and_writes_nothing(
    words: list[str], piece: str, model: Path, tmp_path: Path, capsys: Any
) -> None:
    for name, text in TABLE["files"].items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(text.encode("latin-1"))
    (tmp_path / "empty").mkdir()
    (tmp_path / "model").symlink_to(model)
    make_run(tmp_path / "run", settings_of(0), results_of({"heldout": 3.0}))
    before = files_in(tmp_path)
    assert piece in refused_line(capsys, *words)
    assert files_in(tmp_path) == before


LONG = {"corpus.path": "a" * 30_000, "+" + "a" * 3_000_000: "1", "student.layers": f"[{'1,' * 4000}1]"}


@pytest.mark.parametrize("name", [*LONG, "seed"], ids=["text", "name", "list", "digits"])
def test_a_long_override_is_not_shown_at_length(name: str, capsys: Any) -> None:
    for words in ([], ["settings"], ["prepare"]):
        assert name[1:12] in refused_line(capsys, *words, f"{name}={LONG.get(name, '9' * 100_000)}")


@pytest.mark.parametrize(("given", "words"), rows("runs"))
def test_a_run_refuses_what_only_corpus_model_or_disk_can_tell(
    given: list[str], words: list[str], shelf: Shelf, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    """And what is wrong in a class of the user's: with the line of the user's file."""
    monkeypatch.delenv("DISTILL_DATA", raising=False)
    (tmp_path / "mine_31.py").write_text(TABLE["code"])
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "empty").mkdir()
    (tmp_path / "few").mkdir()
    (tmp_path / "few" / "a.txt").write_text("Hm.")
    (library(tmp_path / "torn") / "torn.txt.gz").write_bytes(b"\x1f\x8b no gzip at all")
    assert shelf.run(tmp_path / "run", *given) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("distill: ")]
    assert all(word in line for word in words), line
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_a_name_means_the_same_whatever_folders_lie_beside_it(shelf: Shelf, tmp_path: Path) -> None:
    """`runs/model` is a name on the Hub, with a folder `runs/` and without; the message names both readings."""
    lines = []
    for number in range(2):
        process = command(*shelf.arguments(tmp_path / f"run{number}", "teacher.path=runs/model"))
        (line,) = [line for line in process.communicate()[1].splitlines() if line.startswith("distill: ")]
        assert process.returncode == 2 and "teacher.path=runs/model" in line
        assert "Hugging Face Hub" in line and str(tmp_path / "runs/model") in line
        lines.append(line)
        (tmp_path / "runs").mkdir(exist_ok=True)
    assert lines[0] == lines[1]


def test_full_folder_and_changed_settings_and_damage(shelf: Shelf, tmp_path: Path, capsys: Any) -> None:
    folder = tmp_path / "run"
    arguments = shelf.arguments(folder, "train.steps=4")

    def refused(*more: str) -> str:
        assert distill(*arguments, *more) == 2
        return capsys.readouterr().err.splitlines()[-1]

    assert distill(*arguments) == 0
    assert "resume=never" in refused("resume=never")
    assert "objective.temperature was 2.0" in refused("objective.temperature=3")
    (folder / "results.json").unlink()  # as if it had been killed before the report
    weights = sorted((folder / "checkpoints").iterdir())[-1] / "model.safetensors"
    whole, before = weights.read_bytes(), metrics(folder)
    weights.write_bytes(whole[:-4] + b"oops")
    line = refused("resume=strict")
    assert all(word in line for word in (str(weights.parent), "damaged", "resume=auto"))
    assert metrics(folder) == before
    weights.write_bytes(whole)
    assert distill(*arguments) == 0
