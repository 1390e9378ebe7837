"""One module around any language model: one forward gives the hidden states and the head's input that are requested.

Shapes: B sequences, S positions, N selected positions, H hidden size, E input size of the output embedding, V tokens of
the vocabulary.

The model's own forward runs, watched by hooks that are there for that call only: what its encoder (`base_model`) gives
is cut down to the selected positions before the model's own head sees it, and what the output embedding
(`get_output_embeddings`) would multiply is recorded instead. So the head's input is what the model itself computes.
`models.check.check_model` compares the outcome with the model's own logits.
"""

import copy
import functools
import inspect
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from transformers import PreTrainedModel

from distill.distributed.shard import device_of, is_root, is_sharded, join_outputs, plain_class
from distill.models.blocks import block_list, checkpointed, depth_of, in_evaluation_mode
from distill.models.kernels.masks import Layout, document_bounds, layout_known, makes_known_masks
from distill.models.known_layers import last_block_at
from distill.models.pooling import pooled
from distill.models.precision import at_least_fp32, autocast, dtype_of
from distill.models.recorded_attention import QKV, record_attention

LAST = -1  # the layer number of an encoder's last hidden state, whatever its depth
# Heads beside that over the vocabulary, and the names that transformers' models give their logits: of the order of
# segments, and of classes or a value, [B, C], and of the first and last tokens of an answer, [B, S, 2].
HEADS = {
    "sop": (("sop_logits",), ("seq_relationship_logits",)),
    "class": (("logits",),),
    "span": (("start_logits", "end_logits"),),
}


class OutputSpec(NamedTuple):
    """The outputs that a forward is to return.

    Attributes:
        head: whether the head's input is returned.
        positions: flat positions [N] in B * S at which it is; None: all of them.
        layers: layers whose hidden states are: 0 the embeddings, i the output of block i, -1 the encoder's output.
        qkv: blocks, from 1, whose queries, keys and values are.
        pooled: vectors of whole sequences, by kinds of `pooling.pooled`.
        extra: other heads whose logits are: `sop`, `class` or `span`.
        last_rows: whether the encoder's last hidden state at `positions` is.
    """

    head: bool = False
    positions: Tensor | None = None
    layers: tuple[int, ...] = ()
    qkv: tuple[int, ...] = ()
    pooled: tuple[str, ...] = ()
    extra: tuple[str, ...] = ()
    last_rows: bool = False

    @property
    def is_empty(self) -> bool:
        """Whether nothing is requested."""
        return not (self.head or self.layers or self.qkv or self.pooled or self.extra or self.last_rows)

    @property
    def is_of_last_states(self) -> bool:
        """Whether the encoder's last hidden states are all that is read, be it through the head."""
        return not self.is_empty and {*self.layers} <= {LAST} and not (self.qkv or self.pooled or self.extra)


def union(specs: Iterable[OutputSpec]) -> OutputSpec:
    """Everything that one of these requests, but for the positions, which belong to a batch."""
    several = list(specs)
    return OutputSpec(
        head=any(spec.head for spec in several),
        layers=tuple(sorted({layer for spec in several for layer in spec.layers})),
        qkv=tuple(sorted({block for spec in several for block in spec.qkv})),
        pooled=tuple(sorted({kind for spec in several for kind in spec.pooled})),
        extra=tuple(sorted({head for spec in several for head in spec.extra})),
        last_rows=any(spec.last_rows for spec in several),
    )


class Outputs(NamedTuple):
    """The outputs of a forward of the student or of a teacher.

    Attributes:
        head_rows: [N, E], input of the output embedding at the selected positions.
        hidden: hidden states [B, S, H] by layer number, as in `OutputSpec.layers`.
        qkv: queries, keys and values by block number.
        pooled: vectors of sequences [B, H] by kind.
        extra: logits of other heads, in at least fp32, by name.
        last_rows: [N, H], the last hidden state at the selected positions.
        head: of the student, where a loss term reads it: `head_rows` with the weight that makes logits of them.
    """

    head_rows: Tensor | None
    hidden: dict[int, Tensor]
    qkv: Mapping[int, QKV] = MappingProxyType({})
    pooled: Mapping[str, Tensor] = MappingProxyType({})
    extra: Mapping[str, Tensor] = MappingProxyType({})
    last_rows: Tensor | None = None
    head: "Head | None" = None

    def of_sequences(self, sequences: slice) -> "Outputs":
        """The outputs of some sequences of the batch, without those at positions."""
        hidden = {layer: states[sequences] for layer, states in self.hidden.items()}
        qkv = {block: record.of_sequences(sequences) for block, record in self.qkv.items()}
        pooled = {kind: vectors[sequences] for kind, vectors in self.pooled.items()}
        return Outputs(None, hidden, qkv, pooled, {head: logits[sequences] for head, logits in self.extra.items()})


NO_OUTPUTS = Outputs(None, {})


class _Rounded(NamedTuple):
    """A weight in another format, as it was in one of its versions."""

    weight: Tensor
    version: int
    cast: Tensor


class Head(NamedTuple):
    """An output embedding and its input: rows [N, E], weight [V, E], bias [V] or None; their product is the logits.

    `dtype` is the format of the matrix product; None takes it from autocast where that is on, else from the tensors.
    `rounded` [V, E] is the weight in that format, where the caller has it. With a `softcap` c the logits are c *
    tanh(product / c), as in Gemma 2; such heads have no bias.
    """

    rows: Tensor
    weight: Tensor
    bias: Tensor | None = None
    dtype: torch.dtype | None = None
    rounded: Tensor | None = None
    softcap: float | None = None

    def logits(self) -> Tensor:
        """[N, V], all at once, in at least fp32 where the rows are."""
        dtype = torch.promote_types(self.rows.dtype, self.weight.dtype)
        bias = None if self.bias is None else self.bias.to(dtype)
        product = torch.nn.functional.linear(self.rows.to(dtype), self.weight.to(dtype), bias)
        return product if self.softcap is None else self.softcap * (product / self.softcap).tanh()

    def cap(self, product: Tensor) -> Tensor:
        """The product of rows and weight (with the bias) -> logits; the tensor is overwritten."""
        return product if self.softcap is None else product.div_(self.softcap).tanh_().mul_(self.softcap)


class LanguageModel(nn.Module):
    """A transformers language model, or any module that offers the same.

    That is: `base_model`, a submodule that gives the last hidden state [B, S, H] or something whose first entry it is;
    `get_output_embeddings()`, a submodule with weight and bias; and a forward that calls both. A model serves one
    forward at a time: the hooks of two threads would read each other's.
    """

    def __init__(
        self, model: Any, precision: str = "fp32", plain: bool = False, checkpoints: bool = False, rounded: bool = False
    ) -> None:
        """
        Args:
            precision: of the forward: fp32, or autocast in fp16 or, for anything else, bf16.
            plain: let the last block compute its output at positions that are not read, too; see `last_block_at`.
            checkpoints: in training, compute the inside of blocks again in the backward pass instead of keeping it.
            rounded: the weights have the format of `precision` already, and the forward is in it without autocast.
        """
        super().__init__()
        self.model = model
        self.precision = precision
        self.plain = plain
        self._autocast = "fp32" if rounded else precision
        self._checkpointed = list(block_list(model.base_model, depth_of(model))) if checkpoints else []
        self._casts: dict[torch.dtype, Tensor] | None = None
        self._frozen_head: _Rounded | None = None

    def forward(self, inputs: dict[str, Tensor], documents: Tensor | None, spec: OutputSpec) -> Outputs:
        """
        Args:
            inputs: as a `Batch` has them: `input_ids` [B, S] and whatever else the model takes.
            documents: [B, S], negative at padding.

        Raises:
            ValueError: queries and keys of a model that does not record them, as DeBERTa and MPNet do not, or
                a head that it does not have, or its forward does not call its encoder or its output embedding.
        """
        inputs = _without_segments(inputs, self.model)
        bounds = document_bounds(self.model, inputs.pop("document_lengths", None), inputs["input_ids"].shape[1])
        # Where bounds, or positions that start anew, separate the documents, a mask would undo that.
        attention = None if documents is None or bounds or "position_ids" in inputs else documents >= 0
        if attention is not None and isinstance(self.model, PreTrainedModel):
            attention = attention.long()  # which is what transformers calls it: DeBERTa takes it from 1
        # A model that is sharded over ranks is made whole in its own forward alone.
        model = self.model if spec.head or spec.extra or is_root(self.model) else self.model.base_model
        layout = Layout(attention is not None, inputs.get("position_ids"))
        if attention is None and makes_known_masks(self.model):
            attention = torch.ones_like(inputs["input_ids"])  # else causal models ask for it in their positions
        with ExitStack() as entered:
            entered.enter_context(layout_known(layout))
            entered.enter_context(autocast(self._autocast, inputs["input_ids"].device))
            entered.enter_context(without_advice_on_masks())
            record = entered.enter_context(_watched(self.model, spec, self.plain))
            if self.model.training and torch.is_grad_enabled():
                entered.enter_context(checkpointed(self._checkpointed))
            further = _without_cache(plain_class(self.model).forward) | bounds
            output = model(**inputs, attention_mask=attention, **further)
        name = plain_class(self.model).__name__
        if missing := [block for block in spec.qkv if ("qkv", block) not in record]:
            raise ValueError(
                f"{name} does not show the queries and keys of block {missing[0]}: it has no such block, or an "
                "attention that is not one of transformers' AttentionInterface; choose another model"
            )
        if spec.head and "head_rows" not in record:
            raise ValueError("its forward does not call both")
        if missing := [layer for layer in spec.layers if layer not in record]:
            raise ValueError(f"its forward does not give the hidden state of layer {missing[0]}")
        return Outputs(
            record.get("head_rows"),
            {layer: record[layer] for layer in spec.layers},
            {block: record["qkv", block] for block in spec.qkv},
            {kind: pooled(kind, record[LAST], documents) for kind in spec.pooled},
            {name: _logits_of(name, output, self.model) for name in spec.extra},
            record.get("last_rows"),
        )

    def head(self, rows: Tensor) -> Head:
        """The output embedding with its input `rows` [N, E], in the format of this model."""
        layer = self.model.get_output_embeddings()
        dtype = rows.dtype if self.precision == "fp32" else dtype_of(self.precision)
        scale, softcap = _logit_changes(self.model)
        rows = rows if scale == 1 else rows * scale
        return Head(rows, layer.weight, layer.bias, dtype, self._cast(layer.weight, dtype), softcap)

    @torch.no_grad()
    def head_of(self, states: Tensor) -> Head:
        """The head where the encoder's last hidden states [N, H] are known; of a model that `head_alone` has made."""
        self.model.base_model.show(states.to(self.model.get_output_embeddings().weight.dtype))
        ids = torch.zeros(1, 1, dtype=torch.long, device=states.device)
        rows = self({"input_ids": ids}, None, OutputSpec(head=True)).head_rows
        assert rows is not None
        return self.head(rows)

    def logits(self, rows: Tensor, vocab: int | None = None) -> Tensor:
        """rows [N, E] -> logits [N, vocab]; without `vocab` those of all rows, also of what only pads the embedding."""
        layer = self.model.get_output_embeddings()
        scale, softcap = _logit_changes(self.model)
        with autocast(self.precision, rows.device):
            bias = None if layer.bias is None else layer.bias[:vocab]
            product = nn.functional.linear(rows if scale == 1 else rows * scale, layer.weight[:vocab], bias)
        return Head(rows, layer.weight, softcap=softcap).cap(product)

    @contextmanager
    def weight_cast_cache(self) -> Iterator[None]:
        """While it is open each weight is rounded once: around the micro-batches of one step.

        Weights must not change inside. (Their version does not show it: the fused AdamW leaves it as it is.)
        """
        device = device_of(self)
        # Autocast drops its copies when the outermost of its contexts ends: this one, which itself casts nothing.
        with torch.autocast(device.type, enabled=False):
            self._casts = {}
            try:
                yield
            finally:
                self._casts = None

    def _cast(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """The output embedding's weight in another format, without a way back for gradients.

        That of a frozen one is kept: rounding it in every step took 3 % of a step of SmolLM2.
        """
        if weight.dtype != dtype and not weight.requires_grad and not is_sharded(self.model):
            kept = self._frozen_head
            if kept is None or kept.weight is not weight or kept.version != weight._version or kept.cast.dtype != dtype:
                kept = self._frozen_head = _Rounded(weight, weight._version, weight.detach().to(dtype))
            return kept.cast
        casts = {} if self._casts is None or weight.dtype == dtype else self._casts
        if dtype not in casts:
            casts[dtype] = weight.detach().to(dtype)
        return casts[dtype]


@contextmanager
def without_advice_on_masks() -> Iterator[None]:
    """While it is open transformers does not warn that a batch without a mask may be padded.

    Models are given no mask where nothing is padding, and the token that fills up may also be the end of a text.
    """
    source = logging.getLogger("transformers.modeling_utils")
    source.addFilter(silent := lambda record: "passing in an `attention_mask`" not in record.getMessage())
    try:
        yield
    finally:
        source.removeFilter(silent)


@torch.no_grad()
def has_head(model: LanguageModel, head: str) -> bool:
    """Whether a model in evaluation mode has a head of this name in HEADS, as two tokens show."""
    ids = torch.zeros(1, 2, dtype=torch.long, device=device_of(model))
    try:
        model({"input_ids": ids}, None, OutputSpec(extra=(head,)))
    except ValueError:
        return False
    return True


@torch.no_grad()
def idle_forward(model: Any) -> None:
    """A forward of one token, for a rank that takes part so that the others can compute."""
    ids = torch.zeros(1, 1, dtype=torch.long, device=device_of(model))
    LanguageModel(model)({"input_ids": ids}, None, OutputSpec(layers=(LAST,)))


def _without_segments(inputs: dict[str, Tensor], model: Any) -> dict[str, Tensor]:
    """`inputs` without the numbers of segments where a model has an embedding for one of them only, or for none."""
    has_segments = (getattr(getattr(model, "config", None), "type_vocab_size", None) or 0) > 1
    return {name: value for name, value in inputs.items() if has_segments or name != "token_type_ids"}


def _logits_of(head: str, output: Any, model: Any) -> Tensor:
    """The logits of a head beside that over the vocabulary, in at least fp32."""
    for names in HEADS[head]:
        parts = [logits for name in names if (logits := getattr(output, name, None)) is not None]
        if len(parts) == len(names):
            return at_least_fp32(parts[0] if len(parts) == 1 else torch.stack(parts, -1))
    raise ValueError(f"{type(model).__name__} has no head {head}")


@functools.cache
def _without_cache(forward: Callable[..., Any]) -> dict[str, bool]:
    """Keeps causal models from making a cache for the next token, which would make packed sequences silently wrong."""
    return {"use_cache": False} if "use_cache" in inspect.signature(forward).parameters else {}


def _logit_changes(model: Any) -> tuple[float, float | None]:
    """The factor and the soft cap that a model applies to the product of its output embedding.

    Granite divides its logits, Cohere multiplies them, Gemma 2 caps them; `check_model` finds out whether that is all.
    """
    config = getattr(model, "config", None)
    divisor = getattr(config, "logits_scaling", None) or 1.0
    return (getattr(config, "logit_scale", None) or 1.0) / divisor, getattr(config, "final_logit_softcapping", None)


@contextmanager
def _watched(model: Any, spec: OutputSpec, plain: bool = False) -> Iterator[dict[Any, Any]]:
    """While it is open the model's forward fills the dict that is given.

    With hidden states by layer, the `QKV` of block i under ("qkv", i), and `head_rows`.
    """
    record: dict[Any, Any] = {}
    depths = {layer for layer in spec.layers if layer != LAST}
    depth = depth_of(model)
    reads_last = plain or bool(spec.pooled or spec.qkv or spec.extra or {LAST, depth} & set(spec.layers))
    reduced = False  # whether the last block gives the selected positions alone

    def after_encoder(_: nn.Module, __: Any, output: Any) -> Any:
        last = output if isinstance(output, Tensor) else output[0]
        if LAST in spec.layers or spec.pooled:
            record[LAST] = last
        if depth in depths:
            record[depth] = last
        rows = last.flatten(0, 1)
        if spec.positions is not None and not reduced and (spec.head or spec.last_rows):
            rows = rows.index_select(0, spec.positions)
        if spec.last_rows:
            record["last_rows"] = rows
        to_no_head = spec.extra or is_root(model)  # the model's own forward runs, but for its output embedding
        if not spec.head and not (to_no_head and model.get_output_embeddings() is not None):
            return None
        return _replace_first(output, (rows if spec.head else rows[:0])[None])

    def before_output_embedding(_: nn.Module, arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        record["head_rows"] = arguments[0].flatten(0, -2)
        return (record["head_rows"][:0], *arguments[1:])

    with ExitStack() as until_done:
        handles = [model.base_model.register_forward_hook(after_encoder)]
        if (spec.head or spec.last_rows) and not reads_last:
            reduced = until_done.enter_context(last_block_at(model, spec.positions))
        if spec.head:
            handles.append(model.get_output_embeddings().register_forward_pre_hook(before_output_embedding))
        if depths or spec.qkv:
            block_handles, number = _watch_blocks(
                list(block_list(model.base_model, depth)), depths, record, is_root(model)
            )
            handles += block_handles
        for handle in handles:
            until_done.callback(handle.remove)
        if spec.qkv:

            def keep(qkv: QKV) -> None:
                if number() in spec.qkv:
                    record.setdefault(("qkv", number()), qkv)  # the first of a block: its positions among each other

            until_done.enter_context(record_attention(model, keep))
        yield record


def _watch_blocks(
    modules: list[nn.Module], depths: set[int], record: dict[Any, Any], sharded: bool
) -> tuple[list[Any], Callable[[], int]]:
    """Hooks that number the calls of an encoder's blocks, and a function that gives the number of the one under way.

    Some families call one block several times. The output of a block is taken where the next one gets it: a large
    DeBERTa-v2 adds a convolution to that of its first.
    """
    calls = 0

    def before(_: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        if calls in depths:
            record[calls] = arguments[0] if arguments else keywords["hidden_states"]

    def after(_: nn.Module, __: Any, output: Any) -> Any:
        nonlocal calls
        calls += 1
        if not sharded or ("qkv", calls) not in record:
            return None
        qkv = record["qkv", calls]
        first, *inner = join_outputs(output if isinstance(output, Tensor) else output[0], *qkv[:3])
        query, key, value = inner
        record["qkv", calls] = qkv._replace(query=query, key=key, value=value)
        return first if isinstance(output, Tensor) else (first, *output[1:])

    handles: list[Any] = [module.register_forward_pre_hook(before, with_kwargs=True) for module in modules]
    return handles + [module.register_forward_hook(after) for module in modules], lambda: calls + 1


def _replace_first(output: Any, first: Tensor) -> Any:
    """An encoder's output with another last hidden state, in its own form: a tensor, a tuple or transformers' own."""
    if isinstance(output, Tensor):
        return first
    if isinstance(output, tuple):
        return (first, *output[1:])
    return type(output)(**{**output, "last_hidden_state": first})


class KnownStates(nn.Module):
    """In the place of an encoder whose last hidden states are known: what it gives has the form of that encoder's."""

    def __init__(self, output: Any) -> None:
        super().__init__()
        self._output = output

    def show(self, states: Tensor) -> None:
        """From now on it gives the states [N, H] as those of one sequence."""
        alike = tree_map_only(Tensor, lambda part: part.to(states), self._output)
        self._output = _replace_first(alike, states[None])

    def forward(self, *_: Any, **__: Any) -> Any:
        return self._output

    def get_input_embeddings(self) -> None:
        """None are left; transformers shows the output embedding only of a model that answers this."""


def head_alone(model: Any) -> Any:
    """A copy of a model with what follows its encoder alone, and `KnownStates` in the place of that."""
    outputs = list[Any]()
    handle = model.base_model.register_forward_hook(lambda _, __, output: outputs.append(output))
    outputs_of_few(model, OutputSpec(head=True))
    handle.remove()
    return copy.deepcopy(model, {id(model.base_model): KnownStates(outputs[0])})


class AttentionShape(NamedTuple):
    """Sizes of a block's attention."""

    heads: int  # of queries
    widths: tuple[int, int, int]  # of queries, keys and values: heads * size of a head, as if each had its own


def hidden_widths(model: Any, layers: Sequence[int]) -> list[int]:
    """H of each of these hidden states, numbered as in `OutputSpec.layers`."""
    hidden = outputs_of_few(model, OutputSpec(layers=tuple(layers))).hidden
    return [hidden[layer].shape[-1] for layer in layers]


def pooled_width(model: Any, kind: str) -> int:
    """H of the vector of a whole sequence."""
    return outputs_of_few(model, OutputSpec(pooled=(kind,))).pooled[kind].shape[-1]


def attention_shapes(model: Any, blocks: Sequence[int]) -> list[AttentionShape]:
    """Sizes of the attention of each of these blocks, from 1.

    Raises:
        ValueError: the model does not show its queries and keys.
    """
    qkv = outputs_of_few(model, OutputSpec(qkv=tuple(blocks))).qkv
    sizes = [(qkv[block].query.shape[1], [part.shape[-1] for part in qkv[block][:3]]) for block in blocks]
    return [AttentionShape(heads, (heads * q, heads * k, heads * v)) for heads, (q, k, v) in sizes]


@torch.no_grad()
def outputs_of_few(model: Any, spec: OutputSpec, ids: Tensor | None = None, **inputs: Tensor) -> Outputs:
    """What a forward of a few tokens gives in evaluation mode; the model is left as it was.

    Args:
        ids: [B, S]; None: eight tokens.
        inputs: what else the model takes, and `documents`.
    """
    device = device_of(model)
    ids = torch.arange(8)[None] if ids is None else ids
    documents = inputs.pop("documents", None)
    moved = {name: value.to(device) for name, value in {"input_ids": ids, **inputs}.items()}
    with in_evaluation_mode(model):
        outputs: Outputs = LanguageModel(model)(moved, None if documents is None else documents.to(device), spec)
    return outputs
