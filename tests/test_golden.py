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
from distill.data.tokens import train_wordpiece

GOLDEN = {
    "loss/soft": [0.044374, 0.040915, 0.044422, 0.048446, 0.047677, 0.045749],
    "loss/mlm": [5.688395, 5.369462, 5.463419, 5.415443, 5.397589, 5.298283],
    "loss/cosine": [0.119314, 0.107113, 0.107078, 0.109648, 0.101574, 0.099297],
    "grad_norm": [4.636319, 3.503653, 3.961054, 3.786425, 3.963352, 6.828537],
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
