"""What README and manual show of adding a pair, a loss and other parts, run as it stands there."""

import re
import shutil
import sys
from pathlib import Path
from typing import Any

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
TINY_SEQUENCES = "corpus.sequence_length=32"
RUN = Path("run")


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


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: Any) -> None:
    """Where a user would work, as `python -m` sees it."""
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.fixture
def small_pair(shelf: Shelf) -> list[str]:
    return [f"corpus.path={shelf.books}", "teacher=pretrained", f"teacher.path={shelf.teacher}", TINY_SEQUENCES]


def losses(*own: str, **weights: float) -> dict[str, float]:
    """The losses of the last step, whose sum with these weights is what was minimised."""
    line = {name.removeprefix("loss/"): value for name, value in metrics(RUN)[-1].items()}
    assert all(line[name] > 0 for name in own)
    if weights:
        assert line["total"] == pytest.approx(sum(weight * line[name] for name, weight in weights.items()), rel=1e-5)
    return line


DISTILBERT = {"soft": 5.0, "mlm": 0.5, "cosine": 1.0}
LOSSES = [
    ("A loss with settings", "my_softer_losses", {"total_variation": 0.0}),
    ("A loss on hidden states", "my_hidden_losses", DISTILBERT | {"layer_gap": 1.0}),
    ("A loss on attention", "my_attention_losses", DISTILBERT | {"attention_gap": 1.0}),
]


@BOTH
def test_a_loss(page: Path, small_pair: list[str]) -> None:
    found = section("Add a loss", page)
    Path("my_losses.py").write_text(found["python"])
    run(found["sh"], *small_pair)
    losses("total_variation", **DISTILBERT, total_variation=2.0)
    assert "total_variation" in (RUN / "report.md").read_text()


@pytest.mark.parametrize(("title", "module", "weights"), LOSSES, ids=[title for title, *_ in LOSSES])
def test_further_losses(title: str, module: str, weights: dict[str, float], small_pair: list[str]) -> None:
    found = section(title)
    Path(f"{module}.py").write_text(found["python"])
    run(found["sh"], *small_pair)
    losses([*weights][-1], **(weights if len(weights) > 1 else {}))


def test_a_pair(shelf: Shelf) -> None:
    found = section("Add a pair", README)
    Path("my_configs/recipe").mkdir(parents=True)
    Path("my_configs/recipe/my_pair.yaml").write_text(found["yaml"])
    shutil.copytree(shelf.teacher / "student", "my_teacher")
    Path("my_texts").mkdir()
    for number in range(4):
        Path(f"my_texts/{number}.txt").write_text(book(number))
    run(found["sh"])
    content = results(RUN)
    assert content["recipe"] == "my_pair" and content["student"]["name"] == "BertForMaskedLM"


def test_a_model(shelf: Shelf, small_pair: list[str]) -> None:
    """A plain torch module as the student, and then as the teacher of another one."""
    found = section("Add a model")
    Path("my_models.py").write_text(found["python"])
    sys.modules.pop("my_models", None)
    first, second = (line.split("  #")[0] for line in re.sub(r"\\\n\s*", "", found["sh"]).strip().splitlines())
    run(first.replace("hydra.run.dir=runs/mine", ""), *small_pair, "train.save_every=1")
    shutil.move(RUN, "runs/mine")
    card = Path("runs/mine/student/README.md").read_text()
    assert "from my_models import MyModel" in card and "load_model(model" in card
    run(second, f"corpus.path={shelf.books}", TINY_SEQUENCES)
    student, content = results(Path("runs/mine"))["student"], results(RUN)
    assert content["teacher"]["parameters"] > content["student"]["parameters"] and student["name"] == "MyModel"
    scores = [model["perplexity"]["heldout"] for model in (content["teacher"], student)]
    assert scores[0] == pytest.approx(scores[1], rel=1e-4)


def test_a_loss_on_other_outputs(shelf: Shelf) -> None:
    found = section("A loss on other outputs")
    Path("my_class_losses.py").write_text(found["python"])
    data = [f"corpus.path={table(Path('reviews').resolve())}", "corpus.text=review", "corpus.label=stars"]
    given = [f"student.path={shelf.teacher}", *data, TINY_SEQUENCES, *SMALL]
    assert distill("+recipe=table", *given, "hydra.run.dir=runs/table") == 0
    run(found["sh"].replace("hydra.run.dir=runs/class_gap", ""), *given)
    losses("class_gap", classes=1.0, soft_classes=1.0, class_gap=0.1)


def test_a_source() -> None:
    found = section("Add a source")
    Path("my_sources.py").write_text(found["python"])
    Path("my_lines.txt").write_text("".join(book(number).replace("\n\n", "\n") for number in range(4)))
    run(found["sh"])
    content = results(RUN)
    assert content["corpus"]["name"] == "Lines" and content["corpus"]["documents"] > 100


def test_conversations_and_prompts() -> None:
    found = blocks((HOW_TO / "conversations.md").read_text().split("\n## ")[0])
    Path("my_chats.jsonl").write_text("".join(found["json"].replace("snow", f"snow {n}") for n in range(200)))
    size = ["student.config={n_embd:32,n_layer:2,n_head:2}", "corpus.vocab_size=300"]
    chosen = ["corpus=chat", "corpus.path=my_chats.jsonl", "evaluate=heldout", *SMALL, *size]
    assert distill("+recipe=gpt2_pretrain", *chosen, "hydra.run.dir=runs/gpt2_pretrain") == 0
    run(found["sh"], "corpus.heldout=0.1")
    described = results(RUN)["evaluation"]["heldout"]
    assert 0 < described["positions"] < 0.5 * described["tokens"]
    terms = yaml.safe_load((RUN / "config.yaml").read_text())["objective"]
    assert [terms[name]["positions"] for name in ("soft", "cosine")] == ["targets"] * 2, "so that prompts carry no loss"


def optimizer() -> None:
    before, after = (load_file(RUN / f"checkpoints/step-0000000{step}/model.safetensors") for step in (1, 2))
    rate, name = metrics(RUN)[-1]["lr"], "student.model.distilbert.transformer.layer.0.ffn.lin1.weight"
    steps = (after[name] - before[name]).abs()
    torch.testing.assert_close(steps, torch.full_like(steps, rate), rtol=1e-2, atol=1e-7)


def schedule() -> None:
    assert [line["lr"] for line in metrics(RUN)] == pytest.approx([1e-3 * 0.25 / 0.3, 1e-3 * 0.25 / 0.7])


def measure() -> None:
    content = results(RUN)
    assert all(0 <= content[model]["accuracy"]["heldout"] <= 1 for model in ("teacher", "student"))
    assert content["history"][-1]["accuracy"] == content["student"]["accuracy"]
    assert content["measures"]["accuracy"]["lower_is_better"] is False
    assert "Accuracy" in (RUN / "report.md").read_text()


def observer() -> None:
    *lines, last = Path("run/steps.txt").read_text().splitlines()
    for line, logged in zip(metrics(RUN), lines, strict=True):
        assert logged == f"step {line['step']}: loss {line['loss/total']:.4f}, rate {line['lr']:.2e}"
    assert last == f"step 2: {results(RUN)['history'][-1]['perplexity']['heldout']}"


@pytest.mark.parametrize("holds", [optimizer, schedule, measure, observer])
def test_other_parts(holds: Any, small_pair: list[str]) -> None:
    name = holds.__name__
    found = section(f"Add {'an' if name[0] == 'o' else 'a'} {name}")
    Path(f"my_{name}s.py").write_text(found["python"])
    run(found["sh"], *small_pair, "train.save_every=1")
    holds()
