"""Models are scored on the device of their rank, and are afterwards where they were."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from distill.config.settings import PrecisionConfig
from distill.evaluation.readers import MeanModel, Readers


class Placed(nn.Linear):
    """A model that takes down where it goes; it stays on the CPU, of which a test has one."""

    def __init__(self, device: str) -> None:
        super().__init__(2, 2)
        self.moves = [device]

    def parameters(self, recurse: bool = True) -> Any:
        return iter([SimpleNamespace(device=torch.device(self.moves[-1]))])

    def to(self, device: Any) -> Any:
        self.moves.append(str(device))
        return self


def test_of_several_teachers_each_is_moved_that_waits_on_the_host() -> None:
    ranks: Any = SimpleNamespace(device=torch.device("cuda"))
    on_gpu, on_host = Placed("cuda"), Placed("cpu")
    for teachers in ([on_gpu, on_host], [on_host, on_gpu]):
        on_host.moves = ["cpu"]
        with Readers(PrecisionConfig(), ranks).on_device(MeanModel(teachers, [0.5, 0.5])):
            assert (on_gpu.moves, on_host.moves) == (["cuda"], ["cpu", "cuda"])
        assert (on_gpu.moves, on_host.moves) == (["cuda"], ["cpu", "cuda", "cpu"])
