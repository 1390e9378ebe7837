"""Bad input to the command: one line with setting, value and cure; exit status 2; nothing on disk harmed."""

from pathlib import Path

import pytest
from job import Shelf, command, distill, library, metrics


def refused(capfd: pytest.CaptureFixture, status: int, *words: str) -> None:
    """The last call wrote one line of its own, with these words, and no traceback."""
    assert status == 2
    lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith("distill: ")]
    assert len(lines) == 1, lines
    for word in words:
        assert word in lines[0], lines[0]


# Refused by the command: what Hydra or the arguments say alone, and what only a corpus, a model or a disk can tell.
RUN = {
    "smoke": ["give +recipe=smoke"],
    "+recipe=nope": ["recipe=nope", "distilbert_gutenberg"],
    "hydra.searchpath=null": ["hydra.searchpath"],
    "student.layers=[0,9]": ["student.layers=[0, 9]", "layers 0 to 3"],
    "corpus.sequence_length=512": ["corpus.sequence_length=512", "32"],
    "evaluate.sets=[books] evaluate.missing=stop": ["evaluate.sets", "evaluate.sources.books.path", "DISTILL_DATA"],
    "data.local=/proc/nowhere": ["data.local=/proc/nowhere", "give another"],
    "teacher.cache.top_k=99999 objective.masking.static=true objective.cosine.weight=0": ["top_k=99999", "vocabulary"],
    "teacher.cache={top_k:8,gigabytes:1e-6} objective.masking.static=true objective.cosine.weight=0": [
        "teacher.cache.gigabytes=1e-06", "top_k=8", "allow that much",
    ],
    "student.architecture=gpt2": ["student.architecture=gpt2"],
}  # fmt: skip


@pytest.mark.parametrize("given", RUN)
def test_a_run_is_refused(given: str, shelf: Shelf, tmp_path: Path, capfd: pytest.CaptureFixture, monkeypatch) -> None:
    monkeypatch.delenv("DISTILL_DATA", raising=False)
    monkeypatch.chdir(tmp_path)
    arguments = given.split(" ")
    alone = given in list(RUN)[:3]
    status = distill(*arguments) if alone else shelf.run(tmp_path / "run", *arguments)
    refused(capfd, status, *RUN[given])
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_a_name_means_the_same_whatever_folders_lie_beside_it(shelf: Shelf, tmp_path: Path) -> None:
    """`runs/model` is a name on the Hub, with a folder `runs/` and without; the message names both readings."""
    lines = []
    for number in range(2):
        process = command(*shelf.arguments(tmp_path / f"run{number}", "teacher.path=runs/model"))
        _, errors = process.communicate()
        (line,) = [line for line in errors.splitlines() if line.startswith("distill: ")]
        assert process.returncode == 2 and "teacher.path=runs/model" in line
        assert "looked up on the Hugging Face Hub" in line and f"no folder {tmp_path / 'runs/model'} exists" in line
        lines.append(line)
        (tmp_path / "runs").mkdir(exist_ok=True)
    assert lines[0] == lines[1]


def test_what_only_the_text_can_tell(shelf: Shelf, tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    """An empty folder, hardly any text, and a file that cannot be read."""
    books = library(tmp_path / "books")
    (tmp_path / "empty").mkdir()
    (tmp_path / "few").mkdir()
    (tmp_path / "few" / "a.txt").write_text("Hm.")
    for folder in ("empty", "few"):
        refused(capfd, shelf.run(tmp_path / "run", f"corpus.path={tmp_path / folder}"), "corpus.path=")
    (books / "torn.txt.gz").write_bytes(b"\x1f\x8b no gzip at all")
    where = [f"corpus.path={books}", "train.steps=1"]
    refused(capfd, shelf.run(tmp_path / "stops", *where), "torn.txt.gz", "corpus.path")


def test_full_folder_and_changed_settings_and_damage(
    shelf: Shelf, tmp_path: Path, capfd: pytest.CaptureFixture
) -> None:
    folder = tmp_path / "run"
    assert shelf.run(folder, "train.steps=4") == 0
    capfd.readouterr()
    refused(capfd, shelf.run(folder, "train.steps=4", "resume=never"), "resume=never", "holds a run")
    refused(capfd, shelf.run(folder, "train.steps=4", "objective.temperature=3"), "objective.temperature was 2.0")
    (folder / "results.json").unlink()  # as if it had been killed before the report
    weights = sorted((folder / "checkpoints").iterdir())[-1] / "model.safetensors"
    whole, before = weights.read_bytes(), metrics(folder)
    weights.write_bytes(whole[:-4] + b"oops")
    strict = shelf.run(folder, "train.steps=4", "resume=strict")
    refused(capfd, strict, str(weights.parent), "damaged", "resume=auto")
    assert metrics(folder) == before
    weights.write_bytes(whole)
    assert shelf.run(folder, "train.steps=4") == 0
