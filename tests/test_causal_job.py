"""The causal job end to end: a small GPT-2 and half its layers, in one process, resumed, and on two ranks."""

import shutil
from pathlib import Path

import pytest
import torch
from job import Shelf, assert_alike, assert_same, command, distill, metrics, results, weights
from transformers import AutoModelForCausalLM, pipeline

SIZE = "student.config={n_embd:32,n_layer:4,n_head:2}"
TRAIN = ["train.batch_size=8", "train.accumulate=2", "train.epochs=2", "train.save_every=2", "train.log_every=1"]


@pytest.fixture(scope="module")
def causal_teacher(shelf: Shelf) -> Path:
    """Trained for a moment, so that its distributions differ from one another."""
    folder = shelf.root / "gpt2"
    train = ["train.batch_size=16", "train.epochs=null", "train.steps=60", "optimizer.lr=5e-3", "precision=fp32"]
    assert distill("+recipe=gpt2_pretrain", *shelf.corpus, *train, SIZE, "corpus.vocab_size=400", to(folder)) == 0
    return folder


def to(folder: Path) -> str:
    return f"hydra.run.dir={folder}"


def arguments(shelf: Shelf, teacher: Path, folder: Path) -> list[str]:
    return [*shelf.corpus, f"teacher.path={teacher}", "corpus.max_sequences=60", "precision=fp32", *TRAIN, to(folder)]


def run(shelf: Shelf, teacher: Path, folder: Path, *more: str) -> int:
    return distill("+recipe=distilgpt2_gutenberg", *arguments(shelf, teacher, folder), *more)


@pytest.fixture(scope="module")
def student(shelf: Shelf, causal_teacher: Path) -> Path:
    folder = shelf.root / "distilgpt2"
    assert run(shelf, causal_teacher, folder) == 0
    return folder


def test_it_learns_and_is_scored(student: Path, causal_teacher: Path) -> None:
    content = results(student)
    assert content["training"]["final_loss"].keys() == {"total", "soft", "clm", "cosine"}
    lines = metrics(student)
    assert lines[-1]["loss/total"] < lines[0]["loss/total"]
    for model in ("teacher", "student"):
        scores = content[model]
        assert scores["perplexity"]["heldout"] > 1 and 0 < scores["bits_per_byte"]["heldout"] < 8
    assert 0 < content["agreement"]["heldout"]["top1"] <= 1
    assert content["teacher"]["perplexity"] == results(causal_teacher)["student"]["perplexity"]
    text = (student / "report.md").read_text()
    assert "Samples of text" in text and content["samples"]["set"] == "heldout"
    samples = content["samples"]["texts"]
    assert len({sample["prompt"] for sample in samples}) == 3
    assert all(sample["continuations"].keys() == {"teacher", "student"} for sample in samples)
    assert any(len(text) > 16 for sample in samples for text in sample["continuations"].values())
    assert "Bits per byte" in text and "Next token" in text and "seudo-perplexity" not in text


def test_its_student_is_a_causal_model(student: Path, causal_teacher: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(student / "student")
    assert model.config.n_layer == 2
    teacher = AutoModelForCausalLM.from_pretrained(causal_teacher / "student")
    assert model.config.n_embd == teacher.config.n_embd
    text = pipeline("text-generation", str(student / "student"))("The old river", max_new_tokens=5)
    assert text[0]["generated_text"].startswith("The old river")
    card = (student / "student" / "README.md").read_text()
    assert "AutoModelForCausalLM" in card and "text-generation" in card


def test_it_resumes_bitwise(student: Path, shelf: Shelf, causal_teacher: Path) -> None:
    folder = shelf.root / "distilgpt2-resumed"
    shutil.copytree(student, folder)
    (folder / "results.json").unlink()
    newest = sorted((folder / "checkpoints").glob("step-*"))[-1]
    shutil.rmtree(newest)
    assert run(shelf, causal_teacher, folder) == 0
    assert_same(folder, student)


def test_samples_change_nothing_and_can_be_left_out(student: Path, shelf: Shelf, causal_teacher: Path) -> None:
    folder = shelf.root / "distilgpt2-without-samples"
    assert run(shelf, causal_teacher, folder, "evaluate.samples=0") == 0
    assert_same(folder, student)
    content, other = results(folder), results(student)
    assert "samples" not in content and "Samples of text" not in (folder / "report.html").read_text()
    assert content["agreement"] == other["agreement"]
    assert content["student"]["perplexity"] == other["student"]["perplexity"]


@pytest.mark.slow
def test_two_ranks_train_it_alike(student: Path, shelf: Shelf, causal_teacher: Path) -> None:
    folder = shelf.root / "distilgpt2-ranks"
    ranks = ["backend=ddp", "backend.processes=2", "train.accumulate=1"]
    process = command("+recipe=distilgpt2_gutenberg", *arguments(shelf, causal_teacher, folder), *ranks)
    _, errors = process.communicate(timeout=500)
    assert process.returncode == 0, errors
    assert_alike(folder, student)
    one, two = (results(each)["student"]["perplexity"]["heldout"] for each in (student, folder))
    assert one == pytest.approx(two, rel=1e-3)


def test_the_plain_objective_and_kernels_give_the_same_student(
    student: Path, shelf: Shelf, causal_teacher: Path
) -> None:
    folder = shelf.root / "distilgpt2-plain"
    assert run(shelf, causal_teacher, folder, "precision.kernels=plain") == 0
    assert_alike(folder, student)


def test_a_cache_of_its_teacher_needs_no_static_masks(shelf: Shelf, causal_teacher: Path) -> None:
    folder = shelf.root / "distilgpt2-cached"
    assert run(shelf, causal_teacher, folder, "teacher.cache.top_k=16", "objective.cosine.weight=0") == 0
    cache = results(folder)["teacher"]["cache"]
    assert 0.1 < cache["kept_mass"] < 1 and torch.isfinite(weights(folder)["transformer.wte.weight"]).all()


@pytest.mark.slow
def test_draws_of_its_teacher_serve_every_seed_of_the_run(shelf: Shelf, causal_teacher: Path) -> None:
    """As no masks are drawn; another seed reads what the first one made."""
    settings = ["teacher.cache.sampled=24", "objective.cosine.weight=0", "train.epochs=null", "train.steps=2"]
    found = []
    for seed in (0, 1):
        folder = shelf.root / f"distilgpt2-drawn-{seed}"
        assert run(shelf, causal_teacher, folder, *settings, f"seed={seed}") == 0
        found.append(results(folder)["teacher"]["cache"])
    assert found[0] == found[1] and found[0]["kept_mass"] == 0 and found[0]["sampled"] == 24


@pytest.mark.slow
def test_its_baseline_learns_without_the_teacher(shelf: Shelf, causal_teacher: Path, student: Path) -> None:
    folder = shelf.root / "distilgpt2-baseline"
    assert distill("+recipe=distilgpt2_gutenberg_baseline", *arguments(shelf, causal_teacher, folder)) == 0
    content = results(folder)
    assert content["teacher"] is None and content["training"]["final_loss"].keys() == {"total", "clm"}
    again = shelf.root / "distilgpt2-beside"
    assert run(shelf, causal_teacher, again, f"evaluate.baseline={folder}") == 0
    assert results(again)["baseline"]["perplexity"] == pytest.approx(content["student"]["perplexity"])
    assert_same(again, student)
    for sample in results(again)["samples"]["texts"]:
        assert sample["continuations"].keys() == {"teacher", "student", "baseline"}
    assert "Baseline (no teacher)" in (again / "report.md").read_text().split("Samples of text")[1]
