"""Checkpoints: going on is bitwise the same, damage is refused, a kill harms nothing."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from own_parts import Counter
from tiny import Fit, assert_close, make_model, objective_config, weights_of

from distill.config.settings import TrainConfig
from distill.objective.running_mean import RunningMean
from distill.runs import checkpoint
from distill.runs.state import State
from distill.runtime import files
from distill.runtime.errors import SettingError


class Kill(BaseException):
    """Stands for a process that ends between two instructions."""


def make_fit(folder: Path, tokenizer: Any, rows: np.ndarray, teacher: Any, seed: int = 5, **settings: Any) -> Fit:
    """With dropout, AdamW, warm-up and clipping: everything that a checkpoint could forget."""
    train = TrainConfig(**{"batch_size": 4, "accumulate": 2, "epochs": 2, "save_every": 1, "keep": 3, **settings})
    student = make_model("distilbert", 1, seed=seed, dropout=0.2).train()
    objective = objective_config(masking={"mlm_probability": 0.3})
    return Fit(folder, tokenizer, rows, teacher, student, objective, train)


def killed_after(fit: Fit, step: int) -> None:
    """Run until the log of the step after `step`, which comes before that step's checkpoint."""

    def on_log(fit: Fit, metrics: dict[str, float]) -> None:
        if metrics["step"] > step:
            raise Kill

    fit.on_log = on_log
    with pytest.raises(Kill):
        fit.run()
    fit.logs.pop()


@pytest.fixture
def saved(tmp_path: Path, tokenizer: Any, teacher: Any, rows: np.ndarray) -> Fit:
    """A run that was killed in step 4; its checkpoints are those of steps 1, 2, 3."""
    made = make_fit(tmp_path / "checkpoints", tokenizer, rows, teacher)
    killed_after(made, 3)
    return made


def optimizer_state(fit: Fit) -> dict[str, torch.Tensor]:
    slots = fit.made.state_dict()["state"]
    return {f"{number}.{name}": value for number, state in slots.items() for name, value in state.items()}


def same(one: Fit, other: Fit) -> None:
    """Weights and what the optimizer keeps are the same bit for bit."""
    assert_close(weights_of(one.student), weights_of(other.student), rtol=0, atol=0)
    assert_close(optimizer_state(one), optimizer_state(other), rtol=0, atol=0)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: Any, tokenizer: Any, teacher: Any, rows: np.ndarray) -> Fit:
    fit = make_fit(tmp_path_factory.mktemp("whole"), tokenizer, rows, teacher)
    before = weights_of(fit.student)
    fit.run()
    assert not all(torch.equal(weight, before[name]) for name, weight in weights_of(fit.student).items())
    return fit


@pytest.mark.parametrize(("step", "overlap"), [(1, False), (2, True), (3, False), (3, True), (4, True), (5, False)])
def test_going_on_is_bitwise_the_same(
    tmp_path: Path, tokenizer: Any, teacher: Any, rows: np.ndarray, whole: Fit, step: int, overlap: bool
) -> None:
    first = make_fit(tmp_path, tokenizer, rows, teacher, async_checkpoints=overlap)
    killed_after(first, step)
    # A new process knows nothing: other weights, another state of torch's generator.
    second = make_fit(tmp_path, tokenizer, rows, teacher, seed=99)
    torch.manual_seed(1234)
    assert second.resume().state.step == step
    second.run()
    same(second, whole)
    assert first.losses() + second.losses() == whole.losses()
    done = {line[0]: line for line in [*first.epochs, *second.epochs]}
    assert [done[number] for number in sorted(done)] == whole.epochs
    for name in ("step", "tokens", "skipped"):
        assert getattr(second.state, name) == getattr(whole.state, name)


def test_any_state_of_an_optimizer_comes_back(fit: Any) -> None:
    """Tensors in other formats than their parameter, numbers, and what is kept by group: bitwise, of the same type."""
    optimizer = {"optimizer": lambda model: Counter([{"params": list(model.parameters())}], lr=0.01)}
    train = {"epochs": 2, "save_every": 1}
    whole, first, second = (
        fit(folder, train, objective=tiny.only(mlm=1.0), **optimizer) for folder in ("whole", "parts", "parts")
    )
    whole.run()
    killed_after(first, 4)
    second.resume().run()
    assert_close(weights_of(second.student), weights_of(whole.student), rtol=0, atol=0)
    state, expected = (fit.made.state[fit.made.param_groups[0]["params"][0]] for fit in (second, whole))
    kinds = {"sum": torch.Tensor, "age": int, "share": float, "signs": torch.Tensor}
    assert {name: type(value) for name, value in state.items()} == kinds
    assert state["sum"].dtype == torch.float64 and state["signs"].dtype == torch.int64
    assert all(torch.equal(torch.as_tensor(state[name]), torch.as_tensor(expected[name])) for name in kinds)
    group = second.made.param_groups[0]
    assert group["num_steps"] == 6 and float(group["mean"]) == float(whole.made.param_groups[0]["mean"])


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_going_on_with_another_split(fit: Any, dropout: float) -> None:
    """The same rows a step in other micro-batches: the same to floating-point error, with dropout keyed by row too."""

    def made(folder: str, **train: Any) -> Fit:
        student, teacher = make_model("distilbert", 1, seed=5, dropout=dropout).train(), make_model("bert", 2)
        models = {"teacher": teacher.requires_grad_(False), "student": student}
        return fit(folder, {"epochs": 1, **train}, keyed_dropout=True, **models, **tiny.plain_sgd())

    whole, first, second = made("whole"), made("parts", save_every=1), made("parts", batch_size=1, accumulate=8)
    whole.run()
    killed_after(first, 2)
    second.resume().run()
    assert_close(weights_of(second.student), weights_of(whole.student), rtol=1e-4, atol=2e-6)


def test_all_that_a_state_holds_comes_back(saved: Fit, tmp_path: Path) -> None:
    losses = RunningMean({"soft": 0.1, "mlm": 1 / 3}, {"soft": 5.0, "mlm": 2.0, "tokens": 5.0}, 9, {"soft": 0.5})
    state = State(
        step=7, tokens=1234, seconds=5.4321, skipped=3, skipped_in_a_row=2, losses=losses, overflows=1,
        first_losses={"soft": 3.5, "mlm": 0.25}, running_mean=1.125, spike_steps=4, last_good_step=3,
    )  # fmt: skip
    for step, overlap in ((7, True), (8, False)):  # which waits for the one before
        saved.checkpoints.save(replace(state, step=step), saved.model, saved.made, overlap)
    again = saved.checkpoints.load(saved.folder / "step-00000007", saved.model, saved.made)
    assert again == state


def test_before_the_first_step_there_is_no_optimizer_state(fit: Any) -> None:
    """As when every step so far was skipped."""
    made = fit()
    made.checkpoints.save(State(2, skipped=2), made.model, made.made)
    assert made.resume().state.skipped == 2 and not optimizer_state(made)


@pytest.mark.parametrize(("keep", "left"), [(1, [5, 6]), (2, [5, 6]), (9, [1, 2, 3, 4, 5, 6])])
def test_only_the_newest_are_kept(tmp_path: Path, tokenizer: Any, rows: np.ndarray, keep: int, left: list[int]) -> None:
    fit = make_fit(tmp_path, tokenizer, rows, make_model("bert", 1), keep=keep)
    fit.run()
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"step-{step:08d}" for step in left]


# --- kills ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(
    ("owner", "call", "number"),
    [
        (checkpoint, "write_shard", 1),
        (checkpoint, "write_shard", 2),
        (files, "sha256", 2),
        (checkpoint, "flush_to_disk", 4),
        (Path, "rename", 1),
    ],
)
def test_a_kill_while_saving_leaves_the_older_ones(
    saved: Fit, monkeypatch: pytest.MonkeyPatch, owner: Any, call: str, number: int, overlap: bool
) -> None:
    calls = []

    def kill(*arguments: Any, **named: Any) -> Any:
        calls.append(arguments)
        if len(calls) == number:
            raise Kill
        return original(*arguments, **named)

    original = getattr(owner, call)
    with monkeypatch.context() as patch, pytest.raises(Kill):
        patch.setattr(owner, call, kill)
        saved.state.step = 4
        saved.checkpoints.save(saved.state, saved.model, saved.made, overlap)
        saved.checkpoints.finish()
    newest = saved.checkpoints.newest()
    assert newest is not None and newest.name == "step-00000003"
    assert (saved.folder / ".step-00000004.new").is_dir(), "what a killed process leaves"
    assert saved.resume().state.step == 3
    saved.state.step = 4
    saved.checkpoints.save(saved.state, saved.model, saved.made)
    assert sorted(p.name for p in saved.folder.iterdir()) == [f"step-{step:08d}" for step in (2, 3, 4)]
    assert saved.resume().state.step == 4


def test_all_is_on_the_disk_before_a_checkpoint_has_its_name(saved: Fit, monkeypatch: pytest.MonkeyPatch) -> None:
    done, flush, rename = list[str](), checkpoint.flush_to_disk, Path.rename
    monkeypatch.setattr(checkpoint, "flush_to_disk", lambda path: done.append(path.name) or flush(path))
    monkeypatch.setattr(Path, "rename", lambda path, new: done.append(f"named {new.name}") or rename(path, new))
    saved.state.step = 4
    saved.checkpoints.save(saved.state, saved.model, saved.made)
    written = ["model.safetensors", "optimizer.safetensors", "state.json", "SHA256SUMS", ".step-00000004.new"]
    assert done == [*written, "named step-00000004", "checkpoints"]


# --- refusals ------------------------------------------------------------------------------------------------------


def refused(fit: Fit, path: Path) -> str:
    """The one line with which a checkpoint is refused; student and optimizer stay as they were."""
    before, slots = weights_of(fit.student), {name: v.clone() for name, v in optimizer_state(fit).items()}
    with pytest.raises(SettingError) as error:
        fit.resume(path)
    assert_close(weights_of(fit.student), before, rtol=0, atol=0)
    assert_close(optimizer_state(fit), slots, rtol=0, atol=0)
    assert str(path) in str(error.value)
    return str(error.value)


def test_absent_checkpoints_are_refused(saved: Fit, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "nowhere", tmp_path, tmp_path / "file"):
        assert "SHA256SUMS is missing" in refused(saved, path)


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ("format", ["format 99"]),
        ("student", ["layer.1", "has the shape None there"]),
        ("optimizer", ["of an optimizer, which Counter does not train here"]),
        ("settings", ["run was tiny and is now another", "optimizer.lr was None and is now 0.5"]),
    ],
)
def test_checkpoints_of_another_kind_are_refused_by_name(
    saved: Fit, tokenizer: Any, rows: np.ndarray, other: str, words: list[str]
) -> None:
    path, fit = saved.folder / "step-00000003", saved
    if other == "format":
        record = json.loads((path / "state.json").read_text())
        (path / "state.json").write_text(json.dumps(record | {"format": 99}))
        (path / "SHA256SUMS").unlink()
        files.write_manifest(path)
    elif other == "student":
        fit = Fit(saved.folder, tokenizer, rows, student=make_model("distilbert", 2, seed=5))
    elif other == "optimizer":  # of the user's own, whose code was edited
        fit.made = Counter([{"params": list(fit.model.parameters())[:2]}], lr=0.01)
    else:
        fit.checkpoints.identity = {"run": "another", "optimizer.lr": 0.5}
    text = refused(fit, path)
    assert all(word in text for word in words) and "damaged" not in text, text
