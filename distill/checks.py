"""Refuses settings that no run can have, before anything heavy starts. Every message names setting, value and cure."""

import math
from typing import Any

from distill import optim
from distill.component import Component
from distill.config import Config, MaskingConfig, SourceConfig
from distill.data.sources import no_prompts
from distill.errors import SettingError
from distill.evaluation.own_measures import check_measures
from distill.objective.build import make_terms
from distill.objective.terms import Term, VocabularyTerm
from distill.objective.terms.logit_mse import LogitMse
from distill.objective.terms.soft import Soft
from distill.objective.vocabulary import mixing_temperature
from distill.optimizer_state import optimizer_state
from distill.ramp import Ramp
from distill.schedule import ENDLESS, length_in_steps, make_schedule
from distill.tasks import Task, find_task, task_of
from distill.teacher.members import ONLY, errors_of, settings_by_member

FORMATS = ("fp32", "bf16", "fp16", "auto")


def check(config: Config) -> None:
    """Raises SettingError for the first setting that is out of range or at odds with another."""
    _check_objective(config)
    _check_teachers(config)
    _check_training(config)
    _check_evaluation(config)
    _check_corpus(config)
    for name in ("student", "teacher", "evaluate"):
        formats = (*FORMATS, "int8") if name == "teacher" else FORMATS
        _choose(f"precision.{name}", getattr(config.precision, name), formats)
    _choose("teacher.kind", config.teacher.kind, ("embedded", "pretrained", "several", "none", "custom"))
    _choose("student.kind", config.student.kind, ("layers", "config", "pretrained", "custom"))
    _check_unused(config)
    _choose("tracker.kind", config.tracker.kind, ("none", "wandb", "tensorboard"))
    _choose("tracker.mode", config.tracker.mode, ("offline", "online"))
    _choose("precision.kernels", config.precision.kernels, ("auto", "plain"))


def _check_wire(config: Config) -> None:
    if config.precision.student == "fp16" and config.backend.compression == "fp16":
        raise SettingError(
            "backend.compression=fp16 with precision.student=fp16 would scale gradients twice, for the format and for "
            "the wire, and lose small ones: set backend.compression=bf16 or none"
        )


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


def _ends(setting: str, number: float | Ramp) -> list[tuple[str, float]]:
    """The values between which a setting of the objective lies over the run, each with its name."""
    if isinstance(number, Ramp):
        return [(f"{setting}.start", number.start), (f"{setting}.end", number.end)]
    return [(setting, number)]


def _check_unused(config: Config) -> None:
    """Refuse what the chosen kind of model would not read: the run would be another one than was asked for."""
    teacher, student = config.teacher, config.student
    saved = ("pretrained", "custom")
    for name, value, kind, wanting in (
        ("teacher.path", None if teacher.kind == "none" else teacher.path, teacher.kind, saved),
        ("teacher.tokenizer", None if teacher.kind == "none" else teacher.tokenizer, teacher.kind, saved),
        ("student.path", student.path, student.kind, saved),
        ("student.num_layers", student.num_layers, student.kind, ("layers",)),
        ("student.start", None if student.start == "random" else student.start, student.kind, ("config",)),
    ):
        wanted = wanting[0]
        if value is not None and kind not in wanting:
            model = name.partition(".")[0]
            raise SettingError(f"{name}={value} is not read with {model}.kind={kind}: choose {model}.kind={wanted}")
    for name in ("revision", "trust_remote_code"):  # a path and a tokenizer were refused above
        if teacher.kind == "several" and getattr(teacher, name):
            raise SettingError(
                f"teacher.{name}={getattr(teacher, name)} is not read with teacher.kind=several: set "
                f"teacher.members.NAME.{name}"
            )


def _check_objective(config: Config) -> None:
    settings, masking = config.objective, config.objective.masking
    for name, term in settings.terms.items():
        for setting, weight in _ends(f"objective.{name}.weight", term.weight):
            _at_least(setting, weight, 0)
            if math.isinf(weight):
                raise SettingError(f"{setting}={weight} must be finite")
        if term.temperature is not None:
            for setting, temperature in _ends(f"objective.{name}.temperature", term.temperature):
                _above_zero(setting, temperature)
    terms = make_terms(settings)
    if not terms:
        raise SettingError("objective: all weights are 0 and there is nothing to learn; give one of the terms a weight")
    _check_task(config, terms)
    wanting = [name for name, term in terms.items() if term.needs_teacher]
    if config.teacher.kind == "none" and wanting:
        raise SettingError(
            f"teacher.kind=none, but objective.{wanting[0]} needs a teacher: choose a teacher, or objective=mlm"
        )
    _choose("objective.kernel", settings.kernel, ("auto", "plain", "fused"))
    for setting, temperature in _ends("objective.temperature", settings.temperature):
        _above_zero(setting, temperature)
    _above_zero("objective.masking.share", masking.share)
    for name in ("share", "mask", "keep"):
        _share(f"objective.masking.{name}", getattr(masking, name))
    if masking.mask + masking.keep > 1 + 1e-9:
        raise SettingError(
            f"objective.masking.mask={masking.mask} and keep={masking.keep} exceed 1 together: lower one"
        )
    for name, least in (("smoothing", 0), ("ngrams", 1), ("most", 1)):
        _at_least(f"objective.masking.{name}", getattr(masking, name), least)


def _check_task(config: Config, terms: dict[str, Term]) -> None:
    """Refuse terms of another task, and settings that only another task would read."""
    settings = config.objective
    task = find_task(settings.task, terms.values())
    for name, term in terms.items():
        if term.task not in ("", *task.labels):
            raise SettingError(
                f"objective.{name} is a term of objective.task={task_of(term.task)}, but objective.task="
                f"{settings.task}: set objective.{name}.weight=0, or choose another objective"
            )
    if task.labels == ("mlm", "sop") and config.corpus.tokens.cross_documents:
        raise SettingError(
            f"corpus.cross_documents=true, but the rows of objective.task={settings.task} are of one document each: "
            "set it to false"
        )
    _check_unlabelled(config, task, terms)
    if not task.kind.vocabulary:
        _refuse_text_settings(config)
    if not task.kind.vocabulary and settings.masking != MaskingConfig():
        raise SettingError(
            f"objective.masking masks words, and objective.task={settings.task} has labels of its own: leave it out"
        )
    if task.kind.causal and settings.masking != MaskingConfig():
        raise SettingError(
            f"objective.masking masks words, and objective.task={settings.task} predicts the next one: leave it out"
        )
    if not task.kind.causal:
        _refuse_prompts(config)
        if config.evaluate.stride is not None:
            raise SettingError(f"evaluate.stride={config.evaluate.stride} is for causal models: set it to null")
        return
    for name, term in terms.items():
        if term.reads_first_position:
            raise SettingError(
                f"objective.{name} reads the first position of a row, which in a causal model sees nothing of the row: "
                f"set objective.{name}.weight=0, or objective.pooled.pooling=mean"
            )
    if config.student.start == "neighbours":
        raise SettingError(
            f"student.start=neighbours is for masked words, not for objective.task={settings.task}: set "
            "student.start=random"
        )


def _check_unlabelled(config: Config, task: Task, terms: dict[str, Term]) -> None:
    """Refuse unlabelled examples from which no term learns, and a term on labels where no labelled ones are left."""
    corpus = config.corpus
    where = f"corpus.unlabelled={corpus.unlabelled}"
    if corpus.unlabelled is None:
        return
    if task.kind.vocabulary:
        raise SettingError(
            f"{where} is for fine-tuning, and objective.task={config.objective.task} learns from text as it is: give "
            "it as corpus.path"
        )
    if not any(term.needs_teacher for term in terms.values()):
        raise SettingError(
            f"{where} has no labels, and no term of the objective learns from a teacher: choose objective=distil_"
            f"{config.objective.task} teacher=pretrained teacher.path=RUN, or leave it out"
        )
    on_labels = [name for name, term in terms.items() if term.task]
    if corpus.rows == 0 and on_labels:
        raise SettingError(
            f"corpus.rows=0 leaves objective.{on_labels[0]} without a label: set objective.{on_labels[0]}.weight=0"
        )


def _refuse_text_settings(config: Config) -> None:
    """Settings of text that labelled examples do not have."""
    corpus = config.corpus
    for name, value in (
        ("heldout", corpus.tokens.heldout),
        ("cross_documents", corpus.tokens.cross_documents),
        ("add_prose", corpus.add_prose),
        ("fallback", corpus.fallback),
    ):
        if value:
            raise SettingError(
                f"corpus.{name}={value} is for text, and objective.task={config.objective.task} learns from labelled "
                f"examples: set it to {'0' if name == 'heldout' else 'false'}"
            )


def _refuse_prompts(config: Config) -> None:
    """Those of built-in sources; a user's own is refused when its text is prepared."""
    sources: dict[str, Any] = {"corpus": config.corpus.source}
    sources |= {f"evaluate.sources.{name}": config.evaluate.sources.get(name) for name in config.evaluate.sets}
    for setting, source in sources.items():
        if isinstance(source, SourceConfig) and (source.kind == "chat" or source.prompt is not None):
            raise no_prompts(setting)


def _check_teachers(config: Config) -> None:
    """Refuse members that are not read, and losses that several teachers together cannot give what they want."""
    settings = config.teacher
    if (settings.kind == "several") != bool(settings.members):
        raise SettingError(
            f"teacher.kind={settings.kind} with teacher.members={list(settings.members)}: take teacher=several and "
            "name each as +teacher.members.NAME.path=FOLDER"
        )
    for name, member in settings.members.items():
        own = f"teacher.members.{name}"
        _choose(f"{own}.kind", member.kind, ("embedded", "pretrained", "custom"))
        if member.kind != "custom" and (member.path is None) != (member.kind == "embedded"):
            raise SettingError(f"{own}.path={member.path} with kind={member.kind}: give a path, or kind=embedded alone")
        _above_zero(f"{own}.weight", member.weight)
        if member.precision is not None:
            _choose(f"{own}.precision", member.precision, ("fp32", "bf16", "fp16", "int8"))
    for number, (name, alone) in enumerate((settings_by_member(config) or {ONLY: config}).items()):
        with errors_of(name):
            _check_teacher_cache(alone, first=number == 0)
    if len(settings.members) > 1:
        terms = make_terms(config.objective)
        task = find_task(config.objective.task, terms.values())
        for name, term in terms.items():
            if term.teacher_reads.extra or not task.kind.vocabulary:
                raise SettingError(
                    f"teacher.kind=several averages probabilities of words, but objective.{name} is not about words: "
                    "choose one teacher"
                )
        on_logits = {name: term for name, term in terms.items() if isinstance(term, VocabularyTerm)}
        mixing_temperature(on_logits, {name: config.objective.terms[name].temperature for name in on_logits})
        for name, term in terms.items():
            if isinstance(term, LogitMse) and not term.center:
                raise SettingError(
                    f"objective.{name}.center=false, but the mean of several teachers' probabilities has logits only "
                    f"up to a constant: set objective.{name}.center=true"
                )


def _check_teacher_cache(config: Config, first: bool) -> None:
    """`first`: whether this teacher is the one that losses on hidden states read."""
    settings = config.teacher.cache
    _at_least("teacher.micro_batches", config.teacher.micro_batches, 1)
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
    if not find_task(config.objective.task).kind.causal and not config.objective.masking.static:
        raise SettingError(f"{where} needs the same masks in every epoch: set objective.masking.static=true")
    for name, term in terms.items():
        if name not in readers and (first or name in on_logits):
            raise SettingError(
                f"{where}, but objective.{name} needs more of the teacher than its most probable tokens, which are "
                f"all that is cached: set objective.{name}.weight=0"
            )
        if isinstance(term, Soft) and term.cutoff > 0:
            raise SettingError(f"{where} already cuts the teacher off: set objective.{name}.cutoff={term.cutoff} to 0")
        if (ramp := config.objective.terms[name].temperature) is not None:
            raise SettingError(
                f"{where} is kept at one temperature, but objective.{name}.temperature goes from {ramp.start} to "
                f"{ramp.end}: give it one number, or set top_k to null for a live teacher"
            )
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
    _at_least("train.milestone_every", settings.milestone_every, 1)
    if min(settings.milestones or [1]) < 1:
        raise SettingError(f"train.milestones={settings.milestones} counts steps from 1: give 1 or more")
    _above_zero("train.minutes", settings.minutes)
    if settings.epochs is None and settings.steps is None and settings.minutes is None:
        raise SettingError("train.epochs, train.steps and train.minutes are all null: give the run an end")
    _check_optimizer(config)
    if config.student.dropout is not None:
        _share("student.dropout", config.student.dropout)
    _choose("student.start", config.student.start, ("random", "neighbours"))


def _check_optimizer(config: Config) -> None:
    """And its schedule, as far as it can be known before the corpus says how many steps an epoch has."""
    settings = config.optimizer
    _above_zero("optimizer.lr", settings.lr)
    _above_zero("optimizer.clip", settings.clip)
    _choose("optimizer.scale_lr", settings.scale_lr, ("none", "linear", "sqrt"))
    _at_least("optimizer.base_batch", settings.base_batch, 1)
    if (settings.scale_lr == "none") != (settings.base_batch is None):
        raise SettingError(
            f"optimizer.scale_lr={settings.scale_lr} with optimizer.base_batch={settings.base_batch}: give linear or "
            "sqrt and the rows a step that optimizer.lr is meant for, or none and null"
        )
    if settings.clip_each_rank and settings.clip is None:
        raise SettingError("optimizer.clip_each_rank=true, but optimizer.clip=null: give clip a norm")
    if settings.clip_each_rank and config.backend.sync == "every":
        raise SettingError(
            "optimizer.clip_each_rank=true clips once, before the only exchange of a step, but backend.sync=every "
            "exchanges after each micro-batch: set backend.sync=window"
        )
    optimizer_state(*optim.try_out(settings))
    scaled = settings.scale_lr != "none"  # by the rows of a step, which the backend knows
    _check_wire(config)
    make_schedule(config.schedule, length_in_steps(config.train, ENDLESS), math.inf if scaled else settings.lr)


def _check_evaluation(config: Config) -> None:
    settings = config.evaluate
    _at_least("evaluate.stride", settings.stride, 1)
    if settings.stride is not None and settings.stride >= config.corpus.tokens.sequence_length:
        raise SettingError(  # the first token of a window has nothing before it to be predicted from
            f"evaluate.stride={settings.stride} has to be less than a row of corpus.sequence_length="
            f"{config.corpus.tokens.sequence_length}: lower it"
        )
    _at_least("evaluate.every_steps", settings.every_steps, 1)
    _at_least("evaluate.rows", settings.rows, 1)
    _at_least("evaluate.batch_size", settings.batch_size, 1)
    _share("evaluate.pseudo_perplexity.share", settings.pseudo_perplexity.share)
    _at_least("evaluate.pseudo_perplexity.batch_size", settings.pseudo_perplexity.batch_size, 1)
    if "heldout" in settings.sets and config.corpus.tokens.heldout == 0:
        raise SettingError("corpus.heldout=0, but evaluate.sets names heldout: hold a share out, or name other sets")
    check_measures(settings.measures)
    for name, source in settings.sources.items():
        _share(f"evaluate.sources.{name}.share", _share_of(source))


def _check_corpus(config: Config) -> None:
    settings, tokens = config.corpus, config.corpus.tokens
    if not isinstance(settings.source, Component) and settings.source.kind == "heldout":
        raise SettingError("corpus.kind=heldout is for evaluation sets: name where the corpus comes from")
    _share("corpus.share", _share_of(settings.source))
    _at_least("corpus.sequence_length", tokens.sequence_length, 10)
    _at_least("corpus.rows", settings.rows, 1 if settings.unlabelled is None else 0)
    _at_least("corpus.vocab_size", tokens.vocab_size, 300)
    _at_least("corpus.workers", settings.cache.workers, 1)
    if not 0 <= tokens.max_bad <= 1:
        raise SettingError(f"corpus.max_bad={tokens.max_bad} must be from 0 to 1")
    if not 0 <= tokens.heldout < 1:
        raise SettingError(f"corpus.heldout={tokens.heldout} must be at least 0 and below 1")
