"""Gradients in 16 bits on the wire: close to the reference, half the bytes, and what each format loses."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed import run_ranks
from test_backends import HOROVOD, make_model, padded_size, reference, train

from distill.config.settings import BackendConfig
from distill.distributed import GradientSync, join_ranks

CASES = [
    pytest.param(name, rings, format, id=f"{name}-{rings}-{format}", marks=HOROVOD if name == "horovod" else ())
    for name, rings, format in (
        ("ddp", 2, "bf16"),
        ("horovod", 2, "bf16"),
        ("ddp", 1, "fp16"),
        ("ddp", 2, "fp16"),
        ("horovod", 1, "fp16"),  # its own ring
        ("horovod", 2, "fp16"),
    )
]
ABOVE_ONE = {"bf16": 2**-7, "fp16": 2**-10}  # the first number above 1, minus 1
TOLERANCE = {"bf16": 1e-2, "fp16": 1e-3}
SMALL = 3.3e-7  # below what fp16 holds with all its digits


def on_a_rank(settings: BackendConfig) -> dict[str, Any]:
    ranks = join_ranks(settings)
    outcome = train(ranks, 1)
    sync = GradientSync(ranks, make_model(0))
    found: dict[str, Any] = {"outcome": outcome, "rings": ranks.rings}

    def exchanged(value: float, stat: float = 1.0) -> tuple[float, float, float]:
        """The sum of gradients that are `value` everywhere: its least and largest, and the stat beside them."""
        sync.zero()
        sync.gradients.fill_(value)
        stats = sync.all_reduce_gradients(torch.tensor([stat]))
        assert stats is not None and sync.gradients.dtype == torch.float32
        return float(sync.gradients.min()), float(sync.gradients.max()), float(stats)

    spacing = ABOVE_ONE[settings.compression]
    found["kept"], found["lost"] = exchanged(1 + spacing), exchanged(1 + spacing / 4, 70_001.0)
    found["small"], found["large"] = exchanged(SMALL), exchanged(30.0 + 5.0 * ranks.rank)
    ranks.close()
    return found


@pytest.mark.parametrize(("name", "rings", "format"), CASES)
def test_16_bits_on_the_wire(name: str, rings: int, format: str, tmp_path: Path) -> None:
    settings = BackendConfig(name=name, rings=rings, compression=format, device="cpu", threads=1, timeout=60.0)
    expected, losses = reference()
    for found in run_ranks(2, tmp_path, on_a_rank, settings):
        outcome = found["outcome"]
        assert outcome.losses == pytest.approx(losses, rel=TOLERANCE[format])
        for key, value in expected.items():
            torch.testing.assert_close(
                outcome.weights[key].double(), value.double(), rtol=5 * TOLERANCE[format], atol=TOLERANCE[format]
            )
        assert outcome.bytes_sent == 3 * (2 * (padded_size() - 64) + 4 * 64 + 8)
        spacing = ABOVE_ONE[format]
        assert found["kept"] == (2 + 2 * spacing, 2 + 2 * spacing, 2.0)
        assert found["lost"] == (2.0, 2.0, 140_002.0), "counts and losses stay exact"
        assert found["small"][0] == found["small"][1] == pytest.approx(2 * SMALL, rel=spacing)
        # 65 is too much for fp16, and infinite on all ranks, so that all of them skip the step.
        assert found["large"][:2] == ((65.0, 65.0) if format == "bf16" else (math.inf, math.inf))
