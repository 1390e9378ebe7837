"""A student's start from layers of its teacher: which weights it takes, and under which names.

The published DistilBERT starts from every second layer of BERT, embeddings and head included (Sanh et al. 2019).
"""

import re
from typing import Any

import torch
from transformers import PreTrainedModel

from distill.config import StudentConfig
from distill.errors import SettingError

LAYER = re.compile(r"^(.*?\.(?:layer|layers)\.)(\d+)(\..*)$")
NUM_LAYERS = ("num_hidden_layers", "n_layers")
# BERT's names -> DistilBERT's, in the order in which they are replaced.
BERT_TO_DISTILBERT = (
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


def chosen_layers(settings: StudentConfig, available: int) -> list[int]:
    """The teacher's layers to start from: those of `student.layers`, else every second one.

    Raises:
        SettingError: none, or one that the teacher does not have.
    """
    chosen = list(range(0, available, 2)) if settings.layers is None else settings.layers
    if not chosen or any(not 0 <= layer < available for layer in chosen):
        raise SettingError(f"student.layers={chosen}: the teacher has layers 0 to {available - 1}")
    return chosen


def student_fields(settings: StudentConfig, teacher: Any, chosen: list[int]) -> dict[str, Any]:
    """The student's configuration: the teacher's, with fewer layers, in the student's architecture.

    Raises:
        SettingError: an architecture that takes no layers of this teacher.
    """
    family = teacher.config.model_type
    if settings.architecture in ("same", family):
        fields = teacher.config.to_dict()
        if fields.get("layer_types"):
            fields["layer_types"] = [fields["layer_types"][layer] for layer in chosen]
    elif (family, settings.architecture) == ("bert", "distilbert"):
        fields = _distilbert_fields(teacher.config)
    else:
        raise SettingError(
            f"student.architecture={settings.architecture}: layers of {family} go into the same architecture"
            + (" or distilbert" if family == "bert" else "")
        )
    return fields | {name: len(chosen) for name in NUM_LAYERS if name in fields}


def copy_layers(settings: StudentConfig, teacher: Any, student: PreTrainedModel, chosen: list[int]) -> None:
    """Overwrite the student's weights with those of the chosen layers, the embeddings and the head.

    Raises:
        SettingError: they do not fit its shape, or a part is in only one of the two.
    """
    weights = _take_layers(teacher.state_dict(), chosen)
    if student.config.model_type != teacher.config.model_type:
        weights = _bert_to_distilbert(weights)
    try:
        missing, unexpected = student.load_state_dict(weights, strict=False)
    except RuntimeError as error:  # sizes differ
        raise SettingError(
            f"student.config={settings.config}: the teacher's layers do not fit another shape; leave its sizes alone"
        ) from error
    own = dict(student.named_parameters())  # tied weights once: their other names may be missing
    if wrong := [*unexpected, *(name for name in missing if name in own)]:
        raise SettingError(
            f"student.layers={chosen}: {wrong[0]} is in the teacher's layers or in the student's, not in both; keep "
            "layer 0 first and only there, and leave the layers' parts alone in student.config"
        )


def _take_layers(state: dict[str, torch.Tensor], chosen: list[int]) -> dict[str, torch.Tensor]:
    """Keep the chosen layers' tensors, numbered anew, and everything that belongs to no layer."""
    out = {name: tensor for name, tensor in state.items() if not LAYER.match(name)}
    for new, old in enumerate(chosen):
        for name, tensor in state.items():
            if (match := LAYER.match(name)) and int(match[2]) == old:
                out[f"{match[1]}{new}{match[3]}"] = tensor
    return out


def _distilbert_fields(bert: Any) -> dict[str, Any]:
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


def _bert_to_distilbert(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """BERT's weights under DistilBERT's names.

    DistilBERT has no segments: the embedding of segment 0, which BERT adds at every position, moves into the position
    embeddings, so that a student with all the layers computes exactly what the teacher does.
    """
    out = {}
    for name, tensor in state.items():
        if "token_type" in name or "pooler" in name or name.endswith("position_ids"):
            continue
        if name == "bert.embeddings.position_embeddings.weight":
            tensor = tensor + state["bert.embeddings.token_type_embeddings.weight"][0]
        for old, new in BERT_TO_DISTILBERT:
            name = name.replace(old, new)
        out[name] = tensor
    return out
