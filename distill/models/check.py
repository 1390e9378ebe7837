"""Refuses models that are read wrongly, attend in the wrong direction, or do not fit the pair, tokenizer or length."""

from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from distill.data.sequence_format import padding_of
from distill.distributed import Ranks
from distill.distributed.shard import local, plain_class
from distill.models.kind import CAUSAL, CLASSES, MASKED, ModelKind, kind_in_memory
from distill.models.language_model import LAST, LanguageModel, OutputSpec
from distill.models.modes import in_evaluation_mode
from distill.runtime.errors import SettingError, first_line

EXAMPLE = "'Add a model' in docs/how-to/extend.md"  # of what a model has to offer
# What a forward of a module raises that is not made for it.
UNFIT = (AttributeError, KeyError, TypeError, ValueError, AssertionError, NotImplementedError, IndexError, RuntimeError)
COUNT_FROM_PADDING = ("roberta", "xlm-roberta", "xlm-roberta-xl", "camembert", "roberta-prelayernorm", "mpnet")


def check_model(model: Any, setting: str, kind: ModelKind = MASKED) -> None:
    """Refuse a model that `LanguageModel` does not read right, rather than train another function than it computes.

    Raises:
        SettingError: the model has a weight that is not finite, cannot be watched, what is read from it are not its own
            logits and hidden states, or its positions look the other way than those of its kind, or it is made for more
            than text.
    """
    check_finite(model, setting)
    config: Any = getattr(model, "config", None)
    if hasattr(config, "get_text_config") and config.get_text_config() is not config:
        raise SettingError(
            f"{setting}: {_class(model)} takes more than text, such as images: choose a {kind.noun} of text only"
        )
    ids = torch.arange(8, device=next(model.parameters()).device)[None]
    depth: int | None = getattr(config, "num_hidden_layers", None)
    if depth is not None and depth < 1:
        raise SettingError(f"{setting}: {_class(model)} has num_hidden_layers={depth}: give a model with layers")
    layers = (LAST,) if depth is None else (*range(depth), LAST)
    states = {} if depth is None else {"output_hidden_states": True}
    try:
        with torch.no_grad(), in_evaluation_mode(model):
            whole_output = model(input_ids=ids, attention_mask=None, **states)
            reader = LanguageModel(model)
            read = reader({"input_ids": ids}, None, OutputSpec(kind.vocabulary, None, layers, extra=kind.heads))
            pairs = [(read.hidden[layer], whole_output.hidden_states[layer]) for layer in layers[:-1]]
            if read.head_rows is not None:
                logits = _vocabulary_logits(whole_output)[0]
                pairs.append((reader.logits(read.head_rows, logits.shape[-1]), logits))
            _run_both_ways(model)
    except UNFIT as error:
        raise SettingError(
            f"{setting}: {_class(model)} lacks a part of a language model: base_model, "
            f"get_output_embeddings() and a forward that calls both ({first_line(error)}); see {EXAMPLE}"
        ) from error
    if hasattr(getattr(model, "get_output_embeddings", lambda: None)(), "get_base_layer"):
        raise SettingError(
            f"{setting}: the output embedding of {_class(model)} has an adapter, which losses on logits would not "
            "read: leave it out of the modules that get one (of LoRA, target_modules)"
        )
    if any(expected.isnan().any() for _, expected in pairs):
        raise SettingError(
            f"the outputs of {_class(model)} are not finite (NaN), although its weights are",
            setting=setting,
            cure=f"choose another {kind.noun}",
        )
    if not all(alike(*pair) for pair in pairs):
        raise SettingError(
            f"{setting}: {_class(model)} computes something between its layers and its logits that Distill does not "
            f"support; choose a model whose logits are those of its output embedding, or see {EXAMPLE}"
        )
    _check_direction(model, setting, kind)


def check_finite(model: Any, setting: str, ranks: Ranks | None = None) -> None:
    """Refuse a model with a weight that is NaN or infinite, whether or not a text would reach it.

    A bias of -inf of the output embedding may be there: it keeps a row that only pads the vocabulary from being
    predicted.

    Args:
        ranks: over which the model is sharded, where they are to agree; they call this together.

    Raises:
        SettingError: the message names the weight.
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


def _is_finite(weight: torch.Tensor, allows_low: bool) -> bool:
    """Whether all entries are finite, without a copy of them; `allows_low`: or -inf."""
    if not weight.numel():
        return True
    low, high = weight.aminmax()  # NaN, where there is one
    return bool(high.isfinite()) and (bool(low.isfinite()) or (allows_low and not bool(low.isnan())))


def _class(model: Any) -> str:
    return plain_class(model).__name__


def _vocabulary_logits(output: Any) -> Any:
    """What a forward gave of logits over the vocabulary, under either of transformers' names or as it is."""
    names = [name for name in ("prediction_logits", "logits") if hasattr(output, name)]
    return getattr(output, names[0]) if names else output


def alike(read: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether two tensors agree but for rounding; those of a model that is not trained yet are small."""
    if read.shape != expected.shape:
        return False
    return torch.allclose(read, expected, rtol=1e-3, atol=1e-3 * min(1.0, float(expected.abs().max())))


def _run_both_ways(model: Any) -> None:
    """Call the encoder alone, as terms on hidden states do, and with padding, as short sequences are read."""
    ids = torch.arange(8, device=next(model.parameters()).device)[None]
    documents = torch.zeros_like(ids)
    documents[:, -2:] = -1
    LanguageModel(model)({"input_ids": ids}, documents, OutputSpec(False, None, (LAST,)))


def check_length(model: Any, setting: str, length: int) -> None:
    """Refuse a model that cannot read sequences of this length, in spite of its configuration.

    Raises:
        SettingError: its forward fails.
    """
    ids = torch.zeros(1, length, dtype=torch.long, device=next(model.parameters()).device)
    try:
        with torch.no_grad(), in_evaluation_mode(model):
            LanguageModel(model)({"input_ids": ids}, None, OutputSpec(False, None, (LAST,)))
    except UNFIT as error:
        raise SettingError(
            f"{setting}: {_class(model)} cannot read corpus.sequence_length={length} tokens "
            f"({first_line(error)}): lower it"
        ) from error


def _check_direction(model: Any, setting: str, kind: ModelKind) -> None:
    """Refuse a causal model for masked tokens, and one that attends to later tokens for next-token prediction.

    Classes of texts are predicted by either.
    """
    ids = torch.arange(8, device=next(model.parameters()).device)[None].repeat(3, 1)
    ids[1, -1], ids[2, 0] = 0, 1  # another last token, another first one
    reader = LanguageModel(model)
    with torch.no_grad(), in_evaluation_mode(model):
        outputs = [reader({"input_ids": sequence[None]}, None, OutputSpec(False, None, (LAST,))) for sequence in ids]
    states, other_end, other_start = (output.hidden[LAST][0] for output in outputs)
    looks_ahead = not torch.allclose(states[:-1], other_end[:-1], rtol=1e-4, atol=1e-5)
    looks_back = not torch.allclose(states[1:], other_start[1:], rtol=1e-4, atol=1e-5)
    if kind.causal and looks_ahead:
        raise SettingError(
            f"{setting}: {_class(model)} attends to later tokens, so it is not a causal language model: "
            f"choose one, or {MASKED.objective}"
        )
    if kind.vocabulary and not kind.causal and looks_back and not looks_ahead:
        raise SettingError(
            f"{setting}: {_class(model)} attends only to earlier tokens, so it is not a masked language model: choose "
            f"one, or {CAUSAL.objective}"
        )


def check_packing(model: Any, setting: str) -> None:
    """Refuse a causal model that does not keep the documents of one sequence apart.

    Raises:
        SettingError: a document's hidden states depend on the documents before it in the sequence.
    """
    device = next(model.parameters()).device
    ids = torch.arange(9, device=device)[None]
    reader, spec = LanguageModel(model), OutputSpec(False, None, (LAST,))
    starts = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4, 5]], device=device)
    cure = "set corpus.cross_documents=false, so that every sequence holds one document"
    try:
        with torch.no_grad(), in_evaluation_mode(model):
            packed = reader({"input_ids": ids, "position_ids": starts}, None, spec).hidden[LAST][:, 3:]
            apart = reader({"input_ids": ids[:, 3:]}, None, spec).hidden[LAST]
    except TypeError as error:
        raise SettingError(f"{setting}: {_class(model)} takes no position_ids: {cure}") from error
    if not torch.allclose(packed, apart, rtol=1e-3, atol=1e-3):
        raise SettingError(f"{setting}: {_class(model)} does not keep the documents of a sequence apart: {cure}")


def check_vocabulary(model: Any, setting: str, tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse a model whose vocabulary is smaller than the tokenizer's, whether or not a text has the ids beyond it.

    Special tokens that nothing writes may be beyond it: that of images in Gemma 3's tokenizer is.

    Raises:
        SettingError: an output embedding smaller than the vocabulary.
    """
    layer = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    check_vocabulary_size(
        (model.get_input_embeddings() if layer is None else layer).weight.shape[0], setting, tokenizer
    )


def set_padding(model: Any, tokenizer: PreTrainedTokenizerBase) -> None:
    """Let a decoder that gives classes of texts know the padding token that its sequences are filled up with.

    It reads the class at the last token that is none; encoders, which read the first, and other models are left alone.
    """
    if kind_in_memory(model) is not CLASSES:
        return
    family = model.config.model_type
    if CAUSAL.classes(family) and not MASKED.classes(family):
        model.config.update({"pad_token_id": padding_of(tokenizer)})


def check_vocabulary_size(size: int, setting: str, tokenizer: PreTrainedTokenizerBase) -> None:
    """`check_vocabulary` of a model with so many embeddings."""
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


def check_tokenizers(of_run: PreTrainedTokenizerBase, of_model: PreTrainedTokenizerBase, setting: str) -> None:
    """Refuse the model that `setting` names when the ids of its tokenizer mean something else than this run's.

    Raises:
        SettingError: the vocabularies differ.
    """
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
    limit = getattr(config, "max_position_embeddings", None)
    if limit is None:
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
