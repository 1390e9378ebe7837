"""Sweeps and searches from the command line: names of folders, the comparison at the end, a search's number."""

import csv
import shlex
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from job import Shelf, check_sweep, composition, composition_of, distill, results

from distill.commands.sweep import _run
from distill.config.settings import BackendConfig
from distill.runtime.errors import SettingError

SMALL = ["train.steps=2", "train.epochs=null", "corpus.max_sequences=60", "evaluate.pseudo_perplexity.fraction=0"]


def sweep(shelf: Shelf, folder: Path, *more: str) -> int:
    """A sweep on the shelf, without the folder of a run of its own."""
    arguments = [each for each in shelf.arguments(folder) if not each.startswith(("hydra.run.dir", "train.epochs"))]
    given = {each.partition("=")[0] for each in SMALL}
    arguments = [each for each in arguments if each.partition("=")[0] not in given]
    return distill(*arguments, *SMALL, *more, f"hydra.sweep.dir={folder}", "--multirun")


def test_the_comparison_lies_beside_the_runs() -> None:
    assert composition_of("+recipe=smoke", "seed=0,1").sweep_folder == Path("runs/smoke-sweep")


def test_a_sweep_ends_with_its_comparison(
    shelf: Shelf, tmp_path: Path, capsys: pytest.CaptureFixture[str], lines: list[str]
) -> None:
    folder, given = tmp_path / "sweep", ["objective.temperature=1,2,-1", "optimize=perplexity"]
    assert sweep(shelf, folder, *given) == 2
    names = [f"objective.temperature={value}" for value in (1, 2, -1)]
    assert {path.name for path in folder.iterdir() if path.is_dir()} == {*names, "plots"}
    entries = yaml.safe_load((folder / "sweep.yaml").read_text())
    assert [entries[name]["status"] for name in names] == ["finished", "finished", "failed"]
    assert "objective.temperature" in entries[names[2]]["problem"]
    said = capsys.readouterr()
    assert f"Comparison: {folder / 'compare.html'}" in said.out and "3 runs, 2 of them finished" in said.out
    assert f"{names[2]}: failed before its first step: " in said.out
    page = (folder / "compare.html").read_text()
    assert "http-equiv" not in page and names[2] in page, "the sweep is over: nothing is loaded again"
    values = [results(folder / name)["student"]["perplexity"]["heldout"] for name in names[:2]]
    assert [line for line in lines if line.startswith("optimize: ")] == [
        f"optimize: perplexity = {value:.6g}" for value in values
    ]
    with (folder / "compare.csv").open() as file:
        written = [float(line["heldout.perplexity"]) for line in csv.DictReader(file) if line["status"] == "finished"]
    assert sorted(written) == sorted(values)
    before = (folder / names[0] / "results.json").stat().st_mtime_ns
    assert sweep(shelf, folder, *given, "resume=auto") == 2, "the same sweep again finds its runs"
    assert (folder / names[0] / "results.json").stat().st_mtime_ns == before
    assert {path.name for path in folder.iterdir() if path.is_dir()} == {*names, "plots"}


@pytest.mark.slow
def test_a_folder_of_other_settings_is_refused_in_words_of_a_sweep(
    shelf: Shelf, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sweep(shelf, tmp_path / "sweep", "seed=choice(0)") == 0
    assert sweep(shelf, tmp_path / "sweep", "seed=choice(0)", "optimizer.lr=1e-4") == 2
    assert "hydra.sweep.dir=DIR" in capsys.readouterr().err


@pytest.mark.slow
def test_folders_of_long_values_and_many_settings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Runs that are refused at once, so that only the folders are made; both had ended a sweep before its first run."""
    many = [f"train.{name}=1,2" for name in ("keep", "log_every")]
    many += [f"+objective.term_of_a_long_name_{number}.weight={number}" for number in range(15)]
    far = "no/" + "where/" * 30
    for folder, given, names in [
        ("short", ["corpus.path=no/a,no/b"], {"corpus.path=no%2Fa", "corpus.path=no%2Fb"}),
        ("many", ["corpus.path=no/a", *many], None),
        ("long", [f"corpus.path={far}a,{far}b"], {"000", "001"}),
        ("one", ["corpus.path=no/a"], {"only"}),
    ]:
        path = tmp_path / folder
        refused = ["train.batch_size=0", f"hydra.sweep.dir={path}", "--multirun"]
        assert distill("+recipe=smoke", *given, *refused) == 2
        found = {each.name for each in path.iterdir() if each.is_dir()}
        assert found == names if names else "train.keep=1,train.log_every=2" in found
        assert all(each.parent == path for each in path.rglob("*") if each.is_dir())
    assert "Traceback" not in capsys.readouterr().err


def test_a_sweeper_that_chooses_needs_a_number(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plugin = [f"hydra.sweep.dir={tmp_path / 'sweep'}", "hydra/sweeper=optuna", "--multirun"]
    assert distill("+recipe=smoke", "seed=0,1", *plugin) == 2
    (line,) = capsys.readouterr().err.splitlines()
    installed = find_spec("hydra_plugins") and find_spec("hydra_plugins.hydra_optuna_sweeper")
    assert ("set optimize=perplexity" if installed else "pip install 'distill-kd[search]'") in line
    assert not (tmp_path / "sweep").exists()


def test_a_wrong_name_ends_a_run_before_its_training(
    shelf: Shelf, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert shelf.run(tmp_path / "run", *SMALL, "optimize=heldout.perplexty") == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("distill: ")]
    assert "optimize=heldout.perplexty is not a number" in line and "did you mean heldout.perplexity" in line
    assert not (tmp_path / "run").exists()  # as of every refused run


@pytest.mark.slow
def test_a_search_is_given_the_number_and_goes_on(
    shelf: Shelf, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The recipe, with two small runs: it chooses the better one, and the same command runs nothing again."""
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper")
    folder = tmp_path / "search"
    small = [*SMALL, *shelf.corpus, "teacher=pretrained", f"teacher.path={shelf.teacher}", "train.batch_size=8"]
    command = ["+recipe=search", *small, f"hydra.sweep.dir={folder}", "hydra.sweeper.n_trials=2"]
    assert distill(*command) == 0
    values = {name: results(folder / name)["student"]["perplexity"]["heldout"] for name in ("000", "001")}
    best = yaml.safe_load((folder / "optimization_results.yaml").read_text())
    assert best["best_value"] == pytest.approx(min(values.values()))
    assert "objective.temperature" in best["best_params"]
    said = capsys.readouterr().out
    assert f"Comparison: {folder / 'compare.html'}" in said and "2 runs, 2 of them finished" in said
    assert distill(*command) == 0
    assert {path.name for path in folder.iterdir() if path.is_dir()} == {"000", "001", "plots"}
    assert "Traceback" not in capsys.readouterr().err


def test_a_search_without_any_number_ends_in_one_line(
    shelf: Shelf, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper")
    small = [f"corpus.path={tmp_path / 'none'}", f"hydra.sweep.dir={tmp_path / 'search'}", "hydra.sweeper.n_trials=1"]
    assert distill("+recipe=search", *small) == 2
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("distill: ")]
    assert len(said) == 2 and "no run of the search has given a number" in said[1]


def test_each_run_begins_with_all_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after one that has taken fewer, as other programs were at work."""
    job = SimpleNamespace(config=SimpleNamespace(backend=BackendConfig()))
    monkeypatch.setattr(composition, "run_of", lambda run: job)
    run: Any = SimpleNamespace(folder=tmp_path, overrides=[], hydra=SimpleNamespace(sweeper={}))
    under_way: Any = SimpleNamespace(begin=lambda *_: None, end=lambda *_: None)
    begun: list[int] = []

    def train(*_: Any) -> None:
        begun.append(torch.get_num_threads())
        torch.set_num_threads(1)

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        for _ in range(2):
            _run(run, under_way, train, [])
    finally:
        torch.set_num_threads(before)
    assert begun == [2, 2]


def test_the_folder_of_one_run_is_refused_for_a_sweep() -> None:
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper")
    with pytest.raises(SettingError, match=r"^hydra\.run\.dir: .*; a sweep has hydra\.sweep\.dir=DIR"):
        check_sweep(composition_of("+recipe=search", "hydra.run.dir=runs/mine"))


def test_the_command_of_a_run_of_a_search_is_that_of_one_run() -> None:
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper")
    command = composition._command(composition_of("+recipe=search"))
    again = composition_of(*shlex.split(command)[3:])
    assert not again.sweeps and "hydra.run.dir=" in command
