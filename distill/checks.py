"""Refuses settings that no run can have, before anything heavy starts. Every message names setting, value and cure."""

import math

from distill.component import Component
from distill.config import Config, SourceConfig
from distill.errors import SettingError
from distill.objective.build import make_terms
from distill.objective.terms import VocabularyTerm
from distill.objective.terms.soft import Soft

FORMATS = ("fp32", "bf16", "auto")
SCHEDULES = ("linear", "cosine", "constant")


def check(config: Config) -> None:
    """Raises SettingError for the first setting that is out of range or at odds with another."""
    _check_objective(config)
    _check_teacher_cache(config)
    _check_training(config)
    _check_evaluation(config)
    _check_corpus(config)
    for name in ("student", "teacher", "evaluate"):
        formats = (*FORMATS, "int8") if name == "teacher" else FORMATS
        _choose(f"precision.{name}", getattr(config.precision, name), formats)
    _choose("schedule.kind", config.schedule.kind, SCHEDULES)
    _at_least("teacher.micro_batches", config.teacher.micro_batches, 1)
    _choose("teacher.kind", config.teacher.kind, ("embedded", "pretrained", "none"))
    _choose("student.kind", config.student.kind, ("layers", "config", "pretrained", "custom"))
    _check_unused(config)
    _choose("tracker.kind", config.tracker.kind, ("none", "wandb", "tensorboard"))
    _choose("tracker.mode", config.tracker.mode, ("offline", "online"))
    _choose("precision.kernels", config.precision.kernels, ("auto", "plain"))


def _choose(setting: str, value: str, options: tuple[str, ...]) -> None:
    if value not in options:
        raise SettingError(f"{setting}={value} is not known: choose one of {', '.join(options)}")


def _at_least(setting: str, value: float | None, least: float) -> None:
    if value is not None and not value >= least:  # nan too
        raise SettingError(f"{setting}={value} is too small: give {least} or more")


def _share(setting: str, value: float) -> None:
    if not 0 <= value <= 1:
        raise SettingError(f"{setting}={value} is a share: give a number from 0 to 1")


def _share_of(source: SourceConfig | Component) -> float:
    """The share of the documents that is used; all of them where a source of the user's says nothing."""
    share = source.arguments.get("share") if isinstance(source, Component) else source.share
    return 1.0 if share is None else share


def _above_zero(setting: str, value: float | None) -> None:
    if value is not None and not 0 < value < math.inf:
        raise SettingError(f"{setting}={value} must be above 0 and finite")


def _check_unused(config: Config) -> None:
    """Refuse what the chosen kind of model would not read: the run would be another one than was asked for."""
    teacher, student = config.teacher, config.student
    for name, value, kind, wanted in (
        ("teacher.path", None if teacher.kind == "none" else teacher.path, teacher.kind, "pretrained"),
        ("student.path", student.path, student.kind, "pretrained"),
        ("student.start", None if student.start == "random" else student.start, student.kind, "config"),
    ):
        if value is not None and kind != wanted:
            model = name.partition(".")[0]
            raise SettingError(f"{name}={value} is not read with {model}.kind={kind}: choose {model}.kind={wanted}")


def _check_objective(config: Config) -> None:
    settings, masking = config.objective, config.objective.masking
    for name, term in settings.terms.items():
        _at_least(f"objective.{name}.weight", term.weight, 0)
        if math.isinf(term.weight):
            raise SettingError(f"objective.{name}.weight={term.weight} must be finite")
    terms = make_terms(settings)
    if not terms:
        raise SettingError("objective: all weights are 0 and there is nothing to learn; give one of the terms a weight")
    wanting = [name for name, term in terms.items() if term.needs_teacher]
    if config.teacher.kind == "none" and wanting:
        raise SettingError(
            f"teacher.kind=none, but objective.{wanting[0]} needs a teacher: choose a teacher, or objective=mlm"
        )
    _choose("objective.kernel", settings.kernel, ("auto", "plain", "fused"))
    _above_zero("objective.temperature", settings.temperature)
    _above_zero("objective.masking.share", masking.share)
    for name in ("share", "mask", "keep"):
        _share(f"objective.masking.{name}", getattr(masking, name))
    if masking.mask + masking.keep > 1 + 1e-9:
        raise SettingError(
            f"objective.masking.mask={masking.mask} and keep={masking.keep} exceed 1 together: lower one"
        )
    _at_least("objective.masking.smoothing", masking.smoothing, 0)


def _check_teacher_cache(config: Config) -> None:
    settings = config.teacher.cache
    _above_zero("teacher.cache.gigabytes", settings.gigabytes)
    if settings.top_k is None:
        return
    _at_least("teacher.cache.top_k", settings.top_k, 1)
    where = f"teacher.cache.top_k={settings.top_k}"
    terms = {name: term for name, term in make_terms(config.objective).items() if term.needs_teacher}
    on_logits = {name: term for name, term in terms.items() if isinstance(term, VocabularyTerm)}
    readers = {name: term for name, term in on_logits.items() if term.top_k_temperature is not None}
    if not readers:
        raise SettingError(f"{where}, but no term of the objective wants soft targets: set top_k to null")
    if not config.objective.masking.static:
        raise SettingError(f"{where} needs the same masks in every epoch: set objective.masking.static=true")
    for name, term in terms.items():
        if name not in readers:
            raise SettingError(
                f"{where}, but objective.{name} needs more of the teacher than its most probable tokens, which are "
                f"all that is cached: set objective.{name}.weight=0"
            )
        if isinstance(term, Soft) and term.cutoff > 0:
            raise SettingError(f"{where} already cuts the teacher off: set objective.{name}.cutoff={term.cutoff} to 0")
    temperatures = {name: term.top_k_temperature for name, term in readers.items()}
    if len(set(temperatures.values())) > 1:
        found = ", ".join(f"objective.{name}.temperature={value}" for name, value in temperatures.items())
        raise SettingError(f"{where} is kept at one temperature, but there are {found}: give them the same")


def _check_training(config: Config) -> None:
    settings = config.train
    if not 0 <= config.seed < 2**63:
        raise SettingError(f"seed={config.seed} must be from 0 to 2^63 - 1")
    for name in ("batch_size", "accumulate", "log_every", "save_every", "keep", "max_nonfinite", "epochs", "steps"):
        _at_least(f"train.{name}", getattr(settings, name), 1)
    _at_least("train.workers", settings.workers, 0)
    _above_zero("train.minutes", settings.minutes)
    if settings.epochs is None and settings.steps is None and settings.minutes is None:
        raise SettingError("train.epochs, train.steps and train.minutes are all null: give the run an end")
    _above_zero("optimizer.lr", config.optimizer.lr)
    _above_zero("optimizer.eps", config.optimizer.eps)
    _above_zero("optimizer.clip", config.optimizer.clip)
    _at_least("optimizer.weight_decay", config.optimizer.weight_decay, 0)
    if not all(0 <= beta < 1 for beta in config.optimizer.betas):
        raise SettingError(f"optimizer.betas={list(config.optimizer.betas)} must be at least 0 and below 1")
    _share("schedule.warmup", config.schedule.warmup)
    _share("schedule.floor", config.schedule.floor)
    _share("student.dropout", config.student.dropout)
    _choose("student.start", config.student.start, ("random", "neighbours"))


def _check_evaluation(config: Config) -> None:
    settings = config.evaluate
    _at_least("evaluate.rows", settings.rows, 1)
    _at_least("evaluate.batch_size", settings.batch_size, 1)
    _share("evaluate.pseudo_perplexity.share", settings.pseudo_perplexity.share)
    _at_least("evaluate.pseudo_perplexity.batch_size", settings.pseudo_perplexity.batch_size, 1)
    if "heldout" in settings.sets and config.corpus.tokens.heldout == 0:
        raise SettingError("corpus.heldout=0, but evaluate.sets names heldout: hold a share out, or name other sets")
    for name, source in settings.sources.items():
        _share(f"evaluate.sources.{name}.share", _share_of(source))


def _check_corpus(config: Config) -> None:
    settings, tokens = config.corpus, config.corpus.tokens
    if not isinstance(settings.source, Component) and settings.source.kind == "heldout":
        raise SettingError("corpus.kind=heldout is for evaluation sets: name where the corpus comes from")
    _share("corpus.share", _share_of(settings.source))
    _at_least("corpus.sequence_length", tokens.sequence_length, 10)
    _at_least("corpus.rows", settings.rows, 1)
    _at_least("corpus.vocab_size", tokens.vocab_size, 300)
    _at_least("corpus.workers", settings.cache.workers, 1)
    if not 0 <= tokens.heldout < 1:
        raise SettingError(f"corpus.heldout={tokens.heldout} must be at least 0 and below 1")
