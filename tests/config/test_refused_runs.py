"""Bad input to the command: one line with setting, value and cure; exit status 2; nothing on disk harmed."""

import json
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
        lines.append([line for line in errors.splitlines() if line.startswith("distill: ")])
        assert process.returncode == 2 and len(lines[-1]) == 1, errors
        assert "teacher.path=runs/model" in lines[-1][0] and "looked up on the Hugging Face Hub" in lines[-1][0]
        assert f"no folder {tmp_path / 'runs/model'} exists" in lines[-1][0]
        (tmp_path / "runs").mkdir(exist_ok=True)
    assert lines[0] == lines[1]


def test_empty_folder_and_folder_without_text(shelf: Shelf, tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    (tmp_path / "empty").mkdir()
    refused(capfd, shelf.run(tmp_path / "run", f"corpus.path={tmp_path / 'empty'}"), "corpus.path=")
    (tmp_path / "few").mkdir()
    (tmp_path / "few" / "a.txt").write_text("Hm.")
    refused(capfd, shelf.run(tmp_path / "run", f"corpus.path={tmp_path / 'few'}"), "corpus.path=")


def test_unreadable_book_is_skipped_and_counted_or_stops(
    shelf: Shelf,
    tmp_path: Path,
    capfd: pytest.CaptureFixture,
) -> None:
    books = library(tmp_path / "books")
    (books / "torn.txt.gz").write_bytes(b"\x1f\x8b no gzip at all")
    where = [f"corpus.path={books}", "train.steps=1"]
    refused(
        capfd, shelf.run(tmp_path / "stops", *where, "corpus.invalid_files=stop"), "torn.txt.gz", "corpus.invalid_files"
    )
    assert shelf.run(tmp_path / "skips", *where) == 0
    assert "torn.txt.gz" in capfd.readouterr().err
    skipped = json.loads((tmp_path / "skips" / "results.json").read_text())["corpus"]["skipped"]
    assert len(skipped) == 1 and "torn.txt.gz" in skipped[0]


def test_student_of_another_vocabulary(shelf: Shelf, tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    from transformers import AutoModelForMaskedLM, AutoTokenizer

    other = tmp_path / "other"
    AutoModelForMaskedLM.from_pretrained(shelf.teacher / "student").save_pretrained(other)
    tokenizer = AutoTokenizer.from_pretrained(shelf.teacher / "student")
    text = [" ".join(f"unheard{n}" for n in range(200))] * 3
    tokenizer.train_new_from_iterator(text, 300).save_pretrained(other)
    arguments = ["student=pretrained", f"student.path={other}", "student.layers=null"]
    refused(capfd, shelf.run(tmp_path / "run", *arguments), f"student.path={other}", "vocabulary")


def test_full_folder_and_changed_settings_and_damage(
    shelf: Shelf,
    tmp_path: Path,
    capfd: pytest.CaptureFixture,
) -> None:
    folder = tmp_path / "run"
    assert shelf.run(folder, "train.steps=4") == 0
    capfd.readouterr()
    refused(capfd, shelf.run(folder, "train.steps=4", "resume=never"), "resume=never", "holds a run")
    refused(capfd, shelf.run(folder, "train.steps=4", "objective.temperature=3"), "objective.temperature was 2.0")
    (folder / "results.json").unlink()  # as if it had been killed before the report
    newest = sorted((folder / "checkpoints").iterdir())[-1]
    whole = (newest / "model.safetensors").read_bytes()
    (newest / "model.safetensors").write_bytes(whole[:-4] + b"oops")
    before = metrics(folder)
    refused(capfd, shelf.run(folder, "train.steps=4", "resume=strict"), str(newest), "damaged", "resume=auto")
    assert metrics(folder) == before
    (newest / "model.safetensors").write_bytes(whole)
    assert shelf.run(folder, "train.steps=4") == 0
