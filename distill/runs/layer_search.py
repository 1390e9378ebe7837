"""student.layers=auto: the layers of the teacher from which an untrained student has the lowest loss in training.

Only forward passes are needed, on the sequences that training begins with. Where there are few choices all of them are
scored. Of a deep teacher layers are removed one after another: of those with the least influence (block influence, Men
et al. 2024, "ShortGPT") the one without which the loss is lowest. What the rules of `distill.models.layers` would
have chosen is scored beside them, and the best of all is taken.
"""

import logging
import math
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from itertools import combinations
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity

from distill.config.settings import StudentConfig
from distill.data.batch import Batch
from distill.data.batches import Batches
from distill.distributed import Ranks
from distill.models.blocks import block_list
from distill.models.kind import ModelKind
from distill.models.language_model import LAST, NO_OUTPUTS, LanguageModel, OutputSpec
from distill.models.layers import AUTO, RULES, block_prefix, choose_layers, number_of_layers
from distill.models.precision import in_fp32
from distill.models.student import from_layers
from distill.objective.objective import Objective
from distill.objective.terms import Term
from distill.objective.terms.classes import Classes
from distill.objective.terms.clm import Clm
from distill.objective.terms.mlm import Mlm
from distill.objective.terms.span import Span
from distill.objective.trainable import Trainable
from distill.runs.facts import ChosenLayers, LayerSearch
from distill.runtime.errors import SettingError
from distill.runtime.progress import Progress, counted
from distill.teacher.output import TeacherOutput

MOST_SUBSETS = 70  # up to so many are all scored: those of four layers of eight
SHORTLIST = 8  # removals that are scored; all 30 of SmolLM2 led to the same ten layers, in 2.5 times the time
TOKENS = 32_768  # that the losses are taken over, padding and context included ...
CAUSAL_TOKENS = 8_192  # ... where each of them is predicted, not a fraction of them
LEAST_SEQUENCES = 64  # ... or so many sequences, where these are long
# One of so many sequences scores the layers of a deep teacher. Half as many chose worse: on other text 20 layers of
# SmolLM2 had a perplexity of 141 in place of 121.
DEEP = 8
WORDS: tuple[type[Term], ...] = (Mlm, Clm)  # whose loss is the logarithm of a perplexity
TERMS: tuple[type[Term], ...] = (*WORDS, Classes, Span)

Choice = tuple[int, ...]

logger = logging.getLogger(__name__)


class Prediction(NamedTuple):
    """What a student predicts, and how."""

    kind: ModelKind
    label: str  # by its name in `Batch.labels`
    vocabulary: int  # its entries; an embedding may have more
    precision: str  # of the student's forward


class Losses:
    """The mean loss of students that start from layers, on the same sequences with the same masks."""

    def __init__(
        self, settings: StudentConfig, teacher: Any, prediction: Prediction, batches: list[Batch], device: torch.device
    ) -> None:
        self.settings, self.batches = settings.changed(num_layers=None), batches
        self.teacher, self.prediction, self.device = teacher, prediction, device
        term = next(make for make in TERMS if make.task == prediction.label)
        self.perplexity, self.refusal = term in WORDS, ""
        self.objective = Objective({prediction.label: term()}, {prediction.label: 1.0}, prediction.vocabulary)
        self.num_sequences = sum(len(batch.ids) for batch in batches)
        self.counts = self.objective.count(batches)

    @torch.no_grad()
    def __call__(self, layers: Choice) -> float:
        """The loss; infinite where these layers do not go into the student."""
        try:
            trainable = Trainable(self._model(layers))
        except SettingError as error:
            self.refusal = str(error)
            return math.inf
        scales, no_teacher = self.objective.scales(self.counts, self.device), TeacherOutput(None, NO_OUTPUTS)
        losses = [self.objective(trainable, no_teacher, batch, scales)[0] for batch in self.batches]
        mean = float(torch.stack(losses).sum())
        return mean if math.isfinite(mean) else math.inf

    @torch.no_grad()
    def influence(self, layers: Choice) -> list[float]:
        """Of each of these layers 1 - cos(its input, its output), a mean over positions; padding counts, too."""
        model, found = self._model(layers), list[Tensor]()

        def hook(_: nn.Module, inputs: tuple[Any, ...], named: Mapping[str, Tensor], output: Any) -> None:
            before = inputs[0] if inputs else named["hidden_states"]
            after = output if isinstance(output, Tensor) else output[0]
            found.append(1 - cosine_similarity(before.float(), after.float(), dim=-1).mean())

        for block in block_list(model.model.base_model, len(layers)):
            block.register_forward_hook(hook, with_kwargs=True)
        for batch in self.batches:
            model(batch.inputs, batch.documents, OutputSpec(layers=(LAST,)))
        return torch.stack(found).view(len(self.batches), len(layers)).mean(0).tolist()

    def _model(self, layers: Choice) -> LanguageModel:
        model = from_layers(self.settings, self.teacher, list(layers), self.prediction.kind, alias=True)
        return LanguageModel(model.to(self.device).eval(), self.prediction.precision)


def find_layers(
    settings: StudentConfig, teacher: Any, prediction: Prediction, batches: Batches, ranks: Ranks
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

    def search() -> dict[str, Any]:
        tokens = CAUSAL_TOKENS if prediction.label == Clm.task else TOKENS
        num_sequences = max(LEAST_SEQUENCES, tokens // batches.sequences.shape[1])
        if math.comb(available, count) > MOST_SUBSETS:
            num_sequences //= DEEP
        first = [batch.to(ranks.device) for batch in batches.first(num_sequences)]
        score = Losses(settings, teacher, prediction, first, ranks.device)
        if not score.counts[0]:
            raise SettingError(
                f"student.layers=auto scores layers by what is to be predicted, and the first {score.num_sequences:,} "
                "sequences have nothing of it, such as a label: name the layers, such as student.layers=even"
            )
        found = search_layers(available, count, score, settings.search_seconds)
        logger.info(in_a_line(found))
        return found.model_dump()

    opened = on_device(teacher, ranks, "student.layers", AUTO, "name the layers, such as first")
    found: dict[str, Any] = ranks.decide(opened(search))
    return found


@contextmanager
def on_device(teacher: Any, ranks: Ranks, setting: str, value: Any, cure: str) -> Iterator[None]:
    """The whole teacher on this rank's device in fp32 while it is open, also one that is yet to be sharded.

    Raises:
        SettingError: the device has no room for it, as that setting needs it.
    """
    try:
        with in_fp32(teacher, ranks.device):
            yield
    except torch.cuda.OutOfMemoryError:
        problem = "it needs the whole teacher on one device, which has no room for it"
        raise SettingError(problem, setting=setting, value=value, cure=cure) from None


def search_layers(available: int, count: int, score: Losses, seconds: float | None = None) -> LayerSearch:
    """The best choice of `count` of `available` layers, and what it was compared with.

    Args:
        seconds: after which no further choice is scored; None: no limit.

    Raises:
        SettingError: there is none that goes into the student.
    """
    began, losses, stopped = time.monotonic(), dict[Choice, float](), False
    deadline = began + (seconds or math.inf)
    few = math.comb(available, count) <= MOST_SUBSETS
    if not few:
        remove_layers(available, count, score, losses, deadline)
    rules = {name: tuple(rule(available, count)) for name, rule in RULES.items()}
    for choice in [*combinations(range(available), count)] if few else list(rules.values()):
        if stopped := bool(losses) and time.monotonic() > deadline:
            break
        if choice not in losses:
            losses[choice] = score(choice)
    fitting = [choice for choice, loss in losses.items() if len(choice) == count and math.isfinite(loss)]
    ranked = sorted(fitting, key=losses.__getitem__)
    if not ranked:
        raise _no_loss(score)

    def described(choice: Choice) -> ChosenLayers:
        names = [name for name, of_rule in rules.items() if of_rule == choice]
        return ChosenLayers(layers=list(choice), loss=losses[choice], rules=names)

    return LayerSearch(
        layers=list(ranked[0]),
        teacher=score(tuple(range(available))),
        best=[described(choice) for choice in ranked[:3]],
        by_rule=[described(choice) for choice in dict.fromkeys(rules.values()) if choice in ranked],
        tried=len(losses),
        all_subsets=few and not stopped,
        sequences=score.num_sequences,
        perplexity=score.perplexity,
        seconds=time.monotonic() - began,
        stopped=stopped,
    )


def remove_layers(available: int, count: int, score: Losses, losses: dict[Choice, float], deadline: float) -> None:
    """Remove one layer after another until `count` are left; `losses` gets all choices that are scored on the way.

    After the deadline all that are too many go at once, those of the least influence.

    Raises:
        SettingError: no removal goes into the student.
    """
    layers = tuple(range(available))
    with Progress("layers removed", available - count, "layers") as progress:
        while (excess := len(layers) - count) > 0:
            influence = dict(zip(layers, score.influence(layers), strict=True))
            order = sorted(layers, key=influence.__getitem__)
            if time.monotonic() > deadline:
                layers = _without(layers, order[:excess])
                losses[layers] = score(layers)
                return
            fitting = dict[Choice, float]()
            for choice in (_without(layers, [layer]) for layer in order):
                if len(fitting) == SHORTLIST or (fitting and time.monotonic() > deadline):
                    break
                if math.isfinite(loss := score(choice)):
                    fitting[choice] = loss
            if not fitting:
                raise _no_loss(score)
            losses.update(fitting)
            layers = min(fitting, key=fitting.__getitem__)
            progress.update(available - len(layers))


def _without(layers: Choice, gone: Collection[int]) -> Choice:
    return tuple(layer for layer in layers if layer not in gone)


def _no_loss(score: Losses) -> SettingError:
    no_loss = "no choice of layers has a finite loss: check the teacher, or set precision=fp32"
    return SettingError(f"student.layers=auto: {score.refusal or no_loss}")


def in_a_line(search: LayerSearch) -> str:
    """What was chosen, and how good it is; the report lists other choices."""
    measure = "perplexity" if search.perplexity else "loss"
    best, whole = search.best[0].loss or 0.0, search.teacher or 0.0
    if search.perplexity:
        best, whole = (math.exp(min(loss, 700.0)) for loss in (best, whole))
    ended = ", when student.search_seconds ended the search" if search.stopped else ""
    return (
        f"student.layers=auto: {search.layers}, the best of {counted(search.tried or 0, 'choice')} in "
        f"{search.seconds or 0.0:.0f} s{ended}; {measure} of the untrained student {best:,.4g} (the whole teacher: "
        f"{whole:,.4g})"
    )
