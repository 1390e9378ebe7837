"""What the README shows of adding a pair, a loss and a source, run as it stands there."""

import re
import shutil
from pathlib import Path

import pytest
from job import ROOT, Shelf, book, distill, metrics, results

README = (ROOT / "README.md").read_text()
SMALL = ["corpus.cache=cache", "corpus.workers=1", "evaluate.rows=8", "train.steps=2"]


def section(title: str) -> dict[str, str]:
    """The one block of each language in a section."""
    text = README.split(f"### {title}\n")[1].split("\n### ")[0]
    return {language: code for language, code in re.findall(r"```(\w+)\n(.*?)```", text, re.S)}


def run(command: str, *more: str) -> None:
    """A command of the README, in this process."""
    words = [word.strip("'") for word in re.findall(r"'[^']*'|\S+", command.strip())]
    assert words[:3] == ["python", "-m", "distill"]
    assert distill(*words[3:], *more, *SMALL, "hydra.run.dir=run") == 0


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a user would work, as `python -m` sees it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.parametrize("title", ["Add a pair", "Add a loss", "Add a source"])
def test_fifteen_lines_are_enough(title: str) -> None:
    found = section(title)
    own = next(code for language, code in found.items() if language != "sh")
    assert len(own.strip().splitlines()) <= 15 and "sh" in found


def test_a_pair(shelf: Shelf) -> None:
    found = section("Add a pair")
    Path("my_configs/recipe").mkdir(parents=True)
    Path("my_configs/recipe/my_pair.yaml").write_text(found["yaml"])
    shutil.copytree(shelf.teacher / "student", "my_teacher")
    Path("my_texts").mkdir()
    for number in range(4):
        Path(f"my_texts/{number}.txt").write_text(book(number))
    run(found["sh"])
    content = results(Path("run"))
    assert content["recipe"] == "my_pair" and content["student"]["name"] == "BertForMaskedLM"


def test_a_loss(shelf: Shelf) -> None:
    found = section("Add a loss")
    Path("my_losses.py").write_text(found["python"])
    run(found["sh"], f"corpus.path={shelf.books}", "teacher=pretrained", f"teacher.path={shelf.teacher}", TINY_ROWS)
    line = metrics(Path("run"))[-1]
    parts = 5 * line["loss/soft"] + 2 * line["loss/mlm"] + line["loss/cosine"] + 2 * line["loss/reverse_kl"]
    assert line["loss/total"] == pytest.approx(parts, rel=1e-5) and line["loss/reverse_kl"] > 0
    assert "reverse_kl" in Path("run/report.md").read_text()


def test_a_source() -> None:
    found = section("Add a source")
    Path("my_sources.py").write_text(found["python"])
    Path("my_lines.txt").write_text("".join(book(number).replace("\n\n", "\n") for number in range(4)))
    run(found["sh"])
    content = results(Path("run"))
    assert content["corpus"]["name"] == "Lines" and content["corpus"]["documents"] > 100


TINY_ROWS = "corpus.sequence_length=32"
