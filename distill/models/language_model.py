"""One module around any language model: one forward gives the hidden states and the head's input that are requested.

Shapes: B rows, S positions, N selected positions, H hidden size, E input size of the output embedding, V vocabulary.

No table of families is needed. The model's own forward runs, watched by hooks that are there for that call only: what
its encoder (`base_model`) gives is cut down to the selected positions before the model's own head sees it, and what the
output embedding (`get_output_embeddings`) would multiply is recorded instead. So the head's input is what the model
itself computes, whatever its head consists of. `models.load.check_model` compares the outcome with the model's own
logits.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from distill.kernels.precision import autocast

LAST = -1  # the layer number of an encoder's last hidden state, whatever its depth


class OutputSpec(NamedTuple):
    """What is wanted of a forward."""

    head: bool = False  # whether the head's input is
    positions: Tensor | None = None  # flat positions [N] in B * S at which; None: all of them
    layers: tuple[int, ...] = ()  # hidden states: 0 the embeddings, i the output of block i, LAST the encoder's output


class Outputs(NamedTuple):
    """What a forward gave."""

    head_rows: Tensor | None  # [N, E], input of the output embedding at the selected positions
    hidden: dict[int, Tensor]  # [B, S, H] by layer number, as in `OutputSpec.layers`


NO_OUTPUTS = Outputs(None, {})


class Head(NamedTuple):
    """An output embedding and its input: rows [N, E], weight [V, E], bias [V] or None; their product is the logits.

    `dtype` is the format of the matrix product; None takes it from autocast where that is on, else from the tensors.
    `rounded` [V, E] is the weight in that format, where the caller has it.
    """

    rows: Tensor
    weight: Tensor
    bias: Tensor | None = None
    dtype: torch.dtype | None = None
    rounded: Tensor | None = None


class LanguageModel(nn.Module):
    """A transformers language model, or any module that offers the same.

    That is: `base_model`, a submodule that gives the last hidden state [B, S, H] or something whose first entry it is;
    `get_output_embeddings()`, a submodule with weight and bias; and a forward that calls both. A model serves one
    forward at a time: the hooks of two threads would read each other's.
    """

    def __init__(self, model: Any, precision: str = "fp32") -> None:
        """`precision` is the format of the forward: fp32, or bf16 autocast for anything else."""
        super().__init__()
        self.model = model
        self.precision = precision
        self._casts: dict[torch.dtype, Tensor] | None = None

    def forward(self, inputs: dict[str, Tensor], documents: Tensor | None, spec: OutputSpec) -> Outputs:
        """`inputs`: `input_ids` [B, S] and whatever else the model takes; `documents` [B, S]: negative at padding."""
        attention = None if documents is None else documents >= 0
        model = self.model if spec.head else self.model.base_model
        with autocast(self.precision, inputs["input_ids"].device), _watched(self.model, spec) as found:
            model(**inputs, attention_mask=attention)
        return Outputs(found.get("head_rows"), {layer: found[layer] for layer in spec.layers})

    def head(self, rows: Tensor) -> Head:
        """The output embedding with its input `rows` [N, E], in the format of this model."""
        layer = self.model.get_output_embeddings()
        dtype = rows.dtype if self.precision == "fp32" else torch.bfloat16
        return Head(rows, layer.weight, layer.bias, dtype, self._cast(layer.weight, dtype))

    def logits(self, rows: Tensor, vocab: int) -> Tensor:
        """rows [N, E] -> logits [N, vocab], without the entries that only pad the embedding."""
        layer = self.model.get_output_embeddings()
        with autocast(self.precision, rows.device):
            return nn.functional.linear(rows, layer.weight[:vocab], None if layer.bias is None else layer.bias[:vocab])

    @contextmanager
    def weight_cast_cache(self) -> Iterator[None]:
        """While it is open each weight is rounded once: around the micro-batches of one step.

        Weights must not change inside. (Their version does not show it: the fused AdamW leaves it as it is.)
        """
        device = next(self.parameters()).device
        # Autocast drops its copies when the outermost of its contexts ends: this one, which itself casts nothing.
        with torch.autocast(device.type, enabled=False):
            self._casts = {}
            try:
                yield
            finally:
                self._casts = None

    def _cast(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """The output embedding's weight in another format, without a way back for gradients."""
        if self._casts is None or weight.dtype == dtype:
            return weight.detach().to(dtype)
        if dtype not in self._casts:
            self._casts[dtype] = weight.detach().to(dtype)
        return self._casts[dtype]


@contextmanager
def _watched(model: Any, spec: OutputSpec) -> Iterator[dict[Any, Tensor]]:
    """While it is open the model's forward fills the dict that is given: hidden states by layer, and `head_rows`."""
    found: dict[Any, Tensor] = {}
    wanted = {layer for layer in spec.layers if layer != LAST}
    depth = getattr(getattr(model, "config", None), "num_hidden_layers", None)

    def after_encoder(_: nn.Module, __: Any, output: Any) -> Any:
        last = output if isinstance(output, Tensor) else output[0]
        if LAST in spec.layers:
            found[LAST] = last
        if depth in wanted:
            found[depth] = last
        if not spec.head:
            return None
        rows = last.flatten(0, 1)
        return _replace_first(output, (rows if spec.positions is None else rows.index_select(0, spec.positions))[None])

    def before_output_embedding(_: nn.Module, arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        found["head_rows"] = arguments[0].flatten(0, -2)
        return (found["head_rows"][:0], *arguments[1:])

    handles = [model.base_model.register_forward_hook(after_encoder)]
    if spec.head:
        handles.append(model.get_output_embeddings().register_forward_pre_hook(before_output_embedding))
    if wanted:
        handles += _watch_blocks(blocks(model.base_model, depth), wanted, found)
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def _watch_blocks(modules: list[nn.Module], wanted: set[int], found: dict[Any, Tensor]) -> list[Any]:
    """Hooks that number the calls of an encoder's blocks: some families call one block several times."""
    calls = 0

    def before(_: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        if calls == 0 and 0 in wanted:
            found[0] = arguments[0] if arguments else named["hidden_states"]

    def after(_: nn.Module, __: Any, output: Any) -> None:
        nonlocal calls
        calls += 1
        if calls in wanted and calls not in found:
            found[calls] = output if isinstance(output, Tensor) else output[0]

    handles: list[Any] = [module.register_forward_pre_hook(before, with_kwargs=True) for module in modules]
    return handles + [module.register_forward_hook(after) for module in modules]


def blocks(encoder: nn.Module, depth: int | None) -> list[nn.Module]:
    """The blocks of an encoder that are called one after the other: those of its first list of `depth` modules.

    Where there is no such list, as in ALBERT, those of its first list: they are called several times.

    Raises:
        ValueError: the encoder has no list of modules.
    """
    lists = [module for module in encoder.modules() if isinstance(module, nn.ModuleList) and len(module)]
    if not lists:
        raise ValueError(f"{type(encoder).__name__} has no list of blocks, so none of its inner layers can be read")
    return list(next((each for each in lists if len(each) == depth), lists[0]))


def _replace_first(output: Any, first: Tensor) -> Any:
    """An encoder's output with another last hidden state, in its own form: a tensor, a tuple or transformers' own."""
    if isinstance(output, Tensor):
        return first
    if isinstance(output, tuple):
        return (first, *output[1:])
    return type(output)(**{**output, "last_hidden_state": first})
