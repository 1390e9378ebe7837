"""The device and the threads of one rank."""

import logging
import os
from collections.abc import Mapping
from typing import Any

import torch

from distill.config.settings import BackendConfig
from distill.distributed.ranks import Ranks
from distill.runtime.errors import SettingError

logger = logging.getLogger(__name__)


def choose_device(settings: BackendConfig, local_rank: int, local_size: int) -> torch.device:
    """The device of this rank, made current; sets the number of torch's threads on the way.

    On GPUs each rank of a host gets its own. Ranks that share a host share its cores evenly, unless `backend.threads`
    sets the number of threads. Raises SettingError when there is no such device, or not one for each rank; NCCL itself
    refuses a GPU that two ranks share.
    """
    if settings.threads is not None or local_size > 1:
        torch.set_num_threads(settings.threads or max(1, len(os.sched_getaffinity(0)) // local_size))
    kind = settings.device
    if kind == "auto":
        kind = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(kind)
    if device.type != "cuda":
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


def keep_threads(settings: BackendConfig, recorded: Mapping[str, Any], ranks: Ranks) -> dict[str, int]:
    """Continue with as many threads as a run began with, since its last bits may depend on them; for its checkpoints.

    A run of several ranks begins with as many on each as the host with the fewest has. All ranks call it.

    Args:
        recorded: of the checkpoint to resume from, as this function gave it; empty where there is none. Where other
            numbers of ranks shared a host, each takes its share anew.
    """
    begun, now, local_size = recorded.get("threads"), torch.get_num_threads(), ranks.local_size
    ranks.barrier()  # hosts may be minutes apart in reading a checkpoint
    fewest = min(ranks.gather(now))
    if settings.threads is None and "OMP_NUM_THREADS" not in os.environ:
        is_same = recorded.get("local_ranks", 1) == local_size
        if is_same and isinstance(begun, int) and 0 < begun <= len(os.sched_getaffinity(0)):
            if begun != now:
                torch.set_num_threads(begun)
                logger.info(f"backend.threads={begun}, as this run began; now it would be {now}")
        elif fewest != now:
            torch.set_num_threads(fewest)
            logger.info(f"backend.threads={fewest}, as on the rank with the fewest")
    return {"threads": torch.get_num_threads(), **({"local_ranks": local_size} if local_size > 1 else {})}
