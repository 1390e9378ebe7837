"""What wins is what wins in Hydra: the command line's settings, then the recipe, then options, then the defaults."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from job import distill

from distill.commands.sweep import by_hydra
from distill.config.command_line import CommandLine
from distill.config.compose import build, compose, composed, composed_run, of_job
from distill.config.settings import Config
from distill.runtime.errors import SettingError

MINE = {
    "optimizer/base.yaml": "kind: adamw\nlr: 3.0e-5\nweight_decay: 0.5\n",
    "optimizer/mine.yaml": "defaults: [base]\nlr: 5.0e-5\n",
    "teacher/mine.yaml": "path: ./mine\n",
    "recipe/mine.yaml": "# @package _global_\n"
    "defaults: [smoke, override /optimizer: mine, _self_]\noptimizer: {lr: 7.0e-5}\nteacher: {path: ./other}\n",
}


@pytest.fixture
def mine(tmp_path: Path) -> list[str]:
    """The option that names a folder of the user's own options and recipes."""
    for name, text in MINE.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    return ["--config-dir", str(tmp_path)]


def test_a_recipe_wins_over_an_option_of_the_command_line() -> None:
    recipe = composed(["+recipe=squad", "student.path=x"])
    assert (recipe.optimizer.lr, recipe.optimizer.make.path) == (5e-5, "distill.optim.optimizers.adamw.Adamw")
    for line in (["optimizer=lamb", "+recipe=squad"], ["+recipe=squad", "optimizer=lamb"]):
        named = composed([*line, "student.path=x"]).optimizer
        assert (named.lr, named.make.path) == (5e-5, "distill.optim.optimizers.lamb.Lamb")
        assert named.make.arguments["bias_correction"] is False, "which the recipe does not set"


def test_options_of_the_users_are_found_with_what_their_own_defaults_lists_name(mine: list[str]) -> None:
    optimizer = composed([*mine, "+recipe=bert_pretrain", "optimizer=mine"]).optimizer
    assert (optimizer.lr, optimizer.make.arguments["weight_decay"]) == (1e-3, 0.5)
    assert composed([*mine, "+recipe=mine"]).optimizer.lr == 7e-5


def test_settings_of_the_command_line_come_last(mine: list[str]) -> None:
    for order in (["optimizer.lr=1", "optimizer=mine"], ["optimizer=mine", "optimizer.lr=1"]):
        optimizer = composed([*mine, "+recipe=distilbert_gutenberg", *order]).optimizer
        assert (optimizer.lr, optimizer.make.arguments["weight_decay"]) == (1.0, 0.5)
    objective = composed(["objective=distilbert", "objective.masking={smoothing: 0.2}", "~objective.cosine"]).objective
    assert (objective.masking.mlm_probability, objective.masking.smoothing) == (0.3, 0.2)
    assert set(objective.terms) == {"soft", "mlm"}


@pytest.mark.parametrize("option", ["none", "bundled_small"])
def test_a_teacher_that_would_have_no_effect_is_refused(mine: list[str], option: str) -> None:
    refusal = rf"^teacher={option}: the recipe sets teacher\.path=\./other, .*give teacher\.path="
    with pytest.raises(SettingError, match=refusal):
        composed([*mine, "+recipe=mine", f"teacher={option}"])
    assert composed([*mine, "+recipe=mine", "teacher.path=bundled_small"]).teacher.bundled


def test_a_baseline_of_a_recipe_that_sets_weights_is_refused_or_has_no_teacher(tmp_path: Path) -> None:
    """Else a run would print a command for its baseline that learns from the teacher."""
    (tmp_path / "recipe").mkdir()
    text = "# @package _global_\ndefaults: [smoke, _self_]\nobjective: {soft: {weight: 3.0}}\n"
    (tmp_path / "recipe" / "heavy.yaml").write_text(text)
    heavy = ["--config-dir", str(tmp_path), "+recipe=heavy", "objective=mlm"]
    with pytest.raises(SettingError, match=r"^objective=mlm: the recipe sets objective\.soft\.weight=3\.0, .*weight=0"):
        composed(heavy)
    assert composed([*heavy, "objective.soft.weight=0"]).objective.terms["soft"].weight == 0
    assert composed([*heavy[:-1], "objective=masked"]).objective.terms["soft"].weight == 3.0
    for recipe, without in (("distil_chat", "clm"), ("distilbert_gutenberg", "mlm"), ("distil_smollm2", "clm")):
        terms = composed([f"+recipe={recipe}", f"objective={without}", "corpus.path=x"]).objective.terms
        assert [name for name, term in terms.items() if term.weight] == [without]


@pytest.mark.parametrize("recipe", ["+recipe=smoke", "recipe=smoke"])
def test_a_recipe_is_taken_with_and_without_a_plus_anywhere(recipe: str) -> None:
    for line in ([recipe, "seed=3"], ["seed=3", recipe]):
        run = composed_run(line)
        assert run.config.corpus.max_sequences == 256 and run.config.seed == 3
        assert "+recipe=smoke" in run.command and run.folder == Path("runs/smoke")
    assert composed_run([]).config == composed_run(["+recipe=distilbert_gutenberg"]).config, "the main job"


def test_dicts_are_merged() -> None:
    bert = {"hidden_size": 192, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 768}
    new = composed(["student=bert", "student.config.hidden_size=64", "+student.config.type_vocab_size=1"]).student
    assert new.config == bert | {"hidden_size": 64, "type_vocab_size": 1}
    of_recipe = composed(["+recipe=bert_pretrain", "student.config={hidden_size:32}"]).student
    assert of_recipe.config == bert | {"hidden_size": 32}


def test_a_sweep_over_recipes_has_a_folder_that_is_no_recipes() -> None:
    for recipe in ("+recipe=smoke,squad", "recipe=smoke,squad"):
        assert compose(CommandLine.of(["-m", recipe])).sweep_folder == Path("runs/default-sweep")
    assert compose(CommandLine.of(["-m", "+recipe=smoke", "seed=1,2"])).sweep_folder == Path("runs/smoke-sweep")


def test_a_run_from_python_has_them_too(mine: list[str]) -> None:
    run = composed_run([*mine, "+recipe=mine"])
    assert run.config.optimizer.lr == 7e-5 and yaml.safe_load(run.resolved)["optimizer"]["lr"] == 7e-5


def test_a_sweep_has_them_run_by_run(mine: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = f"hydra.sweep.dir={tmp_path / 'sweep'}"
    arguments = [*mine, "+recipe=squad", "student.path=x", "optimizer=lamb,mine", folder, "--multirun"]
    line, runs = CommandLine.of(arguments), list[Config]()
    monkeypatch.setattr("sys.argv", ["distill", *arguments])

    def keep(settings: Any) -> None:
        composition = of_job(settings)
        runs.append(build(composition.settings, composition.overrides))

    by_hydra(line, keep)
    made = [(run.optimizer.lr, run.optimizer.make.path.rpartition(".")[2]) for run in runs]
    assert made == [(5e-5, "Lamb"), (5e-5, "Adamw")]


def test_what_cfg_shows_is_what_a_run_has(mine: list[str], capsys: pytest.CaptureFixture) -> None:
    assert distill(*mine, "+recipe=mine", "--cfg", "job") == 0
    shown = yaml.safe_load(capsys.readouterr().out)
    assert shown["optimizer"] == {"lr": 7e-5} | shown["optimizer"] and "hydra" not in shown
