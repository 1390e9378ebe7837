"""student.frozen: parts of a student that keep the weights they start with."""

from typing import Any

from torch import nn

from distill.models.protocol import block_list, depth_of
from distill.runtime.errors import SettingError

EMBEDDINGS = "embeddings"


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
    """What is below the blocks: the modules of the encoder that hold embeddings and no blocks."""
    encoder = model.base_model
    children = [child for child in encoder.children() if not _holds(child, nn.ModuleList)]
    return [child for child in children if _holds(child, nn.Embedding)]


def _holds(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether a module is, or has inside, one of a kind."""
    return any(isinstance(part, kind) for part in module.modules())
