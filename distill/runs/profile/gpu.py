"""Reads what an NVIDIA GPU does by NVML (https://docs.nvidia.com/deploy/nvml-api), where its Python module is there."""

from typing import Any

import torch

MISSING = "utilisation and power of the GPU are not known: `pip install nvidia-ml-py` gives them"


class Gpu:
    """The GPU of a rank; without NVML its memory alone is known, from torch.

    Attributes:
        note: what is missing, in a sentence; empty where nothing is.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._nvml, self._handle, self.note = device, None, None, ""
        try:
            import pynvml

            pynvml.nvmlInit()
            # By its unique name: CUDA_VISIBLE_DEVICES gives GPUs other numbers than NVML does.
            name = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
            self._nvml, self._handle = pynvml, pynvml.nvmlDeviceGetHandleByUUID(name)
        except Exception as error:  # the module, the driver or the right to ask it
            self.note = MISSING if isinstance(error, ImportError) else f"NVML does not answer: {error}"

    def levels(self) -> dict[str, float]:
        """Share of the time in which it computed, bytes of memory, watts."""
        free, total = torch.cuda.mem_get_info(self._device)
        found = {"gpu_memory": float(total - free), "gpu_memory_total": float(total)}
        for name, ask in (("gpu_busy", self._busy), ("gpu_watts", self._watts)):
            if (value := ask()) is not None:
                found[name] = value
        return found

    def joules(self) -> float | None:
        """Energy since the driver was loaded; None where the GPU does not count it."""
        return self._ask(lambda nvml: nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle) / 1000)

    def retries(self) -> int:
        """Allocations that found the memory full, gave back what was kept, and were tried again."""
        return int(torch.cuda.memory_stats(self._device).get("num_alloc_retries", 0))

    def _busy(self) -> float | None:
        return self._ask(lambda nvml: nvml.nvmlDeviceGetUtilizationRates(self._handle).gpu / 100)

    def _watts(self) -> float | None:
        return self._ask(lambda nvml: nvml.nvmlDeviceGetPowerUsage(self._handle) / 1000)

    def _ask(self, question: Any) -> float | None:
        if self._nvml is None:
            return None
        try:
            return float(question(self._nvml))
        except self._nvml.NVMLError:  # not every GPU tells everything
            return None
