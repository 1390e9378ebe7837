"""The losses of untrained students that start from layers of a teacher, on the sequences that training begins with.

A choice that begins with layers of one that was recorded need not compute these again: in its student, modules that
give the recorded outputs stand in place of those blocks. The rest is computed as ever, so that the loss is the same.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity

from distill.config.settings import StudentConfig
from distill.data.batch import Batch
from distill.data.batches import Batches
from distill.models.kind import ModelKind
from distill.models.language_model import LAST, NO_OUTPUTS, LanguageModel, OutputSpec
from distill.models.layer_choice import Layer
from distill.models.protocol import block_list
from distill.models.student import from_layers
from distill.objective.objective import Objective
from distill.objective.terms import Term
from distill.objective.terms.classes import Classes
from distill.objective.terms.clm import Clm
from distill.objective.terms.mlm import Mlm
from distill.objective.terms.span import Span
from distill.objective.trainable import Trainable
from distill.runtime.errors import SettingError
from distill.teacher.output import TeacherOutput

TOKENS = 32_768  # that the losses are taken over, padding and context included ...
CAUSAL_TOKENS = 8_192  # ... where each of them is predicted, not a fraction of them
LEAST_SEQUENCES = 64  # ... or so many sequences, where these are long
WORDS: tuple[type[Term], ...] = (Mlm, Clm)  # whose loss is the logarithm of a perplexity
TERMS: tuple[type[Term], ...] = (*WORDS, Classes, Span)


class Prediction(NamedTuple):
    """What a student predicts, and how."""

    kind: ModelKind
    label: str  # by its name in `Batch.labels`
    vocabulary: int  # its entries; an embedding may have more
    precision: str  # of the student's forward


class Recorded(nn.Module):
    """Stands in place of a block and gives the outputs that were recorded of it, one a call."""

    def __init__(self, block: nn.Module, outputs: Iterator[Any]) -> None:
        super().__init__()
        self.block, self.outputs = block, outputs

    def forward(self, *_: Any, **__: Any) -> Any:
        """The output of the next batch."""
        return next(self.outputs)

    def __getattr__(self, name: str) -> Any:
        """What models read of their blocks, such as the kind of attention."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("block"), name)


def first_batches(batches: Batches, prediction: Prediction, device: torch.device, part: int = 1) -> list[Batch]:
    """The micro-batches that a choice of layers is scored on: those that training begins with, one of `part`."""
    tokens = CAUSAL_TOKENS if prediction.label == Clm.task else TOKENS
    count = max(LEAST_SEQUENCES, tokens // batches.sequences.shape[1]) // part
    return [batch.to(device) for batch in batches.first(count)]


class Losses:
    """The mean loss of students that start from layers, on the same sequences with the same masks."""

    def __init__(
        self,
        settings: StudentConfig,
        teacher: Any,
        prediction: Prediction,
        batches: list[Batch],
        device: torch.device,
    ) -> None:
        self.settings = settings.changed(num_layers=None)
        self.teacher, self.prediction, self.device = teacher, prediction, device
        term = next(make for make in TERMS if make.task == prediction.label)
        self.perplexity, self.refusal = term in WORDS, ""
        self.objective = Objective({prediction.label: term()}, {prediction.label: 1.0}, prediction.vocabulary)
        self.batches = batches
        self.num_sequences = sum(len(batch.ids) for batch in batches)
        self._recorded: tuple[Layer, ...] = ()
        self._outputs = list[list[Any]]()  # of each recorded block, by batch

    def of_fewer_sequences(self, part: int) -> "Losses | None":
        """The losses on one of `part` sequences; None where these have no target."""
        fewer = Losses(
            self.settings, self.teacher, self.prediction, self.batches[: len(self.batches) // part], self.device
        )
        return fewer if fewer.num_targets else None

    @property
    def num_targets(self) -> int:
        """How many positions the loss has."""
        return int(self.objective.count(self.batches)[0]) if self.batches else 0

    @torch.no_grad()
    def __call__(self, chosen: Sequence[Layer]) -> float:
        """The loss; infinite where these layers do not go into the student."""
        try:
            model = self._model(chosen)
        except SettingError as error:
            self.refusal = str(error)
            return math.inf
        trainable = Trainable(model)
        scales = self.objective.scales(self.objective.count(self.batches), self.device)
        losses = [
            self.objective(trainable, TeacherOutput(None, NO_OUTPUTS), batch, scales)[0] for batch in self.batches
        ]
        mean = float(torch.stack(losses).sum())
        return mean if math.isfinite(mean) else math.inf

    @torch.no_grad()
    def record(self, chosen: tuple[Layer, ...]) -> list[float]:
        """Record what the blocks of this choice give, for the choices that are scored next.

        Returns:
            The influence of each of its layers: 1 - cos(its input, its output), a mean over positions (block influence,
            Men et al. 2024, "ShortGPT"). Padding counts, too.
        """
        model, outputs, influence = self._model(chosen), list[list[Any]](), list[Tensor]()
        for number, block in enumerate(block_list(model.model.base_model, len(chosen))):
            outputs.append([])
            block.register_forward_hook(_keeps(outputs[number], influence), with_kwargs=True)
        for batch in self.batches:
            model(batch.inputs, batch.documents, OutputSpec(layers=(LAST,)))
        self._recorded, self._outputs = chosen, outputs
        return torch.stack(influence).view(len(self.batches), len(chosen)).mean(0).tolist()

    def influence_of_runs(self, length: int) -> list[float]:
        """The influence of each run of so many layers from the second on, in what was recorded last."""
        ends = [[_states(output) for output in outputs] for outputs in self._outputs]
        return [
            float(torch.stack([_influence(*states) for states in zip(before, after, strict=True)]).mean())
            for before, after in zip(ends, ends[length:], strict=False)
        ]

    def _model(self, chosen: Sequence[Layer]) -> LanguageModel:
        """The student, whose first blocks give what was recorded of the same layers."""
        model = from_layers(self.settings, self.teacher, list(chosen), self.prediction.kind, alias=True)
        model.to(self.device).eval()
        shared = 0
        while shared < min(len(chosen), len(self._recorded)) and chosen[shared] == self._recorded[shared]:
            shared += 1
        blocks: Any = block_list(model.base_model, len(chosen)) if shared else []
        for number in range(shared):
            blocks[number] = Recorded(blocks[number], iter(self._outputs[number]))
        return LanguageModel(model, self.prediction.precision)


def _keeps(outputs: list[Any], influence: list[Tensor]) -> Any:
    """A forward hook that keeps the output of a block, and the influence of the block."""

    def hook(_: nn.Module, inputs: tuple[Any, ...], named: Mapping[str, Tensor], output: Any) -> None:
        outputs.append(output)
        influence.append(_influence(inputs[0] if inputs else named["hidden_states"], _states(output)))

    return hook


def _states(output: Any) -> Tensor:
    """The hidden states that a block gives."""
    states: Tensor = output if isinstance(output, Tensor) else output[0]
    return states


def _influence(before: Tensor, after: Tensor) -> Tensor:
    """1 - cos of hidden states [B, S, H] before and after, a mean over positions."""
    return 1 - cosine_similarity(before.float(), after.float(), dim=-1).mean()
