"""Every recipe that ships: composes, passes the checks, runs."""

import re
import shutil
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest
import yaml
from job import (
    ROOT,
    TINY,
    Shelf,
    composed,
    composed_chain,
    distill,
    metrics,
    refused_line,
    results,
    save_model,
    save_ordered,
)

from distill.commands.chain import REFERENCE, check_chain
from distill.config.component import TABLES, kinds
from distill.config.settings import CONF, RECIPES, Config, SourceConfig, StudentConfig, TeacherConfig
from distill.models.check import check_packing
from distill.models.layers import AUTO, RULES, choose_layers
from distill.models.student import make_student
from distill.models.teacher import load_teacher
from distill.optim.schedule import Limits, length_in_steps, make_schedule
from distill.runs.check import check
from distill.runtime.errors import SettingError
from distill.tasks import find_task

CHAINS = {"albert_chain"}
SEARCHES = {"search"}  # of an optional package; run by test_sweep_job.py
NAMES = sorted({path.stem for path in RECIPES.glob("*.yaml")} - CHAINS - SEARCHES)
LARGE = {"distilbert_gpu", "distilbert_paper", "albert_paper", "albert_aws"}  # for other machines than this one
OF_TABLES = {"squad", "glue", "table"}  # run by test_jobs.py
OF_CHATS = {"distil_chat"}  # run by test_conversations.py
ELSEWHERE = {*OF_TABLES, *OF_CHATS, "mixture", *LARGE}
ALBERT = (
    "student.config={embedding_size:16,hidden_size:32,num_hidden_layers:2,num_attention_heads:2,intermediate_size:64}"
)
OF_SCRATCH = {
    "bert_pretrain": [TINY],
    "albert_pretrain": [ALBERT],
    "gpt2_pretrain": ["student.config={n_embd:32,n_layer:2,n_head:2}", "corpus.vocab_size=300"],
}
OF_A_DEEP_TEACHER = {  # which has more layers than that of the tests
    "distil_smollm2": ["student.layers=even", "student.intermediate_size=24"],
    "distil_scarce": [
        "student.layers=even",
        "student.intermediate_size=24",
        "train.keep_best=null",
        "train.patience=null",
    ],
}
OF_A_CAUSAL_STUDENT = {"smollm2_books"}  # which is trained further


@pytest.mark.parametrize("name", sorted({*NAMES, *SEARCHES}))
def test_a_recipe_can_be_copied_and_composes_below_the_command_line(name: str) -> None:
    first, *rest = (RECIPES / f"{name}.yaml").read_text().splitlines()
    assert first == "# @package _global_"
    assert any(f"python -m distill +recipe={name}" in line for line in rest)
    if name in SEARCHES:
        pytest.importorskip("hydra_plugins.hydra_optuna_sweeper")
    config = composed(f"+recipe={name}", *["student.path=albert/albert-base-v2"] * (name in OF_TABLES))
    if (path := getattr(config.teacher, "path", None) or "").startswith("./runs/"):  # of a run of another recipe
        with pytest.raises(SettingError, match="no such file or folder"):
            check(config)
        Path(path).mkdir(parents=True)
    check(config)
    if name in LARGE:
        config = composed(f"+recipe={name}", "teacher=pretrained", "teacher.path=mine", "corpus.sequence_length=64")
        assert config.teacher.path == "mine" and config.corpus.sequence_length == 64
    if name in OF_TABLES:
        given = ["student.path=x", "corpus.hub=my/data", "corpus.subset=second"]
        sources = composed(f"+recipe={name}", *given).evaluate.sources.values()
        tables = [source for source in sources if source.kind in kinds(TABLES)]
        assert tables and {(source.hub, source.subset) for source in tables} == {("my/data", "second")}


def test_a_recipe_that_sets_nothing_is_for_the_machine_at_hand(tmp_path: Path) -> None:
    """No 800 sequences a step and three epochs, which are those of the benchmark."""
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe" / "empty.yaml").write_text("# @package _global_\n{}\n")
    train = composed(f"hydra.searchpath=[file://{tmp_path}]", "+recipe=empty").train
    assert (train.batch_size, train.sequences(1), train.epochs) == (16, 16, 1)


@pytest.mark.parametrize("name", sorted(CHAINS))
def test_every_stage_of_a_chain_passes_the_checks(name: str, tmp_path: Path) -> None:
    for step in (1, 2000, 4000, 6000, 8000):
        (tmp_path / "snapshots" / f"step-{step}").mkdir(parents=True)  # of the stages before
    chain = composed_chain(f"+recipe={name}")
    assert chain is not None
    check_chain(chain)
    lengths: dict[str, int] = {}  # of the sequences that each stage's model has learned to read
    for stage_name, stage in chain.stages.items():
        config = composed(f"+recipe={stage.recipe}", *(REFERENCE.sub(str(tmp_path), each) for each in stage.settings))
        check(config)
        assert not isinstance(config.corpus, SourceConfig) or config.corpus.path is None, "the usual books"
        lengths[stage_name] = config.corpus.sequence_length
        for earlier in {found for setting in stage.settings for found in REFERENCE.findall(setting)}:
            assert lengths[stage_name] <= lengths[earlier], "longer sequences than those of its model"


def test_the_papers_recipe_is_the_benchmark() -> None:
    config = composed("+recipe=distilbert_paper")
    assert isinstance(config.teacher, TeacherConfig) and config.teacher.path == "google-bert/bert-base-uncased"
    assert config.student.architecture == "distilbert" and config.student.layers == [0, 2, 4, 7, 9, 11]
    assert (config.train.batch_size, config.train.sequences(2), config.train.epochs) == (16, 800, 3)
    assert config.corpus.sequence_length == 512 and config.evaluate.sets == ["wikitext2", "imdb"]
    objective = config.objective
    weights = {name: term.weight for name, term in objective.terms.items()}
    assert weights == {"soft": 5.0, "mlm": 2.0, "cosine": 1.0} and objective.temperature == 2.0


@pytest.mark.parametrize("name", ["albert_aws", "albert_paper"])
def test_published_trainings_of_albert(name: str, tmp_path: Path) -> None:
    """ALBERT-base, 125,000 steps of 4,096 sequences on 64 ranks; what differs between the two is in their heads."""
    config = composed(f"+recipe={name}", f"corpus.path={tmp_path}")
    assert config.objective.task == composed("+recipe=albert_pretrain").objective.task
    student, train, optimizer = config.student, config.train, config.optimizer
    shape = ("embedding_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
    assert student.architecture == "albert" and [student.config[each] for each in shape] == [128, 768, 12, 12, 3072]
    assert {train.sequences(ranks) for ranks in (1, 8, 64)} == {4096} and (train.epochs, train.steps) == (None, 125_000)
    assert config.corpus.sequence_length == 512 and config.corpus.vocab_size == 30_000
    assert optimizer.make.path.endswith("Lamb") and optimizer.make.arguments["weight_decay"] == 0.01
    aws = name == "albert_aws"
    assert (optimizer.lr, optimizer.clip, optimizer.clip_each_rank) == (1.76e-3, 1.0, aws)
    assert config.backend.compression == ("fp16" if aws else "none") and student.dropout == (0.0 if aws else 0.1)
    assert config.objective.masking.max_predictions == (None if aws else 20)
    schedule = make_schedule(config.schedule.make, length_in_steps(train, 0), optimizer.lr)
    limits = Limits(125_000, 1.0, False)
    rates = [optimizer.lr * schedule(limits.progress(step, 0.0)) for step in (0, 3124, 3125, 124_999)]
    slope = (optimizer.lr - (3e-5 if aws else 0.0)) / (125_000 - 3125)  # a step
    rise, end = optimizer.lr / 3125, optimizer.lr - (125_000 - 3125) * slope
    assert rates == pytest.approx([rise / 2, 3124.5 * rise, optimizer.lr - slope / 2, end + slope / 2])


NEEDED = {
    "corpus=hub": ["corpus.hub=x"],
    "corpus=mixture": ["corpus.sources={a: {kind: text, path: A, weight: 1}, b: {kind: text, path: B, weight: 1}}"],
    "teacher=pretrained": ["teacher.path=x"],
    "student=pretrained": ["student.path=x"],
    "student=new": ["student.architecture=bert"],
}


@pytest.mark.slow
def test_every_option_of_every_group_composes() -> None:
    """Those of groups that do not depend on each other are composed together."""
    options = {path: sorted(path.glob("*.yaml")) for path in CONF.iterdir() if path.is_dir()}
    independent = [options.pop(CONF / name) for name in ("backend", "optimizer", "precision", "profile", "tracker")]
    alone = [(option,) for group in options.values() for option in group]
    for together in [*alone, *zip_longest(*independent)]:
        chosen = [f"{option.parent.name}={option.stem}" for option in together if option]
        more = [setting for choice in chosen for setting in NEEDED.get(choice, [])]
        more += [f"{option.parent.name}._target_=x.y" for option in together if option and option.stem == "custom"]
        assert isinstance(composed(*chosen, *more), Config), chosen


@pytest.mark.parametrize("name", sorted(set(NAMES) - ELSEWHERE))
def test_recipe_runs_two_steps(name: str, shelf: Shelf, tmp_path: Path) -> None:
    small = [*shelf.corpus, "corpus.max_sequences=60", "train.steps=2", "train.batch_size=4", "train.accumulate=2"]
    models = OF_SCRATCH.get(name)
    if name in OF_A_CAUSAL_STUDENT:
        models = [f"student.path={save_model(tmp_path / 'model')}"]
    if models is None:
        saved = {"clm": save_model, "mlm_sop": save_ordered}.get(composed(f"+recipe={name}").objective.task)
        teacher = shelf.teacher if saved is None else saved(tmp_path / "teacher")
        models = ["teacher=pretrained", f"teacher.path={teacher}", *OF_A_DEEP_TEACHER.get(name, [])]
    assert distill(f"+recipe={name}", *small, *models, f"hydra.run.dir={tmp_path / 'run'}") == 0
    assert metrics(tmp_path / "run")[-1]["step"] == 2
    assert results(tmp_path / "run")["student"]["perplexity"]["heldout"] > 1


MANUAL = "".join((ROOT / "docs" / "how-to" / page).read_text() for page in ("recipes.md", "students.md"))
SMALL = ["data.cache=cache", "data.workers=1", "corpus.heldout=0.1", "corpus.max_sequences=60", "precision=fp32"]
SMALL += ["train.steps=2", "evaluate.max_sequences=8", "evaluate.sets=[heldout]", "hydra.run.dir=run"]


def section(title: str) -> str:
    return MANUAL.split(f"\n## {title}\n")[1].split("\n## ")[0]


def commands(title: str) -> list[list[str]]:
    """The arguments of every command in a section."""
    blocks = re.findall(r"```sh\n(.*?)```", section(title), re.S)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").strip().splitlines()]
    found = [[word.strip("'") for word in re.findall(r"'[^']*'|\S+", line)] for line in lines]
    assert all(words[:3] == ["python", "-m", "distill"] for words in found)
    return [words[3:] for words in found]


def table(text: str) -> list[list[str]]:
    rows = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row] for row in rows if not row[0].strip().startswith("---")][1:]


@pytest.fixture(autouse=True)
def here(tmp_path: Path) -> None:
    (tmp_path / "BOOKS").mkdir()  # where a command is only checked


def on_the_shelf(words: list[str], shelf: Shelf) -> list[str]:
    return [word.replace("BOOKS", str(shelf.books)) for word in words]


def test_the_tables_are_whole(capsys: Any) -> None:
    """Of recipes, which is itself no recipe, and of the rules for layers."""
    named = {name for row in table(section("Choose one")) for name in re.findall(r"`(\w+)`", row[2])}
    assert len(named) > 10 and named <= {path.stem for path in RECIPES.glob("*.yaml")}
    error = refused_line(capsys, "+recipe=README")
    assert "recipe/README" in error and "smoke" in error
    rows = table(section("Layers"))
    assert len(rows) == len(RULES)
    for rule, taken in rows:
        name = re.findall(r"`(\w+)`", rule)[0]
        assert choose_layers(name, 6, 12) == [int(number) for number in taken.split(",")]
    assert "`null`" in rows[0][0] and choose_layers(None, 6, 12) == choose_layers("every_second", 6, 12)


@pytest.mark.parametrize("number", range(len(commands("Change one"))))
def test_changed_recipes_run(number: int, shelf: Shelf) -> None:
    # Of a width that MiniLM's 48 relation heads divide, as they do that of the bundled teacher.
    teacher = save_model(Path("teacher"), "bert", hidden_size=48)
    pair = ["teacher=pretrained", f"teacher.path={teacher}", "corpus.sequence_length=32"]
    assert distill(*on_the_shelf(commands("Change one")[number], shelf), *pair, *SMALL) == 0
    last = metrics(Path("run"))[-1]
    assert last["step"] == 2 and any(f"loss/{name}" in last for name in ("mlm", "relations", "hidden_mse"))


def test_a_recipe_of_ones_own(shelf: Shelf) -> None:
    (own,) = re.findall(r"```yaml\n(.*?)```", section("Write one"), re.S)
    Path("my_configs/recipe").mkdir(parents=True)
    Path("my_configs/recipe/mine.yaml").write_text(own)
    shutil.copytree(shelf.teacher / "student", "my_teacher")
    ((*words,),) = commands("Write one")
    assert distill(*on_the_shelf(words, shelf), *SMALL) == 0
    content = results(Path("run"))
    assert content["recipe"] == "mine" and content["student"]["name"] == "BertForMaskedLM"
    assert "layers: even" in Path("run/config.yaml").read_text()


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
    settings_of_student = config.student
    if isinstance(settings_of_student, StudentConfig) and settings_of_student.layers == AUTO:
        settings_of_student = settings_of_student.changed(layers="even")  # the search needs text
    student = make_student(settings_of_student, teacher, tokenizer, 32, kind)
    if kind.causal:
        check_packing(student, "student")
    (said,) = [line for line in lines if line.startswith("the student starts from layers")]
    assert said.endswith(f"of the teacher's {layers}") and 1 < student.config.num_hidden_layers < layers
    assert student.config.model_type == ("distilbert" if "student=distilbert" in settings else family)
