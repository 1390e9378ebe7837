"""The loss curve of a small distillation, written down: a change that moves it has to say so.

Recorded with torch 2.13 on one CPU thread. Other processors round otherwise, hence the tolerance; a factor in a loss,
another mask, order or schedule moves these numbers a hundred times further.
"""

import json
from pathlib import Path

import pytest
import torch
from job import distill, library
from transformers import AutoModelForMaskedLM, BertConfig

from distill.config import Corpus, Kind
from distill.tokens import train_wordpiece

GOLDEN = {
    "loss/soft": [0.043411, 0.03959, 0.044101, 0.046766, 0.046389, 0.049253],
    "loss/mlm": [5.641373, 5.317724, 5.459949, 5.425689, 5.372592, 5.294367],
    "loss/cosine": [0.116358, 0.106721, 0.109042, 0.106539, 0.099358, 0.110688],
    "grad_norm": [4.669448, 3.530518, 3.858956, 3.798103, 3.940115, 6.637704],
}


def test_the_loss_curve_is_the_one_written_down(tmp_path: Path) -> None:
    books = library(tmp_path / "books")
    corpus = Corpus(kind=Kind.gutenberg, path=str(books), cache=str(tmp_path / "cache"), workers=1, heldout=0.1)
    tokenizer = train_wordpiece(corpus, 300, corpus.cache)
    torch.manual_seed(11)
    size = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 64}
    config = BertConfig(vocab_size=len(tokenizer), max_position_embeddings=32, initializer_range=0.1, **size)
    AutoModelForMaskedLM.from_config(config).save_pretrained(tmp_path / "teacher")
    tokenizer.save_pretrained(tmp_path / "teacher")
    status = distill(
        "+recipe=distilbert_gutenberg",
        f"corpus.path={books}",
        f"corpus.cache={tmp_path / 'cache'}",
        "corpus={workers:1,heldout:0.1,rows:64,sequence_length:32}",
        "teacher=pretrained",
        f"teacher.path={tmp_path / 'teacher'}",
        "student.dropout=0.1",
        "train={batch_size:4,accumulate:3,epochs:1}",
        "optimizer.lr=2e-3",
        "evaluate={sets:[heldout],rows:4}",
        f"hydra.run.dir={tmp_path / 'run'}",
    )
    assert status == 0
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    measured = {key: [round(line[key], 6) for line in lines] for key in GOLDEN}
    for key, values in GOLDEN.items():
        assert measured[key] == pytest.approx(values, rel=1e-3), measured
