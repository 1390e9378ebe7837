"""Start a BERT whose first layer already looks at neighbouring positions, so that it learns from context at once.

A small BERT from plain random weights stays long at the level of word frequencies: its attention is
uniform, the average of a whole row says next to nothing about a masked word, and no head has a reason to prefer the
words beside it. Here the position embeddings are waves of evenly spaced frequencies, which makes the positions nearly
orthogonal, and queries and keys of the first layer read them with a shift, so that head h attends to offset -1, +1,
-2, +2, ... from the first step on. The waves are those of Vaswani et al. 2017 with other frequencies; that a shift of
them is a rotation is noted there. All weights stay free to change.
"""

import math
from typing import Any

import torch

from distill.errors import SettingError

GAIN = 1.5  # of queries and keys: the neighbour's weight stands out from the noise of the words


def attend_to_neighbours(model: Any) -> None:
    """Change the position embeddings [positions, H] and the first layer's queries and keys [H, H] in place.

    Raises:
        SettingError: a family without learned position embeddings, or heads of odd size.
    """
    family = model.config.model_type
    if family == "bert":
        attention = model.bert.encoder.layer[0].attention.self
        query, key, heads = attention.query.weight, attention.key.weight, attention.num_attention_heads
    elif family == "distilbert":
        attention = model.distilbert.transformer.layer[0].attention
        query, key, heads = attention.q_lin.weight, attention.k_lin.weight, attention.n_heads
    else:
        raise SettingError(f"student.start=neighbours is for bert and distilbert, not for {family}: use random")
    positions = model.base_model.embeddings.position_embeddings.weight
    width = positions.shape[1]
    size = width // heads
    if size % 2:
        raise SettingError(f"student.start=neighbours needs heads of even size, not {size}: choose other heads")
    frequencies = math.pi * torch.arange(1, width // 2 + 1) / (width // 2 + 1)
    angles = torch.arange(len(positions))[:, None] * frequencies
    spread = math.sqrt(2) * model.config.initializer_range  # of a wave with the words' standard deviation
    with torch.no_grad():
        positions[:, 0::2], positions[:, 1::2] = spread * angles.sin(), spread * angles.cos()
        for head in range(heads):
            offset = (head // 2 + 1) * (-1 if head % 2 == 0 else 1)
            waves = torch.arange(head, heads * (size // 2), heads)  # every head gets waves of all lengths
            sines = head * size + 2 * torch.arange(size // 2)
            turn = offset * frequencies[waves]
            key[sines, 2 * waves] += GAIN
            key[sines + 1, 2 * waves + 1] += GAIN
            query[sines, 2 * waves] += GAIN * turn.cos()
            query[sines, 2 * waves + 1] += GAIN * turn.sin()
            query[sines + 1, 2 * waves] -= GAIN * turn.sin()
            query[sines + 1, 2 * waves + 1] += GAIN * turn.cos()
