"""What the chosen student, teacher, optimizer or schedule does not read: refused on the command line, else left out."""

import pytest
from job import distill

from distill.config.compose import schedule_config
from distill.config.composition import composed
from distill.config.settings import (
    BundledTeacherConfig,
    Config,
    CustomStudentConfig,
    LayersStudentConfig,
    NewStudentConfig,
    NoTeacherConfig,
    SavedStudentConfig,
    SavedTeacherConfig,
    SeveralTeachersConfig,
)
from distill.runtime.errors import SettingError

NOT_READ = {
    "student.path=x": (["student=layers"], "student.init=layers; choose student.init=pretrained"),
    "student.num_layers=2": (["student=bert"], "student.init=neighbours; choose student.init=layers"),
    "student.architecture=bert": (["student=pretrained", "student.path=x"], "student.init=pretrained; choose student"),
    "teacher.path=x": (["teacher=bundled_small"], "teacher.kind=bundled_small; choose teacher.kind=pretrained"),
    "teacher.tokenizer=x": (["teacher=none", "objective=mlm"], "teacher.kind=none; choose teacher.kind=pretrained"),
    "teacher.revision=main": (["teacher=several"], "teacher.kind=several; set teacher.members.NAME.revision"),
    "teacher.members.a.path=x": ([], "teacher.kind=bundled_small; choose teacher.kind=several"),
    "teacher.cache.top_k=8": (["teacher=none", "objective=mlm"], "teacher.kind=none; choose teacher.kind=bundled_deep"),
}


@pytest.mark.parametrize("setting", NOT_READ)
def test_what_the_command_line_gives_is_read_or_refused(setting: str, capfd: pytest.CaptureFixture) -> None:
    overrides, cure = NOT_READ[setting]
    assert distill("+recipe=smoke", *overrides, setting) == 2
    (line,) = [line for line in capfd.readouterr().err.splitlines() if line.startswith("distill: ")]
    assert f"{setting}: not read with {cure}" in line


def test_what_a_recipe_has_set_for_another_kind_is_left_out() -> None:
    """Its student has layers and a dropout, whose null on the command line is no wish either."""
    smoke = composed(["+recipe=smoke"])
    assert isinstance(smoke.student, LayersStudentConfig) and isinstance(smoke.teacher, BundledTeacherConfig)
    assert smoke.student.layers == "auto" and smoke.student.dropout == 0.0
    new = composed(["+recipe=smoke", "student=bert", "student.layers=null", "teacher=none", "objective=mlm"])
    assert isinstance(new.student, NewStudentConfig) and isinstance(new.teacher, NoTeacherConfig)
    assert new.student.init == "neighbours" and new.student.dropout == 0.0
    saved = composed(["+recipe=smoke", "student=pretrained", "student.path=x", "student.dropout=0.3"])
    assert isinstance(saved.student, SavedStudentConfig) and saved.student.dropout == 0.3


def test_a_callable_gets_what_it_takes_of_a_recipe_and_all_of_the_command_line() -> None:
    made = composed(["+recipe=smoke", "student=custom", "student._target_=builtins.dict", "+student.width=3"])
    assert isinstance(made.student, CustomStudentConfig)
    assert made.student.custom.arguments["width"] == 3 and "dropout" in made.student.custom.optional
    asked = composed(["+recipe=smoke", "student=custom", "student._target_=builtins.dict", "student.dropout=0.2"])
    assert isinstance(asked.student, CustomStudentConfig) and "dropout" not in asked.student.custom.optional


OTHER_COMPONENTS = {
    "a schedule of another kind": (["+recipe=albert_paper", "schedule=constant"], "schedule", "power"),
    "by its kind": (["+recipe=smoke", "schedule.kind=constant"], "schedule", "floor"),
    "a schedule of the user's": (
        ["+recipe=table", "schedule=custom", "schedule._target_=own_parts.Triangle"], "schedule", "warmup"
    ),
    "an optimizer of torch": (
        ["+recipe=glue", "optimizer=custom", "optimizer._target_=torch.optim.SGD"], "optimizer", "betas"
    ),
    "an optimizer of another kind": (["+recipe=albert_paper", "optimizer.kind=adamw"], "optimizer", "bias_correction"),
}  # fmt: skip


@pytest.mark.parametrize("case", OTHER_COMPONENTS)
def test_another_optimizer_or_schedule_leaves_out_what_the_recipe_set_for_its_own(case: str) -> None:
    """What the command line itself names is refused, and so is a name that no kind has."""
    overrides, group, left_out = OTHER_COMPONENTS[case]

    def bound(*more: str) -> set[str]:
        config = composed([*overrides, *more])
        component = config.schedule if group == "schedule" else config.optimizer.make
        return {*component.bind(params=[], lr=0.1, total_steps=100, peak_lr=0.1)[1]}

    assert left_out not in bound()
    for name in (left_out, "misspelt"):
        with pytest.raises(SettingError, match=rf"^{group}\.{name}: no setting of"):
            bound(f"++{group}.{name}=0.1")


def test_a_recipe_is_held_to_the_component_that_it_chooses() -> None:
    """There a name of another kind is a mistake."""
    with pytest.raises(SettingError, match=r"^schedule\.power: no setting of"):
        schedule_config({"kind": "constant", "power": 2.0}).bind()


def test_members_are_of_their_kinds() -> None:
    members = ["teacher.members.a.path=x", "teacher.members.b={kind: bundled_deep, weight: 2}"]
    teacher = composed(["+recipe=smoke", "teacher=several", *members]).teacher
    assert isinstance(teacher, SeveralTeachersConfig)
    assert [member.kind for member in teacher.members.values()] == ["pretrained", "bundled_deep"]
    not_read = r"teacher.members.b.path=x: not read with teacher.members.b.kind=bundled_small"
    with pytest.raises(SettingError, match=not_read):
        composed(["+recipe=smoke", "teacher=several", "teacher.members.b={kind: bundled_small, path: x}"])


def test_settings_made_in_python_are_of_their_kinds() -> None:
    """Without a tag of the union in the place of an error."""
    config = Config(student=NewStudentConfig(init="neighbours", architecture="bert"), teacher=SavedTeacherConfig())
    assert isinstance(config.student, NewStudentConfig) and isinstance(config.teacher, SavedTeacherConfig)
    changed = config.changed(student=config.student.changed(architecture="albert"))
    assert isinstance(changed.student, NewStudentConfig) and changed.student.architecture == "albert"
