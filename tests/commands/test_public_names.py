"""What the package promises: names that are there, imported lazily, and not hidden by commands of the same name."""

import importlib
import inspect
import re
import subprocess
import sys
from types import ModuleType

import pytest
from job import ROOT, environment

import distill

PROGRAM = """
import sys, distill
heavy = {"torch", "transformers", "hydra", "omegaconf", "matplotlib", "numpy"}
assert not heavy & set(sys.modules), heavy & set(sys.modules)
import distill.predict
assert not heavy & set(sys.modules), heavy & set(sys.modules)
"""


def test_nothing_heavy_is_imported_before_it_is_used() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", distill.__all__)
def test_every_public_name_is_there_and_described(name: str) -> None:
    found = getattr(distill, name)
    assert not isinstance(found, ModuleType) and name in dir(distill)
    if name != "__version__":
        assert len(inspect.getdoc(found) or "") > 30


@pytest.mark.parametrize("name", [name for name in distill.__all__ if (ROOT / "distill" / f"{name}.py").is_file()])
def test_commands_do_not_hide_functions(name: str) -> None:
    module = importlib.import_module(f"distill.{name}")
    assert isinstance(module, ModuleType) and callable(module.main)
    assert getattr(distill, name) is not module and callable(getattr(distill, name))
    assert sys.modules[f"distill.{name}"] is module


def test_an_unknown_name() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'distil'"):
        distill.distil  # noqa: B018
    with pytest.raises(ImportError):
        from distill import distil  # noqa: F401


def test_the_types_are_marked_and_stand_beside_the_lazy_names() -> None:
    """A checker sees every public name: the package has its marker, and each name an import for checkers."""
    assert (ROOT / "distill" / "py.typed").is_file()
    text = (ROOT / "distill" / "__init__.py").read_text()
    names = [name for name in distill.__all__ if name != "__version__"]
    # `import X as Y` re-exports only where both names are the same; a value that is assigned is the package's own.
    assert not [name for name in names if not re.search(rf"import {name} as {name}$|^    {name} = \w+$", text, re.M)]
