"""Untrained models with heads for classes and answers, as folders, for tests of predictions."""

from pathlib import Path
from typing import Any

import torch
from families import SIZES
from transformers import BertConfig
from vocabularies import special_ids, vocabulary_of


def save_fine_tuned(folder: Path, auto_class: Any, **fields: Any) -> Path:
    """An untrained BERT with a head for classes or answers, whose outputs differ from input to input."""
    tokenizer = vocabulary_of("bert")
    torch.manual_seed(2)
    config = BertConfig(**{**SIZES, "max_position_embeddings": 64, **special_ids(tokenizer), **fields})
    model = auto_class.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
