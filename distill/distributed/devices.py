"""The device and the threads of one rank."""

import os

import torch

from distill.config.settings import BackendConfig
from distill.distributed.thread_choice import use_quickest_threads
from distill.runtime.errors import SettingError


def choose_device(settings: BackendConfig, local_rank: int, local_size: int) -> torch.device:
    """The device of this rank, made current; sets the number of torch's threads on the way.

    On GPUs each rank of a host gets its own. Ranks that share a host share its cores evenly, and take fewer threads
    where other programs need them, unless `backend.threads` sets their number. Raises SettingError when there
    is no such device, or not one for each rank; NCCL itself refuses a GPU that two ranks share.
    """
    if settings.threads is not None or local_size > 1:
        torch.set_num_threads(settings.threads or max(1, len(os.sched_getaffinity(0)) // local_size))
    kind = settings.device
    if kind == "auto":
        kind = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(kind)
    if device.type != "cuda":
        if settings.threads is None:
            use_quickest_threads()
        return device
    available = torch.cuda.device_count()
    if local_size > 1 and device.index is not None:
        raise SettingError(f"backend.device={settings.device} is one GPU for {local_size} ranks: set it to cuda")
    # A launcher may show each rank its own GPU alone, as Slurm does with --gpus-per-task=1.
    alone = local_size > 1 and available == 1 and "CUDA_VISIBLE_DEVICES" in os.environ
    if device.index is None:
        device = torch.device("cuda", 0 if alone else local_rank)
    if not alone and available <= max(device.index, local_size - 1):
        requested = f"{local_size} ranks on this host" if local_size > 1 else f"device {device.index}"
        raise SettingError(
            f"backend.device={settings.device}: {requested}, but torch sees {available} GPU{'s' * (available != 1)} "
            "here: ask for no more, or set backend.device=cpu"
        )
    torch.cuda.set_device(device)
    return device
