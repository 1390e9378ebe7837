"""Tiny models of many families, masked and causal, with settings that another version could misread, and tokenizers."""

from typing import Any

import torch
from tiny import CLS, MASK, PAD, SEP, SPECIAL, UNK, VOCAB, make_model, make_tokenizer
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from tokenizers.decoders import ByteLevel
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM, PreTrainedTokenizerFast

from distill.models.student import dropout_names
from distill.models.weights import keep_soft_cap

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
SPECIAL_IDS = {"pad_token_id": PAD, "bos_token_id": CLS, "eos_token_id": SEP}
GROUPED = SIZES | {"num_key_value_heads": 2}
ROPE = {"rope_type": "default", "rope_theta": 500.0}
# A scaling that changes nothing would show nothing: positions of the tests are beyond its original length.
SCALED = {"rope_type": "linear", "factor": 4.0, "rope_theta": 700.0}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 8}
WINDOWS = ["sliding_attention", "full_attention"]
WIDE = {"rope_type": "linear", "factor": 4.0, "rope_theta": 300.0}
MODERNBERT_ROPE = {"full_attention": ROPE | {"rope_theta": 300.0}, "sliding_attention": ROPE | {"rope_theta": 50.0}}
GEMMA3_ROPE = {"full_attention": WIDE, "sliding_attention": ROPE | {"rope_theta": 50.0}}

MASKED: dict[str, dict[str, Any]] = {
    "bert": SIZES,
    "distilbert": {"dim": 32, "n_heads": 4, "hidden_dim": 48, "n_layers": 2},
    "roberta": SIZES | {"type_vocab_size": 1},
    "xlm-roberta": SIZES | {"type_vocab_size": 1},
    "camembert": SIZES | {"type_vocab_size": 1},
    "mpnet": SIZES,
    "modernbert": SIZES
    | {"local_attention": 4, "cls_token_id": CLS, "sep_token_id": SEP, "rope_parameters": MODERNBERT_ROPE},
    "albert": SIZES | {"embedding_size": 16},
    "electra": SIZES | {"embedding_size": 16},
    "deberta-v2": SIZES | {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 8},
}
CAUSAL: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4},
    "llama": GROUPED | {"rope_parameters": LLAMA3, "tie_word_embeddings": True},
    "qwen2": GROUPED
    | {"rope_parameters": ROPE, "use_sliding_window": True, "sliding_window": 4, "layer_types": WINDOWS},
    "qwen3": GROUPED | {"rope_parameters": SCALED, "head_dim": 16},
    "mistral": GROUPED | {"rope_parameters": ROPE, "sliding_window": 4},
    "gemma": GROUPED | {"rope_parameters": ROPE, "head_dim": 8},
    "gemma2": GROUPED
    | {"rope_parameters": ROPE, "head_dim": 8, "sliding_window": 4, "layer_types": WINDOWS}
    | {"query_pre_attn_scalar": 8, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 1.5},
    "gemma3_text": GROUPED
    | {"rope_parameters": GEMMA3_ROPE, "head_dim": 8, "sliding_window": 4, "layer_types": WINDOWS[::-1]},
    "granite": GROUPED
    | {"rope_parameters": ROPE, "logits_scaling": 0.25, "embedding_multiplier": 3.0}
    | {"residual_multiplier": 0.5, "attention_multiplier": 0.3},
    "cohere": GROUPED | {"rope_parameters": ROPE, "logit_scale": 3.0},
    "cohere2": GROUPED | {"rope_parameters": ROPE, "logit_scale": 3.0, "sliding_window": 4, "layer_types": WINDOWS},
    "gpt_neox": SIZES | {"rope_parameters": {"rope_theta": 500.0, "partial_rotary_factor": 0.5}},
}
FAMILIES = {**MASKED, **CAUSAL}


def make_family(family: str, **fields: Any) -> Any:
    """A language model of 2 layers x 32 in evaluation mode, with weights that make predictions differ."""
    known = {"vocab_size": VOCAB, "max_position_embeddings": 64, **SPECIAL_IDS}
    kind = AutoModelForMaskedLM if family in MASKED else AutoModelForCausalLM
    torch.manual_seed(1)
    model = kind.from_config(AutoConfig.for_model(family, **{**known, **FAMILIES[family], **fields}))
    keep_soft_cap(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.15)
    return model.eval()


def depth_fields(family: str, layers: int) -> dict[str, Any]:
    """The fields of `make_family` for so many layers; what its layers differ in goes on in turns."""
    known = FAMILIES[family]
    name = next((name for name in ("n_layers", "n_layer") if name in known), "num_hidden_layers")
    types = {"layer_types": (known["layer_types"] * layers)[:layers]} if "layer_types" in known else {}
    return {name: layers, **types}


def without_dropout(family: str, **fields: Any) -> Any:
    """`make_family` with nothing dropped in training mode."""
    rates = dict.fromkeys(dropout_names(AutoConfig.for_model(family)), 0.0)
    return make_family(family, **rates, **fields)


def tokenizer_of(family: str) -> PreTrainedTokenizerFast:
    """WordPiece with [CLS] and [SEP] for masked models; byte pairs for causal ones."""
    if family not in MASKED:
        return byte_pairs()
    tokenizer = make_tokenizer()
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", CLS), ("[SEP]", SEP)]
    )
    tokenizer.model_max_length = 64
    return tokenizer


def byte_pairs() -> PreTrainedTokenizerFast:
    """Byte pairs without merges beyond a few, as large as the models' vocabulary."""
    letters = "Ġabcdefghijklmnopqrstuvwxyz.,"
    pieces = [*SPECIAL, *letters, "th", "the", "Ġthe", "an", "Ġan"]
    vocab = {piece: number for number, piece in enumerate(pieces)}
    assert len(vocab) <= VOCAB and vocab["[MASK]"] == MASK and vocab["[UNK]"] == UNK
    merges = [("t", "h"), ("th", "e"), ("Ġ", "the"), ("a", "n"), ("Ġ", "an")]
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevel()
    special = {"pad_token": "[PAD]", "unk_token": "[UNK]", "bos_token": "[CLS]", "eos_token": "[SEP]"}
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, additional_special_tokens=["[MASK]"], model_max_length=64, **special
    )


# Of `make`: with more differences between layers and heads.
OTHERS: dict[str, dict[str, Any]] = {
    "electra": {"hidden_size": 32, "embedding_size": 16, "num_attention_heads": 4, "intermediate_size": 48},
    "gpt2": {"n_embd": 32, "n_head": 4},
    # Keys and values in groups, and heads that are wider together than the hidden state.
    "llama": {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 12}
    | {"intermediate_size": 48},
    "deberta-v2": {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 48, "legacy": True},
    "mpnet": {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 48},
}


def make(family: str, layers: int = 3, **fields: Any) -> Any:
    """A model of so many blocks, in evaluation mode."""
    if family not in OTHERS:
        return make_model(family, layers, **fields)
    known = {"vocab_size": VOCAB, "num_hidden_layers": layers, **SPECIAL_IDS}
    known |= {"intermediate_size": 48} if family == "llama" else {}
    kind = AutoModelForCausalLM if family in ("gpt2", "llama") else AutoModelForMaskedLM
    torch.manual_seed(1)
    model = kind.from_config(AutoConfig.for_model(family, **{**known, **OTHERS[family], **fields}))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.15)
    return model.eval()
