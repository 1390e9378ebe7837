"""The range of every number among the settings, and the one check that goes through all of them."""

import math
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any, NamedTuple

from distill.config import settings
from distill.config.component import Component
from distill.config.corpus import NearConfig
from distill.config.evaluate import CurveConfig
from distill.config.profile import ProfileConfig
from distill.config.ramp import Ramp
from distill.config.report import ReportConfig
from distill.config.settings import Config
from distill.optim.schedule import ENDLESS
from distill.runtime.errors import SettingError


class Range(NamedTuple):
    """From `least` to `most`; an end that is `open` does not belong to it."""

    least: float
    most: float
    open_below: bool = False
    open_above: bool = False

    def __contains__(self, value: object) -> bool:
        assert isinstance(value, int | float)
        above = self.least < value if self.open_below else self.least <= value
        return above and (value < self.most if self.open_above else value <= self.most)  # nan is in no range

    def __str__(self) -> str:
        low = f"above {_shown(self.least)}" if self.open_below else f"from {_shown(self.least)}"
        if self.open_above:
            return f"{low} and below {_shown(self.most)}" if self.open_below else f"{low} to below {_shown(self.most)}"
        return f"{low} and at most {_shown(self.most)}" if self.open_below else f"{low} to {_shown(self.most)}"


SHARE = Range(0, 1)
SHARE_ABOVE_ZERO = Range(0, 1, open_below=True)
BELOW_ONE = Range(0, 1, open_above=True)
STEPS = Range(1, ENDLESS)
ROWS = Range(1, 10**12)
BATCH = Range(1, 65_536)  # rows: ten times what a large machine holds of short ones
WEIGHT = Range(0, 1e6)
TEMPERATURE = Range(0.01, 1000)
EVERYWHERE = Range(-1e12, 1e12)  # numbers that have no range of their own, such as those of a callable of the user's

# Of every dataclass of `distill.config.settings`, each field that is a number. The upper ends are far above what any
# run has had: they are there for slips of the finger, which would end in a lack of memory or in a student of nan.
RANGES: dict[type[Any], dict[str, Range]] = {
    settings.SourceConfig: {"share": SHARE_ABOVE_ZERO},
    settings.TokensConfig: {
        "sequence_length": Range(10, 131_072),
        "heldout": BELOW_ONE,
        "max_bad": SHARE,
        "vocab_size": Range(300, 4_000_000),
    },
    NearConfig: {
        "threshold": Range(0.1, 1),
        "shingle": Range(1, 100),
        "permutations": Range(16, 4096),  # fewer would leave hardly a choice of bands
    },
    # A shard is held on the disk of the host that makes it, and object stores take files of up to 5 TB.
    settings.CacheConfig: {
        "workers": Range(1, 1024),
        "shard_bytes": Range(1, 1 << 40),
        "local_bytes": Range(1, 1 << 50),
        "shuffle_bytes": Range(1, 1 << 40),
    },
    settings.CorpusFlags: {"rows": Range(0, 10**12), "unknown": SHARE},
    settings.TeacherCacheConfig: {
        "top_k": Range(1, 4_000_000),
        "sampled": Range(1, 65_536),
        "exponent": SHARE_ABOVE_ZERO,  # with 0 all tokens would be drawn alike; above 1 weights have no bound
        "seed": Range(0, 2**63 - 1),
        "gigabytes": Range(0, 1e6, open_below=True),
    },
    settings.MemberConfig: {"weight": Range(0, 1e6, open_below=True), "micro_batches": Range(1, 10_000)},
    settings.TeacherConfig: {"micro_batches": Range(1, 10_000)},
    settings.StudentConfig: {"num_layers": Range(1, 10_000), "dropout": BELOW_ONE},
    settings.MaskingConfig: {
        "share": Range(0, 1, open_below=True, open_above=True),  # of 1 nothing would be left to predict from
        "mask": SHARE,
        "keep": SHARE,
        "smoothing": Range(0, 100),
        "ngrams": Range(1, 100),
        "most": Range(1, 1_048_576),
    },
    settings.TermConfig: {"weight": WEIGHT, "temperature": TEMPERATURE},
    settings.ObjectiveConfig: {"temperature": TEMPERATURE},
    settings.OptimizerFlags: {
        "lr": Range(1e-12, 1e6),
        "base_batch": Range(1, 10**9),
        "clip": Range(1e-9, 1e9),
    },
    settings.TrainConfig: {
        "batch_size": BATCH,
        "accumulate": Range(1, 1_000_000),
        "rows_per_step": Range(1, 10**9),
        "epochs": Range(1, 1_000_000),
        "steps": STEPS,
        "minutes": Range(1e-6, 1e7),
        "log_every": STEPS,
        "save_every": STEPS,
        "keep": Range(1, 1_000_000),
        "milestones": STEPS,
        "milestone_every": STEPS,
        "max_nonfinite": Range(1, 1_000_000),
        "max_loss_ratio": Range(1, 1e9),
        "max_spike": Range(1, 10**9),
        "workers": Range(0, 1024),
    },
    settings.PseudoPerplexityConfig: {"share": SHARE, "batch_size": BATCH},
    settings.SetConfig: {"rows": ROWS},
    settings.SetShare: {"share": SHARE},
    CurveConfig: {"points": Range(0, 1000), "rows": ROWS},
    settings.EvaluateConfig: {
        "rows": ROWS,
        "batch_size": BATCH,
        "every_steps": STEPS,
        "stride": Range(1, 1_048_576),
    },
    settings.BackendConfig: {
        "threads": Range(1, 1024),  # beyond, OpenMP ends the process when it cannot start them
        "processes": Range(1, 65_536),
        "timeout": Range(0, 1e7, open_below=True),
        "elastic_wait": Range(0, 1e7),
    },
    ProfileConfig: {
        "trace_steps": Range(0, 100),
        "stop_after": STEPS,
    },
    ReportConfig: {"every": Range(0, 86_400)},
    settings.StageConfig: {"seeds": Range(0, 2**63 - 1)},
    Config: {"seed": Range(0, 2**63 - 1)},
}


def check_ranges(config: Config) -> None:
    """Raises SettingError for the first number that is not in its range, or not finite, wherever it stands."""
    for setting, value, allowed in _numbers(config, ""):
        for number in value if isinstance(value, list) else [value]:
            if number not in allowed:
                which = f", of which {number}" if isinstance(value, list) else ""
                raise SettingError(f"{setting}={value}{which} {_verdict(number, allowed)}: give a number {allowed}")


def range_of(owner: type[Any], name: str) -> Range | None:
    """The range of a field of a dataclass, or of one that it inherits."""
    return next((RANGES[each][name] for each in owner.__mro__ if name in RANGES.get(each, ())), None)


def _verdict(value: float, allowed: Range) -> str:
    if not math.isfinite(value):
        return "is not finite"
    return "is too large" if value >= allowed.most else "is too small"


def _shown(number: float) -> str:
    return f"{number:,.0f}" if abs(number) >= 10_000 and number < 1e15 else f"{number:g}"


# These parts have no name of their own on the command line: their settings stand directly under their group.
FLAT = {"corpus.source": "corpus", "corpus.tokens": "corpus", "corpus.cache": "corpus", "objective.terms": "objective"}
FLAT |= {"optimizer.make": "optimizer", "teacher.custom": "teacher", "student.custom": "student"}


def _numbers(part: Any, path: str) -> Iterator[tuple[str, float | list[float], Range]]:
    """(setting, number, its range) of all numbers in a dataclass, by their names on the command line."""
    for each in fields(part):
        if path == "" and each.name == "given":
            continue
        allowed = range_of(type(part), each.name) or EVERYWHERE
        name = f"{path}.{each.name}".lstrip(".")
        yield from _inside(getattr(part, each.name), FLAT.get(name, name), allowed)


def _inside(value: Any, name: str, allowed: Range) -> Iterator[tuple[str, float | list[float], Range]]:
    if isinstance(value, bool | str | Enum) or value is None:
        return
    if isinstance(value, int | float):
        yield name, value, allowed
    elif isinstance(value, Ramp):
        yield from ((f"{name}.start", value.start, allowed), (f"{name}.end", value.end, allowed))
    elif isinstance(value, settings.TermConfig):
        yield from _inside(value.weight, f"{name}.weight", WEIGHT)
        yield from _inside(value.temperature, f"{name}.temperature", TEMPERATURE)
        yield from _inside(value.make, name, EVERYWHERE)
    elif isinstance(value, Component):
        yield from _inside(value.arguments, name, EVERYWHERE)
    elif is_dataclass(value):
        yield from _numbers(value, name)
    elif isinstance(value, dict):
        for key, one in value.items():
            yield from _inside(one, f"{name}.{key}", allowed)
    elif isinstance(value, list | tuple):
        numbers = all(isinstance(one, int | float) and not isinstance(one, bool) for one in value)
        if numbers:
            yield name, list(value), allowed
        for one in [] if numbers else value:
            yield from _inside(one, name, allowed)
