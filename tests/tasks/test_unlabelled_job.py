"""Distillation on examples without labels, end to end: what is said, learned, ignored, resumed and refused."""

import csv
import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
from job import NOUNS, Shelf, assert_same, distill, results

from distill import evaluate

SMALL = ["corpus.sequence_length=32", "train.batch_size=8", "train.accumulate=2", "train.save_every=2"]
SMALL += ["train.log_every=1", "precision=fp32", "optimizer.lr=5e-3"]
PAIR = ["objective=distil_classes", "teacher=pretrained", "objective.temperature=2"]
HIDDEN = "+objective.hidden_mse.weight=0.1"
FEW, MANY = 6, 90


def texts(seed: int, count: int) -> list[tuple[str, int]]:
    """Texts, and how many ships are in each."""
    draw, found = random.Random(seed), []
    for _ in range(count):
        ships = draw.randrange(3)
        words = [*draw.choices(NOUNS[:10], k=6), *["ship"] * ships]
        draw.shuffle(words)
        found.append((" ".join(words), ships))
    return found


def table(path: Path, rows: list[tuple[str, Any]]) -> Path:
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([("text", "label"), *rows])
    return path


def named(rows: list[tuple[str, int]]) -> list[tuple[str, Any]]:
    return [(text, "yes" if ships else "no") for text, ships in rows]


class Desk:
    """Tables, a teacher that was fine-tuned on one, and the arguments of students with few labels."""

    def __init__(self, shelf: Shelf, root: Path, values: bool = False) -> None:
        self.shelf, self.root = shelf, root
        of = (lambda rows: rows) if values else named
        for name, seed, count in (("train", 0, 160), ("validation", 1, 40)):
            table(root / f"{name}.csv", of(texts(seed, count)))
        self.more = table(root / "more.txt", [])
        self.more.write_text("".join(f"{text}\n" for text, _ in texts(2, MANY)))
        self.regression = [f"corpus.regression={str(values).lower()}"]
        self.teacher = root / "teacher"
        start = [f"student.path={shelf.teacher}", f"train.epochs={2 if values else 8}"]
        assert distill(*self.common(self.teacher), *start) == 0

    def common(self, folder: Path) -> list[str]:
        return ["+recipe=table", f"corpus.path={self.root}", *SMALL, *self.regression, f"hydra.run.dir={folder}"]

    def arguments(self, folder: Path, *more: str) -> list[str]:
        pair = [*PAIR, f"teacher.path={self.teacher}", f"student.path={self.shelf.teacher}", "student.dropout=0"]
        few = [f"corpus.max_sequences={FEW}", f"corpus.unlabelled={self.more}", "train.epochs=2"]
        return [*self.common(folder), *pair, *few, *more]


@pytest.fixture(scope="module")
def desk(shelf: Shelf, tmp_path_factory: pytest.TempPathFactory) -> Desk:
    return Desk(shelf, tmp_path_factory.mktemp("desk"))


@pytest.fixture(scope="module")
def student(desk: Desk) -> Path:
    folder = desk.root / "student"
    assert distill(*desk.arguments(folder, HIDDEN)) == 0
    return folder


def test_accuracy_against_the_baseline_has_an_interval_in_points(desk: Desk, tmp_path: Path) -> None:
    """The baseline learns from the same labels, without a teacher; each of the 40 examples is drawn by itself."""
    baseline, run, few = tmp_path / "baseline", tmp_path / "run", ["corpus.max_sequences=48", "train.epochs=6"]
    student = [*PAIR, f"student.path={desk.shelf.teacher}", "student.dropout=0"]
    assert (
        distill(*desk.common(baseline), *student, *few, "teacher=none", "objective=classes", "optimizer.lr=1e-5") == 0
    )
    pair = [*student, f"teacher.path={desk.teacher}", f"evaluate.baseline={baseline}"]
    assert distill(*desk.common(run), *pair, *few) == 0
    content = results(run)
    drawn = content["baseline"]["bootstrap"]["accuracy"]["dev"]
    points = content["student"]["accuracy"]["dev"] - content["baseline"]["accuracy"]["dev"]
    assert drawn["points"] == pytest.approx(points) and drawn["ratio"] is None
    assert points and drawn["low"] <= drawn["points"] <= drawn["high"] and drawn["num_units"] == 40
    assert "interval of the difference" in (run / "report.md").read_text()
    scores = evaluate([run, baseline])
    (compared,) = scores.comparisons
    assert compared.measure == "accuracy" and compared.bootstrap.points == pytest.approx(-points)
    assert " points" in scores.markdown()


def test_labels_of_such_a_file_are_ignored(desk: Desk, student: Path, tmp_path: Path) -> None:
    rows = [(text, draw) for (text, _), draw in zip(texts(2, MANY), ["yes", "", "nonsense"] * MANY, strict=False)]
    table(tmp_path / "labelled.csv", rows)
    more = [HIDDEN, f"corpus.unlabelled={tmp_path / 'labelled.csv'}"]
    assert distill(*desk.arguments(tmp_path / "run", *more)) == 0
    assert_same(tmp_path / "run", student)


def test_it_resumes_bitwise_and_not_with_other_texts(
    desk: Desk, student: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "resumed"
    shutil.copytree(student, folder)
    (folder / "results.json").unlink()
    shutil.rmtree(sorted((folder / "checkpoints").glob("step-*"))[-1])
    other = tmp_path / "other.txt"
    other.write_text(desk.more.read_text().replace("ship", "boat", 1))
    assert distill(*desk.arguments(folder, HIDDEN, f"corpus.unlabelled={other}")) == 2
    assert "the corpus has another text now" in capsys.readouterr().err
    assert distill(*desk.arguments(folder, HIDDEN)) == 0
    assert_same(folder, student)


def test_questions_without_answers(shelf: Shelf, tmp_path: Path, lines: list[str]) -> None:
    draw = random.Random(0)

    def questions(count: int) -> list[dict[str, Any]]:
        found = []
        for number in range(count):
            noun = draw.choice(NOUNS)
            context = f"The old {draw.choice(NOUNS)} stood by the sea. The bright {noun} was in the valley."
            answer = {"text": [noun], "answer_start": [context.index(f"bright {noun}") + 7]}
            found.append({"id": str(number), "context": context, "question": "What was bright?", "answers": answer})
        return found

    for name, count in (("train", 16), ("dev", 6)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(each) + "\n" for each in questions(count)))
    bare = [{"context": each["context"], "question": each["question"]} for each in questions(50)]
    (tmp_path / "bare.jsonl").write_text("".join(json.dumps(each) + "\n" for each in bare))
    windows = ["corpus.stride=12", "corpus.max_query=8"]
    common = ["+recipe=squad", f"corpus.path={tmp_path}", *windows, *SMALL, "train.epochs=1"]
    teacher = [f"student.path={shelf.teacher}", f"hydra.run.dir={tmp_path / 'teacher'}"]
    assert distill(*common, *teacher) == 0
    student = ["student=layers", "student.layers=first", "objective=distil_spans", "teacher=pretrained"]
    more = [f"teacher.path={tmp_path / 'teacher'}", f"corpus.unlabelled={tmp_path / 'bare.jsonl'}", HIDDEN]
    assert distill(*common, *student, *more, f"hydra.run.dir={tmp_path / 'run'}") == 0
    content = results(tmp_path / "run")
    said = (
        "16 labelled and 50 unlabelled examples: 16 questions of train.jsonl (v1.1); 50 questions of bare.jsonl (v1.1)"
    )
    assert content["corpus"]["name"] == said and any(f"  corpus   {said}\n" in line for line in lines)
    assert content["corpus"]["sequences"] > results(tmp_path / "teacher")["corpus"]["sequences"]
    assert content["training"]["final_loss"].keys() == {"total", "span", "soft_span", "hidden_mse"}
    assert all(value > 0 for value in content["training"]["final_loss"].values())


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["objective=classes"], ("corpus.unlabelled=", "no labels", "objective=distil_classes teacher=pretrained")),
        (["teacher=none"], ("teacher.path=null: objective.soft_classes needs a teacher",)),
        (
            ["corpus.max_sequences=0"],
            ("corpus.max_sequences=0: leaves objective.classes", "set objective.classes.weight=0"),
        ),
        (["corpus.max_sequences=0", "corpus.unlabelled=null"], ("corpus.max_sequences=0: too small",)),
        (["corpus.unlabelled=/no/such/file"], ("corpus.unlabelled=/no/such/file: no such file or folder",)),
        (["corpus.unlabelled=${corpus.path}/validation.csv"], ("evaluate.sources.dev", "corpus.unlabelled", "apart")),
        (["corpus.unlabelled=${corpus.path}"], ("no file of the split unlabelled in this folder", "give a file")),
    ],
)
def test_what_is_refused(
    desk: Desk, tmp_path: Path, more: list[str], words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = desk.arguments(tmp_path / "run", *more)
    if "teacher=none" in more:
        arguments = [each for each in arguments if not each.startswith("teacher.path")]
    assert distill(*arguments) == 2
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert all(word in line for word in words), line
    assert not (tmp_path / "run" / "checkpoints").exists()
