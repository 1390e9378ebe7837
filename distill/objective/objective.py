"""The combined objective: soft targets, masked words and hidden directions, each over its own global count.

Shapes: B rows, S positions, A = positions that are no padding, L = positions to predict, H hidden size, V vocabulary.
"""

from collections.abc import Iterator
from typing import Any

import torch

from distill.config import Objective as Settings
from distill.config import Precision, Rows
from distill.data.batches import Batch
from distill.kernels.precision import autocast, rounded
from distill.models.load import head_rows, hidden_states, output_embedding
from distill.objective import losses
from distill.objective.fused import Head, TopK, soft_and_mlm

TERMS = ("soft", "mlm", "cosine")
# Of a run on the CPU: where torch.compile should win back the seconds that it takes to start. An estimate, from 8 ns
# saved a logit (measured at 512 x 30,522) and 10 to 20 s to start.
MANY_LOGITS = 4e9


def pays_to_compile(settings: Settings, precision: Precision, device: torch.device, num_logits: float) -> bool:
    """Whether a run that visits `num_logits` of the student compiles the elementwise part of its objective."""
    if settings.kernel != "auto" or precision.compile:
        return precision.compile
    return device.type == "cuda" or num_logits >= MANY_LOGITS


class Objective:
    """total = sum over the terms of weight * (sum of the term over its positions) / (its count over the whole step).

    The counts are taken over all micro-batches and ranks of the step before the first backward. So the gradient is the
    same for every split of the step's rows, and padding or uneven masks weigh nothing.
    """

    def __init__(
        self, settings: Settings, precision: Precision, vocab: int, compiled: bool = False, micro_batches: int = 1
    ) -> None:
        """`compiled`: the fused kernel's elementwise part goes through torch.compile, where there is a compiler.

        `micro_batches`: how many of them one forward of the teacher takes.
        """
        self.settings, self.precision, self.vocab, self.compiled = settings, precision, vocab, compiled
        self.micro_batches = micro_batches
        self.weights = torch.tensor([settings.soft.weight, settings.mlm.weight, settings.cosine.weight])
        self.needs_teacher = settings.soft.weight > 0 or settings.cosine.weight > 0

    def counts(self, window: list[Batch]) -> torch.Tensor:
        """Positions that carry each term in these micro-batches: [3] float64, in the order of `TERMS`."""
        targets = sum(batch.num_targets for batch in window)
        positions = sum(batch.num_positions for batch in window)
        soft = positions if self.settings.soft.rows is Rows.all else targets
        return torch.tensor([soft, targets, positions], dtype=torch.float64)

    def total(self, sums: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """The weighted sum of the terms' means; a term without positions counts nothing."""
        return (self.weights.to(sums) * sums / counts.to(sums).clamp(min=1)).sum()

    def ask(self, teacher: Any | None, window: list[Batch]) -> Iterator[tuple[Batch, torch.Tensor | None]]:
        """Each micro-batch with the teacher's last hidden state of it, [B * S, H]; None where no live one is needed."""
        for start in range(0, len(window), self.micro_batches):
            part = window[start : start + self.micro_batches]
            if teacher is None or not self.needs_teacher or part[0].top_ids is not None:
                yield from ((batch, None) for batch in part)
            else:
                yield from zip(part, self._encode(teacher, part), strict=True)

    def __call__(
        self,
        student: Any,
        teacher: Any | None,
        batch: Batch,
        counts: torch.Tensor,
        taught: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """This micro-batch's share of the step's loss, and the sums of the three terms, [3], detached.

        `counts` [3]: positions of each term over the whole step and all ranks. `taught`: what `ask` says of the batch;
        without it the teacher is asked here.
        """
        settings, device = self.settings, batch.inputs.device
        with autocast(self.precision.student, device):
            hidden = hidden_states(student, batch.inputs, batch.attention).flatten(0, 1)
            ours = Head(head_rows(student, self._select(hidden, batch)), *output_embedding(student))
        dtype = ours.rows.dtype if self.precision.student == "fp32" else torch.bfloat16
        ours = ours._replace(dtype=dtype, rounded=rounded(ours.weight, dtype))
        if taught is None:
            ((_, taught),) = self.ask(teacher, [batch])
        theirs = self._soft_targets(teacher, taught, batch)
        targets = self._select(batch.targets[:, None], batch)[:, 0]
        scales = (self.weights / counts.clamp(min=1)).to(device, torch.promote_types(hidden.dtype, torch.float32))
        terms = self._plain if settings.kernel == "plain" else self._fused
        loss, sums = terms(ours, theirs, targets if settings.mlm.weight > 0 else None, scales)
        directions = torch.zeros((), device=device)
        if taught is not None and settings.cosine.weight > 0:
            directions = losses.cosine(_real(hidden, batch), _real(taught, batch)).sum()
            loss = loss + scales[2] * directions
        return loss, torch.cat([sums, directions.detach()[None]])

    def _encode(self, teacher: Any, batches: list[Batch]) -> list[torch.Tensor]:
        """The teacher's last hidden state of each batch, [B * S, H], from one forward."""
        inputs = torch.cat([batch.inputs for batch in batches])
        attention = None
        if any(batch.attention is not None for batch in batches):
            attention = torch.cat([_attention(batch) for batch in batches])
        with torch.no_grad(), autocast(self.precision.teacher, inputs.device):
            hidden = hidden_states(teacher, inputs, attention)
        return [part.flatten(0, 1) for part in hidden.split([len(batch.inputs) for batch in batches])]

    def _soft_targets(self, teacher: Any | None, taught: torch.Tensor | None, batch: Batch) -> Head | TopK | None:
        """What soft targets come from, where they are wanted: the teacher's head, or what is cached."""
        if batch.top_ids is not None and batch.top_log_probs is not None:
            return TopK(batch.top_ids, batch.top_log_probs)
        if taught is None or self.settings.soft.weight == 0:
            return None
        with torch.no_grad(), autocast(self.precision.teacher, batch.inputs.device):
            rows = head_rows(teacher, self._select(taught, batch))
        dtype = rows.dtype if self.precision.teacher == "fp32" else torch.bfloat16
        return Head(rows, *output_embedding(teacher), dtype)

    def _fused(
        self, ours: Head, theirs: Head | TopK | None, targets: torch.Tensor | None, scales: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return soft_and_mlm(
            ours,
            theirs,
            targets,
            soft_scale=scales[0],
            mlm_scale=scales[1],
            temperature=self.settings.temperature,
            cutoff=self.settings.soft.cutoff,
            vocab=self.vocab,
            compiled=self.compiled,
        )

    def _plain(
        self, ours: Head, theirs: Head | TopK | None, targets: torch.Tensor | None, scales: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The reference: all logits of both models, then the terms as `distill.losses` writes them."""
        logits = self._logits(ours)
        sums = torch.zeros(2, device=logits.device, dtype=scales.dtype)
        temperature = self.settings.temperature
        if isinstance(theirs, TopK):
            sums[0] = losses.soft_topk(logits, theirs.ids, theirs.log_probs, temperature).sum()
        elif theirs is not None:
            sums[0] = losses.soft(logits, self._logits(theirs), temperature, self.settings.soft.cutoff).sum()
        if targets is not None:
            sums[1] = losses.mlm(logits, targets).sum()
        return (scales[:2] * sums).sum(), sums.detach()

    def _logits(self, head: Head) -> torch.Tensor:
        bias = None if head.bias is None else head.bias[: self.vocab].to(head.dtype)
        return torch.nn.functional.linear(head.rows.to(head.dtype), head.weight[: self.vocab].to(head.dtype), bias)

    def _select(self, values: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Only the rows that carry a term reach the vocabulary-sized head: [B * S, ...] -> [A or L, ...]."""
        if self.settings.soft.weight > 0 and self.settings.soft.rows is Rows.all:
            return _real(values, batch)
        return values.index_select(0, batch.masked)


def _attention(batch: Batch) -> torch.Tensor:
    return torch.ones_like(batch.inputs, dtype=torch.bool) if batch.attention is None else batch.attention


def _real(values: torch.Tensor, batch: Batch) -> torch.Tensor:
    return values if batch.real is None else values.index_select(0, batch.real)
