"""Refuses settings of the objective and of its task that do not go together."""

from typing import Any

from distill.config.settings import Config, MaskingConfig, SourceConfig
from distill.data.sources import no_prompts
from distill.objective.build import make_terms
from distill.objective.terms import Term
from distill.runtime.errors import SettingError
from distill.runtime.nearest import choose
from distill.tasks import Task, find_task, task_of


def check_objective(config: Config) -> None:
    """Raises SettingError for an objective that has no terms, or terms that want what is not there."""
    settings, masking = config.objective, config.objective.masking
    terms = make_terms(settings)
    if not terms:
        raise SettingError("objective: all weights are 0 and there is nothing to learn; give one of the terms a weight")
    _check_task(config, terms)
    wanting = [name for name, term in terms.items() if term.needs_teacher]
    if config.teacher.kind == "none" and wanting:
        raise SettingError(
            f"teacher.kind=none, but objective.{wanting[0]} needs a teacher: choose a teacher, or objective=mlm"
        )
    choose("objective.kernel", settings.kernel, ("auto", "plain", "fused"))
    if masking.mask + masking.keep > 1 + 1e-9:
        raise SettingError(
            f"objective.masking.mask={masking.mask} and keep={masking.keep} exceed 1 together: lower one"
        )


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
    for name, term in terms.items():
        if term.student_reads.last_rows and not task.kind.vocabulary:
            raise SettingError(
                f"objective.{name}.rows chooses the positions of words that are predicted, and objective.task="
                f"{settings.task} predicts none: set it to all"
            )
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
    if corpus.sources:
        raise SettingError(
            f"corpus=mixture is for text, and objective.task={config.objective.task} learns from labelled examples: "
            "name the corpus of these"
        )
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
    sources |= {f"corpus.sources.{name}": source for name, source in config.corpus.sources.items()}
    sources |= {f"evaluate.sources.{name}": config.evaluate.sources.get(name) for name in config.evaluate.sets}
    for setting, source in sources.items():
        if isinstance(source, SourceConfig) and (source.kind == "chat" or source.prompt is not None):
            raise no_prompts(setting)
