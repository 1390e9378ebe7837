"""What the chosen student, teacher, optimizer or schedule does not read is refused, whoever has set it."""

import pytest

from distill.config.compose import composed
from distill.config.settings import Config, StudentConfig, TeacherConfig
from distill.runs.check import check
from distill.runtime.errors import SettingError


def test_what_a_recipe_sets_for_another_kind_is_refused_too() -> None:
    """And nothing that a shipped option sets is left over when another is chosen."""
    refusal = r"^student\.layers=\[0, 1, .*: not read with student\.init=random; .*or set it to null"
    with pytest.raises(SettingError, match=refusal):
        composed(["+recipe=distil_smollm2", "student=gpt2"])
    assert composed(["+recipe=distil_smollm2", "student=gpt2", "student.layers=null"]).student.is_new
    for student in ("bert", "albert", "modernbert", "layers"):
        chosen = composed(["+recipe=smoke", f"student={student}"]).student
        assert chosen.dropout == 0.0 and chosen.layers == ("auto" if student == "layers" else None)
    assert composed(["+recipe=smoke", "teacher=none", "objective=mlm", "student=bert"]).teacher.is_none


def test_the_tokenizer_of_a_teacher_of_ones_own_is_for_us() -> None:
    """The callable, which takes width and depth alone, does not get it."""
    custom = ["teacher=custom", "teacher._target_=own_models.Convolutions", "teacher.tokenizer=some/folder"]
    teacher = composed([*custom, "student=bert"]).teacher
    assert teacher.custom is not None and teacher.tokenizer == "some/folder"
    assert "tokenizer" not in teacher.custom.bind()[1]


def test_a_callable_gets_what_it_takes_of_the_settings_that_all_have() -> None:
    made = composed(["+recipe=smoke", "student=custom", "student._target_=builtins.dict", "student.width=3"]).student
    assert made.custom is not None
    assert made.custom.arguments["width"] == 3 and "dropout" in made.custom.optional


OTHER_COMPONENTS = {
    "schedule.power": ["+recipe=albert_paper", "schedule=constant", "~schedule.floor"],
    "schedule.floor": ["+recipe=smoke", "schedule.kind=constant"],
    "schedule.warmup": ["+recipe=table", "schedule=custom", "schedule._target_=own_parts.Table"],
    "optimizer.betas": ["+recipe=glue", "optimizer=custom", "optimizer._target_=torch.optim.SGD"],
    "optimizer.misspelt": ["+recipe=smoke", "++optimizer.misspelt=0.1"],
}


@pytest.mark.parametrize("setting", OTHER_COMPONENTS)
def test_another_optimizer_or_schedule_refuses_what_it_does_not_take(setting: str) -> None:
    """It can be taken out, as anything of Hydra's."""
    group = setting.partition(".")[0]

    def bound(*more: str) -> None:
        config = composed(
            [*OTHER_COMPONENTS[setting], "corpus.path=x", "student=pretrained", "student.path=x", "teacher=none", *more]
        )
        getattr(config, group).make.bind(params=[], lr=0.1, total_steps=100, peak_lr=0.1)

    with pytest.raises(SettingError, match=rf"^{setting}: no setting of .*~{setting} takes out what a recipe sets$"):
        bound()
    bound(f"~{setting}")


def test_members_are_models_of_their_own() -> None:
    members = ["teacher.members.a.path=x", "teacher.members.b={path: bundled_deep, weight: 2}"]
    teacher = composed(["+recipe=smoke", "teacher=several", *members]).teacher
    assert [(member.saved, member.bundled) for member in teacher.members.values()] == [(True, False), (False, True)]


def test_settings_made_in_python_are_checked_alike() -> None:
    config = Config(student=StudentConfig(init="neighbours", architecture="bert"), teacher=TeacherConfig(path="x"))
    changed = config.changed(student=config.student.changed(architecture="albert"))
    assert changed.student.architecture == "albert" and changed.teacher.saved
    with pytest.raises(ValueError, match=r"not read with student\.init=neighbours"):
        config.student.changed(layers=[0])


@pytest.mark.parametrize("setting", ["optimizer.betaz", "schedule.powre", "objective.soft.wieght"])
def test_an_argument_that_nothing_takes_is_refused_with_the_settings(setting: str) -> None:
    """Not when all that a run needs has been imported, which takes seconds."""
    with pytest.raises(SettingError, match=rf"^{setting}: no setting of distill\..*it takes"):
        composed([f"{setting}=1"])
    check(composed([f"{setting}=null"]))  # which nothing gives
