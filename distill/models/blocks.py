"""The blocks of a model and what is done to them: freezing, checkpoints; and evaluation mode."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from distill.models.kernels.dropout import repeated
from distill.runtime.errors import SettingError

EMBEDDINGS = "embeddings"  # of student.frozen


def depth_of(model: Any) -> int | None:
    """How many blocks a model has, by its configuration or by its first list of modules; None where it has neither."""
    depth = getattr(getattr(model, "config", None), "num_hidden_layers", None)
    if isinstance(depth, int):
        return depth
    lists = [module for module in model.base_model.modules() if isinstance(module, nn.ModuleList) and len(module)]
    return len(lists[0]) if lists else None


def block_list(encoder: nn.Module, depth: int | None) -> nn.ModuleList:
    """The blocks of an encoder that are called one after the other: its first list of `depth` modules.

    Where there is no such list, as in ALBERT, its first list: those blocks are called several times.

    Raises:
        ValueError: the encoder has no list of modules.
    """
    lists = [module for module in encoder.modules() if isinstance(module, nn.ModuleList) and len(module)]
    if not lists:
        raise ValueError(f"{type(encoder).__name__} has no list of blocks, so none of its inner layers can be read")
    return next((blocks for blocks in lists if len(blocks) == depth), lists[0])


@contextmanager
def in_evaluation_mode(model: Any) -> Iterator[Any]:
    """Gives the model in evaluation mode; each of its modules goes back into the mode that it was in by itself."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield model
    finally:
        for module, training in modes:
            module.train(training)  # and those in it, which come later here


def freeze(model: Any, frozen: Sequence[str | int]) -> None:
    """Take these parts out of training: `embeddings`, and blocks by their numbers in the student.

    Embeddings, with the matrix of a head that is tied to them, are the modules of the encoder that hold no blocks.
    """
    for child in model.base_model.children() if EMBEDDINGS in frozen else ():
        parts = list(child.modules())
        if any(isinstance(part, nn.Embedding) for part in parts) and not any(
            isinstance(part, nn.ModuleList) for part in parts
        ):
            child.requires_grad_(False)
    numbers = [part for part in frozen if isinstance(part, int)]
    depth, blocks = depth_of(model), nn.ModuleList()
    try:
        blocks = block_list(model.base_model, depth) if numbers else blocks
    except ValueError as error:
        raise SettingError(error, setting="student.frozen", value=frozen, cure=f"name {EMBEDDINGS} alone") from error
    if numbers and depth is not None and len(blocks) != depth:
        problem = f"a {type(model).__name__} calls one block several times"
        raise SettingError(problem, setting="student.frozen", value=frozen, cure=f"name {EMBEDDINGS} alone, or nothing")
    for number in numbers:
        if number >= len(blocks):
            cure = f"the student has layers 0 to {len(blocks) - 1}: name some of these"
            raise SettingError(f"{number} is no layer", setting="student.frozen", value=frozen, cure=cure)
        blocks[number].requires_grad_(False)


def require_blocks(model: Any) -> None:
    """Raises SettingError for a model without a list of blocks, of which none can be computed again."""
    try:
        block_list(model.base_model, depth_of(model))
    except ValueError as error:
        cure = "leave it out, or put the blocks into a torch.nn.ModuleList"
        raise SettingError(error, setting="student.gradient_checkpointing", value="true", cure=cure) from error


@contextmanager
def checkpointed(blocks: Sequence[Any]) -> Iterator[None]:
    """While it is open each of these modules keeps its input alone for the backward pass.

    This is torch's non-reentrant checkpoint around the forward of each block: what is read of a block's inside has its
    gradient, and hooks, also those that gather a sharded block's weights, stay outside of what is computed again. A
    forward that stands in for the module's own, such as a compiled one, is kept.
    """
    before = [vars(block).get("forward") for block in blocks]
    for block in blocks:
        block.forward = partial(_checkpointed, block.forward)
    try:
        yield
    finally:
        for block, forward in zip(blocks, before, strict=True):
            if forward is None:
                del block.forward
            else:
                block.forward = forward


def _checkpointed(forward: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """The outputs of a block. All its inputs go by position: torch keeps generators of the devices of these alone."""
    names = list(named)

    def call(*values: Any) -> Any:
        return forward(*values[len(names) :], **dict(zip(names, values[: len(names)], strict=True)))

    return checkpoint(call, *named.values(), *arguments, use_reentrant=False, context_fn=repeated)
