"""The setting `backend.elastic`: how few and how many ranks a run may have."""

import re

from distill.runtime.errors import SettingError


def parse_elastic(text: str | None) -> tuple[int, int] | None:
    """The fewest and the most ranks of `backend.elastic`, or None where it is null. Raises SettingError."""
    if text is None:
        return None
    match = re.fullmatch(r"([1-9]\d*):([1-9]\d*)", text)
    if match is None or int(match[1]) > int(match[2]):
        raise SettingError(f"backend.elastic={text}: give the fewest and the most ranks as MIN:MAX, such as 2:4")
    return int(match[1]), int(match[2])
