"""Which rows are computed together: those of alike length, the longest first, so that little of a batch is padding."""

from collections.abc import Iterator, Sequence

from distill.models.loaded import LoadedModel
from distill.runtime.errors import SettingError


def in_batches(lengths: Sequence[int], batch_size: int) -> Iterator[list[int]]:
    """The numbers of the rows with these lengths, in batches."""
    order = sorted(range(len(lengths)), key=lambda number: -lengths[number])
    yield from (order[start : start + batch_size] for start in range(0, len(order), batch_size))


def check_length(found: LoadedModel, what: str, length: int, further: str = "") -> None:
    """Raises SettingError where a row has more tokens than the model reads; `further` says what counts besides."""
    if found.longest is not None and length > found.longest:
        raise SettingError(
            f"{what} has {length:,} tokens{further}, and model={found.path} reads {found.longest:,}: shorten it"
        )
