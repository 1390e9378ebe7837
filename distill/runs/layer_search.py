"""student.layers=auto: the layers of the teacher from which an untrained student has the lowest loss in training.

Only forward passes are needed. Where there are few subsets all of them are scored; else one layer after another is
taken away, always the one whose loss costs least, which is greedy backward elimination. What the rules of
`distill.models.layer_choice` would have chosen is scored beside them. The best of all that was scored is taken;
averages of layers are only compared. Where there is much to score, few sequences sort out what is then scored on all.
"""

import logging
import math
import time
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from typing import Any, NamedTuple

import torch
from torch import nn

from distill.config.settings import LayersStudentConfig
from distill.data.batch import Batch
from distill.data.batches import Batches
from distill.distributed import Ranks
from distill.models.from_layers import block_prefix
from distill.models.kind import ModelKind
from distill.models.language_model import NO_OUTPUTS, LanguageModel
from distill.models.layer_choice import AUTO, RULES, Layer, choose_layers, number_of_layers
from distill.models.student import from_layers
from distill.objective.objective import Objective
from distill.objective.terms import Term
from distill.objective.terms.classes import Classes
from distill.objective.terms.clm import Clm
from distill.objective.terms.mlm import Mlm
from distill.objective.terms.span import Span
from distill.objective.trainable import Trainable
from distill.runtime.errors import SettingError
from distill.runtime.progress import counted
from distill.teacher.output import TeacherOutput

TOKENS = 32_768  # that the losses are taken over, padding and context included ...
CAUSAL_TOKENS = 8_192  # ... where each of them is predicted, not a fraction of them
LEAST_SEQUENCES = 64  # ... or so many sequences, where these are long
MOST_SUBSETS = 70  # up to so many are all scored: those of four layers of eight
ROUGH = 4  # one of so many sequences, for the first of two rounds
SHORTLIST = 8  # choices that come into the second round, besides those of the rules
WORDS: tuple[type[Term], ...] = (Mlm, Clm)  # whose loss is the logarithm of a perplexity
TERMS: tuple[type[Term], ...] = (*WORDS, Classes, Span)

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Scored:
    """A choice of layers and the loss of the untrained student; `rules`: which rules make it."""

    layers: list[Layer]
    loss: float
    rules: tuple[str, ...] = ()


class Prediction(NamedTuple):
    """What a student predicts, and how."""

    kind: ModelKind
    label: str  # by its name in `Batch.labels`
    vocabulary: int  # its entries; an embedding may have more
    precision: str  # of the student's forward


@dataclass(frozen=True)
class LayerSearch:
    """What `student.layers=auto` has found.

    Attributes:
        layers: the choice.
        teacher: the loss of the whole teacher, a mean over predicted positions or sequences.
        best: the best choices, in their order.
        by_rule: what the rules choose.
        tried: how many subsets were scored, the rules' included.
        all_subsets: whether these were all there are.
        sequences: of the corpus, on which.
        perplexity: whether the losses are logarithms of perplexities.
    """

    layers: list[Layer]
    teacher: float
    best: list[Scored]
    by_rule: list[Scored]
    tried: int
    all_subsets: bool
    sequences: int
    perplexity: bool
    seconds: float

    def lines(self) -> list[str]:
        """A table, the best choices first."""
        how = f"all {self.tried}" if self.all_subsets else f"{self.tried}, one layer after another taken away"
        what = "perplexity" if self.perplexity else "loss"
        lines = [
            f"student.layers=auto: {what} of the untrained student on {counted(self.sequences, 'training sequence')}, "
            f"of choices of {counted(len(self.layers), 'layer')} ({how}; {self.seconds:.0f} s)"
        ]
        lines.append(f"  {self._shown(self.teacher)}  the whole teacher")
        listed = {str(choice.layers): choice for choice in [*self.best, *self.by_rule]}
        for choice in sorted(listed.values(), key=lambda choice: choice.loss):
            names = f"  {', '.join(choice.rules)}" if choice.rules else ""
            chosen = "  <- chosen" if choice.layers == self.layers else ""
            lines.append(f"  {self._shown(choice.loss)}  {choice.layers}{names}{chosen}")
        return lines

    def _shown(self, loss: float) -> str:
        return f"{math.exp(min(loss, 700.0)) if self.perplexity else loss:>10,.4g}"


def find_layers(
    settings: LayersStudentConfig,
    teacher: Any,
    prediction: Prediction,
    batches: Batches,
    ranks: Ranks,
) -> dict[str, Any]:
    """Score choices on rank 0; all ranks call it and get the same: a `LayerSearch` by its names.

    Where all choices are one and the same it has `layers` alone.

    Raises:
        SettingError: a number of layers that the teacher does not have, or layers that go into no such student.
    """
    available = teacher.config.num_hidden_layers
    count = number_of_layers(settings.num_layers, available)
    if block_prefix(teacher) is None or count == available:
        return {"layers": choose_layers(AUTO, count, available)}
    result, message = dict[str, Any](), ""
    if ranks.rank == 0:
        try:
            whole_teacher = on_device(teacher, ranks)
            scored = first_batches(batches, prediction, ranks.device)
            score = Losses(settings, whole_teacher, prediction, scored, ranks.device)
            searched = search(available, count, score, score.of_fewer_sequences())
            result = asdict(searched)
            for line in searched.lines():
                logger.info(line)
        except SettingError as error:
            message = str(error)
    result, message = ranks.broadcast((result, message))
    if message:
        raise SettingError(message)
    return result


def on_device(teacher: Any, ranks: Ranks) -> Any:
    """The whole teacher on this rank's device, in fp32, as it is loaded where nothing is sharded.

    One that is yet to be sharded stays where it is and in its format, and this is a copy.

    Raises:
        SettingError: the device has no room for it.
    """
    if not ranks.shards:
        return teacher.to(ranks.device)
    try:
        memo = {
            id(parameter): nn.Parameter(parameter.detach().to(ranks.device, torch.float32), False)
            for parameter in teacher.parameters()
        }
        return deepcopy(teacher, dict(memo)).to(ranks.device)
    except torch.cuda.OutOfMemoryError:
        raise SettingError(
            "student.layers=auto scores layers of the whole teacher on one device, which has no room for it: name the "
            "layers, such as student.layers=first"
        ) from None


def search(available: int, count: int, score: "Losses", rough: "Losses | None" = None) -> LayerSearch:
    """The best choice of `count` of `available` layers, and what it was compared with.

    Args:
        rough: the same loss on few of the sequences, for what is only to be sorted out; None: `score` does that, too.

    Raises:
        SettingError: there is none that goes into the student.
    """
    began = time.monotonic()
    losses, first = dict[tuple[int, ...], float](), dict[tuple[int, ...], float]()

    def loss(chosen: tuple[int, ...]) -> float:
        if chosen not in losses:
            losses[chosen] = score(chosen)
        return losses[chosen]

    def sorted_out(chosen: tuple[int, ...]) -> float:
        if chosen not in first:
            first[chosen] = (rough or score)(chosen)
        return first[chosen]

    everything = math.comb(available, count) <= MOST_SUBSETS
    if rough is None or math.comb(available, count) <= SHORTLIST:
        rough, first = None, losses
    for subset in combinations(range(available), count) if everything else ():
        sorted_out(subset)
    if not everything:
        _remove_greedily(available, count, sorted_out)
    of_full_length = sorted((chosen for chosen in first if len(chosen) == count), key=first.__getitem__)
    for subset in of_full_length[:SHORTLIST]:
        loss(subset)
    by_choice: dict[str, Scored] = {}
    for name, rule in RULES.items():
        layers = rule(available, count)
        numbers = tuple(layer for layer in layers if isinstance(layer, int))
        mean = loss(numbers) if len(numbers) == count else score(layers)
        if math.isfinite(mean):  # else they do not go into the student
            scored = by_choice.get(str(layers), Scored(layers, mean))
            by_choice[str(layers)] = replace(scored, rules=(*scored.rules, name))
    fitting = (chosen for chosen in losses if len(chosen) == count and math.isfinite(losses[chosen]))
    ranked = sorted(fitting, key=losses.__getitem__)
    if not ranked:
        raise SettingError(f"student.layers=auto: {score.refusal or 'no choice of layers has a finite loss'}")
    return LayerSearch(
        list(ranked[0]),
        score(range(available)),
        [Scored(list(chosen), losses[chosen]) for chosen in ranked[:3]],
        list(by_choice.values()),
        sum(len(chosen) == count for chosen in {**first, **losses}) if everything else len({**first, **losses}),
        everything,
        score.num_sequences,
        score.perplexity,
        time.monotonic() - began,
    )


def _remove_greedily(available: int, count: int, loss: Callable[[tuple[int, ...]], float]) -> None:
    """Take one layer after another away, always the one whose loss costs least."""
    left = tuple(range(available))
    while len(left) > count:
        left = min(combinations(left, len(left) - 1), key=loss)


def first_batches(batches: Batches, prediction: Prediction, device: torch.device) -> list[Batch]:
    """The micro-batches that a choice of layers is scored on: those that training begins with."""
    tokens = CAUSAL_TOKENS if prediction.label == Clm.task else TOKENS
    return [batch.to(device) for batch in batches.first(max(LEAST_SEQUENCES, tokens // batches.sequences.shape[1]))]


class Losses:
    """The mean loss of students that start from layers, on the same sequences with the same masks."""

    def __init__(
        self,
        settings: LayersStudentConfig,
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

    def of_fewer_sequences(self) -> "Losses | None":
        """The losses on one of `ROUGH` sequences; None where there are too few batches for that."""
        fewer = self.batches[: len(self.batches) // ROUGH]
        return Losses(self.settings, self.teacher, self.prediction, fewer, self.device) if fewer else None

    @torch.no_grad()
    def __call__(self, chosen: Sequence[Layer]) -> float:
        """The loss; infinite where these layers do not go into the student."""
        try:
            model = from_layers(self.settings, self.teacher, list(chosen), self.prediction.kind, alias=True)
        except SettingError as error:
            self.refusal = str(error)
            return math.inf
        trainable = Trainable(LanguageModel(model.to(self.device).eval(), self.prediction.precision))
        counts = self.objective.count(self.batches)
        scales = self.objective.scales(counts, self.device)
        losses = [
            self.objective(trainable, TeacherOutput(None, NO_OUTPUTS), batch, scales)[0] for batch in self.batches
        ]
        mean = float(torch.stack(losses).sum())
        return mean if math.isfinite(mean) else math.inf
