"""ALBERT end to end: words and the order of segments from scratch, distilled, resumed, and on two ranks."""

import shutil
from pathlib import Path

import pytest
from job import Shelf, assert_alike, assert_same, command, distill, metrics, results, weights
from transformers import AlbertForPreTraining, AutoModelForMaskedLM

SIZE = (
    "student.config={embedding_size:16,hidden_size:32,num_hidden_layers:4,num_attention_heads:2,intermediate_size:64}"
)
TRAIN = ["train.batch_size=8", "train.accumulate=2", "train.epochs=2", "train.save_every=2", "train.log_every=1"]


def to(folder: Path) -> str:
    return f"hydra.run.dir={folder}"


@pytest.fixture(scope="module")
def albert(shelf: Shelf) -> Path:
    folder = shelf.root / "albert"
    train = ["train.batch_size=16", "train.epochs=null", "train.steps=60", "optimizer.lr=5e-3", "precision=fp32"]
    assert distill("+recipe=albert_pretrain", *shelf.corpus, *train, SIZE, "corpus.vocab_size=400", to(folder)) == 0
    return folder


def arguments(shelf: Shelf, teacher: Path, folder: Path) -> list[str]:
    return [*shelf.corpus, f"teacher.path={teacher}", "corpus.max_sequences=60", "precision=fp32", *TRAIN, to(folder)]


def run(shelf: Shelf, teacher: Path, folder: Path, *more: str) -> int:
    return distill("+recipe=distilalbert_gutenberg", *arguments(shelf, teacher, folder), *more)


@pytest.fixture(scope="module")
def student(shelf: Shelf, albert: Path) -> Path:
    folder = shelf.root / "distilalbert"
    assert run(shelf, albert, folder) == 0
    return folder


def test_both_tasks_are_trained_and_scored(albert: Path) -> None:
    content, lines = results(albert), metrics(albert)
    assert content["training"]["final_loss"].keys() == {"total", "mlm", "sop"}
    assert lines[-1]["loss/mlm"] < lines[0]["loss/mlm"]
    scores = content["student"]
    assert set(scores) >= {"perplexity", "pseudo_perplexity", "order_accuracy"}
    assert 0 <= scores["order_accuracy"]["heldout"] <= 1
    model = AlbertForPreTraining.from_pretrained(albert / "student")
    assert float(model.sop_classifier.classifier.weight.detach().abs().sum()) > 0
    report = (albert / "report.md").read_text()
    assert "Order accuracy" in report and "Order of segments" in report
    AutoModelForMaskedLM.from_pretrained(albert / "student")


def test_both_are_distilled(student: Path, albert: Path) -> None:
    content = results(student)
    assert content["training"]["final_loss"].keys() == {"total", "soft", "mlm", "cosine", "sop", "soft_sop"}
    assert content["teacher"]["order_accuracy"] == results(albert)["student"]["order_accuracy"]
    assert AlbertForPreTraining.from_pretrained(student / "student").config.num_hidden_layers == 2


def test_it_resumes_bitwise(student: Path, shelf: Shelf, albert: Path) -> None:
    folder = shelf.root / "distilalbert-resumed"
    shutil.copytree(student, folder)
    (folder / "results.json").unlink()
    shutil.rmtree(sorted((folder / "checkpoints").glob("step-*"))[-1])
    assert run(shelf, albert, folder) == 0
    assert_same(folder, student)


@pytest.mark.slow
def test_two_ranks_train_it_alike(student: Path, shelf: Shelf, albert: Path) -> None:
    folder = shelf.root / "distilalbert-ranks"
    ranks = ["backend=ddp", "backend.processes=2", "train.accumulate=1"]
    process = command("+recipe=distilalbert_gutenberg", *arguments(shelf, albert, folder), *ranks)
    _, error = process.communicate(timeout=500)
    assert process.returncode == 0, error
    assert_alike(folder, student)


def test_plain_kernels_train_it_alike(student: Path, shelf: Shelf, albert: Path) -> None:
    folder = shelf.root / "distilalbert-plain"
    assert run(shelf, albert, folder, "precision.kernels=plain") == 0
    assert_alike(folder, student)


def test_words_alone_swap_nothing_and_have_no_head(shelf: Shelf, albert: Path) -> None:
    folder = shelf.root / "words"
    assert run(shelf, albert, folder, "objective.sop.weight=0", "objective.soft_sop.weight=0") == 0
    assert not any("sop" in name for name in weights(folder))
    content = results(folder)
    assert "order_accuracy" not in content["student"] and "sop" not in content["training"]["final_loss"]


def test_an_albert_learns_words_from_a_bert_and_the_order_by_itself(shelf: Shelf) -> None:
    folder = shelf.root / "from-bert"
    pair = ["student=albert", SIZE, "objective.soft_sop.weight=0"]
    assert run(shelf, shelf.teacher, folder, *pair, "train.epochs=1") == 0
    scores = results(folder)
    assert "order_accuracy" in scores["student"] and "order_accuracy" not in scores["teacher"]


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["corpus.cross_documents=true"], "corpus.cross_documents=true: a sequence"),
        (["precision.student=fp16", "backend.compression=fp16"], "would scale gradients twice"),
        (
            ["teacher=several", "+teacher.members.a.path=A", "+teacher.members.b.path=B", "teacher.path=null"],
            "objective.soft_sop is not about words",
        ),
    ],
)
def test_what_is_refused(
    shelf: Shelf, albert: Path, tmp_path: Path, more: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(shelf, albert, tmp_path / "run", *more) == 2
    assert words in capsys.readouterr().err


def test_soft_targets_for_the_order_need_a_teacher_with_that_head(
    shelf: Shelf, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(shelf, shelf.teacher, tmp_path / "run", "student=albert", SIZE) == 2
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert "teacher.path" in line and "head for the order" in line and "soft_sop" in line
