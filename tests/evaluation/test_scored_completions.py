"""Perplexity and bits per byte of text with prompts are those of what counts, each token seen after its prompt."""

from pathlib import Path

import numpy as np
import pytest
import torch
from chats import FORMAT, TEMPLATE, TOKENIZER, chats, naive_rows, tokens_of
from families import make_family
from tiny import all_of
from torch.nn.functional import cross_entropy

from distill.config.settings import BackendConfig, EvaluateConfig, PrecisionConfig
from distill.data.collate.clm import CausalLM
from distill.distributed.single import Single
from distill.evaluation.evaluator import Evaluator
from distill.evaluation.measures import Scoring
from distill.evaluation.sets import EvaluationSet
from distill.evaluation.text_bytes import TextBytes
from distill.tasks.clm import Clm

WIDTH = 24


def evaluator(prompts: bool = True, packed: bool = True) -> Evaluator:
    settings = EvaluateConfig(batch_size=5, stride=1)
    sets = [EvaluationSet("prompts", "", np.zeros((1, WIDTH), np.uint32), 1, prompts=prompts)]
    scoring = Scoring(CausalLM(FORMAT, packed), TOKENIZER, settings, Single(BackendConfig(device="cpu")), sets)
    return Evaluator(scoring, Clm().passes(scoring), PrecisionConfig())


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "apart"])
def test_scores_are_those_of_a_naive_loop(tmp_path: Path, packed: bool) -> None:
    assert "[SEP]" in TEMPLATE  # inside a conversation, over whose sequences a window runs all the same
    found = tokens_of(chats(tmp_path, sequence_length=WIDTH, cross_documents=packed))
    data = EvaluationSet("chats", "", all_of(found.sequences), found.documents, found.sequences, prompts=found.prompts)
    model = make_family("gpt2")
    scoring = evaluator(packed=packed)
    scores = scoring.score(model, "model", [data])
    stream = [token for row in naive_rows(WIDTH, packed) for token in row]
    is_text, lengths = (part[0] for part in TextBytes(TOKENIZER)(np.array([[id_ for id_, *_ in stream]])))
    losses, bits, num_bytes = [], 0.0, 0
    for at, (id_, counts, number) in enumerate(stream):
        # A window holds the token itself and those of its conversation before it, which may begin in the sequence
        # before.
        context = [other for other, _, of in stream[max(0, at - WIDTH + 1) : at] if of == number]
        if not counts or not context:
            continue
        with torch.inference_mode():
            logits = model(input_ids=torch.tensor([context])).logits[0, -1]  # of all tokens: its own probabilities
        losses.append(float(cross_entropy(logits.double(), torch.tensor(id_))))
        bits += losses[-1] / np.log(2) * is_text[at]
        num_bytes += int(lengths[at])
    assert scores["perplexity"]["chats"] == pytest.approx(np.exp(np.mean(losses)), rel=1e-4)
    assert scores["bits_per_byte"]["chats"] == pytest.approx(bits / num_bytes, rel=1e-4)
    described = scoring.describe(data)
    assert described["positions"] == len(losses) < 0.7 * described["tokens"] and described["tokens"] == len(stream)


def test_the_measure_says_what_it_leaves_out() -> None:
    assert "prompts are read and not scored" in evaluator().measures[0].explanation
    assert "prompt" not in evaluator(prompts=False).measures[0].explanation
