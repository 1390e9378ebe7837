"""Samples of text: how models continue the beginnings of a few sequences of an evaluation set.

Tokens are drawn, as small models that take the most probable one soon repeat themselves. The random numbers are the
same for all models and in every run.
"""

import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from distill.config.objective import SamplingConfig
from distill.data.collate.clm import CausalLM
from distill.data.prompts import prompt_of
from distill.data.sequence_format import SequenceFormat
from distill.data.sequence_store import ids_of
from distill.evaluation.evaluator import Evaluator
from distill.evaluation.measures import Scoring
from distill.evaluation.sets import SEED, EvaluationSet
from distill.evaluation.speed import uncompiled
from distill.models.generation import can_complete, complete
from distill.models.precision import autocast
from distill.runtime.seed import key

TEMPERATURE = 0.7
NEW_TOKENS = 40
PROMPT_TOKENS = 32  # of a text without prompts of its own
MAX_PROMPT_TOKENS = 256  # of a conversation up to its first answer, the last of which are kept
KEPT_CONTROLS = "\n\r\t"
UNSHOWN = ("Cc", "Cs", "Cn")  # categories of characters: controls, halves of pairs, and what is none


def choose_prompts(data: EvaluationSet, count: int, sequence_format: SequenceFormat) -> list[np.ndarray]:
    """The beginnings of `count` evenly spaced sequences of a set, fewer where it has fewer; each an array of tokens."""
    numbers = (2 * np.arange(count) + 1) * data.num_sequences // (2 * count)
    width = data.sequences.shape[1]
    room = min(MAX_PROMPT_TOKENS, width - num_new_tokens(width))
    sequences = (data.sequences[number] for number in dict.fromkeys(numbers.tolist()))
    prompts = [prompt_of(sequence, sequence_format, PROMPT_TOKENS, room).tokens for sequence in sequences]
    return [prompt for prompt in prompts if len(prompt)]


def num_new_tokens(width: int) -> int:
    """Tokens of a continuation where sequences have `width`, which no model has to read beyond."""
    return min(NEW_TOKENS, width // 2)


def continue_with_each(
    models: Mapping[str, Any], prompts: Sequence[np.ndarray], evaluator: Evaluator, count: int
) -> dict[str, list[list[int]]]:
    """`continue_prompts` of each model by its name, on rank 0 alone; all ranks call it.

    A module of the user's, and several teachers together, write nothing.
    """
    written: dict[str, list[list[int]]] = {}
    for name, model in models.items():
        # Of a sharded model the other ranks compute their part inside.
        if can_complete(model):
            with evaluator.readers.timed(), evaluator.readers.opened(model) as reader, uncompiled([reader.model]):
                if evaluator.ranks.rank == 0:
                    with autocast(reader.precision, evaluator.ranks.device):
                        written[name] = continue_prompts(reader.model, prompts, evaluator.scoring, count)
    evaluator.ranks.barrier()  # rank 0 may write for longer than the others wait in an exchange
    return written


def continue_prompts(model: Any, prompts: Sequence[np.ndarray], scoring: Scoring, count: int) -> list[list[int]]:
    """What a transformers model writes behind each prompt: `count` tokens, fewer where it ends the text."""
    assert isinstance(scoring.collator, CausalLM)
    settings = SamplingConfig(max_new_tokens=count, temperature=TEMPERATURE)
    assert scoring.collator.format.document_end is not None, "causal sequences have one"
    written, ends = [], {scoring.collator.format.document_end}
    for number, prompt in enumerate(prompts):  # one by one, as sharded models and large vocabularies have little room
        ids = scoring.collator.collate(prompt[None], np.zeros(1, np.uint64), np.arange(1)).ids.numpy()
        keys = key(SEED, "sample", np.array([number]))
        (completion,) = complete(model, [*ids], keys, settings, ends, scoring.vocab)
        written.append(completion.tokens[: -1 if completion.ended else None].tolist())
    return written


def text_of(tokens: Sequence[int] | np.ndarray, tokenizer: PreTrainedTokenizerBase) -> str:
    """Tokens as text that any page can hold, without special ones."""
    text = str(tokenizer.decode(ids_of(np.asarray(tokens)).tolist(), skip_special_tokens=True))
    return "".join(
        "\ufffd" if unicodedata.category(letter) in UNSHOWN and letter not in KEPT_CONTROLS else letter
        for letter in text
    )
