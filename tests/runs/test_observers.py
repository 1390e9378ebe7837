"""Observers of a user's own: what they read is what the run records, and an error in one ends the run in one line."""

from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import Any

import pytest
from job import Shelf, assert_same, command, metrics, results

import distill
from distill.config.component import Component
from distill.config.settings import BackendConfig
from distill.distributed.single import Single
from distill.runs import trackers
from distill.runs.callbacks import check_observers, make_observers
from distill.runs.checkpoint import Checkpoints
from distill.runtime.errors import SettingError

SEEN: list[Any] = []


class Recorder(distill.Observer):
    """Keeps all that it reads, and fails where it should."""

    def __init__(self, folder: Path, fails_at: int = 0, method: str = "after_step") -> None:
        self.folder, self.fails = folder, (method, fails_at)

    def after_step(self, step: distill.StepResult) -> None:
        self._see("after_step", step.step, step)

    def at_evaluation(self, evaluation: distill.HistoryPoint) -> None:
        self._see("at_evaluation", evaluation.step, evaluation)

    def at_checkpoint(self, folder: Path) -> None:
        assert folder.parent.parent == self.folder
        Checkpoints(folder.parent, 1, {}, Single(BackendConfig())).check(folder)  # it is whole
        self._see("at_checkpoint", int(folder.name.removeprefix("step-")), folder)

    def _see(self, method: str, number: int | None, observed: Any) -> None:
        if (method, number) == self.fails:
            raise ValueError(f"no more\nafter {number}")
        SEEN.append(observed)


class Half:
    """Has one of the methods and no base class."""

    def at_evaluation(self, evaluation: distill.HistoryPoint) -> None:
        SEEN.append(evaluation)


class Misspelt(distill.Observer):
    """Would never be called."""

    def on_step_end(self, step: distill.StepResult) -> None:
        SEEN.append(step)


def misspelt() -> Misspelt:
    return Misspelt()


def each_step(prefix: str = "") -> Any:
    """Gives a plain function of a step."""
    return lambda step: SEEN.append(f"{prefix}{step.step}")


def observe(name: str, **settings: Any) -> list[str]:
    values = ", ".join(f"{key}: {value}" for key, value in {"_target_": f"{__name__}.{name}", **settings}.items())
    return [f"observers.{name.lower()}={{{values}}}"]


@pytest.fixture(autouse=True)
def _nothing_seen() -> None:
    SEEN.clear()


def test_what_they_read_is_what_the_run_records(shelf: Shelf, done: Path) -> None:
    folder = shelf.root / "observed"
    both = [*observe("Recorder"), *observe("each_step", prefix="step-")]
    assert shelf.run(folder, *both, "evaluate.every_steps=3") == 0
    assert_same(folder, done)
    kinds = (distill.StepResult, distill.HistoryPoint, Path)
    steps, evaluations, checkpoints = ([one for one in SEEN if isinstance(one, kind)] for kind in kinds)
    for step, line in zip(steps, metrics(folder), strict=True):
        losses = {name.removeprefix("loss/"): value for name, value in line.items() if name.startswith("loss/")}
        assert step.losses == losses and not step.skipped
        found = (step.step, step.epoch, step.tokens, step.lr, step.grad_norm)
        assert found == tuple(line[name] for name in ("step", "epoch", "tokens", "lr", "grad_norm"))
    for evaluation, line in zip(evaluations, results(folder)["history"], strict=True):
        assert evaluation.loss == line["loss"]
        assert evaluation.scores == {name: line[name] for name in ("perplexity", "pseudo_perplexity")}
    assert [one.step for one in evaluations] == [3, 6, 8]
    assert [one.name for one in checkpoints] == [f"step-{number:08d}" for number in (2, 3, 4, 6, 8)]
    assert [one for one in SEEN if isinstance(one, str)] == [f"step-{number}" for number in range(1, 9)]
    with pytest.raises(FrozenInstanceError):
        steps[0].lr = 0.0


@pytest.mark.parametrize("method", ["after_step", "at_checkpoint", "at_evaluation"])
def test_an_error_ends_the_run_in_one_line_and_it_resumes(
    method: str, shelf: Shelf, done: Path, capfd: pytest.CaptureFixture
) -> None:
    """After step 4 there are a checkpoint and an evaluation; the error comes before or behind the checkpoint."""
    folder = shelf.root / f"broken-{method}"
    at = [*observe("Recorder", fails_at=4, method=method), *observe("Half")]
    more = ("evaluate.every_steps=2", "train.save_every=1", "train.keep=9")
    assert shelf.run(folder, *at, *more) == 2
    (line,) = [line for line in capfd.readouterr().err.splitlines() if line.startswith("distill: ")]
    assert line.startswith("distill: observers.recorder: ValueError: no more after 4 (test_observers.py, line ")
    assert line.endswith(': raise ValueError(f"no more\\nafter {number}"))')
    last = (folder / "checkpoints").glob("step-*")
    assert max(path.name for path in last) == f"step-0000000{3 if method == 'after_step' else 4}"
    SEEN.clear()
    assert shelf.run(folder, *observe("Half"), *more) == 0
    # The evaluation at the checkpoint comes again; it is not made again.
    assert [one.step for one in SEEN] == [4, 6, 8]
    assert [line["step"] for line in results(folder)["history"]] == [2, 4, 6, 8]
    assert_same(folder, done)


def test_what_is_no_observer_is_refused(tmp_path: Path) -> None:
    def refusal(name: str, path: str, **arguments: Any) -> str:
        components = {name: Component(f"observers.{name}", path, arguments)}
        with pytest.raises(SettingError) as error:
            check_observers(components)
            make_observers(components, tmp_path, Single(BackendConfig(device="cpu")))
        return str(error.value)

    assert refusal("a-b", f"{__name__}.Half") == (
        "observers.a-b: the name of an observer has to be letters, digits and underscores"
    )
    for path in ("fractions.Fraction", "os.getcwd"):
        assert f"observers.mine._target_={path}" in (line := refusal("mine", path)) and "distill.Observer" in line
    for path in (f"{__name__}.Misspelt", f"{__name__}.misspelt"):
        assert f"observers.mine._target_={path}" in (line := refusal("mine", path)) and "after_step" in line
    assert "observers.mine.x: missing" in refusal("mine", "math.sqrt")  # of C, without a __dict__
    assert "observers.mine.fail: no setting" in refusal("mine", f"{__name__}.Recorder", fail=1)
    assert "observers.mine.fails_at=soon: should be a valid integer" in refusal(
        "mine", f"{__name__}.Recorder", fails_at="soon"
    )
    assert "cannot be imported" in refusal("mine", "no_such_module_33.Observer")


@pytest.mark.slow
def test_rank_0_alone_observes_and_its_error_ends_all_ranks(shelf: Shelf, tmp_path: Path) -> None:
    folder, ranks = shelf.root / "two-observers", ("backend=ddp", "backend.processes=2", "train.accumulate=1")
    (tmp_path / "mine_33.py").write_text(
        "class Fails:\n"
        "    def __init__(self, folder):\n"
        "        self.file = open(folder / 'seen.txt', 'a', buffering=1)\n\n"
        "    def after_step(self, step):\n"
        "        print(step.step, step.tokens, step.losses['total'], file=self.file)\n"
        "        assert step.step < 5, 'enough'\n"
    )
    process = command(*shelf.arguments(folder, *ranks, "observers.mine._target_=mine_33.Fails"), path=tmp_path)
    _, errors = process.communicate(timeout=500)
    assert process.returncode == 2, errors
    assert "distill: observers.mine: AssertionError: enough (mine_33.py, line 7: assert step.step < 5" in errors
    seen = [[float(value) for value in line.split()] for line in (folder / "seen.txt").read_text().splitlines()]
    lines = metrics(folder)
    assert seen == [[line["step"], line["tokens"], line["loss/total"]] for line in lines] and len(seen) == 5
    assert (folder / "checkpoints" / "step-00000004").is_dir()


def test_a_run_that_an_error_ends_closes_its_tracker(
    shelf: Shelf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[str] = []

    class Kept(trackers.Tracker):
        def close(self, failed: bool = False) -> None:
            closed.append("failed" if failed else "finished")

    monkeypatch.setattr(trackers, "build", lambda *_: Kept())
    assert shelf.run(tmp_path / "run", *observe("Recorder", fails_at=1)) == 2
    assert closed == ["failed"]
