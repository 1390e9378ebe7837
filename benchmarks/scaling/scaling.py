"""Throughput T(N) and efficiency T(N) / (N T(1)) with and without accumulation, and a cost model that projects further.

    sudo python benchmarks/scaling/scaling.py                   # 1, 2, 4, 8 emulated hosts with a fifth of a core each
    python benchmarks/scaling/scaling.py --network loopback --sizes 1,2 --share 0
    python benchmarks/scaling/scaling.py --projection           # only the model, beside the published table

The model: a step of `k` micro-batches on N hosts takes

    k * compute + 2 (N - 1) * latency + 2 (N - 1) / N * bytes / bandwidth

(a ring allreduce moves every byte twice, except the host's own share; Patarasuk and Yuan 2009). It is
`cost_model.exchange.Model`, on which `projection.py` builds. `compute` is measured on one host, the
bandwidth that one exchange reaches on two; the model then has to predict the larger ones.
"""

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any

from benchmarks.scaling.cost_model.exchange import Model

# The DistilBERT distributed-training benchmark, 8 GPUs a node, minutes of three epochs as published.
PUBLISHED = {
    "1 node, exchange after every micro-batch": 402,
    "1 node, delayed sync": 204,
    "4 nodes, Horovod": 70,
    "4 nodes, Horovod, multi-ring": 66,
    "8 nodes, Horovod": 37,
    "8 nodes, Horovod, multi-ring": 32,
}
ACCUMULATE = 50


def nodes(minutes_of_compute: float, minutes_on_four: float, size: int) -> float:
    """Minutes on `size` nodes when the exchanges cost `minutes_on_four` of the run on four.

    With more nodes there are fewer steps in proportion, and each exchange costs (N - 1) / N of the transfer.
    """
    share = (size - 1) / size / (3 / 4)
    return (minutes_of_compute + 4 * minutes_on_four * share) / size


def projection() -> list[list[str]]:
    """The published table from three of its entries, and what lies beyond it: rows of (case, model, published)."""
    one, delayed, four, rings = (list(PUBLISHED.values())[i] for i in (0, 1, 2, 3))
    # On one node the two runs differ by all exchanges but one in fifty.
    exchanges = (one - delayed) / (ACCUMULATE - 1)
    compute = delayed - exchanges
    plain, multi = four - compute / 4, rings - compute / 4
    cases = [
        ("compute of all steps on one node", compute, None),
        ("1 node, exchange after every micro-batch", compute + ACCUMULATE * exchanges, 402),
        ("1 node, delayed sync", compute + exchanges, 204),
        ("4 nodes, Horovod", nodes(compute, plain, 4), 70),
        ("4 nodes, Horovod, multi-ring", nodes(compute, multi, 4), 66),
        ("8 nodes, Horovod", nodes(compute, plain, 8), 37),
        ("8 nodes, Horovod, multi-ring", nodes(compute, multi, 8), 32),
        ("8 nodes, multi-ring, bfloat16 on the wire", nodes(compute, multi / 2, 8), None),
        ("16 nodes, multi-ring", nodes(compute, multi, 16), None),
        ("16 nodes, multi-ring, bfloat16 on the wire", nodes(compute, multi / 2, 16), None),
        ("32 nodes, multi-ring, bfloat16 on the wire", nodes(compute, multi / 2, 32), None),
    ]
    used = {402, 204, 70, 66}
    return [
        [case, f"{model:.1f}", "-" if published is None else f"{published}{' (given)' if published in used else ''}"]
        for case, model, published in cases
    ]


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Seconds per step for every engine, accumulation and number of hosts, each with the rounds it was measured in."""
    from benchmarks.scaling.cluster import NETWORKS, Cluster

    results = []
    network = None if options.network == "loopback" else NETWORKS[options.network]
    for engine in options.engines.split(","):
        for size in map(int, options.sizes.split(",")):
            with Cluster(size, network, options.share or None) as cluster:
                for accumulate in map(int, options.accumulate.split(",")):
                    steps = max(1, options.micro_batches // accumulate)
                    times = cluster.run_json(
                        "scaling/sync.py", "--rank", "--engines", engine, "--variants", "distill window",
                        "--accumulate", accumulate, "--steps", steps, "--rounds", options.rounds,
                        "--width", options.width, "--layers", options.layers, "--tokens", options.tokens,
                        "--rings", options.rings,
                    )["distill window"]  # fmt: skip
                    seconds = statistics.median(times)
                    results.append(
                        {"engine": engine, "size": size, "accumulate": accumulate, "seconds": seconds, "all": times}
                    )
                    print(f"{engine}, {size} hosts, {accumulate} x: {seconds:.2f} s", file=sys.stderr, flush=True)
    return results


def fit(results: list[dict[str, Any]], latency: float) -> Model:
    """Compute from one host's steps, transfer from those of two hosts without accumulation (or the least of it)."""
    alone = [r for r in results if r["size"] == 1]
    compute = statistics.median(r["seconds"] / r["accumulate"] for r in alone)
    pair = min((r for r in results if r["size"] == 2), key=lambda r: r["accumulate"])
    left = pair["seconds"] - pair["accumulate"] * compute - 2 * latency
    return Model(compute, latency, max(0.0, 2 * left))


def report(results: list[dict[str, Any]], options: argparse.Namespace) -> None:
    from benchmarks.common import table
    from benchmarks.scaling.cluster import NETWORKS

    latency = 0.0 if options.network == "loopback" else NETWORKS[options.network].delay / 1e6
    for engine in options.engines.split(","):
        own = [r for r in results if r["engine"] == engine]
        model = fit(own, latency) if {1, 2} <= {r["size"] for r in own} else None
        rows = []
        for r in own:
            alone = [o["seconds"] for o in own if o["size"] == 1 and o["accumulate"] == r["accumulate"]]
            tokens = r["size"] * r["accumulate"] * options.tokens / r["seconds"]
            rows.append(
                [
                    str(r["size"]),
                    str(r["accumulate"]),
                    f"{r['seconds']:.3f}",
                    f"{model.step(r['size'], r['accumulate']):.3f}" if model else "-",
                    f"{tokens:.0f}",
                    f"{alone[0] / r['seconds']:.1%}" if alone else "-",
                    f"{model.efficiency(r['size'], r['accumulate']):.1%}" if model else "-",
                ]
            )
        print(f"\n{engine} on {options.network}, a host has {options.share or 'no limit'} of a core\n")
        head = ["hosts", "micro-batches", "s/step", "model", "tokens/s", "T(N) / (N T(1))", "model"]
        print(table(head, sorted(rows, key=lambda row: (int(row[1]), int(row[0])))))
        if model:
            print(f"\ncompute {model.compute:.3f} s, transfer {model.transfer:.3f} s, latency {model.latency:.4f} s")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", default="1gbit", help="loopback, 1gbit, 1gbit-far or capped")
    parser.add_argument("--share", type=float, default=0.2, help="of a core, for each host; 0: no limit")
    parser.add_argument("--sizes", default="1,2,4,8")
    parser.add_argument("--engines", default="ddp,horovod")
    parser.add_argument("--accumulate", default="1,50")
    parser.add_argument("--micro-batches", type=int, default=50, help="of a turn")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--rings", default="1")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--projection", action="store_true", help="measure nothing")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def main() -> None:
    from benchmarks.common import save, table

    options = _options()
    if not options.projection:
        results = measure(options)
        report(results, options)
        save(options.json, {"settings": vars(options) | {"json": None}, "measured": results})
    print(
        "\nThe published benchmark (minutes), and the model with compute and exchange taken from four of its entries\n"
    )
    print(table(["case", "model", "published"], projection()))


if __name__ == "__main__":
    main()
