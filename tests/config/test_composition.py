"""What wins is what wins in Hydra: the command line's settings, then the recipe, then options, then the defaults."""

from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import yaml
from job import distill

from distill.commands.sweep import by_hydra
from distill.config.command_line import CommandLine
from distill.config.compose import build, compose, composed, composed_run, of_job
from distill.config.settings import Config, StudentConfig, TeacherConfig
from distill.distributed.bucket import MAX_STATS
from distill.objective.terms.soft import Soft
from distill.runs.check import MOST_TERMS, check
from distill.runs.step import StepStats
from distill.runtime.errors import SettingError
from distill.runtime.signals import ALL

MINE = {
    "optimizer/base.yaml": "kind: adamw\nlr: 3.0e-5\nweight_decay: 0.5\n",
    "optimizer/mine.yaml": "defaults: [base]\nlr: 5.0e-5\n",
    "teacher/mine.yaml": "path: ./mine\n",
    "recipe/mine.yaml": "# @package _global_\n"
    "defaults: [smoke, override /optimizer: mine, _self_]\noptimizer: {lr: 7.0e-5}\nteacher: {path: ./other}\n",
    "recipe/heavy.yaml": "# @package _global_\ndefaults: [smoke, _self_]\nobjective: {soft: {weight: 3.0}}\n",
}
BERT = {"hidden_size": 192, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 768}


@pytest.fixture
def mine(tmp_path: Path) -> list[str]:
    """The option that names a folder of the user's own options and recipes."""
    for name, text in MINE.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    return ["--config-dir", str(tmp_path)]


def optimizer_of(*arguments: str) -> tuple[float, str, Any]:
    optimizer = composed([*arguments]).optimizer
    return optimizer.lr, optimizer.make.path.rpartition(".")[2], optimizer.make.arguments.get("weight_decay")


def test_a_recipe_wins_over_an_option_and_the_command_line_over_all(mine: list[str]) -> None:
    assert optimizer_of("+recipe=squad", "student.path=x")[:2] == (5e-5, "Adamw")
    for line in (["optimizer=lamb", "+recipe=squad"], ["+recipe=squad", "optimizer=lamb"]):
        assert optimizer_of(*line, "student.path=x")[:2] == (5e-5, "Lamb")
    assert optimizer_of(*mine, "+recipe=bert_pretrain", "optimizer=mine") == (1e-3, "Adamw", 0.5)
    assert optimizer_of(*mine, "+recipe=mine")[0] == 7e-5
    for order in (["optimizer.lr=1", "optimizer=mine"], ["optimizer=mine", "optimizer.lr=1"]):
        assert optimizer_of(*mine, "+recipe=distilbert_gutenberg", *order) == (1.0, "Adamw", 0.5)
    objective = composed(["objective=distilbert", "objective.masking={smoothing: 0.2}", "~objective.cosine"]).objective
    assert (objective.masking.mlm_probability, objective.masking.smoothing) == (0.3, 0.2)
    assert set(objective.terms) == {"soft", "mlm"}


@pytest.mark.parametrize("option", ["none", "bundled_small"])
def test_a_teacher_that_would_have_no_effect_is_refused(mine: list[str], option: str) -> None:
    with pytest.raises(SettingError) as error:
        composed([*mine, "+recipe=mine", f"teacher={option}"])
    assert (error.value.setting, error.value.value) == ("teacher", option) and "teacher.path=" in error.value.cure
    assert composed([*mine, "+recipe=mine", "teacher.path=bundled_small"]).teacher.bundled


def test_a_baseline_of_a_recipe_that_sets_weights_is_refused_or_has_no_teacher(mine: list[str]) -> None:
    """Else a run would print a command for its baseline that learns from the teacher."""
    heavy = [*mine, "+recipe=heavy", "objective=mlm"]
    with pytest.raises(SettingError) as error:
        composed(heavy)
    assert (error.value.setting, error.value.value) == ("objective", "mlm") and "weight=0" in error.value.cure
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
    assert compose(CommandLine.of(["-m", f"{recipe},squad"])).sweep_folder == Path("runs/default-sweep")
    assert compose(CommandLine.of(["-m", recipe, "seed=1,2"])).sweep_folder == Path("runs/smoke-sweep")


def test_dicts_are_merged() -> None:
    new = composed(["student=bert", "student.config.hidden_size=64", "+student.config.type_vocab_size=1"]).student
    assert new.config == BERT | {"hidden_size": 64, "type_vocab_size": 1}
    assert composed(["+recipe=bert_pretrain", "student.config={hidden_size:32}"]).student.config["hidden_size"] == 32


def test_runs_of_programs_and_sweeps_and_what_cfg_shows_have_them_too(
    mine: list[str], tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    run = composed_run([*mine, "+recipe=mine"])
    assert run.config.optimizer.lr == 7e-5 and yaml.safe_load(run.resolved)["optimizer"]["lr"] == 7e-5
    assert distill(*mine, "+recipe=mine", "--cfg", "job") == 0
    shown = yaml.safe_load(capsys.readouterr().out)
    assert shown["optimizer"] == {"lr": 7e-5} | shown["optimizer"] and "hydra" not in shown
    folder = f"hydra.sweep.dir={tmp_path / 'sweep'}"
    arguments = [*mine, "+recipe=squad", "student.path=x", "optimizer=lamb,mine", folder, "--multirun"]
    made = list[tuple[float, str]]()
    monkeypatch.setattr("sys.argv", ["distill", *arguments])

    def keep(settings: Any) -> None:
        composition = of_job(settings)
        optimizer = build(composition.settings, composition.overrides).optimizer
        made.append((optimizer.lr, optimizer.make.path.rpartition(".")[2]))

    by_hydra(CommandLine.of(arguments), keep)
    assert made == [(5e-5, "Lamb"), (5e-5, "Adamw")]


def test_nothing_that_an_option_sets_is_left_over_when_another_is_chosen() -> None:
    for student in ("bert", "albert", "modernbert", "layers"):
        chosen = composed(["+recipe=smoke", f"student={student}"]).student
        assert chosen.dropout == 0.0 and chosen.layers == ("auto" if student == "layers" else None)
    assert composed(["+recipe=smoke", "teacher=none", "objective=mlm", "student=bert"]).teacher.is_none
    of_layers = ["student.layers=null", "student.intermediate_size=null", "student.refit=false"]
    assert composed(["+recipe=distil_smollm2", "student=gpt2", *of_layers]).student.is_new


def test_a_callable_of_ones_own_gets_what_it_takes() -> None:
    """Not the tokenizer of a teacher, which is for us; members are models of their own."""
    custom = ["teacher=custom", "teacher._target_=own_models.Convolutions", "teacher.tokenizer=some/folder"]
    teacher = composed([*custom, "student=bert"]).teacher
    assert teacher.tokenizer == "some/folder" and "tokenizer" not in teacher.custom.bind()[1]
    made = composed(["+recipe=smoke", "student=custom", "student._target_=builtins.dict", "student.width=3"]).student
    assert made.custom.arguments["width"] == 3 and "dropout" in made.custom.optional
    members = ["teacher.members.a.path=x", "teacher.members.b={path: bundled_deep, weight: 2}"]
    teacher = composed(["+recipe=smoke", "teacher=several", *members]).teacher
    assert [(member.saved, member.bundled) for member in teacher.members.values()] == [(True, False), (False, True)]


def make(**more: Any) -> Config:
    corpus, objective = tiny.corpus_config(kind="text", path="."), tiny.objective_config(**more)
    return Config(corpus=corpus, teacher=TeacherConfig(path="x"), student=StudentConfig(), objective=objective)


def test_settings_made_in_python_are_checked_alike(monkeypatch: Any) -> None:
    student = StudentConfig(init="neighbours", architecture="bert")
    assert student.changed(architecture="albert").architecture == "albert"
    with pytest.raises(ValueError, match=r"not read with student\.init=neighbours"):
        student.changed(layers=[0])
    config = tiny.change(tiny.change(make(), "objective.masking.static", True), "objective.cosine.weight", 0.0)
    monkeypatch.setattr(Soft, "reads_samples", False)
    check(tiny.change(config, "teacher.cache.top_k", 8))
    with pytest.raises(SettingError, match=r"objective\.soft reads the most probable tokens alone"):
        check(tiny.change(config, "teacher.cache.sampled", 12))


def test_a_schedule_of_the_users_is_tried_with_the_numbers_of_the_run_alone() -> None:
    """Steps by epochs and a rate that grows with the ranks are not there yet; what fails without them is refused."""

    def schedule(name: str, *more: str) -> None:
        check(composed(["+recipe=smoke", "schedule=custom", f"schedule._target_=own_parts.{name}", *more]))

    steps = ["train.steps=50", "train.epochs=null"]
    for more in ([], steps, [*steps, "optimizer.scale_lr=linear", "optimizer.base_batch=8"]):
        schedule("Table", *more)
    with pytest.raises(SettingError, match=r"own_parts\.Triangle fails at progress 0"):
        schedule("Triangle", "schedule.peak=1.0")
    with pytest.raises(SettingError, match=r"schedule\.peak: no setting of own_parts\.Table"):
        schedule("Table", "schedule.peak=1.0")


def test_more_losses_than_travel_with_the_gradients_are_refused() -> None:
    further = {f"further{number}": {"kind": "mlm", "weight": 1.0} for number in range(MOST_TERMS - 3)}
    check(make(**further))  # besides soft, mlm and cosine
    with pytest.raises(SettingError) as error:
        check(make(**further, one={"kind": "mlm", "weight": 1.0}))
    assert error.value.setting == "objective" and str(MOST_TERMS) in str(error.value)
    counts = torch.zeros(MOST_TERMS + 1)
    assert len(StepStats.pack(counts[1:], counts, [0.0] * len(ALL), False, 0.0)) <= MAX_STATS


@pytest.mark.parametrize("setting", ["optimizer.betaz", "schedule.powre", "objective.soft.wieght"])
def test_an_argument_that_nothing_takes_is_refused_with_the_settings(setting: str) -> None:
    """Not when all that a run needs has been imported, which takes seconds."""
    with pytest.raises(SettingError) as error:
        composed([f"{setting}=1"])
    assert error.value.setting == setting
