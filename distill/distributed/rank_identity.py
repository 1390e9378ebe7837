"""Refuses a rank that would train something else than the others: other settings, data, teacher or code."""

import hashlib
import importlib.metadata
import platform
from pathlib import Path
from typing import Any

from distill.config.base import flatten
from distill.distributed import Ranks
from distill.runtime.errors import SettingError

LIBRARIES = ("torch", "transformers", "numpy")
NAMED = 3  # differences in the message
# Last parts of the names of settings that a host may have its own values of.
OF_A_HOST = ("path", "cache", "unlabelled", "tokenizer", "baseline", "device", "threads", "workers")
OF_A_NODE = ("data.local", "data.local_bytes", "data.tokens")  # whole names, of its own disk and mount points


def refuse_differing_settings(nested: dict[str, Any], ranks: Ranks) -> None:
    """Compare the settings of every rank before anything is read; all ranks call it together.

    Ranks that score at different steps, for example, would wait for each other in different places.

    Args:
        nested: the settings by their names. Paths, numbers of threads and a node's own disk may differ.

    Raises:
        SettingError: on all ranks, naming the ranks that differ from rank 0, and in what.
    """
    settings = flatten(nested)
    free = {name for name in settings if name in OF_A_NODE or name.rpartition(".")[2] in OF_A_HOST}
    compared = {name: str(value) for name, value in settings.items() if name not in free}
    compared["evaluate.baseline"] = "None" if settings.get("evaluate.baseline") is None else "a run"  # all score it
    refuse_differing_ranks(compared | versions(), ranks)


def refuse_differing_ranks(identity: dict[str, Any], ranks: Ranks) -> None:
    """Compare what every rank is about to train; all ranks call it together.

    Args:
        identity: what the trained student depends on, with the digests of corpus, teachers and student.

    Raises:
        SettingError: on all ranks, naming the ranks that differ from rank 0, and in what.
    """
    if ranks.size == 1:
        return
    ranks.barrier()  # hosts may be minutes apart in preparing their data
    first, *others = ranks.gather(identity)
    differing = {rank: _differences(first, other) for rank, other in enumerate(others, 1) if other != first}
    if not differing:
        return
    rank, differences = next(iter(differing.items()))
    more = f" (and {len(differing) - 1} more ranks differ)" if len(differing) > 1 else ""
    raise SettingError(
        f"rank {rank} would train something else than rank 0{more}: {'; '.join(differences[:NAMED])}"
        f"{f' and {len(differences) - NAMED} more' if len(differences) > NAMED else ''}: start all ranks by the same "
        "command, with the same code and the same data"
    )


def versions() -> dict[str, str]:
    """What this rank runs: the code of this package by its content, and the libraries that it computes with."""
    package = Path(__file__).parent.parent
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(f"{path.relative_to(package)}\0".encode() + path.read_bytes() + b"\0")
    libraries = {f"the version of {name}": importlib.metadata.version(name) for name in LIBRARIES}
    return {
        "the code of distill": digest.hexdigest()[:12],
        "the version of Python": platform.python_version(),
        **libraries,
    }


def _differences(first: dict[str, Any], other: dict[str, Any]) -> list[str]:
    names = [name for name in sorted({*first, *other}) if first.get(name) != other.get(name)]
    return [f"{name} is {_short(other.get(name))} there and {_short(first.get(name))} on rank 0" for name in names]


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:60]}..."
