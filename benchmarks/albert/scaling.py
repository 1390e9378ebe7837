"""Scaling of ALBERT's pre-training on emulated hosts, as two published systems report it; predictions come first.

    sudo python benchmarks/albert/scaling.py                        # 1, 2, 4, 8 hosts; 11 minutes on 2 cores
    sudo python benchmarks/albert/scaling.py --protocol examples    # the same rows for any number of hosts; 7 minutes
    python benchmarks/albert/scaling.py --predict                   # the published nodes by the cost model

Bandwidth and computation of the published nodes are scaled by one and the same factor (`published.py`): first
the micro-batch of a host is timed, with all hosts at work and none exchanging, and from that follows the network.
T(N) / (N T(1)) is the time of a step without exchange over that of one with it, in turns on the same N hosts: so what
they take from each other on this machine's cores does not count, nor a machine that changes its speed. The cost model
knows the network alone; what an exchange costs a host's processor has a column of its own.

`--protocol hosts`: throughput and efficiency, with and without accumulation. `--protocol examples`: total time for the
same rows on any number of hosts, whose steps then hold the more rows; engines and formats on the wire side by side,
with the cap on single connections of the published network.
"""

import argparse
import sys
import time
from dataclasses import asdict
from pathlib import Path

from benchmarks.albert.host import SIZES
from benchmarks.albert.measured import Measured, Plan, Variant
from benchmarks.albert.published import (
    EXAMPLES,
    FLOW_GBITS,
    GAINS,
    GBITS,
    NODE_ROWS,
    PARAMETERS,
    SYSTEMS,
    cost_model,
    scaled_network,
    seconds_of_node,
)
from benchmarks.common import save, table, title
from benchmarks.scaling.cluster import Network
from benchmarks.scaling.cost_model.exchange import BYTES

# Of the second protocol: name, engine, rings, format on the wire.
SIDE_BY_SIDE = [
    Variant("ddp", "ddp", "1", "none"),
    Variant("ddp, bf16 on the wire", "ddp", "1", "bf16"),
    Variant("horovod", "horovod", "1", "none"),
    Variant("horovod, rings=auto", "horovod", "auto", "none"),
]
# Tokens of a row, Gbit/s of a connection (0: those of the link) and minutes that a protocol has unless they are given.
DEFAULTS = {"hosts": (512, 0.0, 12.0), "examples": (256, FLOW_GBITS, 8.0)}


def predict() -> None:
    """The published nodes by the cost model: what emulated hosts of the same scale have to give, too."""
    rows = []
    for shape in ("base", "large"):
        system = SYSTEMS[shape]
        for link, flow in ((f"{GBITS:g} Gbit/s", 0.0), (f"at most {FLOW_GBITS:g} a connection", FLOW_GBITS)):
            model = cost_model(1 / system.rate, scaled_network(1.0, GBITS, flow), BYTES["fp16"] * PARAMETERS[shape])
            for many in (system.accumulate, 1):
                times = f"{1000 * many * model.compute:.0f}", f"{1000 * model.exchange(8):.1f}"
                efficiency = f"{model.efficiency(8, many):.1%}", f"{system.efficiency[many > 1]:.0%}"
                rows.append([f"{shape}, {link}", str(many), *times, *efficiency])
    print("\nThe published nodes by the cost model: 8 nodes, gradients in fp16 on one ring\n")
    head = ["shape, link", "micro-batches", "compute ms", "exchange ms", "T(8) / (8 T(1))", "published"]
    print(table(head, rows), flush=True)


def announce(plan: Plan, tokens: int, compute: float, network: Network, scale: float) -> None:
    """The scale, and what it predicts for every variant and number of hosts."""
    print(
        f"\nA micro-batch of a host, {plan.rows} x {tokens} tokens, takes {compute:.2f} s; a node's took "
        f"{1000 * compute * scale:.0f} ms: factor 1 / {1 / scale:.1f}.\nA link has {network.rate:.0f} Mbit/s, a "
        f"connection {network.per_flow or network.rate:.0f}, {network.delay / 1000:.2f} ms one way.\n\nPredicted\n"
    )
    rows = []
    for variant in plan.variants:
        model = plan.model(variant, compute, network)
        efficiencies = [f"{model.efficiency(size, variant.accumulate):.1%}" for size in plan.sizes]
        rows.append([variant.name, str(variant.accumulate), f"{model.exchange(plan.sizes[-1]):.2f}", *efficiencies])
    head = ["T(N) / (N T(1))", "micro-batches", f"exchange of {plan.sizes[-1]}, s"]
    print(table([*head, *[f"N = {size}" for size in plan.sizes]], rows), flush=True)


def report_hosts(plan: Plan, results: list[Measured], compute: float) -> None:
    published = SYSTEMS[plan.shape].efficiency
    rows = [
        [
            r.variant.name,
            str(r.variant.accumulate),
            str(r.size),
            f"{60 * r.size * r.variant.accumulate * plan.rows / r.seconds:.1f}",
            f"{r.seconds:.2f}",
            f"{r.alone:.2f}",
            f"{r.seconds - r.alone:.2f}",
            f"{r.predicted.exchange(r.size):.2f}",
            f"{r.processor:.2f}",
            f"{r.efficiency:.1%}",
            f"{r.predicted_efficiency:.1%}",
            f"{published[r.variant.accumulate > 1]:.0%}" if r.size == 8 else "-",
        ]
        for r in sorted(results, key=lambda r: (r.variant.engine, r.variant.accumulate, r.size))
    ]
    print(f"\nMeasured; one host has {60 * plan.rows / compute:.1f} rows/min\n")
    head = ["engine", "micro-batches", "hosts", "rows/min", "s/step", "without exchange", "exchange", "predicted"]
    print(table([*head, "on the processor", "T(N) / (N T(1))", "predicted", "published (8)"], rows))


def report_examples(plan: Plan, results: list[Measured], compute: float) -> None:
    assert plan.examples is not None
    total = plan.steps(1) * compute
    rows = [["one host", "1", f"{plan.steps(1)} x {plan.rows}", f"{total:.0f}", f"{total:.0f}", "100.0%", "100.0%"]]
    rows[0] += ["-", "-"]
    first = {r.size: r for r in results if r.variant == plan.variants[0]}
    for r in sorted(results, key=lambda r: (r.size, plan.variants.index(r.variant))):
        base = first[r.size]
        gains = base.seconds / r.seconds, base.predicted_seconds / r.predicted_seconds
        rows.append(
            [
                r.variant.name + f" ({r.rings})" * (r.variant.rings == "auto"),
                str(r.size),
                f"{r.steps} x {r.size * plan.rows}",
                f"{r.steps * r.seconds:.0f}",
                f"{r.steps * r.predicted_seconds:.0f}",
                f"{r.efficiency:.1%}",
                f"{r.predicted_efficiency:.1%}",
                *[f"{gain:.2f}" for gain in gains],
            ]
        )
    print(f"\nMeasured: {plan.examples} rows, {EXAMPLES:,} of the published run / {EXAMPLES / plan.examples:,.0f}\n")
    head = ["engine", "hosts", "steps x rows", "total s", "predicted", "T(N) / (N T(1))", "predicted"]
    print(table([*head, f"times as fast as {plan.variants[0].name}", "predicted"], rows))
    print(f"\nPublished gains of an engine over DistributedDataParallel: {GAINS[0]:g} to {GAINS[1]:g} times as fast.")


def make_plan(options: argparse.Namespace) -> Plan:
    """Ends the script where the options do not fit each other."""
    engines = options.engines.split(",")
    system, by_rows = SYSTEMS[options.shape], options.protocol == "examples"
    variants = [variant for variant in SIDE_BY_SIDE if variant.engine in engines]
    if not by_rows:
        many = [int(k) for k in (options.accumulate or f"1,{system.accumulate}").split(",")]
        variants = [Variant(e, e, options.rings, options.compression, k) for e in engines for k in many]
    sizes = sorted({1, *map(int, options.sizes.split(","))})
    if by_rows and any(options.examples % (options.rows * size) for size in sizes):
        sys.exit(f"--examples {options.examples}: give a multiple of --rows {options.rows} times each of --sizes")
    host = ["--tokens", str(options.tokens), "--precision", options.precision, *["--words-only"] * by_rows]
    examples = options.examples if by_rows else None
    return Plan(variants, sizes, options.shape, options.rows, examples, host, options.share or None, options.rounds)


def fit_into(plan: Plan, minutes: float, began: float, start: float, compute: float, network: Network) -> None:
    """As many rounds as there is time for. Ends the script where not even one fits."""
    starts, turn = plan.minutes(compute, network, start)
    spent = (time.monotonic() - began) / 60
    rounds = min(plan.rounds, int((minutes - spent - starts) / turn)) if turn else plan.rounds
    if rounds < 1:
        needed = f"one round would end after about {spent + starts + turn:.1f} minutes"
        sys.exit(f"--minutes {minutes:g}: {needed}; give more of them, or fewer --sizes, --engines or --tokens")
    plan.rounds = rounds
    print(f"\n{rounds} rounds, to end about {spent + starts + rounds * turn:.1f} minutes after the start", flush=True)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--protocol", default="hosts", choices=list(DEFAULTS))
    parser.add_argument("--predict", action="store_true", help="measure nothing")
    parser.add_argument("--shape", default="base", choices=list(SIZES))
    parser.add_argument("--sizes", default="1,2,4,8", help="numbers of hosts")
    parser.add_argument("--engines", default="ddp,horovod")
    parser.add_argument("--accumulate", help="micro-batches of a step (hosts: 1 and the published number)")
    parser.add_argument("--rings", default="1", help="of the protocol hosts")
    parser.add_argument("--compression", default="fp16", choices=list(BYTES), help="of the protocol hosts")
    parser.add_argument("--examples", type=int, default=8, help="rows in all, of the protocol examples")
    parser.add_argument("--rows", type=int, default=1, help="of a host's micro-batch")
    parser.add_argument("--tokens", type=int, help="of a row (hosts: 512, examples: 256)")
    parser.add_argument("--precision", default="fp32", choices=("fp32", "bf16"))
    parser.add_argument("--share", type=float, default=0.2, help="of a core, for each host; 0: no limit")
    parser.add_argument("--gbits", type=float, default=GBITS, help="Gbit/s of a published node's link")
    parser.add_argument("--flow-gbits", type=float, help="of one of its connections; 0: those of the link")
    parser.add_argument("--rounds", type=int, default=1, help="at most, as many as fit into --minutes")
    parser.add_argument("--minutes", type=float, help="for everything (hosts: 12, examples: 8)")
    parser.add_argument("--loopback", action="store_true", help="processes of this machine, no emulated network")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    for name, value in zip(("tokens", "flow_gbits", "minutes"), DEFAULTS[options.protocol], strict=True):
        if getattr(options, name) is None:
            setattr(options, name, value)
    return options


def main() -> None:
    options, began = _options(), time.monotonic()
    predict()
    if options.predict:
        return
    plan = make_plan(options)
    compute, start = plan.calibrate()
    # Both in the same unit, so their quotient is how much slower everything of a host has to be than it was in a node.
    scale = seconds_of_node(options.shape, NODE_ROWS if plan.examples else None) / compute
    network = scaled_network(scale, options.gbits, options.flow_gbits)
    print(f"\nALBERT-{options.shape}, {options.precision}; {title()}")
    announce(plan, options.tokens, compute, network, scale)
    fit_into(plan, options.minutes, began, start, compute, network)
    results = []
    for result in plan.measure(compute, network, not options.loopback):
        results.append(result)
        what = f"{result.variant.name}, {result.size} hosts, {result.variant.accumulate} micro-batches"
        times = f"{result.seconds:.2f} s a step, {result.alone:.2f} without exchange"
        print(f"{what}: {times}", file=sys.stderr, flush=True)
    (report_examples if plan.examples else report_hosts)(plan, results, compute)
    print(f"\n{(time.monotonic() - began) / 60:.1f} minutes")
    settings = vars(options) | {"json": None}
    scaled = {"compute": compute, "scale": scale, "network": network._asdict()}
    save(options.json, {"settings": settings, **scaled, "measured": [asdict(result) for result in results]})


if __name__ == "__main__":
    main()
