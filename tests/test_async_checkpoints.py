"""Checkpoints that a thread writes: what is in them, who waits for them, and what is left whatever ends a training."""

import errno
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from test_train import at_step, poisoned, saved_steps, with_teacher
from tiny import Fit, loop

from distill.config.settings import EvaluateConfig
from distill.distributed import RankLost
from distill.runs import checkpoint
from distill.runs.step import Callback, StepResult

Prepare = Callable[[Fit], object]


class Seen(Callback):
    """Notes each step by its number, and each checkpoint by its name."""

    def __init__(self) -> None:
        self.events = list[int | str]()

    def after_step(self, step: StepResult) -> None:
        self.events.append(step.step)

    def at_checkpoint(self, folder: Path) -> None:
        self.events.append(next(folder.parent.glob(folder.name)).name)


def trained(fit: Any, name: str, prepare: Prepare = id, **train: Any) -> Any:
    """A training to its end, whatever that is; what was seen of it; how it ended; what is left of it."""
    settings = {"epochs": None, "steps": 6, "save_every": 2, "keep": 9, "async_checkpoints": name != "plain", **train}
    made = with_teacher(lambda **given: fit(name, snapshots=Seen(), **given), **settings)
    made.evaluations = EvaluateConfig(every_steps=100)
    prepare(made)
    try:
        ended = made.run()
    except (Exception, KeyboardInterrupt) as error:
        ended = f"{type(error).__name__}: {error}".replace(str(made.folder), "FOLDER")
    files = [load_file(file) for file in sorted(made.folder.glob("*/*.safetensors"))]
    tensors = [{name: each.numpy().tobytes() for name, each in found.items()} for found in files]
    return made, made.snapshots.events, ended, (sorted(os.listdir(made.folder)), tensors)


def held_until(*steps: int, patch: pytest.MonkeyPatch, write: Any = checkpoint.write_shard) -> Prepare:
    """Let no file be written, by `write`, but during the log of one of these steps, and after that of the last."""
    may_write = threading.Event()

    def on_log(made: Fit, metrics: dict[str, float]) -> None:
        if metrics["step"] in steps:
            may_write.set()
            while made.checkpoints.is_writing:
                time.sleep(0.01)
        if metrics["step"] != steps[-1]:
            may_write.clear()

    patch.setattr(checkpoint, "write_shard", lambda *given: write(*given) if may_write.wait(60) else 1 / 0)
    return lambda made: vars(made).update(on_log=on_log)


def test_training_goes_on_and_what_is_written_is_of_the_step(fit: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has its name after the first step that finds it written, and the next save and the end wait for it."""
    *_, expected = trained(fit, "plain", steps=12, save_every=3)
    _, events, _, left = trained(fit, "async", held_until(4, 9, 12, patch=monkeypatch), steps=12, save_every=3)
    third, sixth, ninth, last = left[0]
    assert left == expected and last == "step-00000012"
    assert events == [1, 2, 3, 4, 5, third, 6, 7, 8, 9, sixth, 10, 11, 12, ninth, last]


@pytest.mark.parametrize(("written", "noticed"), [(4, 5), (6, 6)])
def test_an_error_in_the_thread_ends_the_run_as_without_it(
    written: int, noticed: int, fit: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the next step, or where that comes first at the next save."""

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(checkpoint, "write_shard", full)
    _, _, *expected = trained(fit, "plain", save_every=3)
    held = held_until(written, patch=monkeypatch, write=full)
    made, _, *found = trained(fit, "async", held, save_every=3, steps=9)
    assert found == expected and found[0].startswith("StorageFailed: FOLDER: No space left")
    assert made.state.step == noticed


def failing(error: Exception) -> Prepare:
    def fail(made: Fit, metrics: dict[str, float]) -> None:
        if metrics["step"] == 3:
            raise error

    return lambda made: vars(made).update(on_log=fail)


def evaluated(made: Fit) -> None:
    def evaluate(*_: Any) -> Any:
        raise ValueError(saved_steps(made))

    made.evaluations = EvaluateConfig(every_steps=3)
    vars(made)["evaluate"] = evaluate


def terminated(made: Fit) -> None:
    """As a rank that holds a part of the student, which can save nothing on its own on the way out."""
    vars(made.ranks)["shards_student"] = True
    at_step(made, 2, signal.SIGTERM)


@pytest.mark.parametrize(
    ("prepare", "settings"),
    [
        (terminated, {}),
        (lambda made: at_step(made, 2, signal.SIGUSR1), {}),
        (failing(ValueError("a bug")), {}),
        (failing(RankLost("rank 1")), {}),
        (lambda made: poisoned(made, (3,)), {"max_nonfinite": 1}),
        (evaluated, {}),
    ],
)
def test_all_is_left_and_told_as_without_it(
    prepare: Prepare, settings: Any, fit: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever comes while a checkpoint is written, which takes the time of many steps."""
    found, write = [], checkpoint.write_shard
    monkeypatch.setattr(checkpoint, "write_shard", lambda *given: time.sleep(0.2) or write(*given))
    for name in ("plain", "async"):
        told: list[Any] = []  # and what is there at that time
        note = lambda text, at=tmp_path / name, told=told: told.append((text, sorted(os.listdir(at))))  # noqa: E731
        monkeypatch.setattr(loop.logger, "info", note)
        made, _, *ended = trained(fit, name, prepare, **settings)
        found.append((ended, told, made.state.step))
    assert found[0] == found[1] and found[0][0][1][0]
