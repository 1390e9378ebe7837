"""Milliseconds of one exchange of the gradients on engines of torch.distributed: Gloo or NCCL, and plug-ins beside it.

    python benchmarks/scaling/collectives.py --collective NAME          # or MODULE:NAME, several with commas between
    sudo python benchmarks/scaling/collectives.py --collective NAME --network 1gbit --size 4
    srun python benchmarks/scaling/collectives.py --collective NAME     # one engine on ranks that a launcher starts

NAME is what `backend.collective` takes. Without a launcher the engines take turns, each time in new ranks on this
machine, one per GPU where there are GPUs; a time is the slowest rank's, and medians over all turns are compared. Under
a launcher one engine is measured: without --collective it is Gloo or NCCL.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path

import torch
from torch import nn

from benchmarks.common import save, table, title
from benchmarks.scaling.cluster import NETWORKS, Cluster, end_rank
from distill.config.settings import BackendConfig
from distill.distributed import GradientSync, join_ranks
from distill.runtime.rank import rank_from_env


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


def _rank(options: argparse.Namespace) -> None:
    """Measure one engine as one of its ranks; rank 0 prints its name, and by size the seconds of each exchange."""
    settings = BackendConfig(
        name="ddp", device=options.device, collective=options.collective or None, compression=options.compression
    )
    ranks = join_ranks(settings)
    times: dict[str, list[float]] = {}
    for size in options.megabytes.split(","):
        elements = int(float(size) * 1e6 / 4)
        model = nn.ParameterList([nn.Parameter(torch.ones(elements, device=ranks.device))])
        sync = GradientSync(ranks, model)
        times[size] = [seconds_of(sync) for _ in range(options.rounds + 1)][1:]  # the first one opens connections
    end_rank(ranks, {"engine": ranks.engine, "ranks": ranks.size, "seconds": times})


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--collective", default="", help="plug-ins, NAME or MODULE:NAME with commas between them")
    parser.add_argument("--size", type=int, default=2, help="ranks, where no launcher has started them")
    parser.add_argument("--network", default="loopback", help="loopback, 1gbit, 1gbit-far or capped")
    parser.add_argument("--megabytes", default="1,16,64", help="sizes of the gradients")
    parser.add_argument("--compression", default="none", help="none, bf16 or fp16")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--rounds", type=int, default=10, help="exchanges of each size in each turn")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def main() -> None:
    options = _options()
    if rank_from_env() is not None:
        _rank(options)
    sizes = options.megabytes.split(",")
    names = ["", *filter(None, options.collective.split(","))]
    times: dict[str, dict[str, list[float]]] = {name: {size: [] for size in sizes} for name in names}
    engines: dict[str, str] = {}
    shared = ["--megabytes", options.megabytes, "--compression", options.compression, "--device", options.device]
    with Cluster(options.size, NETWORKS.get(options.network)) as cluster:
        for turn in range(options.turns):
            for name in names if turn % 2 == 0 else reversed(names):
                measured = cluster.run_json(
                    "scaling/collectives.py", *shared, "--rounds", options.rounds, "--collective", name
                )
                engines[name] = measured["engine"]
                for size in sizes:
                    times[name][size] += measured["seconds"][size]
                print(f"turn {turn + 1}: {measured['engine']}", file=sys.stderr, flush=True)
    medians = {name: {size: statistics.median(times[name][size]) for size in sizes} for name in names}
    rows = []
    for name in names:
        cells = [f"{1000 * medians[name][size]:.1f} ({medians[''][size] / medians[name][size]:.2f})" for size in sizes]
        rows.append([engines[name], *cells])
    print(f"\n{title()}; {options.size} ranks on {options.network}")
    print("Milliseconds of an exchange, and how many times as fast as the first engine\n")
    print(table(["engine", *[f"{size} MB" for size in sizes]], rows))
    save(options.json, {"engines": engines, "seconds": times, "medians": medians})


if __name__ == "__main__":
    main()
