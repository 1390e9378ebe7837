"""Refuses models that are read wrongly, attend in the wrong direction, or do not fit tokenizer, length or memory."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from distill.data.sequence_format import padding_of
from distill.distributed import Ranks
from distill.distributed.ranks import LOST
from distill.distributed.shard import device_of, local, plain_class
from distill.models.blocks import depth_of, in_evaluation_mode
from distill.models.kind import CAUSAL, CLASSES, MASKED, ModelKind, kind_in_memory
from distill.models.language_model import LAST, LanguageModel, OutputSpec, outputs_of_few, without_advice_on_masks
from distill.models.precision import dtype_of
from distill.runtime.errors import SettingError, first_line
from distill.runtime.host import free_memory

EXAMPLE = "'Add a model' in docs/how-to/extend.md"  # of what a model has to offer
# What a forward of a module raises that is not made for it.
UNFIT = (AttributeError, KeyError, TypeError, ValueError, AssertionError, NotImplementedError, IndexError, RuntimeError)
COUNT_FROM_PADDING = ("roberta", "xlm-roberta", "xlm-roberta-xl", "camembert", "roberta-prelayernorm", "mpnet")
LAST_STATE = OutputSpec(layers=(LAST,))
# Numbers that each block with attention keeps for the backward pass, in multiples of the width of a position: its own
# input, the inputs of its two norms, the queries and what attention makes of them, and most blocks twice as many and
# more (34 bytes in 16-bit formats with the usual inner layer, https://arxiv.org/abs/2205.05198, section 4.1). With
# gradient checkpointing that is so of one block at a time, and each of the others keeps its input.
MIN_KEPT = 4


def check_model(model: Any, setting: str, kind: ModelKind = MASKED) -> None:
    """Refuse a model that `LanguageModel` does not read right, rather than train another function than it computes."""
    check_finite(model, setting)
    config: Any = getattr(model, "config", None)
    name = plain_class(model).__name__
    if hasattr(config, "get_text_config") and config.get_text_config() is not config:
        raise SettingError(f"{setting}: {name} takes more than text, such as images: choose a {kind.noun} of text only")
    if (depth := getattr(config, "num_hidden_layers", None)) is not None and depth < 1:
        raise SettingError(f"{setting}: {name} has num_hidden_layers={depth}: give a model with layers")
    try:
        pairs = _read_and_expected(model, kind, depth)
        outputs_of_few(model, LAST_STATE, documents=torch.tensor([[0] * 6 + [-1] * 2]))  # padded, as short ones are
    except UNFIT as error:
        if LOST.search(str(error)):
            raise
        raise SettingError(
            f"{setting}: {name} lacks a part of a language model: base_model, get_output_embeddings() and a forward "
            f"that calls both ({first_line(error)}); see {EXAMPLE}"
        ) from error
    if hasattr(getattr(model, "get_output_embeddings", lambda: None)(), "get_base_layer"):
        raise SettingError(
            f"{setting}: the output embedding of {name} has an adapter, which losses on logits would not read: leave "
            "it out of the modules that get one (of LoRA, target_modules)"
        )
    if any(expected.isnan().any() for _, expected in pairs):
        problem = f"the outputs of {name} are not finite (NaN), although its weights are"
        raise SettingError(problem, setting=setting, cure=f"choose another {kind.noun}")
    if not all(alike(*pair) for pair in pairs):
        raise SettingError(
            f"{setting}: {name} computes something between its layers and its logits that Distill does not support; "
            f"choose a model whose logits are those of its output embedding, or see {EXAMPLE}"
        )
    _check_direction(model, f"{setting}: {name}", kind)


def _read_and_expected(model: Any, kind: ModelKind, depth: int | None) -> list[tuple[Tensor, Tensor]]:
    """What is read of a few tokens beside what the model's own forward gives: hidden states, and logits."""
    ids = torch.arange(8, device=device_of(model))[None]
    layers = (LAST,) if depth is None else (*range(depth), LAST)
    states = {} if depth is None else {"output_hidden_states": True}
    with torch.no_grad(), in_evaluation_mode(model), without_advice_on_masks():
        whole = model(input_ids=ids, attention_mask=None, **states)
        reader = LanguageModel(model)
        read = reader({"input_ids": ids}, None, OutputSpec(kind.vocabulary, None, layers, extra=kind.heads))
        pairs = [(read.hidden[layer], whole.hidden_states[layer]) for layer in layers[:-1]]
        if read.head_rows is not None:
            names = [name for name in ("prediction_logits", "logits") if hasattr(whole, name)]
            logits = (getattr(whole, names[0]) if names else whole)[0]
            pairs.append((reader.logits(read.head_rows, logits.shape[-1]), logits))
    return pairs


def alike(read: Tensor, expected: Tensor) -> bool:
    """Whether two tensors agree but for rounding; those of a model that is not trained yet are small."""
    if read.shape != expected.shape:
        return False
    return torch.allclose(read, expected, rtol=1e-3, atol=1e-3 * min(1.0, float(expected.abs().max())))


def _check_direction(model: Any, named: str, kind: ModelKind) -> None:
    """Refuse a causal model for masked tokens, and the reverse; classes of texts are predicted by either."""
    ids = torch.arange(8)[None].repeat(3, 1)
    ids[1, -1], ids[2, 0] = 0, 1  # another last token, another first one
    # One by one: a batch of several may be computed by other kernels.
    states, other_end, other_start = (
        outputs_of_few(model, LAST_STATE, sequence[None]).hidden[LAST][0] for sequence in ids
    )
    looks_ahead = not torch.allclose(states[:-1], other_end[:-1], rtol=1e-4, atol=1e-5)
    looks_back = not torch.allclose(states[1:], other_start[1:], rtol=1e-4, atol=1e-5)
    if kind.causal and looks_ahead:
        raise SettingError(
            f"{named} attends to later tokens, so it is not a causal language model: choose one, or {MASKED.objective}"
        )
    if kind.vocabulary and not kind.causal and looks_back and not looks_ahead:
        raise SettingError(
            f"{named} attends only to earlier tokens, so it is not a masked language model: choose one, or "
            f"{CAUSAL.objective}"
        )


def check_finite(model: Any, setting: str, ranks: Ranks | None = None) -> None:
    """Refuse a model with a weight that is NaN or infinite, whether or not a text would reach it.

    A bias of -inf of the output embedding may be there: it keeps a row that only pads the vocabulary from being
    predicted.

    Args:
        ranks: over which the model is sharded, where they are to agree; they call this together.
    """
    named = [(name, weight) for name, weight in model.named_parameters() if weight.is_floating_point()]
    bias = getattr(getattr(model, "get_output_embeddings", lambda: None)(), "bias", None)
    broken = torch.tensor([float(not _is_finite(local(weight.detach()), weight is bias)) for _, weight in named])
    names = [named[number][0] for number in (ranks.sum(broken) if ranks else broken).nonzero()[:, 0].tolist()]
    if names:
        more = f", and so are {len(names) - 1} more" if len(names) > 1 else ""
        raise SettingError(
            f"its weight {names[0]} holds numbers that are not finite (NaN or infinite){more}",
            setting=setting,
            cure="the model was damaged before it was saved: give an earlier checkpoint of it, or another model",
        )


def _is_finite(weight: Tensor, allows_low: bool) -> bool:
    """Whether all entries are finite, without a copy of them; `allows_low`: or -inf."""
    if not weight.numel():
        return True
    low, high = weight.aminmax()  # NaN, where there is one
    return bool(high.isfinite()) and (bool(low.isfinite()) or (allows_low and not bool(low.isnan())))


def check_length(model: Any, setting: str, length: int) -> None:
    """Raises SettingError for a model that cannot read sequences of this length, in spite of its configuration."""
    try:
        outputs_of_few(model, LAST_STATE, torch.zeros(1, length, dtype=torch.long))
    except UNFIT as error:
        if LOST.search(str(error)):
            raise
        raise SettingError(
            f"{setting}: {plain_class(model).__name__} cannot read corpus.sequence_length={length} tokens "
            f"({first_line(error)}): lower it"
        ) from error


def check_packing(model: Any, setting: str) -> None:
    """Refuse a causal model that does not keep the documents of one sequence apart."""
    ids, starts = torch.arange(9)[None], torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4, 5]])
    named = f"{setting}: {plain_class(model).__name__}"
    cure = "set corpus.cross_documents=false, so that every sequence holds one document"
    try:
        packed = outputs_of_few(model, LAST_STATE, ids, position_ids=starts).hidden[LAST][:, 3:]
        apart = outputs_of_few(model, LAST_STATE, ids[:, 3:]).hidden[LAST]
    except TypeError as error:
        raise SettingError(f"{named} takes no position_ids: {cure}") from error
    if not torch.allclose(packed, apart, rtol=1e-3, atol=1e-3):
        raise SettingError(f"{named} does not keep the documents of a sequence apart: {cure}")


def check_vocabulary(model: Any, setting: str, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raises SettingError for an output embedding (or else input embedding) smaller than the tokenizer's vocabulary."""
    layer = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    weight = (model.get_input_embeddings() if layer is None else layer).weight
    check_vocabulary_size(weight.shape[0], setting, tokenizer)


def check_vocabulary_size(size: int, setting: str, tokenizer: PreTrainedTokenizerBase) -> None:
    """`check_vocabulary` of a model with so many embeddings, whether or not a text has the ids beyond it.

    Special tokens that nothing writes may be beyond it: that of images in Gemma 3's tokenizer is.
    """
    template = str(tokenizer.chat_template or "")
    written = {getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")}
    special = {
        number
        for number, token in tokenizer.added_tokens_decoder.items()
        if token.special and number not in written and token.content not in template
    }
    if not special.issuperset(range(size, len(tokenizer))):
        folder = f" of {tokenizer.name_or_path}" if tokenizer.name_or_path else ""
        raise SettingError(
            f"{setting}: its vocabulary has {size} tokens, but the tokenizer{folder} has {len(tokenizer)}: choose a "
            "pair that fits, or save the tokenizer that the model was trained with beside it"
        )


def set_padding(model: Any, tokenizer: PreTrainedTokenizerBase) -> None:
    """Let a decoder that gives classes of texts know the padding token that its sequences are filled up with.

    It reads the class at the last token that is none; encoders, which read the first, and other models are left alone.
    """
    family = getattr(getattr(model, "config", None), "model_type", "")
    if kind_in_memory(model) is CLASSES and CAUSAL.classes(family) and not MASKED.classes(family):
        model.config.update({"pad_token_id": padding_of(tokenizer)})


def check_tokenizers(of_run: PreTrainedTokenizerBase, of_model: PreTrainedTokenizerBase, setting: str) -> None:
    """Raises SettingError for the model that `setting` names where its tokenizer's ids mean something else here."""
    expected, vocabulary = of_run.get_vocab(), of_model.get_vocab()
    if expected != vocabulary:
        differing = sum(expected.get(token) != number for token, number in vocabulary.items())
        raise SettingError(
            f"{setting}: its vocabulary ({len(vocabulary)} tokens) is not that of this run ({len(expected)} tokens, "
            f"{differing} of its tokens differ); choose models with one tokenizer"
        )


def check_positions(model: Any, name: str, length: int) -> None:
    """Raises SettingError for sequences that are longer than a model takes; the message calls it `name`."""
    if (limit := max_positions(model)) is not None and length > limit:
        raise SettingError(f"corpus.sequence_length={length} exceeds the {limit} positions of {name}: lower it")


def max_positions(model: Any) -> int | None:
    """The most positions that a model can take; None where it names no limit."""
    config: Any = getattr(model, "config", None)
    if (limit := getattr(config, "max_position_embeddings", None)) is None:
        return None
    table = getattr(getattr(model.base_model, "embeddings", None), "position_embeddings", None)
    if table is None and getattr(config, "relative_attention", False):  # as in DeBERTa v3
        return None
    padding = getattr(table, "padding_idx", None)  # RoBERTa and its heirs count from the one after it
    return int(limit) - (0 if padding is None else padding + 1)


def position_offset(family: str, pad_id: int | None) -> int:
    """Rows of the position embedding that no position uses: RoBERTa counts from the one after its padding id."""
    padding = 1 if family == "mpnet" else pad_id or 0  # MPNet's is fixed, in spite of its configuration
    return padding + 1 if family in COUNT_FROM_PADDING else 0


# --- memory: a processor's is promised before it is there, and a process that takes it then is killed without a message


def available(ranks: Ranks) -> int | None:
    """Bytes of memory that each rank of this host may still take; None for a GPU, which raises an error itself."""
    return free_memory() // ranks.local_size if ranks.device.type == "cpu" else None


def require_memory_for_weights(named: str, build: Callable[[], Any], copies: int = 1) -> None:
    """Raises SettingError where the weights in fp32 of what `build` makes, so many times, exceed this host's memory."""
    with torch.device("meta"):
        least = copies * sum(4 * parameter.numel() for parameter in build().parameters())
    if least > (free := free_memory()):
        raise SettingError(
            f"{named}: its weights{' and their gradients' * (copies > 1)} take {least / 1e9:.3g} GB, and "
            f"{free / 1e9:.3g} GB are free: choose a smaller model, or shard it over ranks with backend=fsdp"
        )


def require_memory_for_step(
    student: Any, precision: str, batch_size: int, length: int, ranks: Ranks, checkpoints: bool = False
) -> None:
    """Raises SettingError where what the blocks are sure to keep of a micro-batch for its backward pass is too much.

    With `checkpoints` the inside of blocks is computed again then. A student whose configuration has no width and heads
    of attention passes.
    """
    config, free = getattr(student, "config", None), available(ranks)
    width = getattr(config, "hidden_size", None)
    if free is None or not isinstance(width, int) or not hasattr(config, "num_attention_heads"):
        return
    depth = depth_of(student) or 1
    kept = depth - 1 + MIN_KEPT if checkpoints else depth * MIN_KEPT
    least = dtype_of(precision).itemsize * kept * width * batch_size * length
    if least > free:
        cure = "" if checkpoints else ", or set student.gradient_checkpointing=true, which keeps less"
        raise SettingError(
            f"train.batch_size={batch_size}: a micro-batch of {length} positions a sequence takes {least / 1e9:.3g} GB "
            f"at least, and {free / 1e9:.3g} GB are free for each rank; lower train.batch_size, and set "
            f"train.sequences_per_step to the sequences that a step has now{cure}"
        )
