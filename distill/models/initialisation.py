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


def attend_to_neighbours(model: Any) -> None:
    """Change the position embeddings [positions, E] and the first layer's queries and keys [H, H] in place.

    In an ALBERT, whose embeddings are narrower than its layers (E < H), the map between them becomes the identity in
    its first E outputs, so that the layer finds the waves there; and its layer is all of its layers.

    Raises:
        SettingError: a family without learned position embeddings, or heads of odd size.
    """
    query, key, heads = _first_attention(model)
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
        if model.config.model_type == "albert":
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


def _first_attention(model: Any) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Weights of the queries and keys of the first layer [H, H], and its number of heads."""
    family = model.config.model_type
    if family == "bert":
        attention = model.bert.encoder.layer[0].attention.self
        return attention.query.weight, attention.key.weight, attention.num_attention_heads
    if family == "distilbert":
        attention = model.distilbert.transformer.layer[0].attention
        return attention.q_lin.weight, attention.k_lin.weight, attention.n_heads
    if family == "albert":
        attention = model.albert.encoder.albert_layer_groups[0].albert_layers[0].attention
        return attention.query.weight, attention.key.weight, attention.num_attention_heads
    raise SettingError(
        f"student.init=neighbours is for bert, distilbert and albert, not for {family}: set student.init=random"
    )


def _keep_embeddings(mapping: torch.Tensor) -> None:
    """Make a map [H, E] pass its input on in the first E outputs, and mix it, with the same variance, in the others."""
    width = min(mapping.shape)
    mapping.normal_(std=mapping.shape[1] ** -0.5)
    mapping[:width] = torch.eye(width, mapping.shape[1])
