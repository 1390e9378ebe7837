"""Every recipe that ships: composes, passes the checks, runs."""

from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest
from job import TINY, Shelf, composed, composed_chain, distill, metrics, results, save_model, save_ordered

from distill.commands.chain import REFERENCE, check_chain
from distill.config.component import TABLES, kinds
from distill.config.settings import CONF, RECIPES, Config, SourceConfig, TeacherConfig
from distill.optim.schedule import Limits, length_in_steps, make_schedule
from distill.runs.check import check
from distill.runtime.errors import SettingError

CHAINS = {"albert_chain"}
SEARCHES = {"search"}  # of an optional package; run by test_sweep_job.py
NAMES = sorted({path.stem for path in RECIPES.glob("*.yaml")} - CHAINS - SEARCHES)
LARGE = {"distilbert_gpu", "distilbert_paper", "albert_paper", "albert_aws"}  # for other machines than this one

ALBERT = (
    "student.config={embedding_size:16,hidden_size:32,num_hidden_layers:2,num_attention_heads:2,intermediate_size:64}"
)
OF_SCRATCH = {
    "bert_pretrain": [TINY],
    "albert_pretrain": [ALBERT],
    "gpt2_pretrain": ["student.config={n_embd:32,n_layer:2,n_head:2}", "corpus.vocab_size=300"],
}
OF_A_DEEP_TEACHER = {"distil_smollm2": ["student.layers=even"]}  # which has more layers than that of the tests
OF_A_CAUSAL_STUDENT = {"smollm2_books"}  # which is trained further
OF_TABLES = {"squad", "glue", "table"}  # run by test_fine_tuning.py
OF_SOURCES = {"mixture"}  # run by test_mixture_job.py
OF_CHATS = {"distil_chat"}  # run by test_conversations.py


def test_the_recipes_are_there() -> None:
    masked = {"distilbert_gutenberg", "distilbert_gutenberg_baseline", "bert_pretrain", "smoke"}
    causal = {"distilgpt2_gutenberg", "distilgpt2_gutenberg_baseline", "gpt2_pretrain"}
    assert masked | causal | {"albert_pretrain", "distilalbert_gutenberg"} | OF_TABLES <= set(NAMES)


@pytest.mark.parametrize("name", sorted(OF_TABLES))
def test_sets_of_a_table_are_of_its_data_set(name: str) -> None:
    config = composed(f"+recipe={name}", "student.path=x", "corpus.hub=my/data", "corpus.subset=second")
    tables = [source for source in config.evaluate.sources.values() if source.kind in kinds(TABLES)]
    assert tables and {(source.hub, source.subset) for source in tables} == {("my/data", "second")}


@pytest.mark.parametrize("name", sorted({*NAMES, *SEARCHES}))
def test_recipe_says_what_it_is(name: str) -> None:
    """The header lets a user copy the file; the comment says what it does and the command."""
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


@pytest.mark.parametrize("name", sorted(LARGE))
def test_the_command_line_wins_over_a_recipe(name: str) -> None:
    config = composed(f"+recipe={name}", "teacher=pretrained", "teacher.path=mine", "corpus.sequence_length=64")
    assert isinstance(config.teacher, TeacherConfig) and config.teacher.path == "mine"
    assert config.corpus.sequence_length == 64


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
    command = f"python -m distill +recipe={name}"
    assert any(command in line for line in (RECIPES / f"{name}.yaml").read_text().splitlines())
    chain = composed_chain(f"+recipe={name}")
    assert chain is not None
    check_chain(chain)
    positions: dict[str, int] = {}  # rows that each stage's model has learned to read
    for stage_name, stage in chain.stages.items():
        settings = [REFERENCE.sub(str(tmp_path), setting) for setting in stage.settings]
        config = composed(f"+recipe={stage.recipe}", *settings)
        check(config)
        if isinstance(config.corpus, SourceConfig):
            assert config.corpus.path is None, "the usual books"
        positions[stage_name] = config.corpus.sequence_length
        for earlier in {found for setting in stage.settings for found in REFERENCE.findall(setting)}:
            assert positions[stage_name] <= positions[earlier], "longer rows than those of its model"


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
    """ALBERT-base, 125,000 steps of 4,096 rows on 64 ranks; what differs between the two is in their heads."""
    config = composed(f"+recipe={name}", f"corpus.path={tmp_path}")
    check(config)
    assert config.objective.task == composed("+recipe=albert_pretrain").objective.task
    student, train, optimizer = config.student, config.train, config.optimizer
    shape = ("embedding_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
    assert student.architecture == "albert" and [student.config[each] for each in shape] == [128, 768, 12, 12, 3072]
    assert {train.sequences(ranks) for ranks in (1, 8, 64)} == {4096} and (train.epochs, train.steps) == (None, 125_000)
    assert config.corpus.sequence_length == 512 and config.corpus.vocab_size == 30_000
    assert optimizer.make.path.endswith("Lamb") and optimizer.make.arguments["weight_decay"] == 0.01
    aws = name == "albert_aws"
    assert (optimizer.lr, optimizer.clip, optimizer.clip_each_rank) == (1.76e-3, 1.0, aws)
    assert config.backend.compression == ("fp16" if aws else "none")
    assert student.dropout == (0.0 if aws else 0.1) and config.objective.masking.max_predictions == (
        None if aws else 20
    )
    schedule = make_schedule(config.schedule.make, length_in_steps(train, 0), optimizer.lr)
    limits = Limits(125_000, 1.0, False)
    rates = [optimizer.lr * schedule(limits.progress(step, 0.0)) for step in (0, 3124, 3125, 124_999)]
    slope = (optimizer.lr - (3e-5 if aws else 0.0)) / (125_000 - 3125)  # a step
    rise, end = optimizer.lr / 3125, optimizer.lr - (125_000 - 3125) * slope
    assert rates == pytest.approx([rise / 2, 3124.5 * rise, optimizer.lr - slope / 2, end + slope / 2])


TWO_SOURCES = "{a: {kind: text, path: A, weight: 1}, b: {kind: text, path: B, weight: 1}}"


@pytest.mark.slow
def test_every_option_of_every_group_composes() -> None:
    """Those of groups that do not depend on each other are composed together."""
    options = {path: sorted(path.glob("*.yaml")) for path in CONF.iterdir() if path.is_dir()}
    independent = [options.pop(CONF / name) for name in ("backend", "optimizer", "precision", "profile", "tracker")]
    alone = [(option,) for group in options.values() for option in group]
    for together in [*alone, *zip_longest(*independent)]:
        arguments: list[str] = []
        for option in filter(None, together):
            group = option.parent.name
            arguments += [f"{group}={option.stem}"]
            arguments += ["corpus.hub=x"] if option.stem == "hub" else []
            arguments += [f"corpus.sources={TWO_SOURCES}"] if option.stem == "mixture" else []
            arguments += [f"{group}.path=x"] if group in ("teacher", "student") and option.stem == "pretrained" else []
            arguments += [f"{group}._target_=x.y"] if option.stem == "custom" else []
            arguments += ["student.architecture=bert"] if option.stem == "new" else []
        assert isinstance(composed(*arguments), Config), arguments


@pytest.mark.parametrize("name", sorted(set(NAMES) - OF_TABLES - OF_SOURCES - OF_CHATS - LARGE))
def test_recipe_runs_two_steps(name: str, shelf: Shelf, tmp_path: Path) -> None:
    small: list[Any] = [
        *shelf.corpus,
        "train.steps=2",
        "train.batch_size=4",
        "train.accumulate=2",
        "corpus.max_sequences=60",
    ]
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
