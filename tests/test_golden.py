"""The loss curve of a small distillation, written down: a change that moves it has to say so.

Recorded with torch 2.13 on one CPU thread. Other processors round otherwise, hence the tolerance; a factor in a loss,
another mask, order or schedule moves these numbers a hundred times further. The curve without dropout is as old as the
first version of the package; the one with dropout was recorded when its masks became those of the rows.
"""

import json
from pathlib import Path

import pytest
import torch
from job import distill, library
from transformers import AutoModelForMaskedLM, BertConfig

from distill.config.compose import corpus_config
from distill.config.settings import DataConfig
from distill.data.wordpiece import corpus_tokenizer

GOLDEN = {
    0.0: {
        "loss/soft": [0.025327, 0.021945, 0.026865, 0.030754, 0.032409, 0.031766],
        "loss/mlm": [5.702649, 5.362341, 5.47429, 5.427478, 5.35591, 5.23653],
        "loss/cosine": [0.069432, 0.059184, 0.059654, 0.057922, 0.056586, 0.054886],
        "grad_norm": [4.925034, 3.605728, 3.865417, 3.970963, 3.97573, 6.86095],
    },
    0.1: {
        "loss/soft": [0.042852, 0.039533, 0.044085, 0.04549, 0.046058, 0.044223],
        "loss/mlm": [5.674515, 5.428327, 5.463496, 5.438964, 5.36907, 5.289928],
        "loss/cosine": [0.115635, 0.106441, 0.109008, 0.102132, 0.10084, 0.096456],
        "grad_norm": [4.523359, 3.659518, 3.659285, 3.833908, 3.779884, 6.538711],
    },
}
SETTINGS = (
    "objective=masked",
    "corpus={heldout:0.1,max_sequences:64,sequence_length:32}",
    "data.workers=1",
    "teacher=pretrained",
    "student.layers=[0,2]",
    "objective.soft.positions=all",
    "objective.masking={mlm_probability:0.15,smoothing:0.7}",
    "precision=fp32",
    "train={batch_size:4,accumulate:3,epochs:1}",
    "optimizer.lr=2e-3",
    "evaluate={sets:[heldout],max_sequences:4,pseudo_perplexity:{fraction:0.1}}",
)


@pytest.mark.parametrize("dropout", GOLDEN)
def test_the_loss_curve_is_the_one_written_down(dropout: float, tmp_path: Path) -> None:
    books = library(tmp_path / "books")
    corpus = corpus_config({"kind": "gutenberg", "path": str(books), "heldout": 0.1, "vocab_size": 300})
    tokenizer = corpus_tokenizer(corpus, DataConfig(cache=str(tmp_path / "cache"), workers=1))
    torch.manual_seed(11)
    size = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 64}
    config = BertConfig(vocab_size=len(tokenizer), max_position_embeddings=32, initializer_range=0.1, **size)
    AutoModelForMaskedLM.from_config(config).save_pretrained(tmp_path / "teacher")
    tokenizer.save_pretrained(tmp_path / "teacher")
    status = distill(
        "+recipe=distilbert_gutenberg",
        *SETTINGS,
        f"corpus.path={books}",
        f"data.cache={tmp_path / 'cache'}",
        f"teacher.path={tmp_path / 'teacher'}",
        f"student.dropout={dropout}",
        f"hydra.run.dir={tmp_path / 'run'}",
    )
    assert status == 0
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    keys = ("loss/soft", "loss/mlm", "loss/cosine", "grad_norm")
    measured = {key: [round(line[key], 6) for line in lines] for key in keys}
    assert measured.keys() == GOLDEN[dropout].keys(), measured
    for key, values in GOLDEN[dropout].items():
        assert measured[key] == pytest.approx(values, rel=1e-3), measured
