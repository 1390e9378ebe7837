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
    is no such device, or not one for each rank.
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
        raise SettingError(f"backend.device={settings.device}: {local_size} ranks need one GPU each; give cuda")
    device = torch.device("cuda", local_rank if device.index is None else device.index)
    if available <= max(device.index, local_size - 1):
        requested = f"{local_size} ranks on this host" if local_size > 1 else f"device {device.index}"
        raise SettingError(f"backend.device={settings.device}: {requested}, but there are {available} GPUs here")
    torch.cuda.set_device(device)
    return device
