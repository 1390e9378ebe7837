"""student.gradient_checkpointing: blocks whose inner activations are computed again in the backward pass.

Torch's non-reentrant checkpoint around the forward of each block: what is read of a block's inside has its gradient,
and hooks, also those that gather a sharded block's weights, stay outside of what is computed again.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch.utils.checkpoint import checkpoint

from distill.models.kernels.dropout import repeated
from distill.models.protocol import block_list, depth_of
from distill.runtime.errors import SettingError


def require_blocks(model: Any) -> None:
    """Raises SettingError for a model without a list of blocks."""
    try:
        block_list(model.base_model, depth_of(model))
    except ValueError as error:
        raise SettingError(
            f"student.gradient_checkpointing=true: {error}: leave it out, or put the blocks into a torch.nn.ModuleList"
        ) from error


def _checkpointed(forward: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """The outputs of a block. All its inputs go by position: torch keeps generators of the devices of these alone."""
    names = list(named)

    def call(*values: Any) -> Any:
        return forward(*values[len(names) :], **dict(zip(names, values[: len(names)], strict=True)))

    return checkpoint(call, *named.values(), *arguments, use_reentrant=False, context_fn=repeated)


@contextmanager
def checkpointed(blocks: Sequence[Any]) -> Iterator[None]:
    """While it is open each of these modules keeps its input alone for the backward pass.

    A forward that stands in for the module's own is kept, such as a compiled one.
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
