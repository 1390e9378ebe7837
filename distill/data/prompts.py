"""The beginnings of documents, which models continue. Shapes: S positions."""

from dataclasses import dataclass

import numpy as np

from distill.data.sequence_format import SequenceFormat
from distill.data.sequence_store import loss_mask_of, outer_ids


@dataclass(frozen=True)
class Prompt:
    """The beginning of a document in a sequence, and how it goes on there."""

    tokens: np.ndarray  # as the sequence has them
    rest: np.ndarray  # of the document, with the token that ends it; of a conversation to the end of its first answer


def prompt_of(sequence: np.ndarray, sequence_format: SequenceFormat, limit: int, room: int) -> Prompt:
    """The beginning of the longest document in a sequence [S].

    Where the document has prompts of its own it goes up to the first answer, and loses its beginning where it has no
    room; else it is half of the document at most.

    Args:
        limit: most tokens of a prompt from a text without prompts of its own.
        room: most tokens of any prompt.
    """
    ids = outer_ids(sequence)
    ends = ids == sequence_format.document_end
    is_text = ~ends & (ids != sequence_format.pad)
    documents = np.split(np.arange(len(sequence)), np.flatnonzero(ends) + 1)
    numbers = max(documents, key=lambda numbers: int(is_text[numbers].sum()))
    numbers = numbers[is_text[numbers] | ends[numbers]]
    text, document = numbers[is_text[numbers]], sequence[numbers]
    loss_mask = loss_mask_of(sequence[text])
    if loss_mask.all():
        end = min(limit, room, (len(text) + 1) // 2)
        return Prompt(document[:end], document[end:])
    first = int(loss_mask.argmin())
    answers = np.flatnonzero(loss_mask[first:])
    end = first + int(answers[0]) if len(answers) else len(text)
    after = loss_mask_of(document[end:])
    answer = len(after) if after.all() else int(after.argmin())
    return Prompt(document[:end][-room:], document[end : end + answer])
