"""Sizes are bounded before anything of that size is built: overrides, YAML, layers, names of tensors."""

import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from job import environment, refused_line, save_model
from made_runs import make_run, results_of, settings_of

from distill.commands.api.run import RunResults
from distill.commands.cli import main
from distill.models import load
from distill.models.fields import check_fields, family
from distill.models.load import load_pretrained
from distill.runs.located import settings_of_run
from distill.runs.results_file import read_results
from distill.runtime.errors import Damaged, SettingError
from distill.runtime.files import MAX_YAML, read_yaml

SECONDS = 30  # of a busy machine; what is refused here took minutes, or more memory than there is
LAUGHS = "".join([
    "a0: &a0 {x: [1, 2, 3, 4, 5, 6, 7, 8, 9]}\n",
    *(f"a{n}: &a{n} {{x: [{', '.join([f'*a{n - 1}'] * 9)}]}}\n" for n in range(1, 12)),
])  # fmt: skip
MERGED = "a0: &a0 {x: 1, y: 2}\n" + "".join(
    f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 9)}]}}\n" for n in range(1, 12)
)
INSIDE = "a: &a [1, *a]\n"


@pytest.fixture(autouse=True)
def ends_soon() -> Any:
    begin = time.monotonic()
    yield
    assert time.monotonic() - begin < SECONDS


@pytest.mark.parametrize(
    "override",
    ["corpus.path=" + "a" * 30_000, "+" + "a" * 3_000_000 + "=1", "student.layers=[" + ",".join(["1"] * 4000) + "]",
     f"seed={'9' * 100_000}", f"train.snapshots={'[' * 3000}1{']' * 3000}"],
    ids=["text", "name", "list", "digits", "depth"],
)  # fmt: skip
def test_a_long_override(override: str, capsys: pytest.CaptureFixture[str]) -> None:
    for command in ([], ["settings"], ["prepare"]):
        assert override[:12].lstrip("+").partition("=")[0] in refused_line(capsys, *command, override)


@pytest.mark.parametrize(
    "text",
    [LAUGHS, MERGED, INSIDE, "a: [" + "1, " * (MAX_YAML // 3) + "1]\n", "[" * 5000],
    ids=["aliases", "merged", "inside itself", "long", "deep"],
)
def test_yaml_that_stands_for_more_than_it_holds(text: str, tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(text)
    with pytest.raises(ValueError, match=r"^it has|recursion"):
        read_yaml(tmp_path / "a.yaml")


@pytest.mark.parametrize("text", [LAUGHS, INSIDE], ids=["aliases", "inside itself"])
def test_run_folders(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "runs" / "one", settings_of(1), results_of({"heldout": 5.0}))
    make_run(tmp_path / "runs" / "two", settings_of(2), results_of({"heldout": 6.0}))
    (run / "config.yaml").write_text(text)
    assert main(["compare", f"run={tmp_path / 'runs'}", f"output={tmp_path / 'out'}"]) == 0
    assert main(["report", f"run={run}"]) == 0
    capsys.readouterr()
    with pytest.raises(SettingError, match=r"its config\.yaml cannot be read: it has aliases"):
        settings_of_run(run)
    with pytest.raises(Damaged, match=r"config\.yaml is damaged"):
        _ = RunResults(run, read_results(run / "results.json")).settings
    save_model(run / "student")
    assert "config.yaml cannot be read" in refused_line(capsys, "evaluate", f"model={run}")


def test_a_limit_on_memory_below_what_torch_takes() -> None:
    """A C library that gets no memory while it is imported ends the process with messages of its own."""
    low: Callable[[], None] = lambda: resource.setrlimit(resource.RLIMIT_AS, (600 << 20, 600 << 20))  # noqa: E731
    for command in ([], ["evaluate", "model=x"]):
        words = [sys.executable, "-m", "distill", *command]
        done = subprocess.run(words, capture_output=True, text=True, env=environment(), preexec_fn=low)
        assert done.returncode == 2 and done.stdout == ""
        assert (
            done.stderr.startswith("distill: not enough memory: `ulimit -v` is 614400 kB")
            and done.stderr.count("\n") == 1
        )


@pytest.mark.parametrize(
    ("architecture", "name"),
    [("bert", "num_hidden_layers"), ("distilbert", "n_layers"), ("gpt2", "n_layer"), ("albert", "num_hidden_groups"),
     ("bert", "num_labels")],
)  # fmt: skip
def test_a_student_of_a_million_layers(architecture: str, name: str) -> None:
    message = rf"student\.config\.{name}=10000000 is not a size of a model: give a whole number from 1 to 1,000"
    with pytest.raises(SettingError, match=message):
        check_fields(family(architecture), {name: 10_000_000})


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"num_hidden_layers": 10_000_000}, r"its config\.json has num_hidden_layers=10000000, and a"),
        ({"num_labels": 10_000_000}, r"its config\.json has num_labels=10000000, and a"),
        # Else transformers makes up what the folder lacks.
        ({"num_hidden_layers": 900, "hidden_size": 16_384, "intermediate_size": 65_536}, "take .* GB, and .* are free"),
    ],
)
def test_a_saved_model_that_memory_does_not_hold(
    changed: dict[str, int], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a folder, and among those that the Hub's client keeps."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(load, "is_hub_reached", lambda: False)
    (tmp_path / "models--a--b" / "refs").mkdir(parents=True)
    (tmp_path / "models--a--b" / "refs" / "main").write_text("0" * 40)
    folder = save_model(tmp_path / "models--a--b" / "snapshots" / ("0" * 40), "bert")
    assert load_pretrained("teacher.path", "a/b").config.num_hidden_layers == 4
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**fields, **changed}))
    for path in (str(folder), "a/b"):
        with pytest.raises(SettingError, match=rf"teacher\.path={path}: .*{words}"):
            load_pretrained("teacher.path", path)


def test_a_header_of_weights_that_is_too_long(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model", "bert")
    header = json.dumps({"__metadata__": {"a": "b" * 30_000_000}}).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"\0" * 8)
    with pytest.raises(SettingError, match=r"the names of tensors in model\.safetensors take 30 MB"):
        load_pretrained("teacher.path", str(folder))
