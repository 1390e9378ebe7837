"""Observers of a user's own: what they read is what the run records, and an error in one ends the run in one line."""

from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import Any

import pytest
from job import Shelf, assert_same, lines_of, metrics, results

import distill
from distill.config.component import Component
from distill.config.settings import BackendConfig
from distill.distributed.single import Single
from distill.runs import trackers
from distill.runs.callbacks import UserObservers, check_observers
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

    def on_step_end(self, step: distill.StepResult) -> None: ...


def misspelt() -> Misspelt:
    return Misspelt()


def each_step(prefix: str = "") -> Any:
    """Gives a plain function of a step."""
    return lambda step: SEEN.append(f"{prefix}{step.step}")


def observe(name: str, **settings: Any) -> str:
    values = ", ".join(f"{key}: {value}" for key, value in {"_target_": f"{__name__}.{name}", **settings}.items())
    return f"observers.{name.lower()}={{{values}}}"


@pytest.fixture(autouse=True)
def _nothing_seen() -> None:
    SEEN.clear()


def test_what_they_read_is_what_the_run_records(shelf: Shelf, done: Path) -> None:
    folder = shelf.root / "observed"
    both = observe("Recorder"), observe("each_step", prefix="step-")
    assert shelf.run(folder, *both, "evaluate.every_steps=3") == 0
    assert_same(folder, done)
    kinds = (distill.StepResult, distill.HistoryPoint, Path, str)
    steps, evaluations, checkpoints, names = ([one for one in SEEN if isinstance(one, kind)] for kind in kinds)
    for step, line in zip(steps, metrics(folder), strict=True):
        assert step.losses == {name[5:]: value for name, value in line.items() if name.startswith("loss/")}
        for name in ("step", "epoch", "tokens", "lr", "grad_norm"):
            assert getattr(step, name) == line[name]
    for evaluation, line in zip(evaluations, results(folder)["history"], strict=True):
        assert evaluation.loss == line["loss"]
        assert evaluation.scores == {name: line[name] for name in ("perplexity", "pseudo_perplexity")}
    assert [one.step for one in evaluations] == [3, 6, 8] and names == [f"step-{number}" for number in range(1, 9)]
    assert [one.name for one in checkpoints] == [f"step-{number:08d}" for number in (2, 3, 4, 6, 8)]
    with pytest.raises(FrozenInstanceError):
        steps[0].lr = 0.0


@pytest.mark.parametrize("method", ["after_step", "at_checkpoint", "at_evaluation"])
def test_an_error_ends_the_run_in_one_line_and_it_resumes(
    method: str, shelf: Shelf, done: Path, capfd: pytest.CaptureFixture
) -> None:
    """After step 4 there are a checkpoint and an evaluation; the error comes before or behind the checkpoint."""
    folder, more = shelf.root / f"broken-{method}", ("evaluate.every_steps=2", "train.save_every=1", "train.keep=9")
    assert shelf.run(folder, observe("Recorder", fails_at=4, method=method), observe("Half"), *more) == 2
    (line,) = lines_of(capfd)
    assert line.startswith("distill: observers.recorder: ValueError: no more after 4 (test_observers.py, line ")
    last = max(path.name for path in (folder / "checkpoints").glob("step-*"))
    assert last == f"step-0000000{3 if method == 'after_step' else 4}"
    SEEN.clear()
    assert shelf.run(folder, observe("Half"), *more) == 0
    # The evaluation at the checkpoint comes again; it is not made again.
    assert [one.step for one in SEEN] == [4, 6, 8]
    assert [line["step"] for line in results(folder)["history"]] == [2, 4, 6, 8]
    assert_same(folder, done)


@pytest.mark.parametrize(
    ("name", "path", "arguments", "words"),
    [
        ("a-b", f"{__name__}.Half", {}, "observers.a-b: the name"),
        ("mine", "fractions.Fraction", {}, "_target_=fractions.Fraction is no observer"),
        ("mine", "os.getcwd", {}, "_target_=os.getcwd is no observer"),
        ("mine", f"{__name__}.Misspelt", {}, "after_step"),
        ("mine", f"{__name__}.misspelt", {}, "after_step"),
        ("mine", "math.sqrt", {}, "observers.mine.x: missing"),  # of C, without a __dict__
        ("mine", f"{__name__}.Recorder", {"fail": 1}, "observers.mine.fail: no setting"),
        ("mine", f"{__name__}.Recorder", {"fails_at": "soon"}, "observers.mine.fails_at=soon"),
        ("mine", "no_such_module_33.Observer", {}, "cannot be imported"),
    ],
)
def test_what_is_no_observer_is_refused(
    name: str, path: str, arguments: dict[str, Any], words: str, tmp_path: Path
) -> None:
    components = {name: Component(f"observers.{name}", path, arguments)}
    with pytest.raises(SettingError) as error:
        check_observers(components)
        UserObservers(components, tmp_path, Single(BackendConfig(device="cpu")))
    assert words in str(error.value)


def test_a_run_that_an_error_ends_closes_its_tracker(
    shelf: Shelf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[bool] = []

    class Kept(trackers.Tracker):
        def close(self, failed: bool = False) -> None:
            closed.append(failed)

    monkeypatch.setattr(trackers, "build", lambda *_: Kept())
    assert shelf.run(tmp_path / "run", observe("Recorder", fails_at=1)) == 2
    assert closed == [True]
