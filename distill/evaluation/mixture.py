"""Several teachers scored as the one that the student learns from: the mean of their distributions, at temperature 1.

Shapes: N positions, E_k input size of member k's output embedding, V vocabulary.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from distill.config.settings import PrecisionConfig
from distill.models.kernels.packed_linear import pack_for_evaluation
from distill.models.language_model import LanguageModel, Outputs, OutputSpec
from distill.teacher.signal import mixed_logits


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
        self.widths = [each.model.get_output_embeddings().weight.shape[1] for each in self.members]

    def forward(
        self, inputs: dict[str, Tensor], documents: Tensor | None, spec: OutputSpec, below: Tensor | None = None
    ) -> Outputs:
        """`head_rows` [N, sum of E_k]; no hidden states. Nothing is below several models.

        Raises:
            ValueError: other heads are wanted, whose outputs are not averaged.
        """
        if spec.extra:
            raise ValueError(f"the mean of several models has no head {spec.extra[0]}")
        head_only = OutputSpec(True, spec.positions)
        return Outputs(self.joined([each(inputs, documents, head_only).head_rows for each in self.members]), {})

    def joined(self, rows: Sequence[Tensor]) -> Tensor:
        """The members' head inputs [N, E_k] -> [N, sum of E_k]."""
        return torch.cat(list(rows), -1)

    def logits(self, rows: Tensor, vocab: int) -> Tensor:
        """[N, sum of E_k] -> [N, vocab], the logarithms of the mean probabilities."""
        parts = zip(self.members, rows.split(self.widths, -1), strict=True)
        return mixed_logits((each.logits(own, vocab) for each, own in parts), self.model.weights, 1.0)


def pack(model: Any, precision: PrecisionConfig, device: torch.device) -> Any:
    """`pack_for_evaluation`, of several teachers for each."""
    if isinstance(model, MeanModel):
        return MeanModel([pack_for_evaluation(each, precision, device) for each in model.members], model.weights)
    return pack_for_evaluation(model, precision, device)


def reader(model: Any, precision: PrecisionConfig) -> LanguageModel:
    """What reads the logits of a model, or of several teachers together."""
    kind = MeanReader if isinstance(model, MeanModel) else LanguageModel
    return kind(model, precision.evaluate)
