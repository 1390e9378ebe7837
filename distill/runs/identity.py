"""What a trained student depends on: everything that must match to resume a run or to call it finished."""

import hashlib
import logging
from collections.abc import Sequence
from typing import Any

import numpy as np

from distill.config.base import flatten
from distill.config.component import PREFIX
from distill.config.objective import WeightSchedule, is_zero
from distill.config.settings import Config, TeacherCacheConfig
from distill.data.batches import Batches
from distill.evaluation.sets import EvaluationSet
from distill.runtime.errors import SettingError
from distill.teacher.members import settings_by_member

logger = logging.getLogger(__name__)

Identity = dict[str, Any]  # settings, and digests of what they name, by their dotted names

# Groups on which the trained student does not depend, so a resumed run may change them. The corpus is in the
# identity by the digest of its sequences, the teacher by that of its weights.
GROUPS_IGNORED = {"corpus", "data", "teacher", "evaluate", "backend", "precision", "tracker", "profile", "report"}
GROUPS_IGNORED |= {"observers", "resume", "optimize"}
# Settings of the other groups for which the same holds.
SETTINGS_IGNORED = {"student.gradient_checkpointing", "student.path", "student.trust_remote_code", "objective.kernel"}
SETTINGS_IGNORED |= {"train.batch_size", "train.accumulate", "train.workers", "train.log_every", "train.on_usr1"}
SETTINGS_IGNORED |= {"train.save_every", "train.keep", "train.snapshots", "train.snapshot_every", "train.patience"}
SETTINGS_IGNORED |= {"train.max_nonfinite", "train.max_loss_ratio", "train.max_spike", "train.async_checkpoints"}
CODE = "code."  # before the name of a setting: a digest of the user's code behind its `_target_`
FROZEN = "student.frozen.digest"  # of the names of frozen parameters
CONSTANT = "distill.optim.schedules.constant.Constant"
LENGTH = ("train.epochs", "train.steps", "train.minutes")
IN_WORDS = {  # what digests cannot say by their values
    "corpus.digest": "the corpus has another text now",
    "student.digest": "the student starts from other weights now",
    FROZEN: "other parameters of the student are frozen now",
    "evaluate.digest": "the set by which train.keep_best chooses has other sequences now (its text, "
    "evaluate.max_sequences, evaluate.on_the_way.sequences)",
}
MOST_NAMED = 3  # differences in one line


def run_identity(
    config: Config,
    digests: dict[str, str | None],
    batches: Batches,
    total_steps: int,
    sets: Sequence[EvaluationSet] = (),
) -> Identity:
    """Everything that the trained student depends on, flat, by the names of the settings.

    Micro-batch, accumulation and ranks count by their product, because the same sequences give the same step; the
    ranks themselves only where each of them clips a gradient of its own. The length of the run counts only where
    the learning rate of its steps depends on that, or a weight or temperature of the objective.

    Args:
        digests: of the corpus's sequences, each teacher, and the student's start where that is a model of the user's.
        total_steps: after which the run ends, wall-clock aside.
        sets: that the student is scored on.
    """
    terms, schedules = config.objective.terms, config.objective.schedule_of
    weightless, on_policy = {name for name, term in terms.items() if is_zero(term.weight)}, config.objective.on_policy
    if is_zero(on_policy.fraction):
        weightless.add("on_policy")
    settings = {
        name: value
        for name, value in flatten(config.compared).items()
        if name.split(".")[0] not in GROUPS_IGNORED and name not in SETTINGS_IGNORED
        if name not in ("student.refit", "student.intermediate_size") or value  # which older runs do not have
        if name != "student._target_" or not str(value).startswith(PREFIX)  # its digest is there
        if not (name.startswith("objective.") and name.split(".")[1] in weightless)
    }
    if config.schedule.make.path == CONSTANT:
        warmup = settings.pop("schedule.warmup", 0.0)
        settings |= {"schedule.warmup_steps": round(warmup * total_steps, 6)} if warmup else {}
        scheduled = any(
            isinstance(terms[name].weight, WeightSchedule) or schedules(name) is not None
            for name in terms.keys() - weightless
        ) or ("on_policy" not in weightless and on_policy.follows_schedule)
        if not scheduled and (not warmup or config.train.minutes is None):
            settings = {name: value for name, value in settings.items() if name not in LENGTH}
    return {
        **settings,
        **{f"{name}.digest": digest for name, digest in digests.items()},
        **_teachers(config),
        **_code(config, weightless),
        **_scores(config, sets),
        "corpus.num_sequences": len(batches.sequences),
        **({"corpus.order": batches.order.identity} if batches.order.identity is not None else {}),
        "train.sequences_per_step": batches.sequences_per_step,
        **({"backend.ranks": batches.step_shape.size} if config.optimizer.clip_each_rank else {}),
    }


def _teachers(config: Config) -> Identity:
    """What the student learns from besides the teachers' weights; the first of several is also read in its layers."""
    members = settings_by_member(config)
    settings: Identity = {"teacher.members": [*members]} if config.teacher.members else {}
    if not members:
        settings = {"teacher.cache.top_k": TeacherCacheConfig().top_k}
    if config.precision.quantize_teacher is not None:  # which is more than rounding
        settings["precision.quantize_teacher"] = config.precision.quantize_teacher
    for name, member in members.items():
        settings |= {f"{member.setting}.weight": member.weight} if name else {}
        if name and (sources := config.teacher.members[name].sources) is not None:
            settings[f"{member.setting}.sources"] = sources
        cached = ("top_k",) if member.cache.sampled is None else ("top_k", "sampled", "seed")
        settings |= {f"{member.setting}.cache.{field}": getattr(member.cache, field) for field in cached}
    return settings


def _code(config: Config, weightless: set[str]) -> dict[str, str]:
    """Digests of the user's code that the student depends on."""
    parts = [config.objective.component(name) for name in config.objective.terms if name not in weightless]
    parts += [config.optimizer.make, config.schedule.make]
    parts += [] if config.student.custom is None else [config.student.custom]
    best = (config.train.keep_best or "").rpartition(".")[2]
    parts += [made for name, made in config.evaluate.own_measures.items() if name == best]
    codes = {part.setting: (part.title, part.code) for part in parts}
    for member in settings_by_member(config).values():
        custom = member.model.custom
        codes[member.setting] = ("" if custom is None else custom.title, member.code)
    return {
        f"{CODE}{setting}": f"{title}, sha256 {code}" for setting, (title, code) in codes.items() if code is not None
    }


def _scores(config: Config, sets: Sequence[EvaluationSet]) -> Identity:
    """What decides the scores by which `train.keep_best` chooses the student."""
    if config.train.keep_best is None:
        return {}
    data, _, measure = config.train.keep_best.rpartition(".")
    name = next((one.name for one in sets if data in ("", one.name)), data)
    few = config.evaluate.on_the_way.sequences
    chosen = (one if few is None else one.first(few) for one in sets if one.name == name)
    fraction = {"evaluate.pseudo_perplexity.fraction": config.evaluate.fraction_of(name)}
    settings = config.compared.get("evaluate", {}).get("measures", {})
    return {
        "evaluate.digest": next(map(digest_of, chosen), None),
        "evaluate.stride": config.evaluate.stride,
        **(fraction if measure == "pseudo_perplexity" else {}),
        **({f"evaluate.measures.{measure}": settings[measure]} if measure in settings else {}),
    }


def set_digests(sets: Sequence[EvaluationSet]) -> Identity:
    """Digests of what is scored, which all ranks of a run have to have alike."""
    return {f"evaluate.sets: {one.name}": digest_of(one) for one in sets}


def digest_of(data: EvaluationSet) -> str:
    """A digest of the sequences that are scored, as the student's tokenizer cuts them."""
    digest = hashlib.sha256(data.name.encode())
    for field, value in sorted(vars(data).items()):
        if isinstance(value, np.ndarray) and field != "text":
            digest.update(f"{field} {value.dtype} {value.shape}".encode() + np.ascontiguousarray(value).tobytes())
    return digest.hexdigest()


def refuse_other_settings(before: Identity, now: Identity, earlier_run: str, resumes: bool = False) -> None:
    """Raises SettingError when a run would be resumed with settings changed that its student depends on.

    Args:
        earlier_run: what error lines call the earlier run.
        resumes: whether it trains on. Then edited code of the user's is logged: it may be the fix that the run needs.
    """
    found = {name: difference(name, before, now) for name in sorted({*before, *now})}
    found = {name: text for name, text in found.items() if text}
    for name in [name for name in found if resumes and name.startswith(CODE)]:
        logger.warning(f"{earlier_run}: {found.pop(name)}; the run resumes with the present code")
    if not found:
        return
    cure = "restore them, or start another run with hydra.run.dir=DIR"
    if found.keys() <= {*LENGTH}:
        cure = (
            "its rate or a weight follows a schedule that is made for one length (schedule=constant can be continued): "
            "restore the length, or begin another run from its student with student=pretrained student.path=RUN "
            "hydra.run.dir=DIR"
        )
    by_both = sorted(found, key=lambda name: not (name in before and name in now))  # the rest follows from these
    raise SettingError(
        f"{earlier_run} was made with other settings ({listed([found[name] for name in by_both])}): {cure}"
    )


def difference(name: str, before: Identity, now: Identity) -> str:
    """In what two identities differ by that name, in words; empty where they agree."""
    if before.get(name) == now.get(name):
        return ""
    if name in IN_WORDS:
        return IN_WORDS[name]
    if name.startswith(CODE):
        return f"the code or the arguments of {str(now.get(name)).partition(', sha256 ')[0]} have changed since then"
    if name.endswith(".digest"):
        of_one = "the teacher" if name == "teacher.digest" else name.removesuffix(".digest")
        return f"{of_one} has other weights or another tokenizer now"
    return f"{name} was {before.get(name)} and is now {now.get(name)}"


def listed(differences: list[str]) -> str:
    """The first differences, and how many more there are."""
    more = f" and {len(differences) - MOST_NAMED} more" if len(differences) > MOST_NAMED else ""
    return "; ".join(differences[:MOST_NAMED]) + more
