"""The teacher of a run: live, from a cache that is made first where there is none, or none at all."""

import logging

from distill.config.settings import Config
from distill.data.batches import Batches
from distill.distributed import Ranks
from distill.models.language_model import LanguageModel
from distill.teacher import build_cache
from distill.teacher.cache import Cache, CachedTeacher, Positions, find
from distill.teacher.live import LiveTeacher
from distill.teacher.output import NoTeacher, Teacher

logger = logging.getLogger(__name__)


def find_cache(config: Config, identity: dict[str, object], batches: Batches, positions: Positions) -> Cache | None:
    """The cache of the settings, checked or still to be made; None where the teacher is to run live.

    Raises:
        SettingError: as `cache.find`.
    """
    if not config.teacher.cache.wanted:
        return None
    return find(config.teacher.cache, identity, batches, positions, config.data.cache)


def make_teacher(
    model: LanguageModel | None,
    cache: Cache | None,
    batches: Batches,
    positions: Positions,
    temperature: float | None,
    config: Config,
    ranks: Ranks,
) -> Teacher:
    """The teacher that the loop reads from; all ranks call this.

    Args:
        model: None where no loss term needs a teacher.
        temperature: of the cached probabilities, `Objective.top_k_temperature`.
    """
    if model is None:
        return NoTeacher()
    if cache is None:
        return LiveTeacher(model, config.teacher.micro_batches)
    assert temperature is not None, "`checks` refuses a cache that no term reads"
    build_cache.build(cache, model, batches, positions, temperature, ranks)
    logger.info(f"  the teacher is read from {cache.folder}, which other runs and machines can use")
    return CachedTeacher(cache)
