"""What is built for each teacher of a run: its cache, its kernels, and what the loop reads all of them from."""

import logging
from typing import Any

from transformers import PreTrainedTokenizerBase

from distill.config.settings import Config
from distill.data.batches import Batches
from distill.distributed import Ranks
from distill.models.check import longest_row
from distill.models.language_model import LanguageModel
from distill.objective.objective import Objective
from distill.runs.setup import setup_teacher
from distill.teacher import build_cache
from distill.teacher.cache import Cache, CachedTeacher, Positions, find
from distill.teacher.live import LiveTeacher
from distill.teacher.mean import MeanTeacher
from distill.teacher.members import Member, errors_of, setting_of, settings_by_member, shares
from distill.teacher.output import NoTeacher, Teacher
from distill.teacher.retokenized import RetokenizedTeacher

logger = logging.getLogger(__name__)


def find_caches(
    config: Config, digests: dict[str, str | None], content: dict[str, Any], batches: Batches, objective: Objective
) -> dict[str, Cache]:
    """The caches that the settings want, by the name of the teacher, each checked or still to be made.

    Args:
        digests: of the teachers, by their settings.
        content: what else decides what a cache holds.
    """
    caches = {}
    for name, member in settings_by_member(config).items():
        with errors_of(name):
            whole = {**content, "teacher": digests[setting_of(name)], **arithmetic(member.precision.teacher)}
            caches[name] = find_cache(member, whole, batches, objective.positions)
    return {name: cache for name, cache in caches.items() if cache is not None}


def arithmetic(precision: str) -> dict[str, Any]:
    """What of a teacher's number format is part of a cache's key.

    Floating-point formats differ by rounding alone, and machines choose among them: a cache that was made in bf16 on a
    GPU is found by a run in fp32. Weights in int8 give other probabilities.
    """
    return {"int8": precision == "int8"}


def setup_teachers(config: Config, members: list[Member], ranks: Ranks) -> dict[str, LanguageModel]:
    """The teachers as training runs them, by name."""
    frozen, settings = {}, settings_by_member(config)
    for member in members:
        with errors_of(member.name):
            frozen[member.name] = setup_teacher(member.model, settings[member.name].precision, ranks)
    return frozen


def make_teachers(
    config: Config,
    frozen: dict[str, LanguageModel],
    caches: dict[str, Cache],
    batches: Batches,
    objective: Objective,
    ranks: Ranks,
    tokenizers: tuple[PreTrainedTokenizerBase, PreTrainedTokenizerBase] | None = None,
) -> Teacher:
    """What the loop reads from: the only teacher, the mean of several, or none. Caches that are missing are made.

    Args:
        tokenizers: the student's and the teacher's, where they differ.
    """
    if tokenizers is not None and frozen:
        (model,) = frozen.values()
        return RetokenizedTeacher(model, batches.rows, *tokenizers, longest_row(model.model))
    made, settings = [], settings_by_member(config)
    positions, temperature = objective.positions, objective.top_k_temperature
    for name, model in frozen.items():
        with errors_of(name):
            member = settings[name]
            made.append(make_teacher(model, caches.get(name), batches, positions, temperature, member, ranks))
    if not made:
        return NoTeacher()
    weights = shares(config)
    return made[0] if len(made) == 1 else MeanTeacher(made, [weights[name] for name in frozen])


def find_cache(config: Config, content: dict[str, object], batches: Batches, positions: Positions) -> Cache | None:
    """The cache that the settings want, checked or still to be made; None where the teacher is to run live.

    Raises:
        SettingError: as `cache.find`.
    """
    if not config.teacher.cache.wanted:
        return None
    return find(config.teacher.cache, content, batches, positions, config.data.cache)


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
