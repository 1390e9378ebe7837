"""What README and manual show of adding a pair, a loss and other parts, run as it stands there."""

import re
import shutil
import sys
from pathlib import Path

import pytest
import torch
import yaml
from job import ROOT, Shelf, book, distill, metrics, results
from labelled import table
from safetensors.torch import load_file

README, HOW_TO = ROOT / "README.md", ROOT / "docs" / "how-to"
EXTEND = HOW_TO / "extend.md"
BOTH = pytest.mark.parametrize("page", [README, pytest.param(EXTEND, marks=pytest.mark.slow)], ids=["readme", "manual"])
SMALL = ["data.cache=cache", "data.workers=1", "evaluate.max_sequences=8", "train.steps=2"]


def blocks(text: str) -> dict[str, str]:
    """The one block of each language."""
    return {language: code for language, code in re.findall(r"```(\w+)\n(.*?)```", text, re.S)}


def section(title: str, page: Path = EXTEND) -> dict[str, str]:
    """The one block of each language in a section."""
    return blocks(re.split(r"\n##+ ", re.split(rf"\n##+ {title}\n", page.read_text())[1])[0])


def run(command: str, *more: str) -> None:
    """A command of the page, in this process."""
    words = [word.strip("'") for word in re.findall(r"'[^']*'|\S+", command.replace("\\\n", " ").strip())]
    assert words[:3] == ["python", "-m", "distill"]
    assert distill(*words[3:], *more, *SMALL, "hydra.run.dir=run") == 0


def commands(code: str) -> list[str]:
    """The commands of a block, each in one line and without its comment."""
    lines = re.sub(r"\\\n\s*", "", code).splitlines()
    return [line.split("  #")[0].strip() for line in lines if line.strip()]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a user would work, as `python -m` sees it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))


PARTS = ["pair", "loss", "source", "optimizer", "schedule", "measure", "observer"]


@pytest.mark.parametrize("title", [f"Add {'an' if part[0] in 'aeiou' else 'a'} {part}" for part in PARTS])
def test_fifteen_lines_are_enough(title: str) -> None:
    found = section(title)
    own = next(code for language, code in found.items() if language != "sh")
    assert len(own.strip().splitlines()) <= 15 and "sh" in found


@pytest.mark.parametrize("title", ["Add a pair", "Add a loss", "Add a source"])
def test_the_readme_takes_twelve(title: str) -> None:
    own = next(code for language, code in section(title, README).items() if language != "sh")
    assert len(own.strip().splitlines()) <= 12


def test_the_readme_is_short() -> None:
    assert len(README.read_text().splitlines()) <= 220


@BOTH
def test_a_pair(page: Path, shelf: Shelf) -> None:
    found = section("Add a pair", page)
    Path("my_configs/recipe").mkdir(parents=True)
    Path("my_configs/recipe/my_pair.yaml").write_text(found["yaml"])
    shutil.copytree(shelf.teacher / "student", "my_teacher")
    Path("my_texts").mkdir()
    for number in range(4):
        Path(f"my_texts/{number}.txt").write_text(book(number))
    run(found["sh"])
    content = results(Path("run"))
    assert content["recipe"] == "my_pair" and content["student"]["name"] == "BertForMaskedLM"


def test_a_model(shelf: Shelf) -> None:
    """A plain torch module as the student, and then as the teacher of another one."""
    found = section("Add a model")
    Path("my_models.py").write_text(found["python"])
    sys.modules.pop("my_models", None)
    first, second = commands(found["sh"])
    run(first.replace("hydra.run.dir=runs/mine", ""), *small_pair(shelf), "train.save_every=1")
    shutil.move("run", "runs/mine")
    card = Path("runs/mine/student/README.md").read_text()
    assert "from my_models import MyModel" in card and "load_model(model" in card
    assert results(Path("runs/mine"))["student"]["name"] == "MyModel"
    run(second, f"corpus.path={shelf.books}", TINY_ROWS)
    content = results(Path("run"))
    assert content["teacher"]["parameters"] > content["student"]["parameters"]
    assert content["teacher"]["perplexity"]["heldout"] == pytest.approx(
        results(Path("runs/mine"))["student"]["perplexity"]["heldout"], rel=1e-4
    )


@BOTH
def test_a_loss(page: Path, shelf: Shelf) -> None:
    found = section("Add a loss", page)
    Path("my_losses.py").write_text(found["python"])
    run(found["sh"], *small_pair(shelf))
    line = metrics(Path("run"))[-1]
    parts = 5 * line["loss/soft"] + 0.5 * line["loss/mlm"] + line["loss/cosine"] + 2 * line["loss/total_variation"]
    assert line["loss/total"] == pytest.approx(parts, rel=1e-5) and line["loss/total_variation"] > 0
    assert "total_variation" in Path("run/report.md").read_text()


def test_a_loss_with_settings(shelf: Shelf) -> None:
    found = section("A loss with settings")
    Path("my_softer_losses.py").write_text(found["python"])
    run(found["sh"], *small_pair(shelf))
    assert metrics(Path("run"))[-1]["loss/total_variation"] > 0


def test_a_loss_on_other_outputs(shelf: Shelf) -> None:
    found = section("A loss on other outputs")
    Path("my_class_losses.py").write_text(found["python"])
    rows = [
        f"corpus.path={table(Path('reviews').resolve())}",
        "corpus.text=review",
        "corpus.label=stars",
        TINY_ROWS,
        *SMALL,
    ]
    assert distill("+recipe=table", f"student.path={shelf.teacher}", *rows, "hydra.run.dir=runs/table") == 0
    run(found["sh"].replace("hydra.run.dir=runs/class_gap", ""), f"student.path={shelf.teacher}", *rows)
    line = metrics(Path("run"))[-1]
    assert line["loss/class_gap"] > 0
    parts = line["loss/classes"] + line["loss/soft_classes"] + 0.1 * line["loss/class_gap"]
    assert line["loss/total"] == pytest.approx(parts, rel=1e-5)


@pytest.mark.parametrize("part", ["hidden states", "attention"])
def test_a_loss_on_inner_layers(part: str, shelf: Shelf) -> None:
    found = section(f"A loss on {part}")
    name = "hidden" if part == "hidden states" else part
    Path(f"my_{name}_losses.py").write_text(found["python"])
    run(found["sh"], *small_pair(shelf))
    term = "layer_gap" if part == "hidden states" else "attention_gap"
    line = metrics(Path("run"))[-1]
    parts = 5 * line["loss/soft"] + 0.5 * line["loss/mlm"] + line["loss/cosine"] + line[f"loss/{term}"]
    assert line["loss/total"] == pytest.approx(parts, rel=1e-5) and line[f"loss/{term}"] > 0


@BOTH
def test_a_source(page: Path) -> None:
    found = section("Add a source", page)
    Path("my_sources.py").write_text(found["python"])
    Path("my_lines.txt").write_text("".join(book(number).replace("\n\n", "\n") for number in range(4)))
    run(found["sh"])
    content = results(Path("run"))
    assert content["corpus"]["name"] == "Lines" and content["corpus"]["documents"] > 100


def test_conversations_and_prompts() -> None:
    found = blocks((HOW_TO / "conversations.md").read_text().split("\n## ")[0])
    Path("my_chats.jsonl").write_text("".join(found["json"].replace("snow", f"snow {n}") for n in range(200)))
    size = [
        "student.config={n_embd:32,n_layer:2,n_head:2}",
        "corpus.vocab_size=300",
        "hydra.run.dir=runs/gpt2_pretrain",
    ]
    chosen = ["corpus=chat", "corpus.path=my_chats.jsonl", "evaluate=heldout", *SMALL, *size]
    assert distill("+recipe=gpt2_pretrain", *chosen) == 0
    run(found["sh"], "corpus.heldout=0.1")
    content = results(Path("run"))
    described = content["evaluation"]["heldout"]
    assert 0 < described["positions"] < 0.5 * described["tokens"]
    assert "prompts are read and not scored" in content["measures"]["perplexity"]["explanation"]
    terms = yaml.safe_load(Path("run/config.yaml").read_text())["objective"]
    assert [terms[name]["positions"] for name in ("soft", "cosine")] == ["targets"] * 2, "so that prompts carry no loss"


def small_pair(shelf: Shelf) -> list[str]:
    return [f"corpus.path={shelf.books}", "teacher=pretrained", f"teacher.path={shelf.teacher}", TINY_ROWS]


def test_an_optimizer(shelf: Shelf) -> None:
    found = section("Add an optimizer")
    Path("my_optimizers.py").write_text(found["python"])
    run(found["sh"], *small_pair(shelf), "train.save_every=1")
    before, after = (load_file(f"run/checkpoints/step-0000000{step}/model.safetensors") for step in (1, 2))
    rate, name = metrics(Path("run"))[-1]["lr"], "student.model.distilbert.transformer.layer.0.ffn.lin1.weight"
    steps = (after[name] - before[name]).abs()
    torch.testing.assert_close(steps, torch.full_like(steps, rate), rtol=1e-2, atol=1e-7)


def test_a_schedule(shelf: Shelf) -> None:
    found = section("Add a schedule")
    Path("my_schedules.py").write_text(found["python"])
    run(found["sh"], *small_pair(shelf))
    rates = [line["lr"] for line in metrics(Path("run"))]
    assert rates == pytest.approx([1e-3 * 0.25 / 0.3, 1e-3 * 0.25 / 0.7])


def test_a_measure(shelf: Shelf) -> None:
    found = section("Add a measure")
    Path("my_measures.py").write_text(found["python"])
    run(found["sh"], *small_pair(shelf))
    content = results(Path("run"))
    for model in ("teacher", "student"):
        assert 0 <= content[model]["accuracy"]["heldout"] <= 1
    assert content["history"][-1]["accuracy"] == content["student"]["accuracy"]
    assert content["measures"]["accuracy"]["lower_is_better"] is False
    report = Path("run/report.md").read_text()
    assert "Accuracy" in report and "Top-1 agreement" in report


def test_an_observer(shelf: Shelf) -> None:
    found = section("Add an observer")
    Path("my_observers.py").write_text(found["python"])
    run(found["sh"], *small_pair(shelf))
    first, second, last = Path("run/steps.txt").read_text().splitlines()
    lines, history = metrics(Path("run")), results(Path("run"))["history"]
    for line, journal in zip(lines, (first, second), strict=True):
        assert journal == f"step {line['step']}: loss {line['loss/total']:.4f}, rate {line['lr']:.2e}"
    assert last == f"step 2: {history[-1]['perplexity']['heldout']}"


TINY_ROWS = "corpus.sequence_length=32"
