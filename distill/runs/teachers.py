"""What is built for each teacher of a run: its cache, its kernels, and what the loop reads all of them from."""

import logging
from typing import Any

from transformers import PreTrainedTokenizerBase

from distill.config.settings import Config
from distill.data.batches import Batches
from distill.distributed import Ranks
from distill.distributed.shard import is_sharded
from distill.models.check import max_positions
from distill.models.kernels.precision import dtype_of
from distill.models.language_model import LanguageModel
from distill.objective.objective import Objective
from distill.runs.setup import setup_teacher
from distill.teacher.build_cache import Recorder, build
from distill.teacher.cache import Cache, CachedTeacher, find
from distill.teacher.live import LiveTeacher, RetokenizedTeacher
from distill.teacher.members import Member, TeacherSettings, settings_by_member, with_models
from distill.teacher.output import MeanTeacher, NoTeacher, Teacher

logger = logging.getLogger(__name__)


def find_caches(
    config: Config,
    digests: dict[str, str | None],
    content: dict[str, Any],
    batches: Batches,
    objective: Objective,
) -> dict[str, Cache]:
    """The caches that the settings request, by the name of the teacher, complete or still to be made.

    Args:
        digests: of the teachers, by their settings.
        content: what else decides what a cache holds.
    """
    caches = {}
    for name, member in settings_by_member(config).items():
        if member.cache.wanted:
            # Floating-point formats differ by rounding alone, and machines choose among them: a cache that was made in
            # bf16 on a GPU is found by a run in fp32. Weights in int8 give other probabilities.
            int8 = member.precision.teacher == "int8"
            identity = {**content, "teacher": digests[member.setting], "int8": int8}
            identity |= {"code": member.code} if member.code is not None else {}
            folder, setting = config.data.cache, f"{member.setting}.cache"
            caches[name] = find(member.cache, identity, batches, objective.positions, folder, setting)
    return caches


def setup_teachers(
    config: Config, members: list[Member], caches: dict[str, Cache], ranks: Ranks
) -> dict[str, LanguageModel]:
    """The teachers with a model as training runs them, by name; one that a cache stands for as it is scored."""
    settings = settings_by_member(config)
    teachers = {}
    for member in with_models(members):
        precision, setting = settings[member.name].precision, settings[member.name].precision_setting
        cache = caches.get(member.name)
        if cache is not None and cache.ready and not is_sharded(member.model):
            placed = ranks.place(member.model, dtype_of(precision.teacher))
            teachers[member.name] = LanguageModel(placed, precision.teacher, precision.kernels == "plain")
        else:
            teachers[member.name] = setup_teacher(member.model, precision, ranks, setting)
    return teachers


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
        frozen: as `setup_teachers` gives them; those that a cache stands for leave it.
        tokenizers: the student's and the teacher's, where they differ.
    """
    if tokenizers is not None and frozen:
        (model,) = frozen.values()
        return RetokenizedTeacher(model, batches.sequences, *tokenizers, max_positions(model.model))
    members = [one for name, one in settings_by_member(config).items() if name in frozen or name in caches]
    made = [
        _make_teacher(one, frozen.get(one.name), caches.get(one.name), batches, objective, ranks) for one in members
    ]
    for name in caches:
        frozen.pop(name, None)  # with its second copy of the weights
    if not made:
        return NoTeacher()
    return made[0] if len(made) == 1 else MeanTeacher(made, [one.weight for one in members])


def _make_teacher(
    settings: TeacherSettings,
    model: LanguageModel | None,
    cache: Cache | None,
    batches: Batches,
    objective: Objective,
    ranks: Ranks,
) -> Teacher:
    """One teacher: live, or from a cache, what is missing of which is made first; all ranks call this."""
    if cache is None:
        assert model is not None
        return LiveTeacher(model, settings.micro_batches)
    if model is not None:  # else it is complete
        temperature = objective.top_k_temperature
        assert temperature is not None, "the rules refuse a cache that no term reads"
        build(Recorder(cache, model, batches, objective.positions, temperature, ranks.device), ranks)
    logger.info(f"  soft targets are read from the cache {cache.folder}, which other runs and machines can use")
    return CachedTeacher(cache, ranks)
