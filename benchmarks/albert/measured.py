"""What `scaling.py` measures: variants of the exchange on several numbers of hosts, with what is predicted."""

import json
import statistics
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.albert.host import Job
from benchmarks.albert.published import PARAMETERS, cost_model
from benchmarks.scaling.cluster import Cluster, Network
from benchmarks.scaling.cost_model.exchange import BYTES, Model

RINGS_OF_AUTO = 4  # the most that `backend.rings=auto` tries


@dataclass(frozen=True)
class Variant:
    """An engine with its settings, and the micro-batches of a step."""

    name: str
    engine: str
    rings: str  # a number, or auto
    compression: str
    accumulate: int = 1

    def job(self, exchange: bool, steps: int = 1) -> Job:
        """Without exchange there are neither rings nor formats on the wire."""
        if not exchange:
            return Job(False, self.accumulate, steps)
        return Job(True, self.accumulate, steps, self.rings, self.compression)


@dataclass
class Measured:
    """Medians of a variant on so many hosts; seconds are those of a step."""

    variant: Variant
    size: int
    steps: int  # of a turn
    seconds: float
    alone: float  # without exchange
    processor: float  # seconds of a host's processor that the exchange took
    rings: int  # in force
    predicted: Model
    runs: list[dict[str, Any]]  # every job as the hosts gave it

    @property
    def efficiency(self) -> float:
        """T(N) / (N T(1)), where T(1) is that of these hosts in the same run when they do not exchange."""
        return self.alone / self.seconds

    @property
    def predicted_seconds(self) -> float:
        return self.predicted.step(self.size, self.variant.accumulate)

    @property
    def predicted_efficiency(self) -> float:
        return self.predicted.efficiency(self.size, self.variant.accumulate)


@dataclass
class Plan:
    """The runs of a protocol: one for each engine and number of hosts, in which its variants take turns."""

    variants: list[Variant]
    sizes: list[int]  # from one upwards
    shape: str
    rows: int  # of a host's micro-batch
    examples: int | None  # rows of a turn on all hosts together; None: a turn is one step
    host: list[str]  # further arguments of albert_host.py
    share: float | None  # of a core
    rounds: int

    def steps(self, size: int) -> int:
        return 1 if self.examples is None else self.examples // (self.rows * size)

    def model(self, variant: Variant, compute: float, network: Network) -> Model:
        """The cost model of a variant on a network, for micro-batches of so many seconds."""
        rings = RINGS_OF_AUTO if variant.rings == "auto" else int(variant.rings)
        return cost_model(compute, network, BYTES[variant.compression] * PARAMETERS[self.shape], rings)

    def engines(self) -> dict[str, list[Variant]]:
        """The variants by their engine."""
        names = dict.fromkeys(variant.engine for variant in self.variants)
        return {name: [variant for variant in self.variants if variant.engine == name] for name in names}

    def jobs(self, own: list[Variant], size: int) -> list[Job]:
        """Of one run: before each number of micro-batches a step without exchange; every other round backwards."""
        once = list(dict.fromkeys(job for v in own for job in (v.job(False), v.job(True, self.steps(size)))))
        return [job for turn in range(self.rounds) for job in (once if turn % 2 == 0 else once[::-1])]

    def calibrate(self) -> tuple[float, float]:
        """Seconds of a micro-batch when all hosts compute and none exchanges, and of the start of so many hosts."""
        began = time.monotonic()
        found = self._run(Cluster(self.sizes[-1], None, self.share, late=True), "ddp", "1", [Job(False)] * 2)
        seconds = statistics.median(step for job in found["jobs"] for rank in job["seconds"] for step in rank)
        return seconds, max(0.0, time.monotonic() - began - 2 * seconds)

    def minutes(self, compute: float, network: Network, start: float) -> tuple[float, float]:
        """About how long all runs take until they have started, and one round of them."""
        starts = turns = 0.0
        for size in self.sizes[1:]:
            for own in self.engines().values():
                starts += start * max(0.4, size / self.sizes[-1])
                alone = sum({variant.accumulate for variant in own})
                models = [(variant, self.model(variant, compute, network)) for variant in own]
                turns += compute * alone + self.steps(size) * sum(m.step(size, v.accumulate) for v, m in models)
        return starts / 60, 1.1 * turns / 60

    def measure(self, compute: float, network: Network, emulated: bool) -> Iterator[Measured]:
        """All runs on more than one host; `emulated` false: on the loopback of this machine."""
        for size in self.sizes[1:]:
            for engine, own in self.engines().items():
                opened = "auto" if any(v.rings == "auto" for v in own) else own[0].rings
                cluster = Cluster(size, network if emulated else None, self.share, limit=3600, late=True)
                found = self._run(cluster, engine, opened, self.jobs(own, size))
                for variant in own:
                    yield self._summary(variant, size, found, self.model(variant, compute, network))

    def _run(self, cluster: Cluster, engine: str, rings: str, jobs: list[Job]) -> dict[str, Any]:
        given = ["--shape", self.shape, "--rows", self.rows, "--engine", engine, "--rings", rings, *self.host]
        with cluster:
            found = cluster.run_json("albert/host.py", *given, "--jobs", json.dumps([asdict(job) for job in jobs]))
        assert isinstance(found, dict)
        return found

    def _summary(self, variant: Variant, size: int, found: dict[str, Any], predicted: Model) -> Measured:
        """A step with exchange takes as long as on its slowest host, one without as long as on a typical one."""

        def of(wanted: Job) -> list[dict[str, Any]]:
            return [each for each in found["jobs"] if Job(**each["job"]) == wanted]

        together, alone = of(variant.job(True, self.steps(size))), of(variant.job(False))
        seconds = [max(step) for job in together for step in zip(*job["seconds"], strict=True)]
        seconds_alone = [step for job in alone for rank in job["seconds"] for step in rank]
        processor = [statistics.median(v for job in jobs for v in job["processor"]) for jobs in (together, alone)]
        return Measured(
            variant, size, self.steps(size), statistics.median(seconds), statistics.median(seconds_alone),
            processor[0] - processor[1], found["rings"] if variant.rings == "auto" else int(variant.rings),
            predicted, [*together, *alone],
        )  # fmt: skip
