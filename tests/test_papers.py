"""What stands around the code: licence, notice, extras, citation, forms for issues, workflows, and the image."""

import hashlib
import itertools
import re
import subprocess
import sys
import sysconfig
import tomllib
import venv
from importlib.metadata import PathDistribution
from pathlib import Path
from typing import Any

import pytest
import yaml
from job import ROOT, environment, library

from distill.config import errors
from distill.data import remote
from distill.runtime.version import DISTRIBUTION, __version__, pip_install

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
APACHE = "cfc7749b96f63bd31c3c42b5c471bf756814053e847c10f3eb003417bc523d30"  # of LICENSE-2.0.txt at apache.org
FOLDERS = ("distill", "conf", "recipes", "docs", "tests", "benchmarks", ".github")
SUFFIXES = (".md", ".py", ".yaml", ".yml", ".ipynb", ".toml")
TEXTS = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.suffix in SUFFIXES]
WORKFLOWS = {path.stem: yaml.safe_load(path.read_text()) for path in (ROOT / ".github/workflows").glob("*.yml")}


def test_licence_notice_and_citation_are_of_what_ships() -> None:
    assert hashlib.sha256((ROOT / "LICENSE").read_bytes()).hexdigest() == APACHE
    assert PROJECT["license"] == "Apache-2.0" and PROJECT["license-files"] == ["LICENSE", "NOTICE"]
    notice, kinds = (ROOT / "NOTICE").read_text(), (".txt", ".gz", ".jsonl", ".safetensors")
    data = [path for path in (ROOT / "distill").rglob("*") if path.suffix in kinds and path.parent.name != "templates"]
    assert data
    for path in data:
        assert str(path.parent.relative_to(ROOT)) in notice, f"{path}: say in NOTICE where it comes from"
        assert path.suffix == ".safetensors" or path.name in notice, f"{path}: say in NOTICE where it comes from"
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["cff-version"] == "1.2.0" and citation["version"] == __version__ and citation["title"]
    assert (citation["license"], citation["authors"]) == (PROJECT["license"], PROJECT["authors"])
    versions = re.findall(r"^## (.+)", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert versions[0] == "Unreleased" or versions[0].startswith(f"{__version__} - ")


def test_extras_that_anything_names_exist() -> None:
    extras = PROJECT["optional-dependencies"]
    named = {*remote.EXTRAS.values(), *errors.EXTRAS.values()}
    for text in (path.read_text() for path in [*TEXTS, ROOT / "README.md", ROOT / "pyproject.toml"]):
        found = re.findall(rf"(?<![\w.-]){DISTRIBUTION}\[([\w,]+)\]", text)
        named |= {extra for names in found for extra in names.split(",")}
        named |= set(re.findall(r"pip_install\(['\"](\w+)", text))
    assert {"s3", "gcs", "http", "near", "onnx", "search"} <= named <= set(extras)
    assert PROJECT["name"] == DISTRIBUTION and pip_install("s3") == f"pip install '{DISTRIBUTION}[s3]'"


def instructions() -> list[tuple[str, str]]:
    lines = [line for line in (ROOT / "Dockerfile").read_text().splitlines() if not line.startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [(word, rest) for word, _, rest in (line.partition(" ") for line in joined.splitlines() if line)]


def test_the_image_is_of_files_that_exist_and_runs_as_nobody_special() -> None:
    found = instructions()
    copied = {source for word, rest in found if word == "COPY" and "--from" not in rest for source in rest.split()[:-1]}
    assert {"pyproject.toml", "README.md", "LICENSE", "NOTICE", "distill", "conf", "recipes"} <= copied
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    assert all((ROOT / source).exists() and f"!{source}" in ignored for source in copied)
    for word, rest in found:
        if word == "RUN":
            subprocess.run(["sh", "-n", "-c", rest], check=True)
    assert ("USER", "10001") in found and found[-1] == ("ENTRYPOINT", '["distill"]')


@pytest.mark.parametrize(
    ("device", "status", "words"),
    [("cpu", 0, "whl/cpu torch"), ("cuda", 0, "constraints.txt torch nvidia-ml-py"), ("tpu", 2, "give cpu or cuda")],
)
def test_the_device_of_the_image_chooses_torch(device: str, status: int, words: str) -> None:
    (chooses,) = [rest for word, rest in instructions() if word == "RUN" and "DEVICE" in rest]
    script = f'pip() {{ echo "$@"; }}; DEVICE={device}; {chooses}'
    done = subprocess.run(["sh", "-c", script], capture_output=True, text=True)
    assert done.returncode == status and words in done.stdout + done.stderr


def test_public_tests_run_at_both_ends_of_what_is_allowed_and_name_files_that_are_there() -> None:
    matrix = WORKFLOWS["ci"]["jobs"]["tests"]["strategy"]["matrix"]
    named = [each.rpartition(" ")[2] for each in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", each)]
    assert matrix["python"] == named and matrix["versions"] == ["lowest-direct", "highest"]
    for requirement in itertools.chain(PROJECT["dependencies"], *PROJECT["optional-dependencies"].values()):
        assert ">=" in requirement or requirement.startswith(DISTRIBUTION), f"{requirement}: no lowest version"
    steps = [step for flow in WORKFLOWS.values() for job in flow["jobs"].values() for step in job["steps"]]
    commands = "\n".join(step.get("run", "") for step in steps)
    paths = re.findall(r"(?:\$GITHUB_WORKSPACE/|\s|^)((?:benchmarks|tests)/[\w./]+|\.ci/\w+)", commands, re.M)
    assert {".ci/run", ".ci/slow"} <= {*paths} and not [path for path in paths if not (ROOT / path).exists()]


PROGRAM = """
import distill

results = distill.run(["+recipe=smoke"])
reveal_type(results)
reveal_type(distill.score(["A dog barks."], results.student))
distill.open_run(1)
"""


@pytest.fixture(scope="module")
def env(tmp_path_factory: Any) -> Path:
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


def in_env(env: Path, folder: Path, *command: str) -> str:
    folder.mkdir(exist_ok=True)
    command = (str(env / "bin" / command[0]), *command[1:])
    done = subprocess.run(command, cwd=folder, env=outside(), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_wheel_carries_everything_and_its_papers(env: Path) -> None:
    names = ["conf/config.yaml", "recipes/smoke.yaml", "report/templates/page.html", "py.typed", "data/books/README.md"]
    names += [f"teacher/{kind}/model.safetensors" for kind in ("bundled_small", "bundled_deep")]
    names += ["data/books/train/austen_emma.txt.gz", "data/books/heldout/collins_the_moonstone.txt.gz"]
    assert not [name for name in names if not (site(env) / "distill" / name).is_file()]
    assert not list((site(env) / "distill").rglob("test_*"))
    (info,) = site(env).glob("*.dist-info")
    for name in ("LICENSE", "NOTICE"):
        assert (info / "licenses" / name).read_bytes() == (ROOT / name).read_bytes()
    about = PathDistribution(info).metadata
    assert (about["Name"], about["Version"], about["License-Expression"]) == (DISTRIBUTION, __version__, "Apache-2.0")
    assert about.get_all("License-File") == ["LICENSE", "NOTICE"] and about["Author"] == "The Distill authors"
    assert {"gpu", "s3", "onnx", "search"} <= set(about.get_all("Provides-Extra"))


@pytest.mark.slow
def test_the_command_in_an_empty_folder_is_the_main_job(env: Path, tmp_path: Path) -> None:
    """And a recipe is run on books of the user's."""
    cache = [f"data.cache={tmp_path / 'cache'}", "evaluate.max_sequences=4", "train.steps=2"]
    in_env(env, tmp_path / "empty", "distill", *cache, "train.epochs=null")
    assert [path.name for path in (tmp_path / "empty").iterdir()] == ["runs"]
    assert (tmp_path / "empty" / "runs" / "distilbert_gutenberg" / "report.html").is_file()
    corpus = [f"corpus.path={library(tmp_path / 'books')}", "data.workers=1", "corpus.heldout=0.1"]
    in_env(env, tmp_path / "elsewhere", "python", "-m", "distill", "+recipe=smoke", *corpus, *cache)
    assert (tmp_path / "elsewhere" / "runs" / "smoke" / "report.html").is_file()


@pytest.mark.slow
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
