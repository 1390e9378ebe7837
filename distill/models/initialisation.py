"""Start a BERT whose first layer already looks at neighbouring positions, so that it learns from context at once.

A small BERT from plain random weights stays long at the level of token frequencies: its attention is uniform, the
average of a whole sequence holds next to nothing about a masked token, and no head has a reason to prefer the tokens
beside it. Here the position embeddings are waves of evenly spaced frequencies, which makes the positions nearly
orthogonal, and queries and keys of the first layer read them with a shift, so that head h attends to offset -1, +1,
-2, +2, ... from the first step on. The waves are those of Vaswani et al. 2017 with other frequencies; that a shift of
them is a rotation is noted there. All weights stay free to change.
"""

import math
from typing import Any

import torch

from distill.runtime.errors import SettingError

GAIN = 1.5  # of queries and keys: the neighbour's weight stands out from the noise of the tokens
FIRST_ATTENTION = {  # of a base model
    "bert": "encoder.layer.0.attention.self",
    "distilbert": "transformer.layer.0.attention",
    "albert": "encoder.albert_layer_groups.0.albert_layers.0.attention",
}


def attend_to_neighbours(model: Any) -> None:
    """Change the position embeddings [positions, E] and the first layer's queries and keys [H, H] in place.

    In an ALBERT, whose embeddings are narrower than its layers (E < H), the map between them becomes the identity in
    its first E outputs, so that the layer finds the waves there; and its layer is all of its layers.

    Raises:
        SettingError: a family without learned position embeddings, or heads of odd size.
    """
    family, heads = model.config.model_type, model.config.num_attention_heads
    if family not in FIRST_ATTENTION:
        known = ", ".join(FIRST_ATTENTION)
        raise SettingError(f"student.init=neighbours is for {known}, not for {family}: set student.init=random")
    attention = model.base_model.get_submodule(FIRST_ATTENTION[family])
    names = ("q_lin", "k_lin") if family == "distilbert" else ("query", "key")
    query, key = (getattr(attention, name).weight for name in names)
    positions = model.base_model.embeddings.position_embeddings.weight
    width, size = positions.shape[1], len(query) // heads
    if size % 2 or width % 2:
        raise SettingError(f"student.init=neighbours needs heads of even size, not {size}: choose other heads")
    count = width // 2
    frequencies = math.pi * torch.arange(1, count + 1) / (count + 1)
    angles = torch.arange(len(positions))[:, None] * frequencies
    spread = math.sqrt(2) * model.config.initializer_range  # of a wave with the tokens' standard deviation
    with torch.no_grad():
        positions[:, 0::2], positions[:, 1::2] = spread * angles.sin(), spread * angles.cos()
        if family == "albert":
            _keep_embeddings(model.base_model.encoder.embedding_hidden_mapping_in.weight)
        for head in range(heads):
            offset = (head // 2 + 1) * (-1 if head % 2 == 0 else 1)
            slots = torch.arange(head, heads * (size // 2), heads)  # every head gets waves of all lengths
            waves = slots * count // (heads * (size // 2))
            sines = head * size + 2 * torch.arange(size // 2)
            turn = offset * frequencies[waves]
            key[sines, 2 * waves] += GAIN
            key[sines + 1, 2 * waves + 1] += GAIN
            query[sines, 2 * waves] += GAIN * turn.cos()
            query[sines, 2 * waves + 1] += GAIN * turn.sin()
            query[sines + 1, 2 * waves] -= GAIN * turn.sin()
            query[sines + 1, 2 * waves + 1] += GAIN * turn.cos()


def _keep_embeddings(mapping: torch.Tensor) -> None:
    """Make a map [H, E] pass its input on in the first E outputs, and mix it, with the same variance, in the others."""
    width = min(mapping.shape)
    mapping.normal_(std=mapping.shape[1] ** -0.5)
    mapping[:width] = torch.eye(width, mapping.shape[1])
