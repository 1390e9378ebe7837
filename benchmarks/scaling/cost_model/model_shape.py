"""How large a model is and how many operations its forward takes, from its modules, which need no weights for that."""

from dataclasses import dataclass
from typing import Any

from torch import nn

from distill.models.kernels.linear_layers import linear_layers
from distill.models.protocol import block_list, depth_of


@dataclass(frozen=True)
class ModelShape:
    """A model as the cost of a step sees it."""

    parameters: int  # tied ones once
    in_blocks: int  # of these, in the blocks; the rest stands outside: embeddings, head, last norm
    largest_block: int
    blocks: int  # 0: the model has no list of them
    layers: int  # calls of a block in a forward
    width: int
    inner: int  # width of a block's feed-forward layer
    vocabulary: int  # 0: no head over one
    encoder_operations: float  # of a forward of one row, without the head over the vocabulary
    head_operations: float  # of one position that reaches that head

    @property
    def outside(self) -> int:
        return self.parameters - self.in_blocks

    @property
    def largest_part(self) -> int:
        """Parameters of the largest module that is divided on its own: a block, or the model where it has none."""
        return self.largest_block or self.parameters

    def operations(self, positions: float) -> float:
        """Of a forward of one row, of which so many positions reach the head. A backward takes twice as many."""
        return self.encoder_operations + positions * self.head_operations


def shape_of(model: Any, length: int) -> ModelShape:
    """The sizes of a model, and the matrix operations of its forward of a row of `length` tokens.

    Two for each weight of a linear layer and token, as often as the layer is called, and 4 A for each pair of
    positions, for attention heads that are A wide together. Attention is counted with all keys, of which a causal or a
    sliding one sees fewer: its kernel may or may not skip the others.
    """
    config = getattr(model, "config", None)
    blocks, layers = _blocks(model)
    head = model.get_output_embeddings()
    width = int(getattr(config, "hidden_size", None) or max(each.shape[-1] for each in model.parameters()))
    heads = int(getattr(config, "num_attention_heads", None) or 1)
    attention = heads * int(getattr(config, "head_dim", None) or width // heads)
    in_blocks = sum(map(_linear_weights, blocks))
    encoder = _linear_weights(model.base_model)
    # Blocks may be called several times; everything else is called once.
    per_token = encoder + in_blocks * (layers / len(blocks) - 1 if blocks else 0)
    transform = _linear_weights(model) - encoder - (0 if head is None else head.weight.numel())
    return ModelShape(
        parameters=sum(each.numel() for each in model.parameters()),
        in_blocks=sum(map(_parameters, blocks)),
        largest_block=max(map(_parameters, blocks), default=0),
        blocks=len(blocks),
        layers=layers,
        width=width,
        inner=int(getattr(config, "intermediate_size", None) or 4 * width),
        vocabulary=0 if head is None else head.weight.shape[0],
        encoder_operations=length * (2.0 * per_token + 4.0 * length * attention * layers),
        head_operations=0.0 if head is None else 2.0 * (transform + head.weight.numel()),
    )


def _blocks(model: Any) -> tuple[list[nn.Module], int]:
    """The blocks of a model, and how often they are called; none, once where it has no list of them."""
    depth = depth_of(model)
    return ([], 1) if depth is None else (list(block_list(model.base_model, depth)), depth)


def _parameters(module: nn.Module) -> int:
    return sum(each.numel() for each in module.parameters())


def _linear_weights(module: nn.Module) -> int:
    """Weights that every token is multiplied with; a pooler takes one token of a row alone."""
    pooler = {id(each) for name, each in module.named_modules() if "pooler" in name}
    return sum(layer.weight.numel() for _, _, own, layer in linear_layers(module) if id(own) not in pooler)
