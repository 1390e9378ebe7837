"""The name of a job's folder in a sweep: what is swept and its value, so that a person can read it."""

import os
from collections.abc import Collection, Sequence

# Bytes of a name. File systems take 255 (some that encrypt take 143), and nobody reads a longer one.
LONGEST = 120
NOTHING_SWEPT = "only"  # the folder of a sweep of one job


def swept_overrides(overrides: Sequence[str], fixed: Collection[str]) -> list[str]:
    """The overrides of a job that can differ between the jobs of a sweep, ordered by name.

    The order does not depend on that of the command line, so the same sweep finds its folders again.

    Args:
        overrides: of the job, such as `seed=1`.
        fixed: names of those that are the same in every job.
    """
    return sorted(override for override in overrides if override.partition("=")[0] not in fixed)


def readable_name(swept: Sequence[str]) -> str | None:
    """`objective.temperature=2,seed=1`; None where that would be too long.

    Different overrides have different names: what cannot stand in one is escaped as in URLs, `%2F` for a slash.
    """
    name = ",".join(escape(override.lstrip("+")) for override in swept) or NOTHING_SWEPT
    return name if len(os.fsencode(name)) <= LONGEST else None


def escape(text: str) -> str:
    """`text` as a part of a file's name, with slashes, control characters and percent signs as %XX."""
    return "".join(
        character if character.isprintable() and character not in "/\\%" else _codes(character) for character in text
    )


def _codes(character: str) -> str:
    return "".join(f"%{byte:02X}" for byte in character.encode("utf-8", "surrogateescape"))
