"""Teachers that run while the student trains."""

from collections.abc import Iterator, Sequence
from itertools import groupby

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from distill.data.batch import PADDING, Batch
from distill.data.sequence_store import SequenceStore, ids_of
from distill.models.language_model import NO_OUTPUTS, LanguageModel, OutputSpec
from distill.teacher.output import TeacherOutput, Wanted


class LiveTeacher:
    """A frozen model; one forward of it may take several of the student's micro-batches, as it keeps nothing."""

    def __init__(self, model: LanguageModel, micro_batches: int = 1) -> None:
        self.model, self.micro_batches = model, micro_batches

    def read_ahead(self, batch: Batch) -> Batch:
        return batch

    def outputs(self, window: list[Batch], spec_of: Wanted) -> Iterator[TeacherOutput]:
        for part in self._parts(window):
            specs = [spec_of(batch) for batch in part]
            if specs[0].is_empty:
                yield from (TeacherOutput(None, NO_OUTPUTS) for _ in part)
            else:
                yield from self._forward(part, specs)

    def _parts(self, window: list[Batch]) -> Iterator[list[Batch]]:
        """Batches in a row for one forward, by length alone: ranks have to run a sharded teacher equally often."""
        for _, of_length in groupby(window, lambda batch: batch.ids.shape[1]):
            alike = list(of_length)
            for start in range(0, len(alike), self.micro_batches):
                yield alike[start : start + self.micro_batches]

    def _forward(self, batches: list[Batch], specs: list[OutputSpec]) -> Iterator[TeacherOutput]:
        """One forward of all batches, and its outcome, cut up again by batch."""
        with torch.no_grad():
            outputs = self.model(*_joined(batches), _joined_spec(batches, specs))
        counts = [
            batch.ids.numel() if spec.positions is None else len(spec.positions)
            for batch, spec in zip(batches, specs, strict=True)
        ]
        rows = None if outputs.head_rows is None else outputs.head_rows.split(counts)
        last_rows = None if outputs.last_rows is None else outputs.last_rows.split(counts)
        start = 0
        for number, batch in enumerate(batches):
            here = outputs.of_sequences(slice(start, start + len(batch.ids)))
            here = here._replace(last_rows=None if last_rows is None else last_rows[number])
            yield TeacherOutput(None if rows is None else self.model.head(rows[number]), here)
            start += len(batch.ids)


class RetokenizedTeacher:
    """A teacher that reads with another tokenizer than the student: it gives pooled vectors of whole sequences.

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


def _joined(batches: list[Batch]) -> tuple[dict[str, torch.Tensor], torch.Tensor | None]:
    """Inputs and documents of all batches, one after the other."""
    if len(batches) == 1:
        return batches[0].inputs, batches[0].documents
    each = [batch.inputs for batch in batches]
    if any("position_ids" in one for one in each):  # of packed documents; a batch without them has the usual ones
        usual = torch.arange(batches[0].ids.shape[1], device=batches[0].ids.device)
        each = [{"position_ids": usual.expand(batch.ids.shape), **batch.inputs} for batch in batches]
    inputs = {name: torch.cat([one[name] for one in each]) for name in each[0]}
    if all(batch.documents is None for batch in batches):
        return inputs, None
    return inputs, torch.cat(
        [torch.zeros_like(batch.ids) if batch.documents is None else batch.documents for batch in batches]
    )


def _joined_spec(batches: list[Batch], specs: list[OutputSpec]) -> OutputSpec:
    """One request for all batches: the positions of each follow those of the batches before it."""
    if len(batches) == 1 or not (specs[0].head or specs[0].last_rows) or all(spec.positions is None for spec in specs):
        return specs[0]
    positions, start = [], 0
    for batch, spec in zip(batches, specs, strict=True):
        count = batch.ids.numel()
        of_batch = torch.arange(count, device=batch.ids.device) if spec.positions is None else spec.positions
        positions.append(of_batch + start)
        start += count
    return specs[0]._replace(positions=torch.cat(positions))


def _padded(sequences: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids [B, L] with zeros behind each sequence, and 0 at text, PADDING behind it."""
    length = max(1, *(len(row) for row in sequences))
    ids, documents = np.zeros((len(sequences), length), np.int64), np.full((len(sequences), length), PADDING, np.int64)
    for number, row in enumerate(sequences):
        ids[number, : len(row)], documents[number, : len(row)] = row, 0
    return torch.from_numpy(ids), torch.from_numpy(documents)
