"""student.frozen: parts of a student that keep the weights they start with; the teacher's own are computed once."""

from typing import Any

import torch
from torch import nn

from distill.models.known_layers import drops, known_blocks
from distill.models.language_model import LanguageModel, OutputSpec, block_list
from distill.models.layer_choice import Layer
from distill.models.protocol import depth_of
from distill.runtime.errors import SettingError

EMBEDDINGS = "embeddings"
SAME = 1e-4  # of the largest value, by which equal states may differ from rounding in fp32


def freeze(model: Any, frozen: list[str | int]) -> None:
    """Take these parts out of training: `embeddings`, and blocks by their numbers in the student.

    Embeddings are frozen with the matrix of the head where that is tied to them.

    Raises:
        SettingError: a block that the student does not have, or that it calls several times.
    """
    if not frozen:
        return
    if EMBEDDINGS in frozen:
        for module in _embeddings(model):
            module.requires_grad_(False)
    numbers = [part for part in frozen if part != EMBEDDINGS]
    blocks = _blocks(model, frozen) if numbers else []
    for number in numbers:
        if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < len(blocks):
            raise SettingError(
                f"student.frozen={frozen}: {number} is neither {EMBEDDINGS} nor a layer of the student, which has 0 to "
                f"{len(blocks) - 1}"
            )
        blocks[number].requires_grad_(False)


def _blocks(model: Any, frozen: list[str | int]) -> list[nn.Module]:
    """The blocks by their numbers. Raises SettingError where they have none."""
    depth = depth_of(model)
    try:
        blocks = list(block_list(model.base_model, depth))
    except ValueError as error:
        raise SettingError(f"student.frozen={frozen}: {error}; name {EMBEDDINGS} alone, or nothing") from error
    if depth is not None and len(blocks) != depth:
        raise SettingError(
            f"student.frozen={frozen}: a {type(model).__name__} calls one block several times; name {EMBEDDINGS} "
            "alone, or nothing"
        )
    return blocks


def _embeddings(model: Any) -> list[nn.Module]:
    """What stands below the blocks: the modules of the encoder that hold embeddings and no blocks."""
    encoder = model.base_model
    lists = [each for each in encoder.modules() if isinstance(each, nn.ModuleList)]
    children = [child for child in encoder.children() if not any(each in lists for each in child.modules())]
    return [child for child in children if any(isinstance(each, nn.Embedding) for each in child.modules())]


def shared_depth(student: Any, teacher: Any, frozen: list[str | int], chosen: list[Layer]) -> int | None:
    """How many of the student's lowest blocks are the teacher's own, with its embeddings; None: not even these.

    Their outcome is then the teacher's hidden state, which the student need not compute again. It is not so under
    dropout, and only for families that are known to the letter, in rows without segments where the families differ.

    Args:
        frozen: as in `freeze`.
        teacher: in fp32, on the student's device.
        chosen: the teacher's layers that the student started from.
    """
    blocks = known_blocks(student)
    if EMBEDDINGS not in frozen or blocks is None or known_blocks(teacher) is None:
        return None
    depth = 0
    while depth < len(blocks) and depth in frozen and chosen[depth] == depth:
        depth += 1
    parts = [student.base_model.embeddings, *blocks[:depth]]
    if any("forward" in vars(part) or any(drops(module) for module in part.modules()) for part in parts):
        return None
    return depth if _agree(student, teacher, depth) else None


@torch.no_grad()
def _agree(student: Any, teacher: Any, depth: int) -> bool:
    """Whether both give the same state there: weights or settings that differ would show in it."""
    device = next(student.parameters()).device
    words = min(model.get_input_embeddings().weight.shape[0] for model in (student, teacher))
    ids = (torch.arange(16, device=device).view(2, 8) * 7919) % words
    spec, states = OutputSpec(layers=(depth,)), []
    for model in (student, teacher):
        states.append(LanguageModel(model)({"input_ids": ids}, None, spec).hidden[depth].double())
    largest = float(states[1].abs().max())
    return float((states[0] - states[1]).abs().max()) <= SAME * max(largest, 1e-12)
