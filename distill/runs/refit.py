"""student.intermediate_size and student.refit in a run: the text that they read, their cost, the same on all ranks."""

import logging
import time
from typing import Any, NamedTuple

import torch
from torch import Tensor

from distill.config.settings import Config
from distill.data.batch import Batch
from distill.data.batches import Batches
from distill.distributed import Ranks
from distill.models.blocks import block_list, depth_of
from distill.models.kind import ModelKind
from distill.models.language_model import LAST, LanguageModel, OutputSpec
from distill.models.layers import AUTO, block_prefix, choose_layers
from distill.models.mlp import width_of
from distill.models.precision import wait_for
from distill.models.refit import Start, gaps_of, refit
from distill.models.student import from_layers
from distill.models.width import narrow, passes
from distill.runs.facts import Neurons, Refit, RefittedBlock
from distill.runs.layer_search import on_device
from distill.runtime.errors import SettingError
from distill.runtime.progress import counted

SEQUENCES = 128  # of the corpus

logger = logging.getLogger(__name__)


def refit_student(
    config: Config, kind: ModelKind, teacher: Any, batches: Batches, ranks: Ranks
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Narrow and refit on rank 0: `layers`, `neurons` and `refit` as `Pair.layers` has them, and weights by name.

    All ranks call it, and get the same. Both are empty where there is nothing to do.

    Raises:
        SettingError: the family is not known, or a device has no room for the teacher.
    """
    settings, weights, is_auto = config.student, dict[str, Tensor](), config.student.refit == AUTO
    narrows, fits = settings.intermediate_size is not None, bool(settings.refit) and (kind.causal or not is_auto)
    chosen = choose_layers(settings.layers, settings.num_layers, teacher.config.num_hidden_layers)
    gaps = gaps_of(chosen, teacher) if fits else []
    if not (narrows or gaps):
        why = "" if gaps_of(chosen, teacher) else ", as no gap is left that needs it"
        logger.info(f"student.refit: no block is refitted{why}")
        return {}, {}

    def work() -> dict[str, Any]:
        began, text = time.monotonic(), [batch.to(ranks.device) for batch in batches.first(SEQUENCES)]
        start, found = Start(settings, chosen, weights), dict[str, Any](layers=chosen)
        on_text = Text(text, seconds_of(teacher, text[0], config.precision.student), config.precision.student)
        if narrows:
            found["neurons"] = _narrow(start, kind, teacher, on_text, fits).model_dump()
        blocks = _close(start, gaps, kind, teacher, on_text) if gaps else []
        if blocks or (fits and narrows):
            tokens = sum(batch.num_valid for batch in text)
            made = Refit(blocks=blocks, tokens=tokens, seconds=time.monotonic() - began)
            found["refit"] = made.model_dump()
        return found if narrows or blocks else {}

    name, value, cure = "refit", "true", "set it to false"
    if narrows:
        name, value, cure = "intermediate_size", str(settings.intermediate_size), "leave it out"
    opened = on_device(teacher, ranks, f"student.{name}", value, cure)
    try:
        found: dict[str, Any] = ranks.decide(opened(work))
    except SettingError as error:
        if narrows or not is_auto:
            raise
        logger.info(f"student.refit=auto: no block is refitted ({error})")
        return {}, {}
    shapes = ranks.broadcast({name: [*weight.shape] for name, weight in weights.items()})
    tensors = {name: weights.get(name, torch.empty(shape)) for name, shape in shapes.items()}
    ranks.broadcast_all([*tensors.values()])
    return found, tensors


class Text(NamedTuple):
    """Training sequences on the teacher's device, the seconds that it takes for one, and the format of forwards."""

    batches: list[Batch]
    seconds: float
    precision: str

    @property
    def sequences(self) -> int:
        return sum(len(batch.ids) for batch in self.batches)


def _narrow(start: Start, kind: ModelKind, teacher: Any, text: Text, fits: bool) -> Neurons:
    """Fill `start.weights` with those of blocks with fewer neurons."""
    student, width = from_layers(start.settings, teacher, start.chosen, kind, alias=True), width_of(teacher) or 0
    like, prefix, errors = block_list(student.base_model, depth_of(student))[0], block_prefix(student), []
    layers, size = sorted({*start.chosen}), start.settings.intermediate_size
    seconds = len(passes(layers, width)) * text.sequences * text.seconds
    logger.info(
        f"student.intermediate_size: choosing {size:,} of {width:,} neurons in each of {counted(len(layers), 'block')} "
        f"on {text.sequences} training sequences, in about {seconds:,.0f} s"
    )
    for one in narrow(LanguageModel(teacher, text.precision), layers, like, text.batches, fits):
        errors.append((one.before, one.after))
        for number in (number for number, layer in enumerate(start.chosen) if layer == one.layer):
            start.weights.update({f"{prefix}{number}.{name}": weight.cpu() for name, weight in one.weights.items()})
    before, after = (sum(each) / len(errors) for each in zip(*errors, strict=True))
    logger.info(f"  what an MLP adds changes by {after:.3f} on average{f', {before:.3f} as copied' if fits else ''}")
    return Neurons(kept=size, of=width, before=before, after=after if fits else None)


def _close(start: Start, gaps: list[tuple[int, int]], kind: ModelKind, teacher: Any, text: Text) -> list[RefittedBlock]:
    """Fill `start.weights` with those of the blocks before gaps. Raises SettingError; of `auto` it leaves them then."""
    read = sum(block + 1 + end for block, end in gaps) / teacher.config.num_hidden_layers
    logger.info(
        f"student.refit: fitting {counted(len(gaps), 'block')} before missing layers, on {text.sequences} training "
        f"sequences, in about {read * text.sequences * text.seconds:,.0f} s"
    )
    weights, blocks = dict[str, Tensor](), list[RefittedBlock]()
    try:
        for one in refit(start, teacher, kind, text.precision, text.batches):
            weights.update({name: weight.cpu() for name, weight in one.weights.items()})
            blocks.append(RefittedBlock(block=one.block, layer=one.end, before=one.before, after=one.after))
            depth = teacher.config.num_hidden_layers
            what = "last state" if one.end == depth else f"input of layer {one.end}"
            logger.info(f"  block {one.block}: {one.after:.3f} from the teacher's {what}, {one.before:.3f} as copied")
    except SettingError as error:
        if start.settings.refit != AUTO:
            raise
        logger.info(f"student.refit=auto: no block before missing layers is refitted ({error})")
        return []
    start.weights.update(weights)
    return blocks


@torch.no_grad()
def seconds_of(teacher: Any, batch: Batch, precision: str) -> float:
    """How long the teacher takes for a sequence, the second time."""
    reader, one = LanguageModel(teacher, precision), {name: value[:1] for name, value in batch.inputs.items()}
    for _ in range(2):
        began = time.monotonic()
        reader(one, None if batch.documents is None else batch.documents[:1], OutputSpec(layers=(LAST,)))
        wait_for(batch.ids.device)
    return time.monotonic() - began
