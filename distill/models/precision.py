"""Number formats: each model's forward in fp32 or under bf16 or fp16 autocast, and which of them `auto` is here."""

import math
import os
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from distill.config.settings import PrecisionConfig
from distill.distributed.shard import is_sharded

MODELS = ("student", "teacher", "evaluate")
MIN_SPEEDUP = 1.2  # times as fast as fp32: below it bf16 is not worth its rounding
ROWS, INNER, OUTER, ROUNDS = 512, 768, 3072, 5  # of the products that are timed


def dtype_of(value: str) -> torch.dtype:
    """The number format of a model's matrix products. int8 layers compute in bf16, which needs no loss scale."""
    return {"fp32": torch.float32, "fp16": torch.float16}.get(value, torch.bfloat16)


def autocast(value: str, device: torch.device) -> AbstractContextManager[object]:
    """The context of a model's forward."""
    return nullcontext() if value == "fp32" else torch.autocast(device.type, dtype_of(value))


@contextmanager
def in_fp32(model: nn.Module, device: torch.device) -> Iterator[None]:
    """A model in fp32 on `device`: what is in another format or elsewhere is a copy while it is open, and then let go.

    One that is sharded is left alone.
    """
    kept = []
    try:
        for tensor in () if is_sharded(model) else (*model.parameters(), *model.buffers()):
            widens = isinstance(tensor, nn.Parameter) and tensor.is_floating_point()
            before = tensor.data
            if (wanted := before.to(device, torch.float32 if widens else None)) is not before:
                kept.append((tensor, before))
                tensor.data = wanted
        yield
    finally:
        for tensor, before in kept:
            tensor.data = before


def set_products(settings: PrecisionConfig, device: torch.device) -> None:
    """How GPUs multiply and convolve in fp32 (`precision.tf32`), and whether they repeat their sums exactly.

    Called before the first product: cuBLAS reads its variable once. Processors repeat theirs in any case.
    """
    if device.type != "cuda":
        return
    torch.set_float32_matmul_precision("high" if settings.tf32 else "highest")
    torch.backends.cudnn.allow_tf32 = settings.tf32  # not by fp32_precision: torch refuses the two forms side by side
    # Without warn_only, since attention takes its deterministic backward only then.
    torch.use_deterministic_algorithms(settings.deterministic)
    if settings.deterministic:
        # Else torch writes to every new tensor, which takes time and changes nothing that is read.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        os.environ.setdefault("FLASH_ATTENTION_DETERMINISTIC", "1")  # transformers asks flash attention for it by this


def bf16_speedup(device: torch.device) -> float:
    """How many times as fast as in fp32 this processor multiplies in bf16; 0 where it only emulates that.

    Of a GPU that has bf16 it is infinite: its tensor cores are built for it. Of a processor it is measured, in a tenth
    of a second, because instructions for bf16 alone are no sign of speed: with those of AVX-512 an AMD Zen 4 was 1.9
    times as fast, and an Intel Sapphire Rapids whose tile unit the virtual machine hid 0.6 times.
    """
    if not _multiplies_bf16(device):
        return 0.0
    if device.type == "cuda":
        return math.inf
    rows, weight = torch.ones(ROWS, INNER, device=device), torch.ones(INNER, OUTER, device=device)
    pairs = {dtype: (rows.to(dtype), weight.to(dtype)) for dtype in (torch.float32, torch.bfloat16)}
    seconds: dict[torch.dtype, list[float]] = {dtype: [] for dtype in pairs}
    for _ in range(ROUNDS):
        for dtype, (left, right) in pairs.items():
            began = time.perf_counter()
            torch.mm(left, right)
            seconds[dtype].append(time.perf_counter() - began)
    return min(seconds[torch.float32]) / min(seconds[torch.bfloat16])


def _multiplies_bf16(device: torch.device) -> bool:
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    # torch has no public name for these.
    names = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(supported() for name in names if (supported := getattr(torch.cpu, name, None)) is not None)


def wait_for(device: torch.device) -> None:
    """Wait until a GPU has computed what it was given, for whoever takes the time."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def resolve(settings: PrecisionConfig, auto: str, recorded: dict[str, str]) -> PrecisionConfig:
    """The settings with a format instead of every `auto`: the recorded one, else `auto` (fp32 or bf16)."""
    chosen: dict[str, Any] = {name: recorded.get(name, auto) for name in MODELS if getattr(settings, name) == "auto"}
    return settings.changed(**chosen)


def at_least_fp32(values: torch.Tensor) -> torch.Tensor:
    """For losses: in fp32, or float64 as it is."""
    return values.to(torch.promote_types(values.dtype, torch.float32))
