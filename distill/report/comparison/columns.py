"""The numbers that runs are compared by, each with its name, where results.json has it, and which way is better."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from distill.report.lookup import label_of, measures_of, sets_of, usable, value_at
from distill.report.page import number, percent
from distill.runtime.errors import SettingError
from distill.runtime.nearest import did_you_mean

# Measures that belong to one vocabulary: another one has other tokens to predict.
OF_VOCABULARY = ("perplexity", "pseudo_perplexity")
SAME_CHOICE = "Same first choice as the teacher"
DIVERGENCE = "KL divergence from the teacher (nats)"


@dataclass(frozen=True)
class Column:
    """One number of a run.

    Attributes:
        name: as `optimize` takes it: `heldout.perplexity`.
        group: what is measured, for the heading.
        label: on what, or the rest of the heading.
        path: the keys of results.json.
        measure: its name in results.json, or empty for what it cost.
        data: the evaluation set, or empty.
    """

    name: str
    group: str
    label: str
    path: tuple[str, ...]
    lower_is_better: bool
    form: Callable[[Any], str] = number
    measure: str = ""
    data: str = ""

    @property
    def title(self) -> str:
        """For a line of text or a panel of a figure."""
        return f"{self.group}, {self.label}" if self.label else self.group

    def value(self, results: dict[str, Any]) -> float | None:
        """None where the results have no such number."""
        found = value_at(results, *self.path)
        return found if usable(found) else None


COSTS = (
    Column("parameters", "Parameters", "", ("student", "parameters"), True),
    Column("tokens_per_second", "Student, tokens/s", "", ("student", "tokens_per_second"), False),
    Column("training.tokens_per_second", "Training, tokens/s", "", ("training", "tokens_per_second"), False),
    Column("training.seconds", "Training, seconds", "", ("training", "seconds"), True),
)


def scores_of(results: dict[str, Any]) -> list[Column]:
    """The student's scores: every measure on every set, then its agreement with the teacher."""
    found = []
    for measure, described in measures_of(results).items():
        title, lower = str(described["title"]), bool(described.get("lower_is_better", True))
        for data in sets_of(results, measure):
            path = ("student", measure, data)
            found.append(
                Column(f"{data}.{measure}", title, label_of(results, data), path, lower, measure=measure, data=data)
            )
    for key, title, lower, form in (("top1", SAME_CHOICE, False, _share), ("kl", DIVERGENCE, True, number)):
        for data, values in (results.get("agreement") or {}).items():
            if (values or {}).get(key) is not None:
                path = ("agreement", data, key)
                label = label_of(results, data)
                found.append(Column(f"{data}.{key}", title, label, path, lower, form, measure=key, data=data))
    return found


def _share(value: Any) -> str:
    return percent(value, 1)


def columns_of(results: dict[str, Any]) -> list[Column]:
    """Every number of a run that has a name: scores, what it cost, and the final losses."""
    losses = value_at(results, "training", "final_loss") or {}
    return [
        *scores_of(results),
        *COSTS,
        *(Column(f"loss.{term}", f"Loss {term}", "", ("training", "final_loss", term), True) for term in losses),
    ]


def column_named(name: str, columns: list[Column], setting: str) -> Column:
    """The column of that name; a measure alone stands for itself on the first set that has it.

    Raises:
        SettingError: there is none; names `setting` and the nearest names.
    """
    by_name = {column.name: column for column in reversed(columns)}
    by_name |= {column.measure: column for column in reversed(columns) if column.measure}
    if name not in by_name:
        known = [*dict.fromkeys(column.measure for column in columns if column.measure)]
        known += [column.name for column in columns]
        nearest = did_you_mean(name, known)
        raise SettingError(f"{setting}={name} is no number of this run{nearest}: choose one of {', '.join(known)}")
    return by_name[name]
