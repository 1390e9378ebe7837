"""Which of a teacher's layers a student starts from: a list, or a rule for a number of them."""

from collections.abc import Callable

from distill.errors import SettingError


def every_second(available: int, count: int) -> list[int]:
    """0, 2, 4, ... as the published DistilBERT takes them; then those that are left out, from the top."""
    return sorted([*range(0, available, 2), *reversed(range(1, available, 2))][:count])


def even(available: int, count: int) -> list[int]:
    """Evenly spread from the first to the last; the first alone where one is wanted."""
    return [round(number * (available - 1) / max(count - 1, 1)) for number in range(count)]


def first(available: int, count: int) -> list[int]:
    """The lowest ones."""
    return list(range(count))


def ends(available: int, count: int) -> list[int]:
    """The lowest and the highest, one more of the lowest where the number is odd."""
    return [*range((count + 1) // 2), *range(available - count // 2, available)]


RULES: dict[str, Callable[[int, int], list[int]]] = {
    "every_second": every_second,
    "even": even,
    "first": first,
    "ends": ends,
}


def choose_layers(layers: list[int] | str | None, count: int | None, available: int) -> list[int]:
    """The teacher's layers to start from, of `available` ones.

    Args:
        layers: their numbers, or a rule; None: every second one.
        count: how many a rule takes; None: half of them, rounded up.

    Raises:
        SettingError: none, more than there are, a rule that is not known, or a layer that the teacher does not have.
    """
    if isinstance(layers, list):
        if count not in (None, len(layers)):
            raise SettingError(f"student.num_layers={count}, but student.layers={layers} names {len(layers)}: drop one")
        chosen = layers
        if any(not isinstance(layer, int) or isinstance(layer, bool) for layer in layers):
            raise SettingError(f"student.layers={layers} has to be whole numbers, such as [0,2,4]")
    else:
        rule = layers or "every_second"
        if rule not in RULES:
            raise SettingError(
                f"student.layers={rule} is not known: give layer numbers such as [0,2,4], or one of {', '.join(RULES)}"
            )
        wanted = (available + 1) // 2 if count is None else count
        if not 1 <= wanted <= available:
            raise SettingError(
                f"student.num_layers={wanted}: the teacher has {available} layers, take 1 to {available}"
            )
        chosen = RULES[rule](available, wanted)
    if not chosen or any(not 0 <= layer < available for layer in chosen):
        raise SettingError(f"student.layers={chosen}: the teacher has layers 0 to {available - 1}")
    return chosen
