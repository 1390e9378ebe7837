"""Samples of text against a plain loop of draws, and the prompts that they continue."""

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
from distill.data.prompts import prompt_of
from distill.data.sequence_format import SequenceFormat, causal_format
from distill.data.sequence_store import ids_of
from distill.distributed.single import Single
from distill.evaluation.measures import Scoring
from distill.evaluation.samples import choose_prompts, continue_prompts, num_new_tokens, text_of
from distill.evaluation.sets import EvaluationSet
from distill.models.generation import can_complete

END, PAD = 0, 99
T, F = [True], [False]
FORMAT = SequenceFormat(None, None, None, END, None, PAD, 1)


def scoring_of(tokenizer: Any, packed: bool, **fields: Any) -> Scoring:
    sequence_format = replace(causal_format(tokenizer), **fields)
    device = Single(BackendConfig(device="cpu"))
    return Scoring(CausalLM(sequence_format, packed), tokenizer, EvaluateConfig(), device)


def test_samples_are_the_same_every_time_up_to_what_ends_the_text_and_leave_no_trace() -> None:
    """Whatever a model's own settings of generation are; `tests/models/test_generation.py` has how they are drawn."""
    tokenizer = vocabulary_of("llama")
    model = make_family("llama", **special_ids(tokenizer))
    prompts = [np.random.default_rng(length).integers(5, 40, length) for length in (9, 2, 5)]
    never = scoring_of(tokenizer, True, document_end=len(tokenizer))
    state, whole = torch.get_rng_state(), continue_prompts(model, prompts, never, 12)
    assert {len(tokens) for tokens in whole} == {12} and len({tuple(tokens) for tokens in whole}) == 3
    model.generation_config.update(top_k=1, repetition_penalty=9.0)
    settings, end = model.generation_config.to_dict(), whole[0][6]
    written = continue_prompts(model, prompts, scoring_of(tokenizer, True, document_end=end), 12)
    assert written == [tokens[: tokens.index(end)] if end in tokens else tokens for tokens in whole]
    assert torch.equal(state, torch.get_rng_state()) and model.generation_config.to_dict() == settings


@pytest.mark.parametrize(
    ("sequence", "prompt", "rest"),
    [
        (list(range(1, 81)), list(range(1, 33)), list(range(33, 81))),  # 32 tokens of a long text
        (list(range(1, 21)), list(range(1, 11)), list(range(11, 21))),  # half of the room of a short sequence
        (
            [5, END, *range(1, 13), END, 6, PAD, PAD, PAD, PAD],
            [1, 2, 3, 4, 5, 6],
            [*range(7, 13), END],
        ),  # half of the longest document
        ([PAD] * 8, [], []),
        ([END] * 8, [], [END]),
        ([7, PAD, PAD, PAD], [7], []),
        # Up to the first answer, whatever stands before the prompt.
        (records([*range(1, 7), *[PAD] * 8], T + F * 2 + T + F + T * 9), [1, 2, 3], [4]),
        (
            records([2, PAD, 3, END, 9, PAD, PAD, PAD], [False, *[True] * 7], [False, True, *[False] * 6]),
            [2],
            [PAD, 3, END],
        ),
        (records(range(1, 9), False), [5, 6, 7, 8], []),  # its end, as there is no room
    ],
)
def test_prompts_are_beginnings_of_documents(sequence: Any, prompt: list[int], rest: list[int]) -> None:
    width = len(sequence)
    found = prompt_of(np.array(sequence), FORMAT, limit=32, room=width - num_new_tokens(width))
    assert ids_of(found.tokens).tolist() == prompt and ids_of(found.rest).tolist() == rest
    assert found.tokens.dtype == np.array(sequence).dtype and len(prompt) + num_new_tokens(width) <= width


@pytest.mark.parametrize(("available", "firsts"), [(30, [5, 15, 25]), (3, [0, 1, 2]), (2, [0, 1]), (1, [0])])
def test_prompts_are_evenly_spaced(available: int, firsts: list[int]) -> None:
    sequences = np.arange(1, available + 1, dtype=np.uint16)[:, None].repeat(8, 1)
    chosen = choose_prompts(EvaluationSet("set", "", sequences, 1), 3, FORMAT)
    assert [int(prompt[0]) - 1 for prompt in chosen] == firsts and {len(prompt) for prompt in chosen} == {4}


def test_a_generate_that_is_not_that_of_transformers_is_not_called() -> None:
    class Own(torch.nn.Module):
        def generate(self, ids: Any, length: int) -> Any:
            raise AssertionError

    assert not can_complete(Own()) and can_complete(make_family("gpt2"))


def test_text_holds_nothing_that_a_page_cannot_hold() -> None:
    tokenizer = vocabulary_of("gpt2")
    ids = tokenizer("a\x00b\x1b\nc\ufffe").input_ids
    assert text_of(records(ids), tokenizer) == "a\ufffdb\ufffd\nc\ufffd"
    assert text_of([ids[0], tokenizer.eos_token_id], tokenizer) == "a"
