"""The wheel, built from the source distribution, installed into an environment of its own, used in an empty folder."""

import subprocess
import sys
import sysconfig
import venv
from importlib.metadata import PathDistribution
from pathlib import Path

import pytest
from job import ROOT, environment, library

from distill.commands.cli import COMMANDS
from distill.runtime.version import DISTRIBUTION, __version__

pytestmark = pytest.mark.slow
PROGRAM = """
import distill

results = distill.run(["+recipe=smoke"])
reveal_type(results)
reveal_type(distill.score(["A dog barks."], results.student))
distill.open_run(1)
"""


@pytest.fixture(scope="module")
def env(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with the wheel in it; what it requires comes from the environment of the tests."""
    dist, folder = tmp_path_factory.mktemp("dist"), tmp_path_factory.mktemp("env")
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(dist), str(ROOT)]
    subprocess.run(build, check=True, capture_output=True)
    (wheel,) = dist.glob("*.whl")
    assert wheel.name.startswith(f"{DISTRIBUTION.replace('-', '_')}-{__version__}-py3-none-any")
    venv.create(folder, with_pip=False)
    pip = [sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python"), "install", "--quiet"]
    subprocess.run([*pip, "--no-index", "--no-deps", str(wheel)], check=True, env=outside())
    # An editable installation there would need its own .pth file, which is not read from here.
    (site(folder) / "required.pth").write_text(f"{sysconfig.get_paths()['purelib']}\n")
    return folder


def site(env: Path) -> Path:
    (folder,) = env.glob("lib/python*/site-packages")
    return folder


def outside() -> dict[str, str]:
    """The environment of a user, whose interpreter does not find this checkout."""
    return {name: value for name, value in environment().items() if name not in ("PYTHONPATH", "DISTILL_DATA")}


def run(env: Path, folder: Path, *command: str) -> str:
    folder.mkdir(exist_ok=True)
    command = (str(env / "bin" / command[0]), *command[1:])
    done = subprocess.run(command, cwd=folder, env=outside(), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_wheel_carries_everything(env: Path) -> None:
    teachers = [f"teacher/{kind}/model.safetensors" for kind in ("bundled_small", "bundled_deep")]
    books = [
        f"data/books/{name}"
        for name in ("README.md", "train/austen_emma.txt.gz", "heldout/collins_the_moonstone.txt.gz")
    ]
    for name in ("conf/config.yaml", "recipes/smoke.yaml", *teachers, *books, "report/templates/page.html", "py.typed"):
        assert (site(env) / "distill" / name).is_file(), name
    assert not list((site(env) / "distill").rglob("test_*"))


def test_the_wheel_has_its_papers(env: Path) -> None:
    (info,) = site(env).glob("*.dist-info")
    for name in ("LICENSE", "NOTICE"):
        assert (info / "licenses" / name).read_bytes() == (ROOT / name).read_bytes()
    about = PathDistribution(info).metadata
    assert (about["Name"], about["Version"], about["License-Expression"]) == (DISTRIBUTION, __version__, "Apache-2.0")
    assert about.get_all("License-File") == ["LICENSE", "NOTICE"] and about["Author"] == "The Distill authors"
    assert {"gpu", "s3", "onnx", "search"} <= set(about.get_all("Provides-Extra"))
    assert "Typing :: Typed" in about.get_all("Classifier") and about["Keywords"]


def test_the_command_in_an_empty_folder_is_the_main_job(env: Path, tmp_path: Path) -> None:
    small = [f"data.cache={tmp_path / 'cache'}", "train.epochs=null", "train.steps=2", "evaluate.max_sequences=4"]
    run(env, tmp_path / "empty", "distill", *small)
    assert [path.name for path in (tmp_path / "empty").iterdir()] == ["runs"]
    assert (tmp_path / "empty" / "runs" / "distilbert_gutenberg" / "report.html").is_file()


def test_a_recipe_on_books_of_the_users(env: Path, tmp_path: Path) -> None:
    books = library(tmp_path / "books")
    corpus = [f"corpus.path={books}", f"data.cache={tmp_path / 'cache'}", "data.workers=1", "corpus.heldout=0.1"]
    command = ["python", "-m", "distill", "+recipe=smoke", *corpus, "train.steps=2", "evaluate.max_sequences=4"]
    run(env, tmp_path / "elsewhere", *command)
    assert (tmp_path / "elsewhere" / "runs" / "smoke" / "report.html").is_file()


def test_help_lists_every_command_and_loads_no_large_package(env: Path, tmp_path: Path) -> None:
    shown = run(env, tmp_path, "distill", "--help")
    assert all(f"\n  {name} " in shown for name in COMMANDS)
    large = {"torch", "transformers", "datasets", "hydra", "numpy", "pandas", "matplotlib"}
    code = f"import sys; from distill.commands.cli import main; main(['--help']); print({large} & {{*sys.modules}})"
    assert run(env, tmp_path, "python", "-c", code).endswith("set()\n")


def test_mypy_sees_the_types_in_a_program_of_the_users(env: Path, tmp_path: Path) -> None:
    """Without py.typed it would take everything for Any, and reveal that."""
    (tmp_path / "program.py").write_text(PROGRAM)
    heavy = "[mypy-torch.*,transformers.*,datasets.*,numpy.*,pandas.*,matplotlib.*,wandb.*,torchmetrics.*]"
    (tmp_path / "mypy.ini").write_text(f"[mypy]\nignore_missing_imports = true\n{heavy}\nfollow_imports = skip\n")
    command = [sys.executable, "-m", "mypy", "--python-executable", str(env / "bin" / "python"), "program.py"]
    done = subprocess.run(command, cwd=tmp_path, env=outside(), capture_output=True, text=True)
    *notes, last = [line.partition(" ")[2] for line in done.stdout.splitlines()]
    assert notes[0] == 'note: Revealed type is "distill.commands.api.run.RunResults"', done.stdout
    assert "distill.evaluation.text_scores.TextScore" in notes[1]
    assert notes[2].startswith('error: Argument 1 to "open_run" has incompatible type') and "1 error in 1 file" in last
