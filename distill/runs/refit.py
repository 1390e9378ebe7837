"""student.refit in a run: the text that blocks are fitted on, what that costs, and the same weights on all ranks."""

import logging
import time
from typing import Any

import torch
from torch import Tensor

from distill.config.settings import Config
from distill.data.batch import Batch
from distill.data.batches import Batches
from distill.distributed import Ranks
from distill.models.kind import ModelKind
from distill.models.language_model import LAST, LanguageModel, OutputSpec
from distill.models.layers import AUTO, choose_layers
from distill.models.precision import wait_for
from distill.models.refit import gaps_of, refit
from distill.runs.facts import Refit, RefittedBlock
from distill.runs.layer_search import on_device
from distill.runtime.errors import SettingError
from distill.runtime.progress import counted

SEQUENCES = 128  # of the corpus

logger = logging.getLogger(__name__)


def refit_student(
    config: Config, kind: ModelKind, teacher: Any, batches: Batches, ranks: Ranks
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Refit on rank 0: `layers` and `refit` as `Pair.layers` has them, and new weights by name, alike on all ranks.

    All ranks call it. Both are empty where there is nothing to refit.

    Raises:
        SettingError: student.refit=true, and the family is not known or a device has no room for the teacher.
    """
    settings, weights, is_auto = config.student, dict[str, Tensor](), config.student.refit == AUTO
    depth = teacher.config.num_hidden_layers
    chosen = choose_layers(settings.layers, settings.num_layers, depth)
    if not (gaps := gaps_of(chosen, teacher)) or (is_auto and not kind.causal):
        logger.info(f"student.refit: no block is refitted{'' if gaps else ', as no gap is left that needs it'}")
        return {}, {}

    def work() -> dict[str, Any]:
        began, precision = time.monotonic(), config.precision.student
        text, blocks = [batch.to(ranks.device) for batch in batches.first(SEQUENCES)], []
        count = sum(len(batch.ids) for batch in text)
        passes = sum(block + 1 + end for block, end in gaps) / depth
        logger.info(
            f"student.refit: fitting {counted(len(gaps), 'block')} before missing layers, on {count} training "
            f"sequences, in about {passes * count * seconds_of(teacher, text[0], precision):,.0f} s"
        )
        for one in refit(settings, teacher, chosen, kind, precision, text):
            weights.update({name: weight.cpu() for name, weight in one.weights.items()})
            blocks.append(RefittedBlock(block=one.block, layer=one.end, before=one.before, after=one.after))
            what = "last state" if one.end == depth else f"input of layer {one.end}"
            logger.info(f"  block {one.block}: {one.after:.3f} from the teacher's {what}, {one.before:.3f} as copied")
        tokens = sum(batch.num_valid for batch in text)
        made = Refit(blocks=blocks, tokens=tokens, seconds=time.monotonic() - began)
        return {"layers": chosen, "refit": made.model_dump()}

    opened = on_device(teacher, ranks, "student.refit", "true", "leave it at false")
    try:
        found: dict[str, Any] = ranks.decide(opened(work))
    except SettingError as error:
        if not is_auto:
            raise
        logger.info(f"student.refit=auto: no block is refitted ({error})")
        return {}, {}
    shapes = ranks.broadcast({name: [*weight.shape] for name, weight in weights.items()})
    tensors = {name: weights.get(name, torch.empty(shape)) for name, shape in shapes.items()}
    ranks.broadcast_all([*tensors.values()])
    return found, tensors


@torch.no_grad()
def seconds_of(teacher: Any, batch: Batch, precision: str) -> float:
    """How long the teacher takes for a sequence, the second time."""
    reader, one = LanguageModel(teacher, precision), {name: value[:1] for name, value in batch.inputs.items()}
    for _ in range(2):
        began = time.monotonic()
        reader(one, None if batch.documents is None else batch.documents[:1], OutputSpec(layers=(LAST,)))
        wait_for(batch.ids.device)
    return time.monotonic() - began
