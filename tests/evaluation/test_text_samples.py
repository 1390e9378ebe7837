"""Samples of text: the greedy limit against transformers' `generate`, draws against probabilities, and the prompts."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from families import make_family
from tiny import records
from vocabularies import special_ids, vocabulary_of

from distill.config.settings import BackendConfig, EvaluateConfig
from distill.data.collate.clm import CausalLM
from distill.data.sequence_format import SequenceFormat, causal_format
from distill.data.sequence_store import ids_of
from distill.distributed.single import Single
from distill.evaluation.measures import Scoring
from distill.evaluation.samples import choose_prompts, continue_prompts, draw, num_new_tokens, prompt_of, text_of
from distill.evaluation.sets import EvaluationSet
from distill.models.language_model import LanguageModel

END, PAD = 0, 99
FORMAT = SequenceFormat(None, None, None, END, None, PAD, 1)
GREEDY = 1e-6  # a temperature at which only the most probable token is drawn


def scoring_of(tokenizer: Any, packed: bool, **fields: Any) -> Scoring:
    sequence_format = replace(causal_format(tokenizer), **fields)
    device = Single(BackendConfig(device="cpu"))
    return Scoring(CausalLM(sequence_format, packed), tokenizer, EvaluateConfig(), device)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_the_most_probable_tokens_are_those_of_generate(family: str, packed: bool) -> None:
    """For prompts of several lengths together, and up to a token that ends the text."""
    tokenizer = vocabulary_of(family)
    model = make_family(family, **special_ids(tokenizer))
    prompts = [np.random.default_rng(length).integers(5, 40, length) for length in (9, 2, 5)]

    def generated(prompt: np.ndarray, end: int | None) -> list[int]:
        ids = torch.from_numpy(prompt)[None]
        settings = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": end, "pad_token_id": 0}
        return model.generate(ids, attention_mask=torch.ones_like(ids), **settings)[0, len(prompt) :].tolist()

    def written(end: int) -> list[list[int]]:
        scoring = scoring_of(tokenizer, packed, document_end=end)
        return continue_prompts(LanguageModel(model), prompts, scoring, 12, GREEDY)

    model.generation_config.eos_token_id = None
    with torch.no_grad():
        whole = [generated(prompt, None) for prompt in prompts]
        assert len({tuple(tokens) for tokens in whole}) == 3 and all(len(set(tokens)) > 1 for tokens in whole)
        end = whole[0][6]  # ends one text early, whichever others have it
        cut = [generated(prompt, end) for prompt in prompts]
        assert written(end) == [tokens[: tokens.index(end)] if end in tokens else tokens for tokens in cut]
        never = next(token for token in range(40) if not any(token in tokens for tokens in whole))
        assert written(never) == whole


def test_draws_follow_the_probabilities() -> None:
    logits, count = torch.tensor([0.3, -1.0, 2.0, 0.0, 1.1]), 10_000
    levels = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    drawn = draw(logits.expand(count, -1), levels, 0.7)
    expected = count * (logits.double() / 0.7).softmax(-1)
    assert (torch.bincount(drawn, minlength=5) - expected).abs().max() <= 1


def test_samples_are_the_same_every_time_and_leave_no_trace() -> None:
    tokenizer = vocabulary_of("gpt2")
    model = make_family("gpt2", **special_ids(tokenizer))
    weights, state = {name: value.clone() for name, value in model.state_dict().items()}, torch.get_rng_state()
    prompts, scoring = [np.array([7, 8, 9])], scoring_of(tokenizer, True)
    with torch.no_grad():
        one, other = (continue_prompts(LanguageModel(model), prompts, scoring, 20) for _ in range(2))
        greedy = continue_prompts(LanguageModel(model), prompts, scoring, 20, GREEDY)
    assert one == other != greedy
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize(
    ("sequence", "prompt"),
    [
        (list(range(1, 81)), list(range(1, 33))),  # 32 tokens of a long text
        (list(range(1, 21)), list(range(1, 11))),  # half of the room of a short sequence
        ([5, END, *range(1, 13), END, 6, PAD, PAD, PAD, PAD], [1, 2, 3, 4, 5, 6]),  # half of the longest document
        ([PAD] * 8, []),
        ([END] * 8, []),
        ([7, PAD, PAD, PAD], [7]),
        # Up to the first answer, whatever stands before the prompt.
        (records([*range(1, 7), *[PAD] * 8], [True, False, False, True, False, *[True] * 9]), [1, 2, 3]),
        (records([2, PAD, 3, END, 9, PAD, PAD, PAD], [False, *[True] * 7], [False, True, *[False] * 6]), [2]),
        (records(range(1, 9), False), [5, 6, 7, 8]),  # its end, as there is no room
    ],
)
def test_prompts_are_beginnings_of_documents(sequence: Any, prompt: list[int]) -> None:
    found = prompt_of(np.array(sequence), FORMAT)
    assert ids_of(found).tolist() == prompt and found.dtype == np.array(sequence).dtype
    assert len(found) + num_new_tokens(len(sequence)) <= len(sequence)


@pytest.mark.parametrize(("available", "firsts"), [(30, [5, 15, 25]), (3, [0, 1, 2]), (2, [0, 1]), (1, [0])])
def test_prompts_are_evenly_spaced(available: int, firsts: list[int]) -> None:
    sequences = np.arange(1, available + 1, dtype=np.uint16)[:, None].repeat(8, 1)
    chosen = choose_prompts(EvaluationSet("set", "", sequences, 1), 3, FORMAT)
    assert [int(prompt[0]) - 1 for prompt in chosen] == firsts and {len(prompt) for prompt in chosen} == {4}


def test_text_holds_nothing_that_a_page_cannot_hold() -> None:
    tokenizer = vocabulary_of("gpt2")
    ids = tokenizer("a\x00b\x1b\nc\ufffe").input_ids
    assert text_of(records(ids), tokenizer) == "a\ufffdb\ufffd\nc\ufffd"
    assert text_of([ids[0], tokenizer.eos_token_id], tokenizer) == "a"
