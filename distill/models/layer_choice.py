"""Which of a teacher's layers a student starts from: a list, or a rule for a number of them."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

from distill.runtime.errors import SettingError
from distill.runtime.progress import counted

# What one layer of a student starts from: a layer of the teacher, or several whose weights are averaged.
Layer = int | Sequence[int]

AUTO = "auto"  # not a rule of numbers: `distill.runs.layer_search` scores subsets on sequences of the corpus


def every_second(available: int, count: int) -> list[Layer]:
    """0, 2, 4, ... as the published DistilBERT takes them; then those that are left out, from the top."""
    return sorted([*range(0, available, 2), *reversed(range(1, available, 2))][:count])


def even(available: int, count: int) -> list[Layer]:
    """Evenly spread from the first to the last; the first alone for one."""
    return [round(number * (available - 1) / max(count - 1, 1)) for number in range(count)]


def first(available: int, count: int) -> list[Layer]:
    """The lowest ones."""
    return list(range(count))


def last(available: int, count: int) -> list[Layer]:
    """The highest ones."""
    return list(range(available - count, available))


def ends(available: int, count: int) -> list[Layer]:
    """The lowest and the highest, one more of the lowest where the number is odd."""
    return [*range((count + 1) // 2), *range(available - count // 2, available)]


def averaged(available: int, count: int) -> list[Layer]:
    """All of them in groups of neighbours, of which each gives the mean of its weights; larger groups come first."""
    size, larger = divmod(available, count)
    bounds = [number * size + min(number, larger) for number in range(count + 1)]
    groups = [list(range(start, stop)) for start, stop in pairwise(bounds)]
    return [group if len(group) > 1 else group[0] for group in groups]


RULES: dict[str, Callable[[int, int], list[Layer]]] = {
    "every_second": every_second,
    "even": even,
    "first": first,
    "last": last,
    "ends": ends,
    "averaged": averaged,
}


def choose_layers(layers: list[Any] | str | None, count: int | None, available: int) -> list[Layer]:
    """The teacher's layers to start from, of `available` ones.

    Args:
        layers: their numbers (a list of some in place of one: the mean of their weights), or a rule; None: every second
            one. Of `auto`, what every other choice has in common: as many of them.
        count: how many a rule takes; None: half of them, rounded up.

    Raises:
        SettingError: none, more than there are, an unknown rule, or a layer that the teacher does not have.
    """
    if isinstance(layers, list):
        if count not in (None, len(layers)):
            raise SettingError(
                f"student.num_layers={count}, but student.layers={layers} names {len(layers)}: leave one of the two "
                "settings out"
            )
        if not are_layers(layers):
            raise SettingError(f"student.layers={layers} must be whole numbers, such as [0,2,4]")
        chosen = layers
    else:
        rule = "every_second" if layers in (None, AUTO) else layers
        if rule not in RULES:
            raise SettingError(
                f"student.layers={rule} is not known: give layer numbers such as [0,2,4], or one of "
                f"{', '.join([AUTO, *RULES])}"
            )
        chosen = RULES[rule](available, number_of_layers(count, available))
    if not chosen or any(not 0 <= layer < available for layer in flat(chosen)):
        raise SettingError(f"student.layers={chosen}: the teacher has layers 0 to {available - 1}")
    return chosen


def number_of_layers(count: int | None, available: int) -> int:
    """How many layers a rule takes. Raises SettingError where there are not so many."""
    num_layers = (available + 1) // 2 if count is None else count
    if not 1 <= num_layers <= available:
        raise SettingError(
            f"student.num_layers={num_layers}: the teacher has {counted(available, 'layer')}, take 1 to {available}"
        )
    return num_layers


def are_layers(layers: list[Any]) -> bool:
    """Whether these are numbers of layers, or lists of some."""
    if not all(isinstance(layer, int) or (isinstance(layer, list) and layer) for layer in layers):
        return False
    return all(isinstance(layer, int) and not isinstance(layer, bool) for layer in flat(layers))


def flat(layers: Sequence[Layer]) -> list[int]:
    """The numbers of all layers that are taken, those of averages too."""
    return [number for layer in layers for number in ([layer] if isinstance(layer, int) else layer)]
