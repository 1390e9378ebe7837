"""Seconds of one exchange of the gradients: rings x engine x network x format on the wire.

    python benchmarks/scaling/rings.py                                   # loopback, 2 ranks
    sudo python benchmarks/scaling/rings.py --networks loopback,1gbit,capped --size 4

Every engine's numbers of rings take turns in one run; a time is the slowest rank's, and medians are compared.
"""

import argparse
import statistics
import sys
import time

import torch
from torch import nn

from benchmarks.common import save, table
from benchmarks.scaling.cluster import clusters, compare_engines, end_rank
from distill.config.settings import BackendConfig
from distill.distributed import GradientSync, Ranks, join_ranks


def seconds_of(sync: GradientSync) -> float:
    """The slowest rank's time of one exchange, the GPU's work included."""
    ranks = sync.ranks
    ranks.sum(torch.zeros(1))  # ranks leave a barrier up to 50 ms apart, and a sum together
    began = time.perf_counter()
    sync.all_reduce_gradients()
    if ranks.device.type == "cuda":
        torch.cuda.synchronize(ranks.device)
    own = torch.zeros(ranks.size, dtype=torch.float64)
    own[ranks.rank] = time.perf_counter() - began
    return float(ranks.sum(own).max())


def _model(megabytes: float) -> nn.Module:
    return nn.ParameterList([nn.Parameter(torch.ones(int(megabytes * 1e6 / 4)))])


def _exchanges(ranks: Ranks, numbers: list[int], megabytes: float, rounds: int) -> dict[str, list[float]]:
    """On one rank: seconds by `<rings>` and `<rings> bf16`, in turns."""
    sync = GradientSync(ranks, _model(megabytes))
    variants = [(number, "none") for number in numbers] + [(number, "bf16") for number in numbers if number > 1]
    times: dict[str, list[float]] = {}
    for turn in range(rounds + 1):
        for number, compression in variants:
            ranks.rings = number
            ranks.settings = ranks.settings.changed(compression=compression)
            taken = seconds_of(sync)
            if turn:  # the first round opens connections
                times.setdefault(f"{number}{' bf16' * (compression == 'bf16')}", []).append(taken)
    return times


def _rank(options: argparse.Namespace) -> None:
    numbers = [int(number) for number in options.rings.split(",")]
    ranks = join_ranks(BackendConfig(name=options.engines, device="cpu", rings=max(numbers), timeout=120.0))
    end_rank(ranks, _exchanges(ranks, numbers, options.megabytes, options.rounds))


def _options() -> argparse.Namespace:
    parser = compare_engines(__doc__)
    parser.add_argument("--rings", default="1,2,4,8")
    parser.add_argument("--megabytes", type=float, default=64.0, help="of gradients")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    options = _options()
    if options.rank:
        _rank(options)
    results, rows = [], []
    for network, engine, cluster in clusters(options):
        arguments = ["--engines", engine, "--megabytes", options.megabytes, "--rounds", options.rounds]
        times = cluster.run_json("scaling/rings.py", *arguments, "--rings", options.rings, "--rank")
        medians = {name: statistics.median(values) for name, values in times.items()}
        results.append({"network": network, "engine": engine, "seconds": times, "medians": medians})
        names = list(medians)
        rows.append([network, engine, *[f"{medians[name]:.3f}" for name in names]])
        print(" ".join(rows[-1]), file=sys.stderr, flush=True)
    print(f"\n{options.size} ranks, {options.megabytes:g} MB of gradients, seconds by rings (medians)\n")
    print(table(["network", "engine", *names], rows))
    save(options.json, results)


if __name__ == "__main__":
    main()
