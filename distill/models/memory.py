"""Checks before training that a step fits into memory."""

from collections.abc import Callable
from typing import Any

import torch

from distill.distributed import Ranks
from distill.models.kernels.precision import dtype_of
from distill.models.protocol import depth_of
from distill.runtime.errors import SettingError
from distill.runtime.host import free_memory

# Numbers that each block with attention keeps for the backward pass, in multiples of the width of a position: its own
# input, the inputs of its two norms, the queries and what attention makes of them, and most blocks twice as many and
# more (34 bytes in 16-bit formats with the usual inner layer, https://arxiv.org/abs/2205.05198, section 4.1). With
# gradient checkpointing that is so of one block at a time, and each of the others keeps its input.
MIN_KEPT = 4


def available(ranks: Ranks) -> int | None:
    """Bytes of memory that each rank of this host may still take; None for a GPU, which raises an error itself."""
    if ranks.device.type != "cpu":
        return None
    return free_memory() // ranks.local_size


def weights_bytes(build: Callable[[], Any]) -> int:
    """Bytes in fp32 of the weights of the model that `build` makes; no memory is taken for them."""
    with torch.device("meta"):
        return sum(4 * parameter.numel() for parameter in build().parameters())


def require_memory_for_weights(name: str, build: Callable[[], Any]) -> None:
    """Raises SettingError where a saved model is sure to be too large for the memory of this host.

    transformers makes up what a folder lacks of the weights that its configuration names.

    Args:
        name: of the model, for the message.
        build: makes a model of that configuration.
    """
    least, free = weights_bytes(build), free_memory()
    if least > free:
        raise SettingError(
            f"{name}: the weights that its config.json names take {least / 1e9:.3g} GB, and {free / 1e9:.3g} GB are "
            "free: correct it, choose a smaller model, or shard it over ranks with backend=fsdp"
        )


def least_bytes(student: Any, precision: str, batch_size: int, length: int, checkpoints: bool = False) -> int | None:
    """Bytes that the blocks of a student are sure to keep of a micro-batch for its backward pass.

    Args:
        student: a model; None is given for one without a width and heads of attention in its configuration.
        precision: the format of its forward.
        batch_size, length: of the micro-batch.
        checkpoints: whether the inside of blocks is computed again in the backward pass.
    """
    config = getattr(student, "config", None)
    width = getattr(config, "hidden_size", None)
    if not isinstance(width, int) or not hasattr(config, "num_attention_heads"):
        return None
    depth = depth_of(student) or 1
    kept = depth - 1 + MIN_KEPT if checkpoints else depth * MIN_KEPT
    return dtype_of(precision).itemsize * kept * width * batch_size * length


def require_memory_for_step(
    student: Any, precision: str, batch_size: int, length: int, ranks: Ranks, checkpoints: bool = False
) -> None:
    """Raises SettingError for a micro-batch that is sure to be too much; the arguments are those of `least_bytes`.

    A processor's memory is promised before it is there, and a process that then takes it is killed without a message.
    Whether a smaller one fits shows in the first micro-batch.
    """
    least, free = least_bytes(student, precision, batch_size, length, checkpoints), available(ranks)
    if least is None or free is None or least <= free:
        return
    cure = "" if checkpoints else ", or set student.gradient_checkpointing=true, which keeps less"
    raise SettingError(
        f"train.batch_size={batch_size}: a micro-batch of {length} positions a sequence takes "
        f"{least / 1e9:.3g} GB at least, and {free / 1e9:.3g} GB are free for each rank; "
        f"lower train.batch_size, and set train.sequences_per_step to the sequences that a step has now{cure}"
    )
