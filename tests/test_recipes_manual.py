"""What the manual shows of recipes and pairs: its commands and files, each pair with a small model of its family."""

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from job import ROOT, Shelf, composed, distill, metrics, results, save_model

from distill.config.settings import RECIPES, StudentConfig
from distill.models.check import check_packing
from distill.models.layers import AUTO, RULES, choose_layers
from distill.models.student import make_student
from distill.models.teacher import load_teacher
from distill.runs.check import check
from distill.tasks import find_task

MANUAL = "".join((ROOT / "docs" / "how-to" / page).read_text() for page in ("recipes.md", "students.md"))
SMALL = [
    "data.cache=cache",
    "data.workers=1",
    "corpus.sequence_length=32",
    "corpus.heldout=0.1",
    "corpus.max_sequences=60",
]
SMALL += ["train.steps=2", "evaluate.max_sequences=8", "evaluate.sets=[heldout]", "precision=fp32", "hydra.run.dir=run"]


def section(title: str) -> str:
    return MANUAL.split(f"\n## {title}\n")[1].split("\n## ")[0]


def commands(title: str) -> list[list[str]]:
    """The arguments of every command in a section."""
    found = []
    for block in re.findall(r"```sh\n(.*?)```", section(title), re.S):
        for line in block.replace("\\\n", " ").strip().splitlines():
            words = [word.strip("'") for word in re.findall(r"'[^']*'|\S+", line)]
            assert words[:3] == ["python", "-m", "distill"]
            found.append(words[3:])
    return found


def table(text: str) -> list[list[str]]:
    rows = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row] for row in rows if not row[0].strip().startswith("---")][1:]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "BOOKS").mkdir()  # where a command is only checked


def on_the_shelf(words: list[str], shelf: Shelf) -> list[str]:
    return [word.replace("BOOKS", str(shelf.books)) for word in words]


def test_the_table_names_recipes_and_is_none(capfd: pytest.CaptureFixture) -> None:
    named = {name for row in table(section("Choose one")) for name in re.findall(r"`(\w+)`", row[2])}
    assert len(named) > 10 and named <= {path.stem for path in RECIPES.glob("*.yaml")}
    assert distill("+recipe=README") == 2
    error = capfd.readouterr().err
    assert "recipe/README" in error and "smoke" in error and "\n\tREADME" not in error


@pytest.mark.parametrize("number", range(len(commands("Change one"))))
def test_changed_recipes_run(number: int, shelf: Shelf) -> None:
    # Of a width that MiniLM's 48 relation heads divide, as they do that of the bundled teacher.
    teacher = save_model(Path("teacher"), "bert", hidden_size=48)
    pair = ["teacher=pretrained", f"teacher.path={teacher}"]
    assert distill(*on_the_shelf(commands("Change one")[number], shelf), *pair, *SMALL) == 0
    assert metrics(Path("run"))[-1]["step"] == 2
    assert any(f"loss/{name}" in metrics(Path("run"))[-1] for name in ("mlm", "relations", "hidden_mse"))


def test_a_recipe_of_ones_own(shelf: Shelf) -> None:
    (own,) = re.findall(r"```yaml\n(.*?)```", section("Write one"), re.S)
    Path("my_configs/recipe").mkdir(parents=True)
    Path("my_configs/recipe/mine.yaml").write_text(own)
    shutil.copytree(shelf.teacher / "student", "my_teacher")
    ((*words,),) = commands("Write one")
    small = [word for word in SMALL if "sequence_length" not in word]
    assert distill(*on_the_shelf(words, shelf), *small) == 0
    content = results(Path("run"))
    assert content["recipe"] == "mine" and content["student"]["name"] == "BertForMaskedLM"
    assert "layers: even" in Path("run/config.yaml").read_text()


def test_the_rules_for_layers() -> None:
    rows = table(section("Layers"))
    assert len(rows) == len(RULES)
    for rule, taken in rows:
        names = re.findall(r"`(\w+)`", rule)
        assert choose_layers(names[0], 6, 12) == [int(number) for number in taken.split(",")]
    assert "(or nothing)" in rows[0][0] and choose_layers(None, 6, 12) == choose_layers("every_second", 6, 12)


MODELS = yaml.safe_load((ROOT / "docs" / "reference" / "models.yaml").read_text())
PAIRS = [(found["command"].split(), row) for found in MODELS.values() for row in found["pairs"]]


@pytest.mark.parametrize(("prefix", "row"), PAIRS, ids=[row[0] for _, row in PAIRS])
def test_a_pair_of_the_table(prefix: list[str], row: list[Any], lines: list[str]) -> None:
    """Its settings compose and pass, and what they make of a teacher of that family and depth is a smaller model."""
    _, family, layers, words = row
    settings = words.split()
    folder = save_model(Path("teacher"), family, layers)
    (path,) = [word for word in settings if word.startswith("teacher.path=")]
    assert re.fullmatch(r"teacher\.path=[\w-]+/[\w.-]+", path), "a name on the Hub"
    config = composed(*prefix, *settings, f"teacher.path={folder}", "corpus.sequence_length=32")
    check(config)
    kind = find_task(config.objective.task).kind
    teacher, tokenizer, _ = load_teacher(config.teacher, kind)
    assert tokenizer is not None
    settings_of_student = config.student
    if isinstance(settings_of_student, StudentConfig) and settings_of_student.layers == AUTO:
        settings_of_student = settings_of_student.changed(layers="even")  # the search needs text
    student = make_student(settings_of_student, teacher, tokenizer, 32, kind)
    if kind.causal:
        check_packing(student, "student")
    (said,) = [line for line in lines if line.startswith("the student starts from layers")]
    assert said.endswith(f"of the teacher's {layers}")
    assert 1 < student.config.num_hidden_layers < layers
    assert student.config.model_type == ("distilbert" if "student=distilbert" in settings else family)
