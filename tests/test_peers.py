"""The step beside those of others: what its matrix products are, and Distill's part of the script."""

from pathlib import Path

import pytest
import torch
from chat_templates import smollm2
from job import library
from test_benchmarks import script
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.step.products import Floor, products


def test_products_of_a_causal_pair() -> None:
    """As many operations as the formula has: 2 for each weight and token, three times where it is trained."""
    sizes = {"hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 40}
    teacher, student = (
        LlamaForCausalLM(LlamaConfig(vocab_size=50, num_hidden_layers=layers, tie_word_embeddings=True, **sizes))
        for layers in (3, 2)
    )
    counts = products(teacher, student, sequences=2, length=8)
    weights = 2 * 16 * 16 + 2 * 16 * 8 + 3 * 16 * 40
    a_layer, head = 2 * 16 * weights + 2 * (2 * 4) * 8 * 4 * 8, 2 * (2 * 7) * 16 * 50
    operations = sum(count * 2 * p.group * p.tokens * p.inner * p.outer for p, count in counts.items())
    assert operations == (3 + 3 * 2) * a_layer + (1 + 3) * head
    floor = Floor(counts, torch.float32)
    floor.measure()
    assert floor.rounds == 1 and floor.seconds > 0


@pytest.mark.slow
def test_peers(tmp_path: Path) -> None:
    """Distill alone, on a pair of random weights; the others want an environment of their own."""
    folder = tmp_path / "teacher"
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 64}
    tokenizer = smollm2()
    config = LlamaConfig(vocab_size=len(tokenizer), num_hidden_layers=3, tie_word_embeddings=True, **sizes)
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    library(tmp_path / "books" / "train", 2)
    library(tmp_path / "books" / "heldout", 1)
    pair = ("--teacher", str(folder), "--layers", "0,2", "--books", str(tmp_path / "books"), "--length", "16")
    small = (*pair, "--batch", "2", "--heldout", "4", "--rounds", "1", "--formats", "fp32")
    printed, (result,) = script("step/peers.py", tmp_path, *small, "--quality", "0.01")
    assert result["seconds"] and result["peak"] > result["state"] > 0 and result["perplexity"] > 1
    assert "| distill fp32 |" in printed and "student before training: perplexity" in printed
