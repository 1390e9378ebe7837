"""Refuses evaluation sets that would be scored at no position at all: their scores would be no numbers."""

from collections.abc import Sequence

from distill.evaluation.measures import Measure
from distill.evaluation.sets import EvaluationSet
from distill.runtime.errors import SettingError


def require_positions(measures: Sequence[Measure], sets: Sequence[EvaluationSet]) -> None:
    """Look whether every set has a position that each measure of text scores; it stops at the first one.

    Measures without `scores_any`, such as those of labelled examples and the user's, are not looked at.

    Raises:
        SettingError: a set has none, such as rows of unknown tokens alone or a share that draws none of a few.
    """
    for data in sets:
        for measure in measures:
            scores_any = getattr(measure, "scores_any", None)
            if scores_any is None or scores_any(data):
                continue
            if measure.name == "pseudo_perplexity" and measures[0] is not measure:
                cure = f"raise evaluate.by_set.{data.name}.pseudo_perplexity.share, or set it to 0 for no such score"
            else:
                cure = "take a longer text, or models whose vocabulary knows this language"
            raise SettingError(
                f"evaluate.sets: {data.name} has {data.num_rows:,} rows and not one position that "
                f"{measure.title.lower()} scores: {cure}"
            )
