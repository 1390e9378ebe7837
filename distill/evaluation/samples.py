"""Samples of text: how models continue the beginnings of a few sequences of an evaluation set.

Tokens are drawn, as small models that take the most probable one soon repeat themselves. The random numbers are the
same for all models and in every run, and come from no generator that training reads. Shapes: S positions.
"""

import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from transformers import GenerationConfig, PreTrainedTokenizerBase

from distill.data.collate.clm import CausalLM
from distill.data.sequence_format import SequenceFormat
from distill.data.sequence_store import ids_of, loss_mask_of, outer_ids
from distill.evaluation.evaluator import Evaluator
from distill.evaluation.measures import Scoring
from distill.evaluation.sets import SEED, EvaluationSet
from distill.evaluation.speed import uncompiled

TEMPERATURE = 0.7
NEW_TOKENS = 40
PROMPT_TOKENS = 32  # of a text without prompts of its own
MAX_PROMPT_TOKENS = 256  # of a conversation up to its first answer, the last of which are kept
KEPT_CONTROLS = "\n\r\t"
UNSHOWN = ("Cc", "Cs", "Cn")  # categories of characters: controls, halves of pairs, and what is none


def choose_prompts(data: EvaluationSet, count: int, sequence_format: SequenceFormat) -> list[np.ndarray]:
    """The beginnings of `count` evenly spaced sequences of a set, fewer where it has fewer; each an array of tokens."""
    numbers = (2 * np.arange(count) + 1) * data.num_sequences // (2 * count)
    prompts = [prompt_of(data.sequences[number], sequence_format) for number in dict.fromkeys(numbers.tolist())]
    return [prompt for prompt in prompts if len(prompt)]


def prompt_of(sequence: np.ndarray, sequence_format: SequenceFormat) -> np.ndarray:
    """The beginning of the longest document in a sequence [S], with as much room behind it as `num_new_tokens` says.

    Where the document has prompts of its own it goes up to the first answer; else it is half of the document at most.
    """
    ids = outer_ids(sequence)
    ends = ids == sequence_format.document_end
    is_text = ~ends & (ids != sequence_format.pad)
    documents = np.split(np.arange(len(sequence)), np.flatnonzero(ends) + 1)
    document = max((sequence[numbers[is_text[numbers]]] for numbers in documents), key=len)
    room = len(sequence) - num_new_tokens(len(sequence))
    loss_mask = loss_mask_of(document)
    if loss_mask.all():
        return document[: min(PROMPT_TOKENS, room, (len(document) + 1) // 2)]
    first = int(loss_mask.argmin())
    answers = np.flatnonzero(loss_mask[first:])
    end = first + int(answers[0]) if len(answers) else len(document)
    return document[:end][-min(MAX_PROMPT_TOKENS, room) :]


def num_new_tokens(width: int) -> int:
    """Tokens of a continuation where sequences have `width`, which no model has to read beyond."""
    return min(NEW_TOKENS, width // 2)


def continue_with_each(
    models: Mapping[str, Any], prompts: Sequence[np.ndarray], evaluator: Evaluator, count: int
) -> dict[str, list[list[int]]]:
    """`continue_prompts` of each model by its name, on rank 0 alone; all ranks call it.

    A model without `generate`, as one of the user's or several teachers together, writes nothing.
    """
    written: dict[str, list[list[int]]] = {}
    for name, model in models.items():
        # Of a sharded model the other ranks compute their part inside.
        if hasattr(model, "generate"):
            with evaluator.readers.timed(), evaluator.readers.opened(model) as reader, uncompiled([reader.model]):
                if evaluator.ranks.rank == 0:
                    written[name] = continue_prompts(reader.model, prompts, evaluator.scoring, count)
    evaluator.ranks.barrier()  # rank 0 may write for longer than the others wait in an exchange
    return written


def continue_prompts(model: Any, prompts: Sequence[np.ndarray], scoring: Scoring, count: int) -> list[list[int]]:
    """What a transformers model writes behind each prompt: `count` tokens, fewer where it ends the text."""
    assert isinstance(scoring.collator, CausalLM)
    device, end = scoring.ranks.device, scoring.collator.format.document_end
    config = GenerationConfig(
        max_new_tokens=count, do_sample=True, temperature=TEMPERATURE, top_k=0, eos_token_id=end, pad_token_id=0
    )
    written = []
    for number, prompt in enumerate(prompts):
        ids = scoring.collator.collate(prompt[None], np.zeros(1, np.uint64), np.arange(1)).ids.to(device)
        tokens = draw(model, ids, config, SEED + number)[0, ids.shape[1] :].tolist()
        written.append(tokens[: tokens.index(end)] if end in tokens else tokens)
    return written


def draw(model: Any, ids: torch.Tensor, config: GenerationConfig, seed: int) -> torch.Tensor:
    """ids [B, S] with what a transformers model writes behind them, by `config` alone and none of the model's own."""
    own, device = model.generation_config, ids.device
    model.generation_config = GenerationConfig()  # from which what `config` leaves out is read
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            torch.manual_seed(seed)
            # This rank alone draws, also from a sharded model.
            drawn: torch.Tensor = model.generate(
                ids, attention_mask=torch.ones_like(ids), generation_config=config, synced_gpus=False
            )
            return drawn
    finally:
        model.generation_config = own


def text_of(tokens: Sequence[int] | np.ndarray, tokenizer: PreTrainedTokenizerBase) -> str:
    """Tokens as text that any page can hold, without special ones."""
    text = str(tokenizer.decode(ids_of(np.asarray(tokens)).tolist(), skip_special_tokens=True))
    return "".join(
        "\ufffd" if unicodedata.category(letter) in UNSHOWN and letter not in KEPT_CONTROLS else letter
        for letter in text
    )
