"""Answers to questions as spans of a context: fine-tuning on SQuAD and data in its forms."""

import logging

from transformers import PreTrainedTokenizerBase

from distill.config.settings import Config
from distill.data.collate.tables import Labelled
from distill.data.span_windows import SpanConfig, SpanWindows, span_windows
from distill.data.tables.squad import Questions, Squad
from distill.evaluation.questions import SquadSet
from distill.models.kind import SPANS, ModelKind
from distill.runtime.progress import counted
from distill.tasks._table import TableTask

logger = logging.getLogger(__name__)


class Spans(TableTask):
    """Windows of a context with the question before each; exact match and F1 as officially."""

    kind: ModelKind = SPANS
    labels: tuple[str, ...] = ("span_start", "span_end")
    noun = "questions with answers"
    corpora = ("squad",)

    def sequences(
        self, split: Squad, examples: Questions, tokenizer: PreTrainedTokenizerBase, config: Config, setting: str
    ) -> SpanWindows:
        settings = SpanConfig(config.corpus.sequence_length, split.stride, split.max_query)
        windows = span_windows(examples, tokenizer, settings, setting, scoring=setting != "corpus")
        if windows.unreached:
            of_all = f"{windows.unreached:,} of {counted(len(examples), 'question')}"
            logger.info(
                f"{examples.name}: {of_all} have an answer that no window holds whole: raise "
                f"corpus.sequence_length={config.corpus.sequence_length}, or lower {setting}.stride"
            )
        return windows

    def collator(self, sequences: SpanWindows) -> Labelled:
        return Labelled(sequences)

    def evaluation_set(self, name: str, split: Squad, examples: Questions, sequences: SpanWindows) -> SquadSet:
        return SquadSet(
            name,
            examples.describe(),
            sequences.sequences,
            documents=len({question.context for question in examples.questions}),
            collator=self.collator(sequences),
            questions=examples,
            windows=sequences,
        )
