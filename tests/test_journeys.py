"""README's Python block and the commands of each tutorial, in their order and in one folder, as somebody follows them.

Models of the Hub and texts of the reader's are small ones made here, and every run takes two steps; the bundled
teachers and books are the real ones.
"""

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
import yaml
from job import ROOT, book, distill, library, results, save_model, save_ordered
from labelled import squad
from test_docs import blocks, commands

TUTORIALS = ROOT / "docs" / "tutorials"
SMALL = ["train.steps=2", "train.epochs=null", "data.workers=1", "data.cache=cache", "evaluate.max_sequences=4"]
SMALL += ["evaluate.pseudo_perplexity.fraction=0.02"]
STEPS = ("train.steps", "train.epochs")
QUESTIONS = ["corpus.max_query=16"]  # tokens, so that short sequences have room for a context
# What the pages name and this machine lacks, by what stands in its place.
MODELS = {
    "google-bert/bert-base-uncased": "bert", "MODEL": "bert", "albert/albert-base-v2": "bert", "TEACHER": "gpt2",
    "Qwen/Qwen3-0.6B": "llama", "Qwen/Qwen2.5-1.5B": "llama", "Qwen/Qwen2.5-0.5B": "llama",
    "runs/albert_pretrain": "bert",
}  # fmt: skip
pytestmark = pytest.mark.slow


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the texts, tables and models that the pages speak of."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DISTILL_DATA", str(tmp_path / "data"))
    library(tmp_path / "BOOKS")
    Path("my_texts").mkdir()
    for number in range(6):
        Path(f"my_texts/{number}.txt").write_text(book(number))
    Path("texts.txt").write_text("a quiet ship\nan old house\n")
    Path("FILE.jsonl").write_text("".join(json.dumps({"text": book(number, 2)}) + "\n" for number in range(40)))
    labelled(Path("FOLDER"), "text,label")
    labelled(Path("rows"), "review,stars")
    for name in ("train", "dev"):
        shutil.copy(f"rows/{name}.csv", f"{name}.csv")
    squad(Path("data/squad"))
    shutil.copy("data/squad/dev-v1.1.json", ".")
    labelled(Path("data/glue/SST-2"), "sentence\tlabel", ".tsv", ("0", "1"))
    for family in set(MODELS.values()):
        save_model(Path("models") / family, family)
    save_ordered(Path("models/albert"))
    return tmp_path


def labelled(folder: Path, header: str, suffix: str = ".csv", classes: tuple[str, str] = ("no", "yes")) -> None:
    folder.mkdir(parents=True)
    between = "\t" if "\t" in header else ","
    for name, count in (("train", 24), ("dev", 8)):
        rows = [f"a {('dull', 'fine')[number % 2]} ship{between}{classes[number % 2]}" for number in range(count)]
        (folder / f"{name}{suffix}").write_text("\n".join([header, *rows]) + "\n")


def follow(words: list[str], *more: str) -> None:
    """One command of a page, with two steps where it trains."""
    named = [re.sub(r"^([\w.]+=)(.+)$", lambda found: found[1] + substitute(found[2]), word) for word in words]
    trains = not re.fullmatch(r"[a-z]\w*", words[0])
    given = {word.partition("=")[0] for word in words}
    added = [setting for setting in [*SMALL, *more] if trains and setting.partition("=")[0] not in given]
    if given & {*STEPS}:  # as the page has them, but fewer
        named = [word for word in named if word.partition("=")[0] not in STEPS]
        added += SMALL[:2]
    assert distill(*named, *added) == 0, shlex.join([*named, *added])


def substitute(value: str) -> str:
    return f"models/{MODELS[value]}" if value in MODELS else value


def test_first_run(here: Path) -> None:
    follow(["+recipe=distilbert_gutenberg"])  # make demo
    for words in commands(TUTORIALS / "first-run.md"):
        follow([word.replace("corpus.path=FOLDER", "corpus.path=my_texts") for word in words])
    (code,) = blocks(TUTORIALS / "first-run.md", "python")
    exec(code, {})
    assert results(Path("runs/beside_baseline"))["baseline"] and Path("runs/warm/report.html").is_file()


def test_your_own_pair(here: Path) -> None:
    page = TUTORIALS / "your-own-pair.md"
    recipe = next(yaml.safe_load(code) for code in blocks(page, "yaml"))
    recipe["teacher"]["path"], recipe["student"] = "models/bert", {"layers": "even", "num_layers": 2}
    Path("my_configs/recipe").mkdir(parents=True)
    Path("my_configs/recipe/my_pair.yaml").write_text("# @package _global_\n" + yaml.safe_dump(recipe))
    for words in commands(page):
        follow(words, "corpus.sequence_length=32", "corpus.heldout=0.2")
    exec(blocks(page, "python")[0], {})
    assert len(list(Path("runs").rglob("student/model.safetensors"))) >= 7  # of which four are a sweep's


def test_a_causal_model(here: Path) -> None:
    for words in commands(TUTORIALS / "causal-model.md"):
        words = ["corpus.sequence_length=64" if word.startswith("corpus.sequence_length") else word for word in words]
        follow(words, *(["corpus.sequence_length=64"] if "teacher.path" in " ".join(words) else []))
    assert results(Path("runs/distilgpt2_gutenberg"))["student"]["perplexity"]


def test_fine_tuning(here: Path) -> None:
    for words in commands(TUTORIALS / "fine-tuning.md"):
        if words[0] == "+recipe=albert_chain":
            assert (
                distill("--config-dir", "my_configs", f"+recipe={stages_of_two_steps('albert_chain')}", *words[1:]) == 0
            )
            continue
        words = ["student.layers=[0,2]" if word.startswith("student.layers") else word for word in words]
        words = [word.replace("teacher.path=MODEL", "teacher.path=runs/table") for word in words]  # a fine-tuned one
        words = [word.replace("input=GLUE/SST-2", "input=data/glue/SST-2/dev.tsv") for word in words]
        words = [word for word in words if not word.startswith("corpus.sequence_length")]
        follow(words, "corpus.sequence_length=64", *(QUESTIONS if words[0] == "+recipe=squad" else []))
    assert Path("answers.json").is_file() and results(Path("runs/table_distilled"))["student"]["accuracy"]


def stages_of_two_steps(name: str) -> str:
    """A recipe of the user's: a chain that ships, with few steps and one seed."""
    text = (ROOT / "recipes" / f"{name}.yaml").read_text()
    chain = yaml.safe_load(text)
    chain["chain"]["given"]["seeds"], chain["chain"]["given"]["length"] = [0], 80
    for stage in chain["chain"]["stages"].values():
        stage["settings"] = [*stage["settings"], *SMALL]
        if stage["recipe"] != "squad":
            stage["settings"] += ["corpus.sequence_length=80"]
    Path("my_configs/recipe").mkdir(parents=True, exist_ok=True)
    text = "# @package _global_\n" + yaml.safe_dump(chain, sort_keys=False)  # stages come in their order
    Path(f"my_configs/recipe/small_{name}.yaml").write_text(text)
    return f"small_{name}"


def test_python_of_the_readme(here: Path) -> None:
    text = (ROOT / "README.md").read_text().split("## From Python")[1].split("\n## ")[0]
    (code,) = re.findall(r"```python\n(.*?)```", text, re.S)
    small = "".join(f', "{setting}"' for setting in SMALL)
    names: dict[str, object] = {}
    exec(code.replace('"corpus.path=BOOKS"]', f'"corpus.path=BOOKS"{small}]'), names)
    assert names["run"].student.is_dir()
