"""Process-group backends of torch.distributed that are plug-ins: named by `backend.collective`, tried before a run."""

import importlib
import re
import threading
from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist

from distill.config.settings import BackendConfig
from distill.runtime.errors import SettingError, first_line
from distill.runtime.users_code import find_modules_here

FORM = re.compile(r"(?:([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*):)?([A-Za-z_]\w*)")
SUMMED = (torch.float32, torch.float64, torch.int32, torch.int64)  # what a run sums besides the format on the wire


def parse_collective(text: str) -> tuple[str | None, str]:
    """`package.module:name` or `name` -> the module that registers the backend, if any, and the backend's name.

    Raises SettingError.
    """
    match = FORM.fullmatch(text)
    if match is None:
        raise SettingError(
            f"backend.collective={text}: give NAME, or MODULE:NAME where a module has to be imported to register it"
        )
    return match[1], match[2].lower()  # as torch keeps it


def check_collective(settings: BackendConfig) -> None:
    """Raises SettingError for a `backend.collective` that is invalid, whatever is installed."""
    if settings.collective is None:
        return
    parse_collective(settings.collective)
    setting = f"backend.collective={settings.collective}"
    if settings.name != "ddp":
        raise SettingError(
            f"{setting} is for torch.distributed, and backend.name={settings.name} is not: choose backend=ddp, or "
            "leave it null"
        )
    if settings.rings not in ("1", "auto"):
        raise SettingError(f"backend.rings={settings.rings} with {setting}: a plug-in has one ring; leave it at 1")


def load_collective(text: str, device: torch.device) -> str:
    """Import the module that registers a process-group backend; returns the backend's name.

    Raises SettingError when the module does not load, or torch has no such backend that serves `device`.
    """
    module, name = parse_collective(text)
    if module is not None:
        try:
            find_modules_here(module)
            importlib.import_module(module)
        except Exception as error:  # a plug-in may refuse the machine by any error of its own
            reason = first_line(error)
            raise SettingError(
                f"backend.collective={text}: {module} does not load ({reason}); install it, or leave it null"
            ) from error
    if not _is_there(name):
        backends = ", ".join(filter(_is_there, dist.Backend.backend_list))
        cure = "import another module" if module else f"name the module that registers it, as in MODULE:{name}"
        raise SettingError(
            f"backend.collective={text}: torch.distributed has no process-group backend {name} here (it has "
            f"{backends}); {cure}, or leave it null"
        )
    served = dist.Backend.backend_capability[name]
    if device.type not in served:
        raise SettingError(
            f"backend.collective={text}: {name} serves {' and '.join(served)}, and the run is on "
            f"{device.type}; set backend.device, or leave backend.collective null"
        )
    return name


def try_out(text: str, rank: int, device: torch.device, wire: Iterable[torch.dtype], timeout: float) -> None:
    """Try each collective that a run needs once, with a few numbers; all ranks call it.

    A plug-in may lack a number format, give the mean for the sum, or never answer, which a run would notice late or
    never.

    Args:
        wire: formats in which gradients travel.
        timeout: seconds for each of them.

    Raises SettingError for the first that fails.
    """
    trials: list[tuple[str, Callable[[], bool]]] = [
        (f"sum {_name_of(dtype)}", lambda dtype=dtype: _sums(dtype, rank, device))  # type: ignore[misc]
        for dtype in dict.fromkeys([*SUMMED, *wire])
    ]
    trials.append(("broadcast uint8", lambda: _broadcasts(rank, device)))
    for what, trial in trials:
        problem = _problem(trial, device, timeout)
        if problem is not None:
            raise SettingError(
                f"backend.collective={text} cannot {what} on {device.type}, which a run needs: {problem}; leave it null"
            )


def _is_there(name: str) -> bool:
    return name in dist.Backend.backend_capability and dist.is_backend_available(name)


def _sums(dtype: torch.dtype, rank: int, device: torch.device) -> bool:
    """Whether all_reduce sums, and in full precision: the largest summand fits into no shorter format."""
    large = 2**40 if dtype.itemsize == 8 else 0
    summand = {0: large + 1, 1: 2}.get(rank, 0)
    values = torch.full((3,), summand, dtype=dtype, device=device)
    dist.all_reduce(values, async_op=True).wait()
    return values.tolist() == [large + 3] * 3


def _broadcasts(rank: int, device: torch.device) -> bool:
    """Whether all values of a byte come from rank 0 to the others."""
    every = torch.arange(256, dtype=torch.uint8, device=device)
    values = every.clone() if rank == 0 else torch.zeros_like(every)
    dist.broadcast(values, 0)
    return torch.equal(values, every)


def _problem(trial: Callable[[], bool], device: torch.device, timeout: float) -> str | None:
    """The reason why `trial` fails, or None; it runs in a thread of its own, since it may never return."""
    problems: list[str | None] = []

    def work() -> None:
        if device.type == "cuda":
            torch.cuda.set_device(device)  # each thread has a current device of its own
        try:
            problems.append(None if trial() else "the result is wrong")
        except Exception as error:
            problems.append(first_line(error))

    thread = threading.Thread(target=work, name="trial of a collective", daemon=True)
    thread.start()
    thread.join(timeout)
    return problems[0] if problems else f"no answer in {timeout:g} s"


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
