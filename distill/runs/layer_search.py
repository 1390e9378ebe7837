"""student.layers=auto: the layers of the teacher from which an untrained student has the lowest loss in training.

Only forward passes are needed. Where there are few choices all of them are scored; few sequences sort out what is then
scored on more. Of a deep teacher layers are taken away one after another (`distill.runs.layer_removal`). What the rules
of `distill.models.layer_choice` would have chosen is scored beside them. The best of all that was scored is taken;
averages of layers are only compared.
"""

import logging
import math
import time
from collections.abc import Mapping
from copy import deepcopy
from itertools import combinations
from typing import Any

import torch
from torch import nn

from distill.config.settings import StudentConfig
from distill.data.batches import Batches
from distill.distributed import Ranks
from distill.models.from_layers import block_prefix
from distill.models.layer_choice import AUTO, RULES, choose_layers, number_of_layers
from distill.runs.facts import ChosenLayers, LayerSearch
from distill.runs.layer_losses import Losses, Prediction, first_batches
from distill.runs.layer_removal import Removal
from distill.runtime.errors import SettingError
from distill.runtime.progress import counted

MOST_SUBSETS = 70  # up to so many are all scored: those of four layers of eight
ROUGH = 4  # one of so many sequences, for the first of two rounds
SHORTLIST = 8  # choices that come into the second round, besides those of the rules
# One of so many sequences scores the layers of a deep teacher. Half as many chose worse: on other text 20 layers of
# SmolLM2 had a perplexity of 141 in place of 121.
DEEP = 8

logger = logging.getLogger(__name__)


def table_of(search: LayerSearch) -> list[str]:
    """The outcome as lines of a table, the best choices first."""
    count, tried, teacher = len(search.layers), search.tried, search.teacher
    how = f"all {tried}" if search.all_subsets else f"{tried}, layers taken away one after another"
    how += ", ended by student.search_seconds" if search.stopped else ""
    what = "perplexity" if search.perplexity else "loss"
    scored = counted(search.sequences or 0, "training sequence")
    lines = [
        f"student.layers=auto: {what} of the untrained student on {scored}, of choices of {counted(count, 'layer')} "
        f"({how}; {search.seconds:.0f} s)",
        f"  {_shown(search, teacher)}  the whole teacher",
    ]
    listed = {str(choice.layers): choice for choice in [*search.best, *search.by_rule]}
    for choice in sorted(listed.values(), key=_loss_of):
        names = f"  {', '.join(choice.rules)}" if choice.rules else ""
        chosen = "  <- chosen" if choice.layers == search.layers else ""
        lines.append(f"  {_shown(search, choice.loss)}  {choice.layers}{names}{chosen}")
    return lines


def _loss_of(choice: ChosenLayers) -> float:
    return math.inf if choice.loss is None else choice.loss


def _shown(search: LayerSearch, loss: float | None) -> str:
    assert loss is not None  # of what was scored
    return f"{math.exp(min(loss, 700.0)) if search.perplexity else loss:>10,.4g}"


def find_layers(
    settings: StudentConfig,
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

    def search() -> dict[str, Any]:
        whole_teacher = on_device(teacher, ranks)
        few_choices = math.comb(available, count) <= MOST_SUBSETS
        scored = first_batches(batches, prediction, ranks.device, 1 if few_choices else DEEP)
        score = Losses(settings, whole_teacher, prediction, scored, ranks.device)
        if not score.num_targets:
            raise SettingError(
                f"student.layers=auto scores layers by what is to be predicted, and the first {score.num_sequences:,} "
                "sequences have nothing of it, such as a label: name the layers, such as student.layers=even"
            )
        seconds = settings.search_seconds
        if few_choices:
            searched = score_all(available, count, score, score.of_fewer_sequences(ROUGH), seconds)
        else:
            searched = remove_layers(available, count, score, seconds)
        for line in table_of(searched):
            logger.info(line)
        return searched.model_dump()

    searched: dict[str, Any] = ranks.decide(search)
    return searched


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


def score_all(
    available: int, count: int, score: Losses, rough: Losses | None = None, seconds: float | None = None
) -> LayerSearch:
    """The best choice of `count` of `available` layers, each of which is scored, and what it was compared with.

    Args:
        rough: the same loss on few of the sequences, for what is only to be sorted out; None: `score` does that, too.
        seconds: after which no further choice is scored.

    Raises:
        SettingError: there is none that goes into the student.
    """
    began, losses, first = time.monotonic(), dict[tuple[int, ...], float](), dict[tuple[int, ...], float]()
    subsets = list(combinations(range(available), count))
    if rough is None or len(subsets) <= SHORTLIST:
        rough, first = score, losses
    for subset in subsets:
        if first and time.monotonic() - began > (seconds or math.inf):
            break
        first[subset] = rough(subset)
    for subset in sorted(first, key=first.__getitem__)[:SHORTLIST]:
        if subset not in losses:
            losses[subset] = score(subset)
    by_rule = _score_rules(available, count, score, losses, began + (seconds or math.inf))
    stopped = len(first) < len(subsets)
    searched = _outcome(losses, by_rule, score, score(range(available)), time.monotonic() - began)
    return searched.changed(tried=len({**first, **losses}), all_subsets=not stopped, stopped=stopped)


def remove_layers(available: int, count: int, score: Losses, seconds: float | None = None) -> LayerSearch:
    """A good choice of `count` of the many choices of `available` layers, and what it was compared with.

    Args:
        seconds: after which the search ends with the best that it has; None: it ends where no exchange helps.

    Raises:
        SettingError: there is none that goes into the student.
    """
    began = time.monotonic()
    removal = Removal(available, count, score, began + (seconds or math.inf))
    whole = removal.begin()
    limit = "" if seconds is None else f", ended after {seconds:g} s (student.search_seconds)"
    logger.info(
        f"student.layers=auto: choosing {count} of {counted(available, 'layer')} by forward passes over "
        f"{counted(score.num_sequences, 'training sequence')}, about {removal.estimate():.0f} s{limit}"
    )
    removal.run()
    stopped = removal.is_over
    by_rule = _score_rules(available, count, score, removal.losses, began + (seconds or math.inf))
    searched = _outcome(removal.losses, by_rule, score, whole, time.monotonic() - began)
    return searched.changed(stopped=stopped)


def _score_rules(
    available: int, count: int, score: Losses, losses: dict[tuple[int, ...], float], deadline: float
) -> list[ChosenLayers]:
    """The choices of the rules, as far as they go into the student; `losses` gets those that average nothing.

    Those that are not scored by the deadline are left out.
    """
    by_choice: dict[str, ChosenLayers] = {}
    for name, rule in RULES.items():
        layers = rule(available, count)
        numbers = tuple(layer for layer in layers if isinstance(layer, int))
        if numbers not in losses and time.monotonic() > deadline:
            continue
        if len(numbers) < count:
            mean = score(layers)
        else:
            mean = losses[numbers] = losses[numbers] if numbers in losses else score(numbers)
        if math.isfinite(mean):
            scored = by_choice.get(str(layers), ChosenLayers(layers=layers, loss=mean))
            by_choice[str(layers)] = scored.changed(rules=[*scored.rules, name])
    return list(by_choice.values())


def _outcome(
    losses: Mapping[tuple[int, ...], float], by_rule: list[ChosenLayers], score: Losses, teacher: float, seconds: float
) -> LayerSearch:
    """The best of the choices with the student's number of layers.

    Raises:
        SettingError: none of them has a finite loss.
    """
    count = min(map(len, losses))  # others are on the way to these
    ranked = sorted(
        (chosen for chosen in losses if len(chosen) == count and math.isfinite(losses[chosen])), key=losses.__getitem__
    )
    if not ranked:
        no_loss = "no choice of layers has a finite loss: check the teacher, or set precision=fp32"
        raise SettingError(f"student.layers=auto: {score.refusal or no_loss}")
    best = [ChosenLayers(layers=list(chosen), loss=losses[chosen]) for chosen in ranked[:3]]
    return LayerSearch(
        layers=list(ranked[0]),
        teacher=teacher,
        best=best,
        by_rule=by_rule,
        tried=len(losses),
        sequences=score.num_sequences,
        perplexity=score.perplexity,
        seconds=seconds,
    )
