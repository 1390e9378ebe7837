"""Fine-tuning end to end on made-up questions and tables: spans, classes, values, from a teacher, on two ranks."""

import json
import re
import shutil
from pathlib import Path

import pytest
from job import TINY, Shelf, assert_alike, assert_same, command, distill, metrics, results
from labelled import mrpc, squad, table
from transformers import AutoModelForQuestionAnswering, AutoModelForSequenceClassification, pipeline

SMALL = ["corpus.sequence_length=32", "train.batch_size=8", "train.accumulate=2", "train.save_every=2"]
SMALL += ["train.log_every=1", "precision=fp32", "optimizer.lr=2e-3"]


def to(folder: Path) -> str:
    return f"hydra.run.dir={folder}"


@pytest.fixture(scope="module")
def questions(shelf: Shelf) -> Path:
    return squad(shelf.root / "squad")


@pytest.fixture(scope="module")
def reviews(shelf: Shelf) -> list[str]:
    """The settings of a table."""
    folder = table(shelf.root / "reviews")
    return [f"corpus.path={folder}", "corpus.text=review", "corpus.label=stars"]


def spans(shelf: Shelf, questions: Path, folder: Path, *more: str) -> list[str]:
    path = [f"student.path={shelf.teacher}", f"corpus.path={questions}", "corpus.stride=12", "corpus.max_query=8"]
    return ["+recipe=squad", *path, *SMALL, "train.epochs=3", to(folder), *more]


@pytest.fixture(scope="module")
def answerer(shelf: Shelf, questions: Path) -> Path:
    folder = shelf.root / "answerer"
    assert distill(*spans(shelf, questions, folder)) == 0
    return folder


def test_answers_are_learned_and_scored(answerer: Path) -> None:
    content, lines = results(answerer), metrics(answerer)
    assert lines[-1]["loss/span"] < lines[0]["loss/span"]
    assert 0 <= content["student"]["exact"]["dev"] <= content["student"]["f1"]["dev"] <= 100
    assert content["agreement"] is None and content["measures"]["f1"]["lower_is_better"] is False
    model = AutoModelForQuestionAnswering.from_pretrained(answerer / "student")
    assert model.config.num_hidden_layers == 4
    card = (answerer / "student" / "README.md").read_text()
    assert "question-answering" in card and "AutoModelForQuestionAnswering" in card
    report = (answerer / "report.md").read_text()
    assert "Exact match" in report and "F1" in report


def test_questions_without_answers(shelf: Shelf, questions: Path) -> None:
    folder = shelf.root / "unanswerable"
    assert distill(*spans(shelf, questions, folder, "corpus.version='2.0'", "train.steps=2")) == 0
    scores = results(folder)["student"]
    assert scores["best_f1"]["dev"] >= scores["f1"]["dev"]
    assert set(scores) >= {"exact", "best_exact", "has_answer_f1", "no_answer_exact"}


def test_it_resumes_bitwise(shelf: Shelf, questions: Path, answerer: Path) -> None:
    folder = shelf.root / "answerer-resumed"
    shutil.copytree(answerer, folder)
    (folder / "results.json").unlink()
    shutil.rmtree(sorted((folder / "checkpoints").glob("step-*"))[-1])
    assert distill(*spans(shelf, questions, folder)) == 0
    assert_same(folder, answerer)


@pytest.mark.slow
def test_two_ranks_give_the_same_scores(shelf: Shelf, questions: Path, answerer: Path) -> None:
    folder = shelf.root / "answerer-ranks"
    ranks = ["backend=ddp", "backend.processes=2", "train.accumulate=1"]
    process = command(*spans(shelf, questions, folder, *ranks))
    _, error = process.communicate(timeout=500)
    assert process.returncode == 0, error
    assert_alike(folder, answerer)
    one, two = (results(each)["student"]["f1"]["dev"] for each in (answerer, folder))
    assert one == pytest.approx(two, abs=9)  # a question of the twelve, where logits are close


def test_a_teacher_helps_with_hidden_states_too(shelf: Shelf, questions: Path, answerer: Path) -> None:
    folder = shelf.root / "smaller"
    pair = [
        "objective=distil_spans",
        "teacher=pretrained",
        f"teacher.path={answerer}",
        "+objective.hidden_mse.weight=1",
    ]
    layers = ["student=layers", "student.path=null", "student.layers=first", "student.dropout=0"]
    assert distill(*spans(shelf, questions, folder, *pair, *layers)) == 0
    content = results(folder)
    assert content["training"]["final_loss"].keys() == {"total", "span", "soft_span", "hidden_mse"}
    assert content["teacher"]["f1"] == results(answerer)["student"]["f1"]


def classify(shelf: Shelf, reviews: list[str], folder: Path, *more: str) -> list[str]:
    return ["+recipe=table", f"student.path={shelf.teacher}", *reviews, *SMALL, "train.epochs=4", to(folder), *more]


def test_classes_of_a_table_and_a_student_of_them(shelf: Shelf, reviews: list[str]) -> None:
    folder = shelf.root / "classifier"
    assert distill(*classify(shelf, reviews, folder)) == 0
    scores = results(folder)["student"]
    assert scores["accuracy"]["dev"] >= 60 and "macro_f1" in scores
    model = AutoModelForSequenceClassification.from_pretrained(folder / "student")
    assert model.config.id2label == {0: "no", 1: "yes"} and model.config.problem_type == "single_label_classification"
    label = pipeline("text-classification", str(folder / "student"))("the old ship")[0]["label"]
    assert label in ("no", "yes")
    smaller = shelf.root / "smaller-classifier"
    pair = ["objective=distil_classes", "teacher=pretrained", f"teacher.path={folder}", "train.epochs=1"]
    layers = ["student=layers", "student.path=null", "student.num_layers=2", "student.layers=even"]
    assert distill(*classify(shelf, reviews, smaller, *pair, *layers)) == 0
    assert results(smaller)["training"]["final_loss"].keys() == {"total", "classes", "soft_classes"}


def test_a_task_of_glue(shelf: Shelf) -> None:
    folder = mrpc(shelf.root / "glue")
    path = [f"student.path={shelf.teacher}", f"corpus.path={folder}", "corpus.task=mrpc"]
    run = shelf.root / "mrpc"
    assert distill("+recipe=glue", *path, *SMALL, "train.epochs=1", to(run)) == 0
    scores = results(run)["student"]
    assert list(results(run)["measures"]) == ["f1", "accuracy"] and 0 <= scores["accuracy"]["dev"] <= 100


def test_values_of_a_table(shelf: Shelf) -> None:
    data = table(shelf.root / "values", values=True)
    given = [f"corpus.path={data}", "corpus.text=review", "corpus.label=stars", "corpus.regression=true"]
    folder = shelf.root / "regression"
    assert distill(*classify(shelf, given, folder)) == 0
    assert results(folder)["student"]["pearson"]["dev"] > 0
    config = AutoModelForSequenceClassification.from_pretrained(folder / "student").config
    assert config.num_labels == 1 and config.problem_type == "regression"


def test_random_weights_with_a_tokenizer_of_another(shelf: Shelf, reviews: list[str]) -> None:
    folder = shelf.root / "from-scratch"
    student = ["student=bert", "student.path=null", TINY, "student.init=random", f"student.tokenizer={shelf.teacher}"]
    assert distill(*classify(shelf, reviews, folder, *student, "train.steps=2")) == 0


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["corpus.text=nothing"], ("corpus.text=nothing", "review")),
        (["objective=spans"], ("corpus.kind=", "questions", "squad")),
        (["objective=mlm"], ("corpus",)),
        (["student.path=null"], ("student.path",)),
        (["evaluate.sets=[other]"], ("evaluate.sets: other has no source",)),
        (["objective.masking.mlm_probability=0.2"], ("objective.masking", "leave it out")),
        (["corpus.heldout=0.1"], ("corpus.heldout=0.1", "labelled examples")),
        (["objective=distil_classes"], ("teacher.path=null", "objective.soft_classes")),
        (
            ["teacher=bundled_small", "+objective.cosine.weight=1", "+objective.cosine.positions=masked"],
            ("objective.cosine.positions", "predicts no words", "set it to all"),
        ),
        (["teacher=bundled_small", "objective=distil_classes"], ("teacher.path=bundled_small", "classes of texts")),
    ],
)
def test_what_is_refused(
    shelf: Shelf, reviews: list[str], tmp_path: Path, more: list[str], words: tuple[str, ...],
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    assert distill(*classify(shelf, reviews, tmp_path / "run", *more)) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert all(word in lines[-1] for word in words), lines[-1]
    assert not (tmp_path / "run" / "checkpoints").exists()


@pytest.mark.parametrize("more", [[], ["corpus.max_sequences=3"], ["evaluate.max_sequences=3"]])
def test_a_file_that_is_trained_on_is_not_scored(
    shelf: Shelf, tmp_path: Path, more: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    file = table(tmp_path / "one") / "train.csv"
    given = [f"corpus.path={file}", "corpus.text=review", "corpus.label=stars"]
    assert distill(*classify(shelf, given, tmp_path / "run", *more)) == 2
    assert re.search(
        r"evaluate\.sources\.dev holds \d+ examples that the student is trained on", capsys.readouterr().err
    )


def test_a_teacher_with_its_classes_in_another_order_is_refused(
    shelf: Shelf, reviews: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert distill(*classify(shelf, reviews, tmp_path / "one", "train.steps=1")) == 0
    config = tmp_path / "one" / "student" / "config.json"
    fields = json.loads(config.read_text())
    fields |= {"id2label": {"0": "yes", "1": "no"}, "label2id": {"yes": 0, "no": 1}}
    config.write_text(json.dumps(fields))
    pair = ["objective=distil_classes", "teacher=pretrained", f"teacher.path={tmp_path / 'one'}"]
    assert distill(*classify(shelf, reviews, tmp_path / "run", *pair)) == 2
    assert "gives its classes as yes, no, and these examples have no, yes" in capsys.readouterr().err
    fields |= {"id2label": {"0": "LABEL_0", "1": "LABEL_1"}, "label2id": {"LABEL_0": 0, "LABEL_1": 1}}
    config.write_text(json.dumps(fields))
    assert distill(*classify(shelf, reviews, tmp_path / "run", "train.steps=1", *pair)) == 0
    assert "names no classes: its outputs are taken for 0=no, 1=yes" in capsys.readouterr().err


def test_a_teacher_with_other_classes_is_refused(
    shelf: Shelf, reviews: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = table(tmp_path / "values", values=True)
    other = [f"corpus.path={data}", "corpus.text=review", "corpus.label=stars"]  # three classes: 0, 1 and 2
    assert distill(*classify(shelf, other, tmp_path / "three", "train.steps=1")) == 0
    pair = ["objective=distil_classes", "teacher=pretrained", f"teacher.path={tmp_path / 'three'}"]
    assert distill(*classify(shelf, reviews, tmp_path / "run", *pair)) == 2
    assert "gives 3 numbers for a text, and these examples need 2" in capsys.readouterr().err


def test_a_run_that_scores_nothing(shelf: Shelf, reviews: list[str]) -> None:
    folder = shelf.root / "unscored"
    assert distill(*classify(shelf, reviews, folder, "evaluate.sets=[]", "train.epochs=1")) == 0
    content = results(folder)
    assert content["student"]["tokens_per_second"] is None and content["evaluation"] == {}
