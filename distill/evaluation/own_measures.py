"""Measures of the user's, as `evaluate.measures` names them."""

from distill.config.component import Component
from distill.evaluation.measures import Measure, Scoring
from distill.runtime.errors import SettingError

# Keys that stand beside the measures, in a line of history and in a model's part of results.json.
TAKEN = {
    *("epoch", "step", "steps", "tokens", "seconds", "loss", "name", "parameters", "bytes", "tokens_per_second"),
    *("folder", "history", "objective", "cache", "perplexity", "pseudo_perplexity", "bits_per_byte", "bootstrap"),
}
ATTRIBUTES = ("title", "explanation", "lower_is_better", "unit", "size", "score")


def check_measures(measures: dict[str, Component]) -> None:
    """Refuse what cannot be a measure, before there is a model to score.

    Raises:
        SettingError: a name that is taken or none, a class that cannot be imported, or settings that it does not take.
    """
    for name, measure in measures.items():
        if not name.isidentifier():
            raise SettingError(f"{measure.setting}: the name of a measure has to be letters, digits and underscores")
        if name in TAKEN:
            raise SettingError(f"{measure.setting}: results have another {name}; give the measure another name")
        measure.bind(scoring=None)


def make_measures(measures: dict[str, Component], scoring: Scoring) -> list[Measure]:
    """Each measure, under the name that the settings give it.

    Raises:
        SettingError: one that lacks what a measure has.
    """
    made = []
    for name, component in measures.items():
        measure = component(scoring=scoring)
        if lacking := [attribute for attribute in ATTRIBUTES if not hasattr(measure, attribute)]:
            raise SettingError(
                f"{component.setting}._target_={component.path} gives no measure: it has no {', '.join(lacking)}"
            )
        measure.name = name
        made.append(measure)
    return made
