"""Opens models for scoring: evaluation mode, no gradients, and evaluation's number format; several teachers as one.

Several teachers are scored as the one that the student learns from: the mean of their distributions, at temperature 1.
Shapes: N positions, E_k input size of member k's output embedding, V vocabulary.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from distill.config.settings import PrecisionConfig
from distill.distributed import Ranks
from distill.distributed.shard import without_gradients
from distill.models.blocks import in_evaluation_mode
from distill.models.kernels.packed_linear import pack_for_evaluation
from distill.models.language_model import LanguageModel, Outputs, OutputSpec, idle_forward
from distill.models.precision import dtype_of, in_fp32
from distill.teacher.distributions import mixed_logits


class MeanModel(nn.Module):
    """Frozen models of one vocabulary and their weights, which add up to 1."""

    def __init__(self, members: Sequence[Any], weights: Sequence[float]) -> None:
        super().__init__()
        self.members, self.weights = nn.ModuleList(members), tuple(weights)
        self.eval()


class MeanReader(LanguageModel):
    """Reads such models like one: a row of head inputs is that of all members side by side."""

    def __init__(self, model: MeanModel, precision: str) -> None:
        super().__init__(model, precision)
        self.members = [LanguageModel(member, precision) for member in model.members]
        self.widths = [member.model.get_output_embeddings().weight.shape[1] for member in self.members]

    def forward(self, inputs: dict[str, Tensor], documents: Tensor | None, spec: OutputSpec) -> Outputs:
        """`head_rows` [N, sum of E_k]; no hidden states.

        Raises:
            ValueError: other heads are wanted, whose outputs are not averaged.
        """
        if spec.extra:
            raise ValueError(f"the mean of several models has no head {spec.extra[0]}")
        head_only = OutputSpec(True, spec.positions)
        return Outputs(self.joined([member(inputs, documents, head_only).head_rows for member in self.members]), {})

    def joined(self, rows: Sequence[Tensor]) -> Tensor:
        """The members' head inputs [N, E_k] -> [N, sum of E_k]."""
        return torch.cat(list(rows), -1)

    def logits(self, rows: Tensor, vocab: int | None = None) -> Tensor:
        """[N, sum of E_k] -> [N, vocab], the logarithms of the mean probabilities; without `vocab` as of one model."""
        parts = zip(self.members, rows.split(self.widths, -1), strict=True)
        logits = [member.logits(part, vocab) for member, part in parts]
        size = max(part.shape[1] for part in logits)  # what pads one embedding has no probability for another
        padded = (nn.functional.pad(part, (0, size - part.shape[1]), value=-torch.inf) for part in logits)
        return mixed_logits(padded, self.model.weights, 1.0)


class Readers:
    """Lays models out for many forward passes, in the format of evaluation, and counts the seconds that it takes.

    Attributes:
        seconds: that scoring has taken so far.
    """

    def __init__(self, precision: PrecisionConfig, ranks: Ranks) -> None:
        self.precision, self.ranks = precision, ranks
        self.seconds = 0.0

    @contextmanager
    def opened(self, model: Any) -> Iterator[LanguageModel]:
        """Gives `model` in evaluation mode and without gradients; all ranks open it, and may make fewer forwards."""
        with self.evaluating(model), self.ranks.in_lockstep([model], idle_forward):
            yield self.reader(self.pack(model))

    def pack(self, model: Any) -> Any:
        """The model in the kernels of evaluation, of several teachers each."""
        if isinstance(model, MeanModel):
            return MeanModel([self.pack(member) for member in model.members], model.weights)
        return pack_for_evaluation(model, self.precision, self.ranks.device)

    def reader(self, model: Any) -> LanguageModel:
        """What reads the logits of a packed model, or of several teachers together."""
        kind = MeanReader if isinstance(model, MeanModel) else LanguageModel
        return kind(model, self.precision.evaluate)

    @contextmanager
    def evaluating(self, model: Any) -> Iterator[None]:
        """Evaluation mode without gradients, in the format of evaluation, and back to what was before."""
        form = dtype_of(self.precision.evaluate)
        with in_evaluation_mode(model), in_fp32(model, self.ranks.device), without_gradients(model, form):
            yield

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Count the seconds inside as those of scoring."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds += time.perf_counter() - began
