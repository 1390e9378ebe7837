"""BERT's configuration and weights in the architecture of DistilBERT, which computes the same without segments."""

from typing import Any

import torch

# BERT's names -> DistilBERT's, in the order in which they are replaced.
NAMES = (
    ("bert.embeddings", "distilbert.embeddings"),
    ("bert.encoder.layer", "distilbert.transformer.layer"),
    ("attention.self.query", "attention.q_lin"),
    ("attention.self.key", "attention.k_lin"),
    ("attention.self.value", "attention.v_lin"),
    ("attention.output.dense", "attention.out_lin"),
    ("attention.output.LayerNorm", "sa_layer_norm"),
    ("intermediate.dense", "ffn.lin1"),
    ("output.dense", "ffn.lin2"),
    ("output.LayerNorm", "output_layer_norm"),
    ("cls.predictions.transform.dense", "vocab_transform"),
    ("cls.predictions.transform.LayerNorm", "vocab_layer_norm"),
    ("cls.predictions.decoder", "vocab_projector"),
    ("cls.predictions.bias", "vocab_projector.bias"),
)


def distilbert_fields(bert: Any) -> dict[str, Any]:
    """The configuration of a DistilBERT of the size of this BERT configuration."""
    return {
        "vocab_size": bert.vocab_size,
        "dim": bert.hidden_size,
        "n_layers": bert.num_hidden_layers,
        "n_heads": bert.num_attention_heads,
        "hidden_dim": bert.intermediate_size,
        "max_position_embeddings": bert.max_position_embeddings,
        "activation": bert.hidden_act,
        "pad_token_id": bert.pad_token_id,
        "tie_word_embeddings": bert.tie_word_embeddings,
    }


def bert_to_distilbert(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """BERT's weights under DistilBERT's names.

    DistilBERT has no segments: the embedding of segment 0, which BERT adds at every position, moves into the position
    embeddings, so that a student with all the layers computes exactly what the teacher does.
    """
    out = {}
    for name, tensor in state.items():
        if "token_type" in name or "pooler" in name or name.endswith("position_ids"):
            continue
        if name == "bert.embeddings.position_embeddings.weight":
            # In the format of training, whatever the two were saved in.
            tensor = tensor.float() + state["bert.embeddings.token_type_embeddings.weight"][0].float()
        for old, new in NAMES:
            name = name.replace(old, new)
        out[name] = tensor
    return out
