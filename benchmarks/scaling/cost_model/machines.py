"""Machines from `machines.yaml`: what a node computes, holds, sends, reads and costs, as ranges from worst to best."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from benchmarks.scaling.cost_model.exchange import Link

CASES = ("worst", "usual", "best")
GIGA, MICRO = 1e9, 1e-6


@dataclass(frozen=True)
class Machine:
    """A node in one case, in bytes, operations and seconds."""

    name: str
    gpus: int  # ranks of a node
    memory: float  # bytes of a GPU, without what drivers and libraries take
    reached: dict[str, float]  # operations a second that a step of the loop reaches on a GPU, by number format
    memory_rate: float  # bytes a second of a GPU's memory
    call: float  # seconds that starting one layer's kernels takes at least
    inside: Link
    between: Link
    overlap: float  # share of the computing beside it that can hide an exchange
    trees: bool
    storage: float  # bytes a second that a node reads
    save: float  # bytes a second that checkpoints are written at
    jitter: float  # standard deviation of a micro-batch's time, as a share of it
    start: float  # seconds from the start of the job to its first step
    price: float  # of a node and hour


@dataclass(frozen=True)
class MachineCases:
    """A machine in the worst, the usual and the best case."""

    worst: Machine
    usual: Machine
    best: Machine

    def cases(self) -> tuple[Machine, Machine, Machine]:
        return self.worst, self.usual, self.best


def load() -> dict[str, MachineCases]:
    """The machines of the file, by name."""
    entries = yaml.safe_load((Path(__file__).parent / "machines.yaml").read_text(encoding="utf-8"))
    return {name: MachineCases(*(_case(name, entry, n) for n in range(3))) for name, entry in entries.items()}


def _case(name: str, entry: dict[str, Any], case: int) -> Machine:
    """One of `CASES`, in the units that the formulas take."""

    def number(value: Any) -> float:
        return float(value[case] if isinstance(value, list) else value)

    def link(value: dict[str, Any]) -> Link:
        return Link(GIGA * number(value["rate"]), MICRO * number(value["latency"]))

    rates = {each: 1e12 * number(rate) * number(entry["share"][each]) for each, rate in entry["rate"].items()}
    return Machine(
        name=name,
        gpus=entry["gpus"],
        memory=GIGA * (number(entry["memory"]) - number(entry["reserved"])),
        reached=rates,
        memory_rate=GIGA * number(entry["memory_rate"]),
        call=MICRO * number(entry["call"]),
        inside=link(entry["inside"]),
        between=link(entry["between"]),
        overlap=number(entry["overlap"]),
        trees=entry["trees"],
        storage=GIGA * number(entry["storage"]),
        save=GIGA * number(entry["save"]),
        jitter=number(entry["jitter"]),
        start=number(entry["start"]),
        price=number(entry["price"]),
    )
