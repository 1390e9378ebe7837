"""Sweeps and searches from the command line: names of folders, the comparison at the end, a search's number."""

import csv
import os
import shlex
import sys
import time
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

SMALL = ["train.steps=2", "train.epochs=null", "corpus.max_sequences=60", "evaluate.pseudo_perplexity.fraction=0"]


def sweep(shelf: Shelf, folder: Path, *more: str) -> int:
    """A sweep on the shelf, without the folder of a run of its own."""
    given = {each.partition("=")[0] for each in [*SMALL, "hydra.run.dir=", "train.epochs="]}
    arguments = [each for each in shelf.arguments(folder) if each.partition("=")[0] not in given]
    return distill(*arguments, *SMALL, *more, f"hydra.sweep.dir={folder}", "--multirun")


def folders_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if path.is_dir()}


@hypothesis.given(st.text(min_size=1), st.text(min_size=1))
def test_other_values_have_other_names_of_one_part_that_can_be_read(one: str, other: str) -> None:
    first, second = (folder_name(f"corpus.path={text}") for text in (one, other))
    assert (first == second) == (one == other)
    assert all("/" not in name and "\0" not in name and len(os.fsencode(name)) <= LONGEST for name in (first, second))
    assert folder_name("seed=1,corpus.path=Bü/c h,x=${a}") == "seed=1,corpus.path=Bü%2Fc h,x=%24{a}"
    assert folder_name("") == "only" and folder_name(LONGEST * "a" + one) != folder_name(LONGEST * "a" + one + other)


def test_a_sweep_ends_with_its_comparison(shelf: Shelf, tmp_path: Path, capsys: Any, lines: list[str]) -> None:
    folder, given = tmp_path / "sweep", ["objective.temperature=-1,1,2", "optimize=perplexity"]
    assert sweep(shelf, folder, *given) == 2
    failed, *names = [f"objective.temperature={value}" for value in (-1, 1, 2)]
    assert folders_in(folder) == {failed, *names, "plots"}
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
    assert folders_in(folder) == {failed, *names, "plots"}
    assert sweep(shelf, folder, *given, "optimizer.lr=1e-4") == 2
    assert "hydra.sweep.dir=DIR" in capsys.readouterr().err


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


def test_a_sweep_is_of_the_arguments_that_a_program_gives(tmp_path: Path, monkeypatch: Any) -> None:
    """Folders of long values and many settings are names of one part, too."""
    monkeypatch.setattr(sys, "argv", ["program", "--of-its-own"])
    far = "no/" + "where/" * 30
    many = [f"+objective.term_of_a_long_name_{number}.weight={number}" for number in range(15)]
    given = ["+recipe=smoke", "train.batch_size=0", f"hydra.sweep.dir={tmp_path}", "--multirun"]
    assert main([*given, "seed=3,4", *many]) == 2
    assert main([*given, f"corpus.path={far}a,{far}b"]) == 2
    names = {"seed=3", "seed=4", *(folder_name(f"corpus.path={far}{end}") for end in "ab")}
    assert folders_in(tmp_path) == names and sys.argv == ["program", "--of-its-own"]


@pytest.mark.slow
def test_processes_of_a_launcher(shelf: Shelf, tmp_path: Path, capfd: Any) -> None:
    """Also the name of a folder is found there, and a run that fails has its line and its status from there."""
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher")
    folder, here = tmp_path / "sweep", tmp_path / "here"
    assert sweep(shelf, folder, "seed=-1,1,2", "hydra/launcher=joblib", "hydra.launcher.n_jobs=2") == 2
    said = capfd.readouterr()
    assert said.err.count("distill: seed=-1: ") == 1 and "2 runs, 2 of them finished" in said.out
    assert sweep(shelf, here, "seed=1,2") == 0
    for seed in (1, 2):
        assert_same(folder / f"seed={seed}", here / f"seed={seed}")


@pytest.mark.slow
def test_a_search_is_given_the_number_and_resumes(shelf: Shelf, tmp_path: Path, capsys: Any) -> None:
    """The recipe, with two small runs: it chooses the better one, and the same command runs nothing again."""
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper")
    folder = tmp_path / "search"
    small = [*SMALL, *shelf.corpus, "teacher=pretrained", f"teacher.path={shelf.teacher}", "train.batch_size=8"]
    command = ["+recipe=search", *small, f"hydra.sweep.dir={folder}", "hydra.sweeper.n_trials=2"]
    assert distill(*command) == 0
    runs = {path.parent.name for path in folder.glob("*/results.json")}
    values = {name: results(folder / name)["student"]["perplexity"]["heldout"] for name in runs}
    best = yaml.safe_load((folder / "optimization_results.yaml").read_text())
    assert len(values) == 2 and best["best_value"] == pytest.approx(min(values.values()))
    assert "objective.temperature" in best["best_params"] and "2 runs, 2 of them finished" in capsys.readouterr().out
    assert distill(*command) == 0
    assert folders_in(folder) == {*runs, "plots"}


def test_a_search_without_any_number_ends_in_one_line(tmp_path: Path, capsys: Any) -> None:
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper")
    small = [f"corpus.path={tmp_path / 'none'}", f"hydra.sweep.dir={tmp_path / 'search'}", "hydra.sweeper.n_trials=1"]
    assert distill("+recipe=search", *small) == 2
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("distill: ")]
    assert len(said) == 2 and "no run of the search has given a number" in said[1]
    command = composition._command(composition_of("+recipe=search"))  # that of one run
    again = composition_of(*shlex.split(command)[3:])
    assert not again.sweeps and "hydra.run.dir=" in command
