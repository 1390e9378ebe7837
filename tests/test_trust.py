"""The allow-list of code: what a recipe names outside of it is refused before it is imported."""

from pathlib import Path

import pytest
from job import Shelf, command

from distill.errors import SettingError
from distill.trust import refuse_targets

CANARY = """
from pathlib import Path

Path(__file__).with_suffix(".ran").touch()


def make(tokenizer):
    raise SystemExit(9)


class Callback:
    pass
"""


@pytest.mark.parametrize("allowed", [None, ["lab"], ["lab.models"], ["lab.models.Big"]])
def test_what_is_allowed(allowed: list[str] | None) -> None:
    refuse_targets({"student": {"_target_": "lab.models.Big"}, "corpus": {"kind": "text"}}, allowed)


@pytest.mark.parametrize("allowed", [[], ["lab.model"], ["lab.models.Bigger"], ["la"]])
def test_what_is_refused(allowed: list[str]) -> None:
    with pytest.raises(
        SettingError, match=r"^evaluate\.sources\.x\._target_=lab\.models\.Big is not among trust\.targets"
    ):
        refuse_targets({"evaluate": {"sources": {"x": {"_target_": "lab.models.Big"}}}}, allowed)


@pytest.mark.parametrize("allowed", ["[]", "[other]"])
def test_nothing_is_imported_that_is_not_allowed(shelf: Shelf, tmp_path: Path, allowed: str) -> None:
    (tmp_path / "canary.py").write_text(CANARY)
    arguments = shelf.arguments(tmp_path / "run", "student=custom", "student._target_=canary.make")
    process = command(*arguments, f"trust.targets={allowed}", path=tmp_path)
    error = process.communicate(timeout=120)[1]
    assert process.returncode == 2 and "student._target_=canary.make is not among trust.targets" in error, error
    assert not (tmp_path / "canary.ran").exists()


def test_hydra_runs_nothing_of_a_recipe_either(shelf: Shelf, tmp_path: Path) -> None:
    (tmp_path / "canary.py").write_text(CANARY)
    (tmp_path / "recipe").mkdir()
    recipe = "# @package _global_\nhydra:\n  callbacks:\n    x: {_target_: canary.Callback}\ntrust: {targets: null}\n"
    (tmp_path / "recipe" / "evil.yaml").write_text(recipe)
    arguments = [each for each in shelf.arguments(tmp_path / "run") if not each.startswith("+recipe")]
    given = ["--config-dir", str(tmp_path), "+recipe=evil", *arguments, "trust.targets=[lab]"]
    process = command(*given, path=tmp_path)
    error = process.communicate(timeout=120)[1]
    assert process.returncode == 2, error
    assert "hydra.callbacks.x._target_=canary.Callback is not among trust.targets=['lab']" in error
    assert not (tmp_path / "canary.ran").exists()
