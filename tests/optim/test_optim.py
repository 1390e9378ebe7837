"""Optimizers and schedules: groups, rates, clipping, torch's and the user's own, and those that no run can use."""

import math
import shutil
from typing import Any

import own_parts
import pytest
import torch
from job import Shelf, assert_same, metrics
from tiny import make_model, optimizer_config, schedule_config
from torch import nn

from distill.config.settings import OptimizerConfig
from distill.optim.optimizer_state import optimizer_state, restore_optimizer
from distill.optim.schedule import Limits, make_schedule
from distill.optim.updates import bound_of_rank, build, clip_gradients, peak_lr, set_learning_rate, try_out
from distill.runtime.errors import SettingError


@pytest.mark.parametrize("family", ["bert", "distilbert", "roberta", "modernbert", "albert"])
def test_matrices_decay_and_nothing_else(family: str) -> None:
    model = make_model(family, 2)
    optimizer = build(model, optimizer_config({"weight_decay": 0.3}))
    decay = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert len(decay) == sum(len(group["params"]) for group in optimizer.param_groups), "a parameter stands there twice"
    assert decay.keys() == {id(p) for p in model.parameters()}
    norms = {id(p) for m in model.modules() if isinstance(m, nn.LayerNorm) for p in m.parameters()}
    for name, parameter in model.named_parameters():
        plain = id(parameter) in norms or name.endswith("bias")
        assert decay[id(parameter)] == (0.0 if plain else 0.3), name
    assert norms and [group.get("adapt", True) for group in optimizer.param_groups] == [True, False]


def test_frozen_parameters_are_left_out() -> None:
    model = nn.Linear(3, 2)
    model.weight.requires_grad_(False)
    assert [p.shape for g in build(model, optimizer_config({})).param_groups for p in g["params"]] == [(2,)]


@pytest.mark.parametrize("given", [{}, {"lr": 0.1, "betas": [0.8, 0.7], "eps": 1e-3, "weight_decay": 0.2}])
def test_settings_reach_adamw(given: dict[str, Any]) -> None:
    optimizer = build(nn.Linear(2, 2), optimizer_config(given))
    lr, betas, eps, decay = given.values() or (5e-4, (0.9, 0.98), 1e-6, 0.01)
    for group, wanted in zip(optimizer.param_groups, (decay, 0.0), strict=True):
        assert (group["lr"], group["betas"], group["eps"], group["weight_decay"]) == (lr, tuple(betas), eps, wanted)
        assert isinstance(optimizer, torch.optim.AdamW) and group["fused"]


@pytest.mark.parametrize("decay", [0.25, 1.0])
def test_groups_with_rates_of_their_own_keep_their_ratios(decay: float) -> None:
    """Also where a resumed run has restored them; of one rate for all nothing is kept."""
    settings = optimizer_config({"_target_": "own_parts.layerwise", "lr": 0.1, "decay": decay})

    def rates(optimizer: torch.optim.Optimizer, lr: float) -> list[float]:
        set_learning_rate(optimizer, lr)
        return [group["lr"] for group in optimizer.param_groups]

    model = nn.Linear(2, 2)
    optimizer = build(model, settings)
    assert rates(optimizer, 0.05) == [0.05, 0.05 * decay] and rates(optimizer, 0.02) == [0.02, 0.02 * decay]
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    resumed, kept = build(model, settings), optimizer_state(model, optimizer)
    restore_optimizer(model, resumed, *kept)
    assert rates(resumed, 0.04) == [0.04, 0.04 * decay]
    assert any("lr_ratio" in name for name in kept[1]) == (decay != 1)


def with_gradients(values: list[list[float]]) -> nn.ParameterList:
    parameters = nn.ParameterList([nn.Parameter(torch.zeros(len(value))) for value in values])
    for parameter, value in zip(parameters, values, strict=True):
        parameter.grad = torch.tensor(value)
    return parameters


def test_clip_is_of_the_whole_gradient() -> None:
    model = with_gradients([[3.0, 0.0], [4.0], [12.0]])
    assert float(clip_gradients(model, 100.0)) == float(clip_gradients(model, None)) == pytest.approx(13.0)
    assert [p.grad.tolist() for p in model] == [[3.0, 0.0], [4.0], [12.0]]
    assert float(clip_gradients(model, 6.5)) == pytest.approx(13.0), "the norm before clipping"
    assert [p.grad.tolist() for p in model] == [[pytest.approx(1.5), 0.0], [pytest.approx(2.0)], [pytest.approx(6.0)]]
    for bad in (math.nan, math.inf):
        assert not math.isfinite(float(clip_gradients(with_gradients([[1.0], [bad]]), 5.0)))


@pytest.mark.parametrize(("how", "growth"), [("none", 1.0), ("linear", 4.0), ("sqrt", 2.0)])
def test_the_learning_rate_grows_with_the_sequences_of_a_step(how: str, growth: float) -> None:
    base = None if how == "none" else 64
    assert peak_lr(OptimizerConfig(lr=0.3, scale_lr=how, base_batch=base), 256) == pytest.approx(0.3 * growth)


@pytest.mark.parametrize(("each", "ranks", "bound"), [(True, 4, 0.25), (True, 1, None), (False, 4, None)])
def test_the_bound_of_a_rank_is_its_part_of_the_whole(each: bool, ranks: int, bound: float | None) -> None:
    assert bound_of_rank(OptimizerConfig(clip=1.0, clip_each_rank=each), ranks) == bound


def test_an_optimizer_of_torch_needs_no_code() -> None:
    settings = {"_target_": "torch.optim.SGD", "lr": 0.1, "momentum": 0.9, "weight_decay": 0.3}
    optimizer = build(nn.Linear(2, 2), optimizer_config(settings))
    found = [(group["lr"], group["momentum"], group["weight_decay"]) for group in optimizer.param_groups]
    assert isinstance(optimizer, torch.optim.SGD) and found == [(0.1, 0.9, 0.3), (0.1, 0.9, 0.0)]


def target(name: str, **settings: Any) -> dict[str, Any]:
    return {"_target_": f"own_parts.{name}", **settings}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"kind": "magic"}, ["optimizer.kind=magic", "adamw", "optimizer._target_"]),
        *(({"kind": kind, "betas": [0.9, 1.0]}, ["optimizer.betas=[0.9, 1.0]"]) for kind in ("adamw", "lamb")),
        ({"betas": [0.9]}, ["optimizer.betas"]),
        *(({"kind": kind, "eps": 0.0}, ["optimizer.eps=0.0"]) for kind in ("adamw", "lamb")),
        ({"eps": math.nan}, ["optimizer.eps"]),
        ({"kind": "lamb", "weight_decay": -0.1}, ["optimizer.weight_decay=-0.1"]),
        ({"kind": "lamb", "power": 2}, ["optimizer.power: no setting"]),
        (target("Counter", speed=1), ["optimizer.speed: no setting", "own_parts.Counter", "decay"]),
        (target("Counter", params=1), ["optimizer.params: no setting"]),
        ({"_target_": "pathlib.PurePath"}, ["optimizer._target_=pathlib.PurePath", "torch.optim.Optimizer"]),
        ({"_target_": "torch.optim.SGD", "momentum": -1}, ["optimizer: Invalid momentum value: -1"]),
        ({"_target_": "torch.optim.LBFGS"}, ["optimizer: LBFGS", "parameter groups"]),
        ({"_target_": f"{__name__}.Partial"}, ["Partial", "pass them all on"]),
        (target("NoRate"), ["own_parts.NoRate", "no lr"]),
        (target("Needy"), ["own_parts.Needy fails in a step", "closure"]),
        (target("Hoarder"), ["Hoarder keeps a list as 'history'", "tensors and numbers"]),
        (target("Central"), ["Central keeps 'total' in its state", "no parameter"]),
    ],
)
def test_optimizers_that_no_run_can_use_are_refused(settings: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(SettingError) as error:
        optimizer_state(*try_out(optimizer_config(settings)))
    text = str(error.value)
    assert "\n" not in text and all(word in text for word in words), text


class Partial(torch.optim.SGD):
    """Leaves parameters as they are."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params[:1], lr=lr)


# --- in whole runs

OPTIMIZER = ["optimizer=custom", "optimizer._target_=own_parts.Counter", "optimizer.lr=1e-3", "+optimizer.decay=0.5"]
SCHEDULE = ["schedule=custom", "schedule._target_=own_parts.Triangle", "+schedule.peak=0.25"]


@pytest.mark.slow
def test_an_optimizer_and_a_schedule_of_ones_own_resume_bitwise(shelf: Shelf, capfd: pytest.CaptureFixture) -> None:
    whole, folder = shelf.root / "own-optimizer", shelf.root / "own-optimizer-resumed"
    assert shelf.run(whole, *OPTIMIZER, *SCHEDULE) == 0
    wanted = [1e-3 * own_parts.Triangle(0.25)((step + 0.5) / 8) for step in range(8)]
    assert [line["lr"] for line in metrics(whole)] == wanted
    shutil.copytree(whole, folder)
    (folder / "results.json").unlink()
    shutil.rmtree(folder / "checkpoints" / "step-00000008")
    assert shelf.run(folder, *OPTIMIZER[:-1], "+optimizer.decay=0.4", *SCHEDULE) == 2
    assert "optimizer.decay was 0.5 and is now 0.4" in capfd.readouterr().err
    assert shelf.run(folder, *OPTIMIZER, *SCHEDULE) == 0
    assert_same(folder, whole)


# --- schedules

KINDS: dict[str, Any] = {
    "linear": lambda x: 1 - x,
    "cosine": lambda x: (1 + math.cos(math.pi * x)) / 2,
    "constant": lambda x: 1.0,
    "polynomial": lambda x: (1 - x) ** 2,
}


def make(given: dict[str, Any], total_steps: int | None = None, peak_lr: float = 1.0) -> Any:
    return make_schedule(schedule_config(given), total_steps, peak_lr)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("warmup", [0.0, 0.25, 0.5])
@pytest.mark.parametrize("floor", [0.0, 0.1])
def test_a_rise_and_a_fall(kind: str, warmup: float, floor: float) -> None:
    """The same where both ends are given as numbers of steps and as a rate."""
    ends = {} if kind == "constant" else {"floor": floor}
    power = {"power": 2.0} if kind == "polynomial" else {}
    schedule = make({"kind": kind, "warmup": warmup, **ends, **power})
    in_rates = {"end_lr": 2e-3 * floor, "floor": 0.0} if ends else {}
    in_steps = make({"kind": kind, "warmup": 0.0, "warmup_steps": int(20 * warmup), **in_rates, **power}, 20, 2e-3)
    for progress in (0.0, 0.01, 0.2, 0.5, 0.77, 1.0, *(Limits(20, math.inf, False).progress(3, 0.0),)):
        expected = progress / (warmup or 1)
        if progress >= warmup:
            expected = floor + (1 - floor) * KINDS[kind]((progress - warmup) / (1 - warmup))
            expected = 1.0 if kind == "constant" else expected
        assert schedule(progress) == pytest.approx(expected, abs=1e-12)
        assert in_steps(progress) == pytest.approx(expected, abs=1e-12)
    assert schedule(1.0) == pytest.approx(1.0 if kind == "constant" else floor)


def test_the_progress_of_a_step_is_that_of_its_middle_or_of_the_clock() -> None:
    assert Limits(20, math.inf, False).progress(3, 0.0) == 3.5 / 20
    assert Limits(20, 2.0, False).progress(3, 60.0) == 0.5 and Limits(20, 2.0, False).progress(30, 0.0) == 1.0
    schedule = make({"kind": "linear", "warmup": 1.0})
    assert schedule(0.999) == pytest.approx(0.999) and 0 <= schedule(1.0) <= 1


def until(end: int, total_steps: int, peak_lr: float) -> Any:
    assert peak_lr == 0.5
    return lambda progress: float(progress <= end / total_steps)


def test_a_schedule_of_the_users_gets_what_it_takes() -> None:
    schedule = make({"_target_": f"{__name__}.until", "end": 10}, 40, 0.5)
    assert schedule(0.25) == 1 and schedule(0.26) == 0


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"kind": "stairs"}, ["schedule.kind=stairs", "constant, cosine, linear, polynomial", "_target_"]),
        ({"warmup": 1.1}, ["schedule.warmup=1.1", "from 0 to 1"]),
        ({"floor": -0.1}, ["schedule.floor=-0.1", "from 0 to 1"]),
        ({"warmup_steps": 5}, ["schedule.warmup_steps=5: set beside warmup=0.05", "warmup=0"]),
        ({"warmup": 0.0, "warmup_steps": 41}, ["schedule.warmup_steps=41", "from 0 to 40"]),
        ({"warmup": 0.0, "warmup_steps": -1}, ["schedule.warmup_steps=-1", "from 0 to 40"]),
        ({"floor": 0.1, "end_lr": 1e-5}, ["schedule.end_lr=1e-05: set beside floor=0.1", "floor=0"]),
        ({"end_lr": 0.6}, ["schedule.end_lr=0.6", "from 0 to 0.5"]),
        ({"end_lr": -0.6}, ["schedule.end_lr=-0.6", "from 0 to 0.5"]),
        ({"kind": "polynomial", "power": 0}, ["schedule.power=0.0", "above 0"]),
        ({"total_steps": 2}, ["schedule.total_steps: no setting", "Linear"]),
        ({"kind": "constant", "floor": 0.1}, ["schedule.floor: no setting", "Constant", "warmup"]),
        ({"_target_": "own_parts.triangle", "progress": 0.5}, ["gives a float", "__call__(self, progress)"]),
        ({"_target_": "own_parts.Triangle", "peak": 1.0}, ["own_parts.Triangle fails at progress 0", "division"]),
        ({"_target_": "own_parts.Triangle", "peak": -1.0}, ["gives -", "at progress 0.01", "at least 0"]),
    ],
)
def test_schedules_that_cannot_be_are_refused(settings: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(SettingError) as error:
        make(settings, 40, 0.5)
    text = str(error.value)
    assert "\n" not in text and all(word in text for word in words), text


def test_steps_in_a_run_that_the_clock_ends_are_refused() -> None:
    with pytest.raises(SettingError, match=r"^schedule\.warmup_steps=5: .*train\.minutes.*fraction$"):
        make({"warmup": 0.0, "warmup_steps": 5}, None)
