"""Questions as sequences: each with a window of its context, and where in the sequence the answer stands.

A context that is too long for a sequence is cut into windows that overlap, as in the published code of BERT (Devlin et
al. 2019) and ALBERT (Lan et al. 2020). Shapes: W windows, S positions of a sequence, T tokens of a context.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple, Self

import numpy as np

from distill.data.tables.squad import Question, Questions
from distill.data.text_pairs import LabelledSequences, TextEncoder, digest_of
from distill.runtime.errors import SettingError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NO_ANSWER = 0  # position of [CLS], which stands for "this window has no answer"


@dataclass
class SpanConfig:
    """How questions become sequences."""

    sequence_length: int = 384  # ids of a sequence
    stride: int = 128  # tokens from the beginning of one window to that of the next, if windows then overlap
    max_query: int = 64  # tokens of a question; the rest is cut off


@dataclass(frozen=True)
class ContextTokens:
    """The places of the tokens of windows in their contexts, which turn positions back into text."""

    # [W, S, 2] int32, characters [begin, end) without blanks around them; -1: no token of a context
    offsets: np.ndarray
    fullest: np.ndarray  # [W, S] bool: the window in which this token of the context has most context on both sides


@dataclass(frozen=True, kw_only=True)
class SpanWindows(LabelledSequences):
    """W windows of questions, whose second text is a part of the context.

    Targets are `span_start` and `span_end`, the positions of the answer's first and last token; NO_ANSWER where the
    window lacks some of it.
    """

    questions: np.ndarray  # [W] int64, the number of each window's question; those of a question stand together
    unreached: int = 0  # questions with an answer that no window holds whole
    context: ContextTokens | None = None  # None in training, which does without

    def with_unlabelled(self, others: Self) -> Self:
        owners = np.concatenate([self.questions, others.questions + self.questions.max(initial=-1) + 1])
        return replace(super().with_unlabelled(others), questions=owners, context=None)


class _Window(NamedTuple):
    """A sequence in the making, with P tokens of the context."""

    question: int
    ids: list[int]
    first: int  # position of its first token of the context
    answer: tuple[int, int] | None  # positions of the answer's first and last token, where all of it is here
    offsets: np.ndarray  # [P, 2] characters of its tokens of the context
    best: np.ndarray  # [P] bool: those that have most context here


def span_windows(
    questions: Questions, tokenizer: "PreTrainedTokenizerBase", settings: SpanConfig, setting: str, scoring: bool
) -> SpanWindows:
    """The windows of all questions, in their order.

    Args:
        setting: what error lines call `settings`.
        scoring: whether to keep what turns positions back into text.

    Raises:
        SettingError: sequences are too short, windows do not move, or the tokenizer lacks a special token.
    """
    encoder = TextEncoder(tokenizer)
    for name, value in (("max_query", settings.max_query), ("stride", settings.stride)):
        if value < 1:
            raise SettingError("give a number of tokens, 1 at least", setting=f"{setting}.{name}", value=value)
    if (shortest := encoder.surroundings(pairs=True).length + settings.max_query + 1) > settings.sequence_length:
        problem = f"no room for a context behind {settings.max_query} tokens of a question"
        cure = f"set it to {shortest} or more, or {setting}.max_query lower"
        raise SettingError(problem, setting="corpus.sequence_length", value=settings.sequence_length, cure=cure)
    windows = list(_windows(questions.questions, encoder, settings))
    shape = (len(windows), settings.sequence_length)
    sequences, segments = np.full(shape, encoder.pad_id, encoder.dtype), np.zeros(shape, np.uint8)
    labels = np.full((len(windows), 2), NO_ANSWER, np.int64)
    context = ContextTokens(np.full((*shape, 2), -1, np.int32), np.zeros(shape, bool)) if scoring else None
    for number, window in enumerate(windows):
        length, positions = len(window.ids), slice(window.first, window.first + len(window.best))
        sequences[number, :length] = window.ids
        segments[number, window.first : length] = 1
        if window.answer is not None:
            labels[number] = window.answer
        if context is not None:
            context.offsets[number, positions] = window.offsets
            context.fullest[number, positions] = window.best
    owners = np.array([window.question for window in windows], np.int64)
    found = {window.question for window in windows if window.answer is not None}
    starts, ends = labels.T.copy()
    return SpanWindows(
        sequences=sequences,
        segments=segments,
        targets={"span_start": starts, "span_end": ends},
        pad_id=encoder.pad_id,
        digest=digest_of(sequences, segments, labels, owners, *(() if context is None else vars(context).values())),
        questions=owners,
        unreached=sum(question.place is not None for question in questions.questions) - len(found),
        context=context,
    )


def _windows(questions: tuple[Question, ...], encoder: TextEncoder, settings: SpanConfig) -> Iterator[_Window]:
    """All windows, into which `tokenizers` cuts the contexts."""
    around = encoder.surroundings(pairs=True)
    queries = encoder.encode([question.question.strip() for question in questions])
    contexts = encoder.encode([question.context for question in questions])
    offsets_of: dict[str, np.ndarray] = {}
    for number, (question, query, context) in enumerate(zip(questions, queries, contexts, strict=True)):
        if question.context not in offsets_of:
            offsets_of[question.context] = _trimmed(context.offsets, question.context)
        offsets, before = offsets_of[question.context], [*around.before, *query.ids[: settings.max_query]]
        before += around.between
        room = settings.sequence_length - len(before) - len(around.after)
        # Windows that a stride would lay side by side overlap by half, or no answer across their ends could be found.
        step = settings.stride if settings.stride < room else max(1, room // 2)
        context.truncate(room, stride=room - step)
        parts = [part.ids for part in (context, *context.overflowing)]
        begins = np.arange(len(parts)) * step
        best = _best_of(begins, begins + np.array([len(ids) for ids in parts]), len(offsets))
        place = None if question.place is None else tokens_of(question.place, offsets)
        for index, (begin, ids) in enumerate(zip(begins.tolist(), parts, strict=True)):
            end, shift = begin + len(ids), len(before) - begin
            is_here = place is not None and begin <= place[0] and place[1] < end
            answer = (place[0] + shift, place[1] + shift) if place is not None and is_here else None
            row = [*before, *ids, *around.after]
            yield _Window(number, row, len(before), answer, offsets[begin:end], best[begin:end] == index)


def tokens_of(place: tuple[int, int], offsets: np.ndarray) -> tuple[int, int] | None:
    """The first and the last token with a character of the place [begin, end); None where there is none."""
    begins, ends = offsets[:, 0], offsets[:, 1]
    inside = np.flatnonzero((ends > place[0]) & (begins < place[1]) & (ends > begins))
    return (int(inside[0]), int(inside[-1])) if len(inside) else None


def _trimmed(offsets: list[tuple[int, int]], text: str) -> np.ndarray:
    """[T, 2] offsets without the blanks around a token, which many tokenizers count to the token behind them.

    A token of blanks alone gets an empty stretch.
    """
    spans = np.asarray(offsets, np.int32).reshape(-1, 2)
    blank = np.fromiter((character.isspace() for character in text), bool, len(text))
    indices = np.arange(len(text) + 1, dtype=np.int32)
    solid = np.append(~blank, True)
    following = np.minimum.accumulate(np.where(solid, indices, len(text))[::-1])[::-1]  # the next that is no blank
    preceding = np.maximum.accumulate(np.append(0, np.where(~blank, indices[1:], 0)))  # the end of the last such before
    begins = np.minimum(following[spans[:, 0]], spans[:, 1])
    return np.stack([begins, np.maximum(preceding[spans[:, 1]], begins)], axis=1).astype(np.int32)


def _best_of(begins: np.ndarray, ends: np.ndarray, tokens: int) -> np.ndarray:
    """[tokens] the index of the window [begin, end) that gives each token of a context most context.

    That is the window with the largest min(tokens on the left, tokens on the right) + length / 100, the first of
    several: the rule of BERT's published code, so that every token of a context is scored in one window alone.
    """
    begins, ends, places = begins[:, None], ends[:, None], np.arange(tokens)
    score = np.minimum(places - begins, ends - 1 - places) + 0.01 * (ends - begins)
    best: np.ndarray = np.where((places >= begins) & (places < ends), score, -np.inf).argmax(0)
    return best
