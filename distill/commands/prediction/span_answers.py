"""Answers to questions as spans of a context, from a model that was fine-tuned for them.

Shapes: W windows, S positions, B sequences.
"""

from collections.abc import Sequence
from typing import NotRequired, TypedDict

import numpy as np
import torch

from distill.commands.prediction.batches import head_outputs, sequence_length
from distill.commands.prediction.settings import PredictConfig
from distill.data.collate.spans import Spans
from distill.data.lines import Record
from distill.data.span_windows import SpanConfig, SpanWindows, span_windows
from distill.data.tables.squad import Question, Questions
from distill.evaluation.measures.answers import AnswerConfig, Answered, find_answers
from distill.models.loaded import LoadedModel
from distill.runtime.errors import SettingError

USUAL = SpanConfig()
THRESHOLD = 0.0  # by how much "no answer" has to beat the best answer


class Candidate(TypedDict):
    """One of several answers."""

    answer: str
    start: int
    end: int
    score: float
    probability: float  # the softmax of the scores of all candidates


class FoundAnswer(TypedDict):
    """What a model answers to a question."""

    answer: str  # empty where it has none
    start: int | None  # characters of the context
    end: int | None
    score: float | None  # the sum of the logits of its first and last token
    no_answer_score: float | None  # the same of having no answer, minus `score`
    answers: NotRequired[list[Candidate]]  # the best ones, with `top_k` above 1


def answer_questions(model: LoadedModel, records: Sequence[Record], settings: PredictConfig) -> list[FoundAnswer]:
    """The answer to each record's `question` in its `context`, by the rule that scores a run on SQuAD.

    Longer contexts are read in windows, of the length and stride of the run that trained the model where there is one.

    Returns:
        For each record the answer, its place and its score.
    """
    if not records:
        return []
    best = settings.top_k or 1
    allowed = str(model.corpus.get("version")) == "2.0" if settings.no_answer is None else settings.no_answer
    questions = Questions(
        "input",
        "2.0" if allowed else "1.1",
        tuple(Question(str(n), record["context"], record["question"], ()) for n, record in enumerate(records)),
    )
    rows = _windows(model, questions, settings)
    logits = _logits(model, rows, settings.batch_size)
    usual = AnswerConfig()
    limits = AnswerConfig(max(best, usual.n_best), settings.max_answer_tokens or usual.max_tokens)
    answered = find_answers(questions, rows, logits[..., 0], logits[..., 1], limits)
    return [_outcome(question, best, allowed) for question in answered]


def _windows(model: LoadedModel, questions: Questions, settings: PredictConfig) -> SpanWindows:
    """The windows of the questions, as in the run that trained the model, else of BERT's sizes where these fit."""
    corpus, length = model.corpus, sequence_length(model, settings)
    if settings.sequence_length is None and "sequence_length" not in corpus:
        length = min(length, USUAL.sequence_length)
    windows = SpanConfig(
        length,
        int(corpus.get("stride") or min(USUAL.stride, length // 3)),
        int(corpus.get("max_query") or min(USUAL.max_query, max(length // 2 - 4, 1))),
    )
    try:
        return span_windows(questions, model.tokenizer, windows, "rows", scoring=True)
    except SettingError as error:
        raise SettingError(str(error).replace("rows.", "")) from None


def _logits(model: LoadedModel, rows: SpanWindows, batch_size: int) -> np.ndarray:
    """Those of an answer's first and last token, float32 [W, S, 2]; 0 at padding, which no answer touches."""
    logits = np.zeros((*rows.sequences.shape, 2), np.float32)
    collator = Spans(rows)
    for numbers, values in head_outputs(model, rows.sequences, rows.pad_id, collator, "span", batch_size):
        logits[numbers, : values.shape[1]] = values
    return logits


def _outcome(answered: Answered, best: int, may_lack: bool) -> FoundAnswer:
    candidates = answered.candidates
    first = candidates[0] if candidates else None
    # A context without a token has no span to answer with.
    lacks = first is None or (may_lack and answered.null_odds > THRESHOLD)
    answer = None if lacks else first
    outcome = FoundAnswer(
        answer="" if answer is None else answer.text,
        start=None if answer is None else answer.place[0],
        end=None if answer is None else answer.place[1],
        score=None if first is None else first.score,
        no_answer_score=None if first is None else float(answered.null_odds),
    )
    if best > 1:
        scores = torch.tensor([candidate.score for candidate in candidates], dtype=torch.float64)
        probabilities = scores.softmax(0).tolist() if candidates else []
        outcome["answers"] = [
            Candidate(
                answer=candidate.text,
                start=candidate.place[0],
                end=candidate.place[1],
                score=candidate.score,
                probability=p,
            )
            for candidate, p in list(zip(candidates, probabilities, strict=True))[:best]
        ]
    return outcome
