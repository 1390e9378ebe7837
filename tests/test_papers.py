"""What stands around the code: licence, notice, citation, changelog, forms for issues, and the image that is built."""

import hashlib
import itertools
import re
import subprocess
import tomllib
from typing import Any

import pytest
import yaml
from job import ROOT

from distill.config import errors
from distill.data import remote
from distill.runtime.version import DISTRIBUTION, __version__, pip_install

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
NOTICE = (ROOT / "NOTICE").read_text()
CHANGELOG = (ROOT / "CHANGELOG.md").read_text()
APACHE = "cfc7749b96f63bd31c3c42b5c471bf756814053e847c10f3eb003417bc523d30"  # of LICENSE-2.0.txt at apache.org
FOLDERS = ("distill", "conf", "recipes", "docs", "tests", "benchmarks", ".github")
TEXTS = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*")]
SUFFIXES = (".md", ".py", ".yaml", ".yml", ".ipynb", ".toml")
TEXTS = [path for path in [*TEXTS, *ROOT.iterdir()] if path.suffix in SUFFIXES]


def test_the_licence_is_the_whole_text() -> None:
    assert hashlib.sha256((ROOT / "LICENSE").read_bytes()).hexdigest() == APACHE
    assert PROJECT["license"] == "Apache-2.0" and PROJECT["license-files"] == ["LICENSE", "NOTICE"]
    assert not any(each.startswith("License ::") for each in PROJECT["classifiers"]), "an index refuses both"


def test_texts_and_weights_that_ship_have_their_origin_in_the_notice() -> None:
    kinds = (".txt", ".gz", ".jsonl", ".safetensors")
    data = [path for path in (ROOT / "distill").rglob("*") if path.suffix in kinds and path.parent.name != "templates"]
    assert data
    for path in data:
        assert str(path.parent.relative_to(ROOT)) in NOTICE, f"{path}: say in NOTICE where it comes from"
        assert path.suffix == ".safetensors" or path.name in NOTICE, f"{path}: say in NOTICE where it comes from"


def test_extras_that_anything_names_exist() -> None:
    extras = PROJECT["optional-dependencies"]
    named = {*remote.EXTRAS.values(), *errors.EXTRAS.values()}
    for path in TEXTS:
        text = path.read_text()
        named |= {
            part for found in re.findall(rf"(?<![\w.-]){DISTRIBUTION}\[([\w,]+)\]", text) for part in found.split(",")
        }
        named |= set(re.findall(r"pip_install\(['\"](\w+)", text))
    assert {"s3", "gcs", "http", "near", "onnx", "search"} <= named <= set(extras)
    assert PROJECT["name"] == DISTRIBUTION and pip_install("s3") == f"pip install '{DISTRIBUTION}[s3]'"


def test_the_citation_is_of_this_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()  # those that the format requires
    assert citation["cff-version"] == "1.2.0" and citation["type"] == "software"
    assert citation["version"] == __version__ and citation["license"] == PROJECT["license"]
    assert citation["authors"] == PROJECT["authors"]


def test_the_changelog_begins_with_this_version_or_the_next() -> None:
    versions = re.findall(r"^## (.+)", CHANGELOG, re.M)
    assert versions[0] == "Unreleased" or versions[0].startswith(f"{__version__} - ")
    assert all(re.fullmatch(r"\d+\.\d+\.\d+ - \d{4}-\d\d-\d\d", each) for each in versions if each != "Unreleased")
    kinds = re.findall(r"^### (.+)", CHANGELOG, re.M)
    assert set(kinds) <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security", "Known limits"}
    assert len(CHANGELOG.split()) <= 400


@pytest.mark.parametrize("name", ["bug", "feature"])
def test_forms_request_settings_and_results(name: str) -> None:
    form: dict[str, Any] = yaml.safe_load((ROOT / f".github/ISSUE_TEMPLATE/{name}.yml").read_text())
    assert form["name"] and form["description"]
    fields = [part for part in form["body"] if part["type"] != "markdown"]
    assert {"config.yaml", "results.json"} <= {part["attributes"]["label"] for part in fields}
    ids = [part["id"] for part in fields]
    assert len(set(ids)) == len(ids) and {part["type"] for part in fields} == {"textarea"}


def instructions() -> list[tuple[str, str]]:
    lines = [line for line in (ROOT / "Dockerfile").read_text().splitlines() if not line.startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [(word, rest) for word, _, rest in (line.partition(" ") for line in joined.splitlines() if line)]


def test_the_image_is_of_files_that_exist_and_runs_as_nobody_special() -> None:
    found = instructions()
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    for word, rest in found:
        if word == "COPY" and not rest.startswith("--from="):
            for source in rest.split()[:-1]:
                assert (ROOT / source).exists() and f"!{source}" in ignored
        if word == "RUN":
            subprocess.run(["sh", "-n", "-c", rest], check=True)
    copied = {source for word, rest in found if word == "COPY" for source in rest.split()[:-1]}
    assert {"pyproject.toml", "README.md", "LICENSE", "NOTICE", "distill", "conf", "recipes"} <= copied
    assert [rest for word, rest in found if word == "USER"] == ["10001"]
    assert found[-1] == ("ENTRYPOINT", '["distill"]')
    assert ("ARG", "DEVICE=cpu") in found


@pytest.mark.parametrize(
    ("device", "asked"), [("cpu", "whl/cpu torch"), ("cuda", "constraints.txt torch nvidia-ml-py")]
)
def test_the_device_of_the_image_chooses_torch(device: str, asked: str) -> None:
    (chooses,) = [rest for word, rest in instructions() if word == "RUN" and "DEVICE" in rest]
    script = f'pip() {{ echo "$@"; }}; DEVICE={device}; {chooses}'
    done = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip().endswith(asked)


def test_an_unknown_device_of_the_image_is_refused() -> None:
    (chooses,) = [rest for word, rest in instructions() if word == "RUN" and "DEVICE" in rest]
    done = subprocess.run(["sh", "-c", f"DEVICE=tpu; {chooses}"], capture_output=True, text=True)
    assert done.returncode == 2 and "give cpu or cuda" in done.stderr


WORKFLOWS = {path.stem: yaml.safe_load(path.read_text()) for path in (ROOT / ".github/workflows").glob("*.yml")}


def test_public_tests_run_at_both_ends_of_what_is_allowed() -> None:
    matrix = WORKFLOWS["ci"]["jobs"]["tests"]["strategy"]["matrix"]
    named = [each.rpartition(" ")[2] for each in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", each)]
    assert matrix["python"] == named and matrix["versions"] == ["lowest-direct", "highest"]
    for requirement in itertools.chain(PROJECT["dependencies"], *PROJECT["optional-dependencies"].values()):
        assert ">=" in requirement or requirement.startswith(DISTRIBUTION), f"{requirement}: no lowest version"


def test_workflows_name_files_that_are_there() -> None:
    steps = [step for flow in WORKFLOWS.values() for job in flow["jobs"].values() for step in job["steps"]]
    commands = "\n".join(step.get("run", "") for step in steps)
    paths = re.findall(r"(?:\$GITHUB_WORKSPACE/|\s|^)((?:benchmarks|tests)/[\w./]+|\.ci/\w+)", commands, re.M)
    assert set(paths) >= {".ci/run", ".ci/slow"}
    assert not [path for path in paths if not (ROOT / path).exists()]
