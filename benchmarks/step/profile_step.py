"""Where the time of a training step goes: phases, and matrix products against everything else.

    python benchmarks/step/profile_step.py --shape base --rows all --precision bf16

One step of the loop of `distill.train` under torch's profiler, after two that warm up; the profiler itself costs some
per cent. Outside of forward, objective, backward and optimizer are zeroing gradients, sums, the bucket and masking.
"""

import argparse
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import profile, record_function

import distill.train
from benchmarks.common import save, table, title
from benchmarks.step.models import SHAPES, AfterStep, Variant, batches, make_student, make_teacher, operations
from benchmarks.step.step import WARM_UP, matrix_rate, train_with_distill
from distill.config.settings import PrecisionConfig
from distill.objective.objective import Objective

PHASES = ("teacher's encoder", "student's encoder", "student and objective", "backward", "clipping and optimizer")
# Names of operators have these in them; the rest is everything else.
KERNELS = {
    "matrix products": ("aten::mm", "aten::addmm", "aten::bmm", "linear_pointwise", "scaled_dot_product"),
    "losses": ("CompiledFxGraph", "Torch-Compiled"),
    "copies and casts": ("aten::copy_", "aten::fill_", "aten::index"),
    "activations, norms, softmax": ("gelu", "layer_norm", "softmax"),
    "dropout's random numbers": ("aten::random_",),
    "optimizer and norm": ("adamw", "vector_norm"),
}


def mark(module: Any, name: str) -> None:
    """Let the profiler see each forward of `module` under `name`."""
    open_ones: list[Any] = []

    def enter(*_: object) -> None:
        open_ones.append(record_function(name))
        open_ones[-1].__enter__()

    module.register_forward_pre_hook(enter)
    module.register_forward_hook(lambda *_: open_ones.pop().__exit__(None, None, None))


def name_calls(owner: Any, attribute: str, name: str) -> None:
    """Let the profiler see each call of a function or method under `name`."""
    function = getattr(owner, attribute)

    @functools.wraps(function)
    def named(*arguments: Any, **more: Any) -> Any:
        with record_function(name):
            return function(*arguments, **more)

    setattr(owner, attribute, named)


def phases(events: list[FunctionEvent], seconds: float) -> dict[str, float]:
    """Seconds of each phase, each without the phases inside it."""
    sums = {name: sum(e.cpu_time_total for e in events if e.name == name) / 1e6 for name in PHASES}
    sums["student and objective"] -= sums["student's encoder"]
    found = {"heads and losses" if name == "student and objective" else name: value for name, value in sums.items()}
    return found | {"outside of these": seconds - sum(found.values())}


def kernels(events: list[FunctionEvent]) -> dict[str, float]:
    """Seconds of operators by kind, each without the operators it calls."""
    found = dict.fromkeys([*KERNELS, "everything else"], 0.0)
    for event in events:
        kinds = (kind for kind, names in KERNELS.items() if any(name in event.name for name in names))
        found[next(kinds, "everything else")] += event.self_cpu_time_total / 1e6
    return found


def profiled(train_for: Callable[[AfterStep], None], shapes: bool = False) -> tuple[list[FunctionEvent], float]:
    """The events of one step after those that warm up, and its seconds; `train_for` trains one step more than these.

    Args:
        shapes: record those of the operators' inputs too.
    """
    profiler, step, steps = profile(record_shapes=shapes), record_function("step"), 0

    def after_step() -> None:
        nonlocal steps
        steps += 1
        if steps == WARM_UP:
            profiler.__enter__()
            step.__enter__()
        if steps == WARM_UP + 1:
            step.__exit__(None, None, None)
            profiler.__exit__(None, None, None)

    train_for(after_step)
    events = list(profiler.events())
    seconds = sum(event.cpu_time_total for event in events if event.name == "step") / 1e6
    return [event for event in events if event.name != "step"], seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="base")
    parser.add_argument("--rows", default="all", choices=["all", "masked"], help="of a masked pair, with soft targets")
    parser.add_argument("--precision", default="bf16", choices=["fp32", "bf16"])
    parser.add_argument("--accumulate", type=int, default=8, help="micro-batches per step")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    shape, device = SHAPES[options.shape], torch.device("cpu")
    rows = "targets" if shape.documents else options.rows
    formats = PrecisionConfig(student=options.precision, teacher=options.precision)
    teacher, student = make_teacher(shape, device), make_student(shape, device)
    for model, name in ((teacher, "teacher's encoder"), (student, "student's encoder")):
        mark(model.base_model, name)
    name_calls(Objective, "__call__", "student and objective")
    name_calls(torch.Tensor, "backward", "backward")
    name_calls(distill.train, "clip_gradients", "clipping and optimizer")
    name_calls(torch.optim.AdamW, "step", "clipping and optimizer")
    variant = Variant("distill", rows, formats)

    def train_for(after_step: AfterStep) -> None:
        source = batches(shape, options.accumulate, WARM_UP + 2)
        train_with_distill(source, (teacher, student), variant, WARM_UP + 1, after_step)

    events, seconds = profiled(train_for)
    dtype = torch.float32 if options.precision == "fp32" else torch.bfloat16
    floor = operations(shape, rows) / matrix_rate(shape, dtype, device)
    found = {"phases": phases(events, seconds), "kernels": kernels(events)}
    took = (
        f"{1000 * seconds / options.accumulate:.0f} ms per micro-batch under the profiler, floor {1000 * floor:.0f} ms"
    )
    print(f"{title()}\n{shape}, {rows} rows, {options.precision}: {took}")
    for kind, values in found.items():
        shares = [
            [name, f"{1000 * value / options.accumulate:.1f}", f"{value / seconds:.1%}"]
            for name, value in values.items()
        ]
        print("\n" + table([kind, "ms per micro-batch", "share"], shares))
    save(options.json, {"shape": str(shape), "seconds": seconds / options.accumulate, "floor": floor, **found})


if __name__ == "__main__":
    main()
