"""A teacher that reads with another tokenizer than the student: it gets the text of each sequence."""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from distill.data.batch import PADDING, Batch
from distill.data.sequence_store import SequenceStore, ids_of
from distill.models.language_model import LanguageModel
from distill.teacher.output import TeacherOutput, Wanted


class RetokenizedTeacher:
    """Gives what does not depend on tokens: pooled vectors of whole sequences.

    The text of a sequence is what the student's tokenizer decodes its ids to, before any token is masked and without
    special tokens. A tokenizer that drops case or spaces drops them for the teacher too, as it drops words that it does
    not know.
    """

    def __init__(
        self,
        model: LanguageModel,
        sequences: SequenceStore,
        student_tokenizer: PreTrainedTokenizerBase,
        teacher_tokenizer: PreTrainedTokenizerBase,
        longest: int | None,
    ) -> None:
        """
        Args:
            sequences: the student's [num_sequences, S], by the numbers in `Batch.row_ids`.
            longest: sequence that the teacher takes; longer ones are cut.
        """
        self.model, self.sequences, self.longest = model, sequences, longest
        self.student_tokenizer, self.teacher_tokenizer = student_tokenizer, teacher_tokenizer

    def read_ahead(self, batch: Batch) -> Batch:
        ids = ids_of(self.sequences[batch.row_ids])
        in_vocabulary = ids < len(self.student_tokenizer)  # padding may have an id beyond it
        texts = [
            self.student_tokenizer.decode(row[here].tolist(), skip_special_tokens=True)
            for row, here in zip(ids, in_vocabulary, strict=True)
        ]
        cuts = self.longest is not None
        encoded = self.teacher_tokenizer(texts, truncation=cuts, max_length=self.longest, verbose=False)
        input_ids, documents = _padded(encoded["input_ids"])
        return batch.with_teacher_data(input_ids=input_ids, documents=documents)

    def outputs(self, window: list[Batch], spec_of: Wanted) -> Iterator[TeacherOutput]:
        for batch in window:
            data = batch.teacher_data
            with torch.no_grad():
                outputs = self.model({"input_ids": data["input_ids"]}, data["documents"], spec_of(batch))
            yield TeacherOutput(None, outputs)


def _padded(sequences: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids [B, L] with zeros behind each sequence, and 0 at text, PADDING behind it."""
    length = max(1, *(len(row) for row in sequences))
    ids, documents = np.zeros((len(sequences), length), np.int64), np.full((len(sequences), length), PADDING, np.int64)
    for number, row in enumerate(sequences):
        ids[number, : len(row)], documents[number, : len(row)] = row, 0
    return torch.from_numpy(ids), torch.from_numpy(documents)
