"""Made-up profiles, whose bottleneck is known."""

from typing import Any

from distill.runs.profile.loader import LoaderTimes
from distill.runs.profile.phases import PHASES
from distill.runs.profile.record import RankProfile, RunProfile, RunSettings

STEPS = 40
HEALTHY = {"data": 0.001, "teacher": 0.03, "forward": 0.02, "backward": 0.04, "optimizer": 0.01}


def step(**seconds: float) -> list[float]:
    """The phases of a step of 100 ms, or what is given of them."""
    return [{**HEALTHY, **seconds}.get(phase, 0.0) for phase in PHASES]


def rank(number: int = 0, steps: list[list[float]] | None = None, **fields: Any) -> RankProfile:
    steps = steps or [step() for _ in range(STEPS)]
    known = {"host": f"host{number}", "device": "cpu", "cores": 4, "local_ranks": 1, "num_steps": len(steps)}
    totals = {phase: sum(one[place] for one in steps) for place, phase in enumerate(PHASES)}
    loader = LoaderTimes(len(steps), prepared=0.02 * len(steps), computed=0.02 * len(steps), most_at_once=1)
    samples = {"seconds": [0.5, 1.0], "process_cpu": [1.0, 1.0], "memory_stalled": [0.0, 0.0]}
    made = {"rank": number, "steps": steps, "exchanges": [0.0] * len(steps), "totals": totals, "loader": loader}
    return RankProfile(**{**known, **made, "samples": samples, **fields})


def run(*ranks: RankProfile, **settings: Any) -> RunProfile:
    known = {"batch_size": 8, "micro_batches": 4, "accumulate": 4, "save_every": 100}
    return RunProfile(list(ranks), RunSettings(**{**known, **settings}))
