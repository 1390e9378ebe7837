"""What the package promises: names that are there, imported lazily, and not hidden by commands of the same name."""

import inspect
import re
import subprocess
import sys
from types import ModuleType

import pytest
from job import ROOT, environment

import distill
from distill.commands.cli import COMMANDS, main
from distill.config import CONF, RECIPES

LIGHT = "assert not {'torch', 'transformers', 'hydra', 'omegaconf', 'matplotlib', 'numpy'} & {*sys.modules}\n"
PROGRAM = f"import sys, distill\n{LIGHT}import distill.commands.predict\ndistill.run, distill.SettingError\n{LIGHT}"
RUN = "import sys, distill.job; print(*{'wandb', 'datasets', 'matplotlib', 'torchmetrics'} & {*sys.modules})"


def printed(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def help_of(*command: str) -> str:
    """Nothing heavy is loaded for it, which takes a second."""
    begin = f"import sys; from distill.commands.cli import main; assert not main({[*command, '--help']!r})\n"
    return printed(begin + "assert not {'torch', 'hydra', 'transformers'} & {*sys.modules}")


def test_nothing_heavy_is_imported_before_it_is_used() -> None:
    assert not printed(PROGRAM)


@pytest.mark.slow
def test_a_run_imports_no_package_that_it_may_never_use() -> None:
    """Nor does what it imports itself, such as transformers."""
    assert not printed(RUN).strip()


def test_every_public_name_is_there_and_described() -> None:
    for name in distill.__all__:
        found = getattr(distill, name)
        assert not isinstance(found, ModuleType) and name in dir(distill)
        assert name == "__version__" or len(inspect.getdoc(found) or "") > 30, name


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_in_no_time(name: str) -> None:
    text = help_of(name)
    assert text.startswith(f"usage: distill {name} ") and max(map(len, text.splitlines())) <= 120


def test_the_help_names_commands_recipes_and_groups() -> None:
    words = set(help_of().split())
    assert {*COMMANDS, *(file.stem for file in RECIPES.glob("*.yaml"))} <= words
    assert {folder.name for folder in CONF.iterdir() if folder.is_dir()} <= words


def test_an_error_of_the_caller_is_raised_at_his_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the frames of the package in between, unless they are asked for."""
    calls = [
        lambda: distill.distill(recipe="smoke", settings={"train.stepz": 1}),
        lambda: distill.run(["+recipe=smoke", "train.stepz=1"]),
        lambda: distill.load_model("./nowhere"),
        lambda: distill.load_pair("./nowhere"),
        lambda: distill.predict("./nowhere", "text"),
        lambda: distill.open_run("nowhere"),
    ]
    for call in calls:
        with pytest.raises(distill.SettingError) as raised:
            call()
        files = [str(frame.path) for frame in raised.traceback]
        assert len(files) <= 4 and sum("/distill/" in file for file in files) <= 1, files
    monkeypatch.setenv("DISTILL_TRACEBACK", "1")
    with pytest.raises(distill.SettingError) as raised:
        distill.load_model("./nowhere")
    assert len(raised.traceback) > 3


def test_names_that_there_are_not(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evalute", "model=x"]) == 2
    assert capsys.readouterr().err.startswith("distill: evalute is not a command (did you mean evaluate?): ")
    with pytest.raises(AttributeError, match="has no attribute 'distil'"):
        distill.distil  # noqa: B018


def test_the_types_are_marked_and_stand_beside_the_lazy_names() -> None:
    """A checker sees every public name: the package has its marker, and each name an import for checkers."""
    assert (ROOT / "distill" / "py.typed").is_file()
    lines = (ROOT / "distill" / "__init__.pyi").read_text().splitlines()[1:]
    # `import X as Y` re-exports only where both names are the same.
    assert [re.fullmatch(r"from [\w.]+ import (\w+) as \1", line) is not None for line in lines] == [True] * len(lines)
    assert len(distill.__all__) == len(lines)
