"""What wins: the command line's settings, then the options that it names, then the recipe, then the defaults."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from job import distill

from distill.commands.sweep import by_hydra
from distill.config.command_line import CommandLine
from distill.config.compose import build
from distill.config.composition import composed, composed_run, of_job
from distill.config.settings import Config

MINE = {
    "optimizer/base.yaml": "kind: adamw\nlr: 3.0e-5\nweight_decay: 0.5\n",
    "optimizer/mine.yaml": "defaults: [base]\nlr: 5.0e-5\n",
    "student/mine.yaml": "init: random\narchitecture: bert\nconfig: {hidden_size: 64}\n",
    "recipe/mine.yaml": "# @package _global_\n"
    "defaults: [smoke, override /optimizer: mine, _self_]\noptimizer: {lr: 7.0e-5}\n",
}


@pytest.fixture
def mine(tmp_path: Path) -> list[str]:
    """The option that names a folder of the user's own options and recipes."""
    for name, text in MINE.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    return ["--config-dir", str(tmp_path)]


def test_an_option_that_is_named_wins_over_the_recipe_and_leaves_the_rest_to_it() -> None:
    recipe = composed(["+recipe=albert_pretrain"])
    assert (recipe.optimizer.lr, recipe.optimizer.clip) == (5e-4, 1.0)
    named = composed(["+recipe=albert_pretrain", "optimizer=lamb"])
    assert (named.optimizer.lr, named.optimizer.make.path) == (1.76e-3, "distill.optim.optimizers.lamb.Lamb")
    assert named.changed(optimizer=recipe.optimizer, written={}, compared={}) == recipe.changed(written={}, compared={})
    for order in (["optimizer=lamb", "+recipe=albert_pretrain"], ["+recipe=albert_pretrain", "optimizer=lamb"]):
        assert composed(order).optimizer == named.optimizer


def test_the_same_option_by_the_recipe_itself_does_not() -> None:
    recipe = composed(["+recipe=albert_aws"])
    assert (recipe.optimizer.make.arguments["weight_decay"], recipe.optimizer.clip_each_rank) == (0.01, True)
    named = composed(["+recipe=albert_aws", "optimizer=lamb", "schedule=polynomial"])
    assert named.optimizer == recipe.optimizer, "it sets what the recipe sets too"
    assert recipe.schedule.arguments["warmup_steps"] == 3125 and named.schedule.arguments["warmup"] == 0.05


def test_options_of_the_users_win_with_what_their_own_defaults_lists_name(mine: list[str]) -> None:
    optimizer = composed([*mine, "+recipe=distilbert_gutenberg", "optimizer=mine"]).optimizer
    assert (optimizer.lr, optimizer.make.arguments["weight_decay"]) == (5e-5, 0.5)
    without = composed([*mine, "optimizer=mine"])  # the main job
    assert without.optimizer == optimizer and without.corpus.max_sequences == 5000
    assert composed([*mine, "+recipe=mine"]).optimizer.lr == 7e-5
    assert composed([*mine, "+recipe=mine", "optimizer=mine"]).optimizer.lr == 5e-5


def test_settings_of_the_command_line_come_last(mine: list[str]) -> None:
    for order in (["optimizer.lr=1", "optimizer=mine"], ["optimizer=mine", "optimizer.lr=1"]):
        optimizer = composed([*mine, "+recipe=distilbert_gutenberg", *order]).optimizer
        assert (optimizer.lr, optimizer.make.arguments["weight_decay"]) == (1.0, 0.5)
    objective = composed(["objective=distilbert", "objective.masking={smoothing: 0.2}", "~objective.cosine"]).objective
    assert (objective.masking.mlm_probability, objective.masking.smoothing) == (0.3, 0.2)
    assert set(objective.terms) == {"soft", "mlm"}


def test_a_configuration_of_an_architecture_replaces_that_of_the_recipe(mine: list[str]) -> None:
    named = [*mine, "+recipe=albert_paper", "student=mine"]
    assert composed(named).student.config == {"hidden_size": 64}
    assert composed([*named, "student.config.num_hidden_layers=2"]).student.config == {
        "hidden_size": 64,
        "num_hidden_layers": 2,
    }
    assert composed([*named, "student.config={num_hidden_layers: 2}"]).student.config == {"num_hidden_layers": 2}


def test_a_value_that_an_option_leaves_open_is_the_recipes() -> None:
    assert composed(["+recipe=distilgpt2_gutenberg", "teacher=pretrained"]).teacher.path == "./runs/gpt2_pretrain"


def test_corpus_and_sets_of_the_command_line(tmp_path: Path) -> None:
    config = composed(["+recipe=smoke", "corpus=text", f"corpus.path={tmp_path}", "evaluate=benchmark"])
    assert (config.corpus.max_sequences, config.corpus.sequence_length) == (256, 64)
    assert config.evaluate.sets == ["heldout", "wikitext2", "imdb"] and config.evaluate.max_sequences == 32


def test_a_run_from_python_has_them_too(mine: list[str]) -> None:
    run = composed_run([*mine, "+recipe=distilbert_gutenberg", "optimizer=mine"])
    assert run.config.optimizer.lr == 5e-5 and yaml.safe_load(run.resolved)["optimizer"]["lr"] == 5e-5


def test_a_sweep_has_them_run_by_run(mine: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = [*mine, "optimizer=lamb,mine", f"hydra.sweep.dir={tmp_path / 'sweep'}", "--multirun"]
    line, runs = CommandLine.of(arguments), list[Config]()
    monkeypatch.setattr("sys.argv", ["distill", *arguments])

    def keep(settings: Any) -> None:
        composition = of_job(settings)
        runs.append(build(composition.settings, composition.overrides))

    by_hydra(line, keep)
    assert [(run.optimizer.lr, run.optimizer.make.path.rpartition(".")[2]) for run in runs] == [
        (1.76e-3, "Lamb"),
        (5e-5, "Adamw"),
    ]


def test_what_cfg_shows_is_what_a_run_has(mine: list[str], capsys: pytest.CaptureFixture) -> None:
    assert distill(*mine, "+recipe=distilbert_gutenberg", "optimizer=mine", "--cfg", "job") == 0
    shown = yaml.safe_load(capsys.readouterr().out)
    assert shown["optimizer"] == {"lr": 5e-5} | shown["optimizer"] and "hydra" not in shown
