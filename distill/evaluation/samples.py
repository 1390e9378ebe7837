"""Samples of text: how models continue the beginnings of a few sequences of an evaluation set.

Tokens are drawn, as small models that take the most probable one soon repeat themselves. The random numbers are the
same for all models and in every run, and come from no generator that training reads. Shapes: P prompts, S positions,
V vocabulary.
"""

import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from distill.data.collate.clm import CausalLM
from distill.data.sequence_format import SequenceFormat
from distill.data.sequence_store import ids_of, loss_mask_of, outer_ids, padded, recorded
from distill.evaluation.evaluator import Evaluator
from distill.evaluation.measures import Scoring
from distill.evaluation.sets import SEED, EvaluationSet
from distill.models.language_model import LanguageModel, OutputSpec
from distill.runtime.seed import key, uniform

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
    """`continue_prompts` of each model by its name, on rank 0 alone; all ranks call it."""
    written: dict[str, list[list[int]]] = {}
    for name, model in models.items():
        # Of a sharded model the other ranks compute their part inside.
        with evaluator.readers.timed(), evaluator.readers.opened(model) as reader:
            if evaluator.ranks.rank == 0:
                written[name] = continue_prompts(reader, prompts, evaluator.scoring, count)
    return written


def continue_prompts(
    model: LanguageModel, prompts: Sequence[np.ndarray], scoring: Scoring, count: int, temperature: float = TEMPERATURE
) -> list[list[int]]:
    """What a model writes behind each prompt: `count` tokens, fewer where it ends the text.

    Every token is a forward of all that is before it: a model of the user's has no cache, nor `generate`.
    """
    assert isinstance(scoring.collator, CausalLM)
    collator, numbers = scoring.collator, np.arange(len(prompts))
    lengths = np.array([len(prompt) for prompt in prompts])
    tokens = padded([recorded(prompt) for prompt in prompts], lengths.max() + count, collator.pad_id)  # [P, S]
    levels = scoring.tensor(uniform(key(SEED, "samples", numbers[:, None], np.arange(count))))  # [P, count]
    written = np.full((len(prompts), count), -1, np.int64)
    for place in range(count):
        width = int(lengths.max())
        batch = collator.collate(tokens[:, :width], numbers.astype(np.uint64), numbers).to(scoring.ranks.device)
        last = scoring.tensor(numbers * width + lengths - 1)
        rows = model(batch.inputs, batch.documents, OutputSpec(True, last)).head_rows
        assert rows is not None
        written[:, place] = draw(model.logits(rows, scoring.vocab), levels[:, place], temperature).cpu().numpy()
        tokens["id"][numbers, lengths] = written[:, place]
        tokens["inner"][numbers, lengths] = True  # whatever it is, no end and no padding to the collator
        lengths += 1
        if (written == collator.format.document_end).any(1).all():
            break
    return [_up_to(collator.format.document_end, row[: place + 1].tolist()) for row in written]


def draw(logits: Tensor, levels: Tensor, temperature: float) -> Tensor:
    """The token of each row at which the sum of the probabilities, the largest first, reaches a level: [P] int64.

    With the same levels two models draw the same token as long as they rank tokens alike.

    Args:
        logits: [P, V].
        levels: [P] in (0, 1), uniform.
    """
    probabilities, tokens = (logits.double() / temperature).softmax(-1).sort(descending=True, stable=True)
    places = (probabilities.cumsum(-1) < levels[:, None]).sum(-1).clamp(max=logits.shape[1] - 1)
    return tokens.gather(-1, places[:, None])[:, 0]


def text_of(tokens: Sequence[int] | np.ndarray, tokenizer: PreTrainedTokenizerBase) -> str:
    """Tokens as text that any page can hold, without special ones."""
    text = str(tokenizer.decode(ids_of(np.asarray(tokens)).tolist(), skip_special_tokens=True))
    return "".join(
        "\ufffd" if unicodedata.category(letter) in UNSHOWN and letter not in KEPT_CONTROLS else letter
        for letter in text
    )


def _up_to(end: int | None, tokens: list[int]) -> list[int]:
    return tokens[: tokens.index(end)] if end in tokens else tokens
