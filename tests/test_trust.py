"""The allow-list of code: what a recipe names outside of it is refused before it is imported."""

import re
from pathlib import Path

import pytest
from forked import Forked
from job import Shelf, command, program

from distill.errors import SettingError
from distill.trust import refuse_collective, refuse_remote_code, refuse_targets

CANARY = """
from functools import partial
import re
from pathlib import Path
from shutil import rmtree

Path(__file__).with_suffix(".ran").touch()


def make(tokenizer):
    raise SystemExit(9)


class Callback:
    pass


shortcut = partial(rmtree)
"""


@pytest.mark.parametrize("allowed", [["lab"], ["lab.models"], ["lab.models.Big"]])
def test_what_is_allowed(allowed: list[str]) -> None:
    refuse_targets({"student": {"_target_": "lab.models.Big"}, "corpus": {"kind": "text"}}, allowed)


@pytest.mark.parametrize("allowed", [[], ["lab.model"], ["lab.models.Bigger"], ["la"]])
def test_what_is_refused(allowed: list[str]) -> None:
    with pytest.raises(
        SettingError, match=r"^evaluate\.sources\.x\._target_=lab\.models\.Big is not among trust\.targets"
    ):
        refuse_targets({"evaluate": {"sources": {"x": {"_target_": "lab.models.Big"}}}}, allowed)


@pytest.mark.parametrize(
    "settings",
    [{"_target_": "os.system", "_partial_": True}, {"_target_": "os.system", "_args_": ["ls"], "_convert_": "all"},
     [[{"_target_": "os.system"}]], [({"a": [{"_target_": ["os.system"]}]},)], {"_target_": {"x": "os.system"}}],
)  # fmt: skip
def test_it_is_refused_wherever_and_however_it_stands(settings: object) -> None:
    with pytest.raises(SettingError, match=r"_target_=.*os\.system.* is not among trust\.targets"):
        refuse_targets({"student": {"config": settings}}, ["lab"])


@pytest.mark.parametrize(
    "target",
    ["distill.chain._run", "distill.files.remove", "distill.objective.terms.soft.torch", "distill.optimizers._x.X",
     "distill.objective.terms._hidden.Hidden", "distill.data.sources.text", "distill.objective.terms.soft.Soft.losses",
     "hydra._internal.utils._locate"],
)  # fmt: skip
def test_of_this_package_only_what_a_kind_names_is_allowed(target: str) -> None:
    refuse_targets({"objective": {"mine": {"_target_": "distill.objective.terms.hidden_mse.HiddenMse"}}}, [])
    refuse_targets({"corpus": {"_target_": "distill.data.sources.text.Text"}}, [])
    with pytest.raises(SettingError, match=r"is not among trust\.targets"):
        refuse_targets({"schedule": {"_target_": target}}, ["lab"])


@pytest.mark.parametrize("name", ["rmtree", "partial", "shortcut", "Path"])
def test_what_allowed_code_only_imports_is_not_allowed(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lab_with_imports.py").write_text(CANARY)
    monkeypatch.syspath_prepend(tmp_path)
    settings = {"student": {"_target_": f"lab_with_imports.{name}"}}
    with pytest.raises(SettingError, match=r"is not defined there but in (shutil|functools|pathlib)"):
        refuse_targets(settings, ["lab_with_imports"])
    refuse_targets(settings, ["lab_with_imports", f"lab_with_imports.{name}"])
    refuse_targets({"student": {"_target_": "lab_with_imports.make"}}, ["lab_with_imports"])


def test_code_of_a_model_is_for_the_command_line_to_allow() -> None:
    settings = {"teacher": {"members": {"a": {"trust_remote_code": True}}}, "student": {"trust_remote_code": False}}
    refuse_remote_code(settings, ["++teacher.members.a.trust_remote_code=true"])
    for overrides in ([], ["teacher.trust_remote_code=true"], ["teacher.members.b.trust_remote_code=true"]):
        with pytest.raises(SettingError, match=r"^teacher\.members\.a\.trust_remote_code=True is set by a recipe"):
            refuse_remote_code(settings, overrides)


def test_a_module_that_registers_an_engine_is_code_too() -> None:
    settings = {"backend": {"collective": "lab.engines:fast"}}
    for allowed in (["lab"], ["lab.engines"]):
        refuse_collective(settings, allowed, [])
    refuse_collective(settings, [], ["++backend.collective=lab.engines:fast"])
    for harmless in ({}, {"backend": {"collective": None}}, {"backend": {"collective": "ucc"}}):
        refuse_collective(harmless, [], [])
    for allowed in ([], ["lab.engines.fast"], ["lab.eng"], ["elsewhere"]):
        with pytest.raises(SettingError, match=r"^backend\.collective=lab\.engines:fast is set by a recipe"):
            refuse_collective(settings, allowed, ["backend.name=ddp"])


@pytest.mark.parametrize("allowed", ["trust.targets=[]", "trust.targets=[other]", "trust={targets: []}"])
def test_nothing_is_imported_that_is_not_allowed(shelf: Shelf, tmp_path: Path, allowed: str) -> None:
    (tmp_path / "canary.py").write_text(CANARY)
    arguments = shelf.arguments(tmp_path / "run", "student=custom", "student._target_=canary.make")
    process = command(*arguments, allowed, path=tmp_path)
    error = process.communicate(timeout=120)[1]
    assert process.returncode == 2 and "student._target_=canary.make is not among trust.targets" in error, error
    assert not (tmp_path / "canary.ran").exists()


RECIPES = {
    "a callback": ("hydra: {callbacks: {x: {_target_: canary.Callback}}}", "hydra.callbacks"),
    "one by a resolver": ("hydra: {callbacks: {x: '${oc.create:{_target_: canary.Callback}}'}}", "hydra.callbacks"),
    "one that lies elsewhere": (
        "student: {config: {evil: {_target_: canary.Callback}}}\nhydra: {callbacks: {x: '${student.config.evil}'}}",
        "hydra.callbacks",
    ),
    "all of them elsewhere": (
        "student: {config: {evil: {x: {_target_: canary.Callback}}}}\nhydra: {callbacks: '${student.config.evil}'}",
        "hydra.callbacks",
    ),
    "a launcher": ("hydra: {launcher: {_target_: canary.Callback}}", "hydra.launcher"),
    "logging": ("hydra: {job_logging: {formatters: {a: {format: 'ext://canary.Callback'}}}}", "hydra.job_logging"),
    "variables": ("hydra: {job: {env_set: {PYTHONPATH: /tmp, LD_PRELOAD: x.so}}}", "hydra.job.env_set"),
    "copied variables": ("hydra: {job: {env_copy: [PYTHONPATH]}}", "hydra.job.env_"),
    "further jobs": ("hydra: {mode: MULTIRUN, sweeper: {params: {seed: '1,2'}}}", "hydra.(sweeper|mode)"),
    "a target by interpolation": (
        "student: {config: {a: canary.make, b: {_target_: '${student.config.a}'}}}", "student.config.b._target_"
    ),
    "a target by a resolver": (
        "student: {config: {b: '${oc.create:{_target_: canary.make}}'}}", "student.config.b._target_"
    ),
    "an engine": ("backend: {name: ddp, processes: 2, collective: 'canary:x'}", "backend.collective"),
    "code of a model": ("student: {trust_remote_code: true}", "student.trust_remote_code"),
}  # fmt: skip


@pytest.mark.parametrize("what", RECIPES)
def test_hydra_runs_nothing_of_a_recipe_either(shelf: Shelf, tmp_path: Path, what: str) -> None:
    content, refused = RECIPES[what]
    process = run_recipe(shelf, tmp_path, content, "trust={targets: [lab]}")
    error = process.communicate(timeout=120)[1]
    assert process.returncode == 2, error
    assert re.match(rf"distill: {refused}\S* is (set by|not among)", error) and error.count("\n") == 1, error
    assert not (tmp_path / "canary.ran").exists()


def test_the_command_line_allows_what_a_recipe_may_not(shelf: Shelf, tmp_path: Path) -> None:
    recipe = f"hydra: {{run: {{dir: {tmp_path / 'elsewhere'}}}}}\ntrain: {{steps: null}}"
    given = ["+hydra.job.env_set.A=b", "trust.targets=[canary]", "+hydra.callbacks.x._target_=canary.Callback"]
    process = run_recipe(shelf, tmp_path, recipe, *given, "--cfg", "job")
    output, error = process.communicate(timeout=120)
    assert process.returncode == 0 and "targets:\n  - canary" in output, error
    process = run_recipe(shelf, tmp_path, recipe, *given[:1], "trust.targets=[]", given[2])
    assert "hydra.callbacks.x._target_=canary.Callback is not among trust.targets=[]" in process.communicate()[1]
    evil = "student: {config: {evil: {_target_: canary.Callback}}}"
    process = run_recipe(shelf, tmp_path, evil, "trust.targets=[]", "+hydra.callbacks.x=${student.config.evil}")
    assert "hydra.callbacks is set by a recipe" in process.communicate()[1]


@pytest.mark.parametrize(
    ("arguments", "refused"),
    [(["+recipe=evil,smoke", "-m"], "recipe: a sweep over files"), (["--config-name=other"], "--config-name other"),
     (["trust.targets=[a],[b]", "-m"], "give one list"), (["+chain.stages={}"], "a chain starts commands")],
)  # fmt: skip
def test_what_cannot_be_looked_at_is_refused(tmp_path: Path, arguments: list[str], refused: str) -> None:
    from distill.command_line import check_trust
    from distill.compose import register

    register()
    (tmp_path / "recipe").mkdir()
    with pytest.raises(SettingError, match=refused):
        check_trust(["--config-dir", str(tmp_path), "trust.targets=[lab]", *arguments])


def run_recipe(shelf: Shelf, folder: Path, content: str, *arguments: str) -> Forked:
    """`python -m distill` with a stranger's recipe, beside which lies the code that it would run."""
    (folder / "canary.py").write_text(CANARY)
    (folder / "recipe").mkdir(exist_ok=True)
    (folder / "recipe" / "evil.yaml").write_text(f"# @package _global_\n{content}\ntrust: {{targets: null}}\n")
    others = [each for each in shelf.arguments(folder / "run") if not each.startswith("+recipe")]
    return command("--config-dir", str(folder), "+recipe=evil", *others, *arguments, path=folder)


def test_a_folder_of_recipes_that_is_not_there(tmp_path: Path) -> None:
    process = program("--config-dir", str(tmp_path / "no"), "+recipe=evil", "trust.targets=[]")
    error = process.communicate(timeout=120)[1]
    assert (
        process.returncode == 2
        and error == f"distill: --config-dir {tmp_path / 'no'}: no such folder; correct the path\n"
    )
