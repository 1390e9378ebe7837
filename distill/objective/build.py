"""Builds the objective of a run from its settings, for the pair at hand."""

from typing import Any

import torch

from distill.config import ObjectiveConfig, PrecisionConfig
from distill.errors import SettingError
from distill.objective.objective import Objective
from distill.objective.terms import Term
from distill.objective.vocabulary import has_pair

# Of a run on the CPU: where torch.compile should win back the seconds that it takes to start. An estimate, from 8 ns
# saved a logit (measured at 512 x 30,522) and 10 to 20 s to start.
MANY_LOGITS = 4e9


def make_terms(settings: ObjectiveConfig) -> dict[str, Term]:
    """The terms that have a weight, by name.

    Raises:
        SettingError: settings that a term does not take, or values that it refuses.
    """
    terms = {name: term.make() for name, term in settings.terms.items() if term.weight > 0}
    for name, term in terms.items():
        if not isinstance(term, Term):
            raise SettingError(f"objective.{name}._target_={settings.terms[name].make.path} gives no loss term")
    return terms


def fit_terms(terms: dict[str, Term], student: Any, teacher: Any | None) -> None:
    """Let each term make what it trains for this pair. Raises SettingError where one does not fit it."""
    for name, term in terms.items():
        try:
            term.build(student, teacher)
        except ValueError as error:
            raise SettingError(f"objective.{name}.{error}") from error


def build_objective(
    terms: dict[str, Term],
    settings: ObjectiveConfig,
    precision: PrecisionConfig,
    vocab: int,
    num_positions: int,
    device: torch.device,
) -> Objective:
    """The objective of these terms, compiled where the run is long enough; a resumed run decides as the first one did.

    Args:
        num_positions: that the whole run visits.
    """
    plain = settings.kernel == "plain" or precision.kernels == "plain"
    weights = {name: term.weight for name, term in settings.terms.items()}
    objective = Objective(terms, weights, vocab, plain)
    share = 1.0 if objective.visits_all_rows else settings.masking.share
    compiles = not plain and has_pair(objective.vocabulary_terms)
    objective.compiled = compiles and pays_to_compile(settings, precision, device, share * num_positions * vocab)
    return objective


def pays_to_compile(
    settings: ObjectiveConfig, precision: PrecisionConfig, device: torch.device, num_logits: float
) -> bool:
    """Whether a run that visits `num_logits` of the student compiles the elementwise part of its objective."""
    if settings.kernel != "auto" or precision.compile:
        return precision.compile
    return device.type == "cuda" or num_logits >= MANY_LOGITS
