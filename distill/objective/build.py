"""Builds the objective of a run from its settings, for the pair at hand."""

import copy
import inspect
import re
from typing import Any

import torch

from distill.config.objective import is_zero
from distill.config.settings import ObjectiveConfig, PrecisionConfig
from distill.objective.chunked import NO_TARGET, by_hand
from distill.objective.objective import Objective, reads_all_rows
from distill.objective.terms import ALL, TARGETS, Term, VocabularyTerm
from distill.runtime.errors import SettingError
from distill.runtime.users_code import mistake, naming_mistakes

# Of a run on the CPU: where torch.compile should win back the seconds that it takes to start. An estimate, from 8 ns
# saved a logit (measured at 512 x 30,522) and 10 to 20 s to start.
MANY_LOGITS = 4e9
# What a loss raises on any logits. Anything else may come of their number: of 7 before the vocabulary is known.
OF_ANY_VOCABULARY = (NameError, AttributeError, TypeError, ImportError)


def make_terms(settings: ObjectiveConfig) -> dict[str, Term]:
    """The terms that have a weight at any time of the run, by name.

    Raises:
        SettingError: settings that a term does not take, values that it refuses, or a user's loss over the vocabulary
            that fails whatever the vocabulary is: before anything heavy starts.
    """
    terms = {name: settings.component(name)() for name, term in settings.terms.items() if not is_zero(term.weight)}
    for name, term in terms.items():
        path = settings.component(name).path
        if not isinstance(term, Term):
            raise SettingError(
                f"objective.{name}._target_={path} gives no loss term: inherit from distill.objective.terms.Term"
            )
        if isinstance(term, VocabularyTerm) and not path.startswith("distill."):
            if term.positions not in (ALL, TARGETS):
                problem = f"positions={term.positions} is not known: choose {ALL} or {TARGETS}"
                raise SettingError(f"objective.{name}._target_={path}: {problem}")
            if type(term).build is Term.build:  # else `losses` may read what only `build` makes
                _try_losses(f"objective.{name}._target_={path}", term, 7, OF_ANY_VOCABULARY)
        if settings.schedule_of(name) is not None and not hasattr(term, "temperature"):
            raise SettingError(
                f"objective.{name}.temperature follows a schedule, but {path} has no attribute temperature to set in "
                "each step: keep it as self.temperature, or give one number"
            )
    return terms


def check_losses(objective: Objective, settings: ObjectiveConfig, device: torch.device) -> None:
    """Compute the user's losses over the vocabulary at three positions, once they are bound and on their device.

    Raises:
        SettingError: one fails, or does not give one value per position that depends on the student.
    """
    for name, term in objective.terms.items():
        path = settings.component(name).path
        if isinstance(term, VocabularyTerm) and not path.startswith("distill."):
            setting = f"objective.{name}._target_={path}"
            _try_losses(setting, term, objective.vocab, (Exception,), device, objective.visits_all_rows)


def _try_losses(
    setting: str,
    term: VocabularyTerm,
    vocab: int,
    refused: tuple[type[Exception], ...],
    device: torch.device | None = None,
    gaps: bool = False,
) -> None:
    """`check_losses` of one term.

    Args:
        refused: of what it raises only these kinds are faults.
        gaps: whether positions without a target are among those that it gets.
    """
    random = torch.Generator().manual_seed(0)
    student, teacher = (torch.randn(3, vocab, generator=random).to(device) for _ in range(2))
    targets = torch.tensor([1 % vocab, 2 % vocab, NO_TARGET if gaps else 3 % vocab], device=device)
    try:
        tried = copy.copy(term)  # a normalization, or a mean that it keeps, begins with the first step
        tried.module = copy.deepcopy(term.module)
        losses = tried.losses(student.requires_grad_(), teacher if term.needs_teacher else None, targets)
        shape, requires_grad = list(losses.shape), losses.requires_grad
        losses.sum().item()  # a GPU reports a fault only to who waits for it
    except refused as error:
        raise SettingError(f"{setting}: losses() fails on logits of 3 positions: {mistake(error)}") from error
    except Exception:
        return
    if shape != [3] or not requires_grad:
        what = f"gives {shape} for 3 positions" if shape != [3] else "does not depend on the student's logits"
        raise SettingError(f"{setting}: losses() {what}; give one value per position, computed from them")


def bind_terms(terms: dict[str, Term], student: Any, teacher: Any | None) -> dict[str, Term]:
    """Bind the terms to the models that they train and read. Raises SettingError where a term does not fit the pair."""
    fitted = {name: copy.copy(term) for name, term in terms.items()}
    for name, term in fitted.items():
        with naming_mistakes(f"objective.{name}: build() of {type(term).__name__}", term):
            try:
                term.build(student, teacher)
            except ValueError as error:
                begin = re.match(r"\w+", str(error))
                settings = {"weight", *inspect.signature(type(term)).parameters}
                names_setting = begin is not None and begin[0] in settings
                raise SettingError(f"objective.{name}{'.' if names_setting else ': '}{error}") from error
    return fitted


def build_objective(
    terms: dict[str, Term],
    settings: ObjectiveConfig,
    precision: PrecisionConfig,
    vocab: int,
    num_positions: int,
    device: torch.device,
) -> Objective:
    """The objective of these terms, compiled where the whole run, with what came before a resume, is long enough.

    Args:
        num_positions: that the whole run visits.

    Raises:
        SettingError: a term reads what compiled encoders hide.
    """
    for name, term in terms.items():
        if precision.compile and (term.student_reads.qkv or term.teacher_reads.qkv):  # recorded anew in each step
            raise SettingError(
                f"precision.compile=true, but objective.{name} reads queries and keys, which a compiled encoder "
                "hides: set precision.compile=false"
            )
    weights = {name: term.weight for name, term in settings.terms.items()}
    schedules = {name: settings.schedule_of(name) for name in terms}
    temperatures = {name: schedule for name, schedule in schedules.items() if schedule is not None}
    on_logits = [term for term in terms.values() if isinstance(term, VocabularyTerm)]
    all_rows = reads_all_rows(terms.values())
    fraction = settings.masking.mlm_probability if not all_rows and settings.task.startswith("mlm") else 1.0
    # The temperature is a constant of the compiled code: with another one in each step it would be compiled in each.
    compiles = any(by_hand(on_logits, all_rows)) and precision.kernels != "plain" and not temperatures
    compiled = compiles and pays_to_compile(settings, precision, device, fraction * num_positions * vocab)
    return Objective(terms, weights, vocab, temperatures, compiled)


def pays_to_compile(
    settings: ObjectiveConfig, precision: PrecisionConfig, device: torch.device, num_logits: float
) -> bool:
    """Whether a run that visits `num_logits` of the student compiles the elementwise part of its objective."""
    if settings.kernel != "auto" or precision.compile:
        return precision.compile
    return device.type == "cuda" or num_logits >= MANY_LOGITS
