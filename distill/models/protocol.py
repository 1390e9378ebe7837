"""The interface of a model, and the facts about it that are found by trying it."""

from typing import Any, Protocol

from torch import Tensor, nn


class TextModel(Protocol):
    """Any `nn.Module` with these; transformers' language models have them.

    Attributes:
        base_model: the submodule that computes the last hidden states [B, S, H] from token ids, or something whose
            first entry they are. For terms on inner layers its blocks have to be in an `nn.ModuleList`, and to be
            called one after the other.
    """

    base_model: nn.Module

    def get_output_embeddings(self) -> nn.Linear:
        """The layer that is called last, whose outcome are the logits: weight [V, E], bias [V] or None."""
        ...

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Logits [B, S, V] of ids [B, S] int64; calls `base_model` once.

        Args:
            attention_mask: [B, S] bool, False at padding; None: no padding, or a causal model. A causal model whose
                sequences hold several documents gets `position_ids` [B, S] too, which start anew with each of them.
        """
        ...


def depth_of(model: Any) -> int | None:
    """How many blocks a model has, by its configuration or by its first list of modules; None where it has neither."""
    depth = getattr(getattr(model, "config", None), "num_hidden_layers", None)
    if isinstance(depth, int):
        return depth
    modules = model.base_model.modules()
    lists = [blocks for blocks in modules if isinstance(blocks, nn.ModuleList) and len(blocks)]
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
