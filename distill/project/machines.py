"""Machines from a file: what a node computes, holds, sends, reads and costs, as ranges from worst to best."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from distill.errors import SettingError, first_line
from distill.nearest import did_you_mean
from distill.project.exchange import Link

OWN = Path(__file__).parent / "machines.yaml"
CASES = ("worst", "usual", "best")
FORMATS = ("fp32", "bf16", "fp16", "int8")
GIGA, MICRO = 1e9, 1e-6


@dataclass(frozen=True)
class Machine:
    """A node in one case, in bytes, operations and seconds."""

    name: str
    title: str
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
    shared: float | None  # bytes a second of the storage that all nodes share; None: each has its own
    save: float  # bytes a second that checkpoints are written at
    jitter: float  # standard deviation of a micro-batch's time, as a share of it
    start: float  # seconds from the start of the job to its first step
    price: float  # of a node and hour


@dataclass(frozen=True)
class MachineCases:
    """A machine in the worst, the usual and the best case, and which of its numbers nobody has measured."""

    worst: Machine
    usual: Machine
    best: Machine
    assumed: tuple[str, ...]
    note: str

    @property
    def name(self) -> str:
        return self.usual.name

    def cases(self) -> tuple[Machine, Machine, Machine]:
        return self.worst, self.usual, self.best


# Of an entry: its fields and the units that they are given in. Those with True may be left out.
FIELDS: dict[str, tuple[str, bool]] = {
    "title": ("a name for people", False),
    "gpus": ("GPUs of a node, or ranks of one without", False),
    "memory": ("GB of each GPU", False),
    "reserved": ("GB of it that drivers and libraries take", False),
    "rate": ("TFLOP/s of a GPU's matrix products by number format, {fp32: NUMBER, bf16: NUMBER}", False),
    "share": ("the share of that rate that a training step reaches, by number format", False),
    "memory_rate": ("GB/s of a GPU's memory", False),
    "call": ("microseconds that starting one layer's kernels takes", False),
    "inside": ("the links between GPUs of a node: {rate: GB/s, latency: MICROSECONDS}", False),
    "between": ("the link of a node to others: {rate: GB/s, latency: MICROSECONDS}", False),
    "overlap": ("the share of the computing beside it that can hide an exchange, 0 to 1", False),
    "trees": ("whether collectives between nodes go through trees, as NCCL's do", False),
    "storage": ("GB/s that a node reads data with", False),
    "shared_storage": ("GB/s of the storage that all nodes read from together; none where each has its own", True),
    "save": ("GB/s that checkpoints are written at", False),
    "jitter": ("standard deviation of a micro-batch's time, as a share of it", False),
    "start": ("seconds from the start of the job to its first step", False),
    "price": ("of a node and hour, in any currency", False),
    "assumed": ("a list of these fields that nobody has measured", True),
    "note": ("where the numbers come from", True),
}
LINK = {"rate": "GB/s", "latency": "microseconds", "flow": "GB/s of a single connection"}


def load(path: str | None = None) -> dict[str, MachineCases]:
    """The machines that come with the package and those of a user's file, by name.

    An entry of the user's may begin with `like: NAME`, another machine whose fields it changes; under the name of a
    machine that is there already it does that by itself.

    Raises:
        SettingError: a file that cannot be read, or an entry with a field that is missing, not known or no number.
    """
    entries = _read(OWN)
    if path is not None:
        for name, entry in _read(Path(path).expanduser()).items():
            where = f"machines={path}: {name}"
            if not isinstance(entry, dict):
                raise SettingError(f"{where} is no machine: give its fields, {', '.join(FIELDS)}")
            own = dict(entry)
            like = own.pop("like", name if name in entries else None)
            if like is not None and like not in entries:
                raise SettingError(
                    f"{where}.like={like} is not known{did_you_mean(like, entries)}: choose one of {', '.join(entries)}"
                )
            entries[name] = _merged(entries[like], own) if like is not None else own
    where = "the package's machines" if path is None else f"machines={path}"
    return {name: _machine(f"{where}: {name}", name, entry) for name, entry in entries.items()}


def choose(machines: dict[str, MachineCases], names: str) -> list[MachineCases]:
    """Those that a list of names, separated by commas, stands for; `all`: every one that is no processor alone.

    Raises:
        SettingError: a name that is not known.
    """
    if names == "all":
        return [machine for machine in machines.values() if machine.usual.call]
    for name in (wanted := [each.strip() for each in names.split(",")]):
        if name not in machines:
            raise SettingError(
                f"machine={name} is not known{did_you_mean(name, machines)}: choose one of {', '.join(machines)}, or "
                "describe it in a file, machines=PATH"
            )
    return [machines[name] for name in wanted]


def _read(path: Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise SettingError(f"machines={path} cannot be read: {first_line(error)}") from error
    if not isinstance(content, dict) or not content:
        raise SettingError(f"machines={path} holds no machines: give each by its name, with its fields")
    return {str(name): entry for name, entry in content.items()}


def _merged(known: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """The fields of `known` with those of `own` in their place; groups of fields, such as a link, entry by entry."""
    both = {name for name in own if isinstance(own[name], dict) and isinstance(known.get(name), dict)}
    return {**known, **own, **{name: {**known[name], **own[name]} for name in both}}


def _machine(where: str, name: str, entry: dict[str, Any]) -> MachineCases:
    for field in entry:
        if field not in FIELDS:
            raise SettingError(f"{where}.{field} is not known{did_you_mean(field, FIELDS)}: leave it out")
    for field, (meaning, optional) in FIELDS.items():
        if not optional and entry.get(field) is None:
            raise SettingError(f"{where} has no {field}: add it ({meaning})")
    assumed = entry.get("assumed") or []
    if not isinstance(assumed, list) or any(str(each) not in FIELDS for each in assumed):
        raise SettingError(f"{where}.assumed={assumed}: give a list of its fields")
    worst, usual, best = (_case(where, name, entry, case) for case in range(len(CASES)))
    return MachineCases(worst, usual, best, tuple(map(str, assumed)), str(entry.get("note") or "").strip())


def _case(where: str, name: str, entry: dict[str, Any], case: int) -> Machine:
    """One of `CASES`, in the units that the formulas take."""

    def number(field: str, least: float = 0.0) -> float:
        return _number(f"{where}.{field}", entry[field], case, least)

    gpus = number("gpus", 1)
    if gpus != int(gpus):
        raise SettingError(f"{where}.gpus={gpus} is no number of GPUs: give 1 or more")
    rate, share = (_by_format(f"{where}.{field}", entry[field], case) for field in ("rate", "share"))
    if rate.keys() != share.keys():
        raise SettingError(f"{where}: rate is given for {', '.join(rate)} and share for {', '.join(share)}: give both")
    shared = entry.get("shared_storage")
    return Machine(
        name=name,
        title=str(entry["title"]),
        gpus=int(gpus),
        memory=GIGA * max(0.0, number("memory") - number("reserved")),
        reached={each: 1e12 * rate[each] * share[each] for each in rate},
        memory_rate=GIGA * number("memory_rate", 1e-6),
        call=MICRO * number("call"),
        inside=_link(f"{where}.inside", entry["inside"], case),
        between=_link(f"{where}.between", entry["between"], case),
        overlap=min(1.0, number("overlap")),
        trees=bool(entry["trees"]),
        storage=GIGA * number("storage", 1e-6),
        shared=None if shared is None else GIGA * _number(f"{where}.shared_storage", shared, case, 1e-6),
        save=GIGA * number("save", 1e-6),
        jitter=number("jitter"),
        start=number("start"),
        price=number("price"),
    )


def _number(where: str, given: Any, case: int, least: float) -> float:
    """A number, or that of a case of three."""
    if isinstance(given, list) and len(given) == len(CASES):
        given = given[case]
    if isinstance(given, bool) or not isinstance(given, int | float) or not least <= given < float("inf"):
        raise SettingError(
            f"{where}={given} is no such number: give one of at least {least:g}, or three of them, [worst, usual, best]"
        )
    return float(given)


def _by_format(where: str, given: Any, case: int) -> dict[str, float]:
    if not isinstance(given, dict) or not given:
        raise SettingError(f"{where}={given} is nothing by number format: give {{bf16: NUMBER}}")
    if (other := _first(given, FORMATS)) is not None:
        raise SettingError(f"{where}.{other} is not known: choose among {', '.join(FORMATS)}")
    return {name: _number(f"{where}.{name}", value, case, 1e-9) for name, value in given.items()}


def _link(where: str, given: Any, case: int) -> Link:
    if not isinstance(given, dict) or "rate" not in given or "latency" not in given:
        raise SettingError(f"{where}={given} is no link: give {{rate: GB/s, latency: MICROSECONDS}}")
    if (other := _first(given, LINK)) is not None:
        raise SettingError(f"{where}.{other} is not known{did_you_mean(other, LINK)}: choose one of {', '.join(LINK)}")
    flow = given.get("flow")
    return Link(
        GIGA * _number(f"{where}.rate", given["rate"], case, 1e-9),
        MICRO * _number(f"{where}.latency", given["latency"], case, 0.0),
        None if flow is None else GIGA * _number(f"{where}.flow", flow, case, 1e-9),
    )


def _first(given: Iterable[Any], known: Iterable[str]) -> Any:
    """The first of these that is not known; None where all are."""
    return next((each for each in given if each not in known), None)
