"""Sweeps and searches from the command line: names of folders, the comparison at the end, a search's number."""

import csv
import os
import shlex
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hypothesis
import pytest
import yaml
from hypothesis import strategies as st
from job import Shelf, assert_same, composition, composition_of, distill, results
from made_runs import make_run, results_of, settings_of

from distill.commands.cli import main
from distill.commands.sweep import EVERY, LONGEST, SweepPage, folder_name

OPTUNA = find_spec("hydra_plugins") and find_spec("hydra_plugins.hydra_optuna_sweeper")
SMALL = ["train.steps=2", "train.epochs=null", "corpus.max_sequences=60", "evaluate.pseudo_perplexity.fraction=0"]


def sweep(shelf: Shelf, folder: Path, *more: str) -> int:
    """A sweep on the shelf, without the folder of a run of its own."""
    arguments = [each for each in shelf.arguments(folder) if not each.startswith(("hydra.run.dir", "train.epochs"))]
    given = {each.partition("=")[0] for each in SMALL}
    arguments = [each for each in arguments if each.partition("=")[0] not in given]
    return distill(*arguments, *SMALL, *more, f"hydra.sweep.dir={folder}", "--multirun")


@pytest.mark.parametrize(
    "swept, name",
    [
        ("objective.temperature=2,seed=1", "objective.temperature=2,seed=1"),
        ("teacher.path=runs/a b", "teacher.path=runs%2Fa b"),
        ("corpus.path=Bücher", "corpus.path=Bücher"),
        ("corpus.path=a%2Fb", "corpus.path=a%252Fb"),
        ("corpus.path=${oc.env:BOOKS}", "corpus.path=%24{oc.env:BOOKS}"),
        ("", "only"),
    ],
)
def test_names_can_be_read(swept: str, name: str) -> None:
    assert folder_name(swept) == name


@hypothesis.given(st.text(min_size=1), st.text(min_size=1))
def test_other_values_have_other_names_of_one_part(one: str, other: str) -> None:
    first, second = (folder_name(f"corpus.path={text}") for text in (one, other))
    assert (first == second) == (one == other)
    assert all("/" not in name and "\0" not in name and len(os.fsencode(name)) <= LONGEST for name in (first, second))


def test_a_sweep_ends_with_its_comparison(
    shelf: Shelf, tmp_path: Path, capsys: pytest.CaptureFixture[str], lines: list[str]
) -> None:
    folder, given = tmp_path / "sweep", ["objective.temperature=-1,1,2", "optimize=perplexity"]
    assert sweep(shelf, folder, *given) == 2
    failed, *names = [f"objective.temperature={value}" for value in (-1, 1, 2)]
    assert {path.name for path in folder.iterdir() if path.is_dir()} == {failed, *names, "plots"}
    said = capsys.readouterr()
    assert said.err.count("distill: objective.temperature=-1.0: ") == 1, "the others ran all the same"
    assert f"Comparison: {folder / 'compare.html'}" in said.out and "2 runs, 2 of them finished" in said.out
    page = (folder / "compare.html").read_text()
    assert "http-equiv" not in page and failed not in page, "the sweep is over: nothing is loaded again"
    values = [results(folder / name)["student"]["perplexity"]["heldout"] for name in names]
    assert [line for line in lines if line.startswith("optimize: ")] == [
        f"optimize: perplexity = {value:.6g}" for value in values
    ]
    with (folder / "compare.csv").open() as file:
        assert sorted(float(line["heldout.perplexity"]) for line in csv.DictReader(file)) == sorted(values)
    before = (folder / names[0] / "results.json").stat().st_mtime_ns
    assert sweep(shelf, folder, *given, "resume=auto") == 2, "the same sweep again finds its runs"
    assert (folder / names[0] / "results.json").stat().st_mtime_ns == before
    assert {path.name for path in folder.iterdir() if path.is_dir()} == {failed, *names, "plots"}


@pytest.mark.slow
def test_processes_of_a_launcher(shelf: Shelf, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Also the name of a folder is found there, and a run that fails has its line and its status from there."""
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher")
    folder, here = tmp_path / "sweep", tmp_path / "here"
    assert sweep(shelf, folder, "seed=-1,1,2", "hydra/launcher=joblib", "hydra.launcher.n_jobs=2") == 2
    said = capfd.readouterr()
    assert said.err.count("distill: seed=-1: ") == 1 and "2 runs, 2 of them finished" in said.out
    assert sweep(shelf, here, "seed=1,2") == 0
    for seed in (1, 2):
        assert_same(folder / f"seed={seed}", here / f"seed={seed}")


def test_the_page_is_written_once_a_minute(tmp_path: Path) -> None:
    make_run(tmp_path / "seed=0", settings_of(0), results_of({"heldout": 3.0}))
    config: Any = SimpleNamespace(hydra=SimpleNamespace(sweep=SimpleNamespace(dir=str(tmp_path))), get=lambda _: None)
    ended, page = SimpleNamespace(overrides=["corpus.path=https://me:word@host"]), tmp_path / "compare.html"
    SweepPage().on_job_end(config, ended)
    assert "so far" in page.read_text() and ended.overrides == ["corpus.path=https://***@host"]
    for age, is_new in ((1, False), (EVERY + 10, True)):
        page.write_text("old")
        os.utime(page, (time.time() - age,) * 2)
        SweepPage().on_job_end(config, ended)
        assert (page.read_text() != "old") == is_new


def test_a_sweep_is_of_the_arguments_that_a_program_gives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["program", "--of-its-own"])
    given = ["+recipe=smoke", "train.batch_size=0", "seed=3,4", f"hydra.sweep.dir={tmp_path}", "--multirun"]
    assert main(given) == 2
    assert {path.name for path in tmp_path.iterdir() if path.is_dir()} == {"seed=3", "seed=4"}
    assert sys.argv == ["program", "--of-its-own"]


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
    for folder, given, name in [
        ("many", ["corpus.path=no/a", *many], "train.keep=1,train.log_every=2"),
        ("long", [f"corpus.path={far}a,{far}b"], folder_name(f"corpus.path={far}b")),
        ("one", ["corpus.path=no/a"], "only"),
    ]:
        path = tmp_path / folder
        assert distill("+recipe=smoke", *given, "train.batch_size=0", f"hydra.sweep.dir={path}", "--multirun") == 2
        found = [each for each in path.rglob("*") if each.is_dir()]
        assert name in {each.name for each in found} and all(each.parent == path for each in found)
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("plugin", "words"),
    [
        ("hydra/sweeper=optuna", "set optimize=perplexity" if OPTUNA else "pip install 'distill-kd[search]'"),
        ("hydra/launcher=submitit_slurm", "hydra/launcher=submitit_slurm: no launcher that is installed"),
        ("hydra.run.dir=runs/mine", "hydra.run.dir: names the folder of one run; a sweep has hydra.sweep.dir=DIR"),
    ],
)
def test_what_is_refused(plugin: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert distill("+recipe=smoke", "seed=0,1", f"hydra.sweep.dir={tmp_path / 'sweep'}", "--multirun", plugin) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert words in line and not (tmp_path / "sweep").exists()


def test_a_wrong_name_ends_a_run_before_its_training(
    shelf: Shelf, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert shelf.run(tmp_path / "run", *SMALL, "optimize=heldout.perplexty") == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("distill: ")]
    assert "optimize=heldout.perplexty is not a number" in line and "did you mean heldout.perplexity" in line
    assert not (tmp_path / "run").exists()  # as of every refused run


@pytest.mark.slow
def test_a_search_is_given_the_number_and_resumes(
    shelf: Shelf, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The recipe, with two small runs: it chooses the better one, and the same command runs nothing again."""
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper")
    folder = tmp_path / "search"
    small = [*SMALL, *shelf.corpus, "teacher=pretrained", f"teacher.path={shelf.teacher}", "train.batch_size=8"]
    command = ["+recipe=search", *small, f"hydra.sweep.dir={folder}", "hydra.sweeper.n_trials=2"]
    assert distill(*command) == 0
    runs = {path.parent.name for path in folder.glob("*/results.json")}
    values = {name: results(folder / name)["student"]["perplexity"]["heldout"] for name in runs}
    assert len(values) == 2
    best = yaml.safe_load((folder / "optimization_results.yaml").read_text())
    assert best["best_value"] == pytest.approx(min(values.values()))
    assert "objective.temperature" in best["best_params"]
    said = capsys.readouterr().out
    assert f"Comparison: {folder / 'compare.html'}" in said and "2 runs, 2 of them finished" in said
    assert distill(*command) == 0
    assert {path.name for path in folder.iterdir() if path.is_dir()} == {*runs, "plots"}
    assert "Traceback" not in capsys.readouterr().err


def test_a_search_without_any_number_ends_in_one_line(
    shelf: Shelf, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper")
    small = [f"corpus.path={tmp_path / 'none'}", f"hydra.sweep.dir={tmp_path / 'search'}", "hydra.sweeper.n_trials=1"]
    assert distill("+recipe=search", *small) == 2
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("distill: ")]
    assert len(said) == 2 and "no run of the search has given a number" in said[1]


def test_the_command_of_a_run_of_a_search_is_that_of_one_run() -> None:
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper")
    command = composition._command(composition_of("+recipe=search"))
    again = composition_of(*shlex.split(command)[3:])
    assert not again.sweeps and "hydra.run.dir=" in command
