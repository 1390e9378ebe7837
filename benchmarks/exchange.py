"""The exchange of gradients: steps with delayed sync against an exchange per micro-batch, and rings by network.

    python -m benchmarks.exchange sync                                        # loopback, 2 ranks
    sudo python -m benchmarks.exchange sync --networks loopback,1gbit         # and between emulated hosts
    sudo python -m benchmarks.exchange rings --networks loopback,1gbit,capped --size 4

`sync`: every variant trains its own copy of one BERT (cross-entropy, AdamW) on the same batches; within an engine all
variants take turns in one run. `none` exchanges nothing at all: what is left when communication costs nothing.

    distill window    one flat bucket, one exchange per step, as `python -m distill` trains
    distill every     one exchange per micro-batch: the same with `backend.sync=every`
    wrapper window    DistributedDataParallel with no_sync(); hvd.DistributedOptimizer with backward_passes_per_step

`rings`: seconds of one exchange by number of rings and format on the wire, in turns; a time is the slowest rank's.
"""

import argparse
import contextlib
import copy
import itertools
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import BertConfig, BertForMaskedLM

from benchmarks.cluster import NETWORKS, Cluster, end_rank
from benchmarks.common import Results, parser_of
from distill.config.settings import BackendConfig
from distill.distributed import GradientSync, Ranks, join_ranks

VOCABULARY = 6144
VARIANTS = ("none", "distill window", "distill every", "wrapper window")

# One optimizer step on these micro-batches, [rows, tokens] each.
Step = Callable[[list[torch.Tensor]], None]


def make_model(width: int, layers: int) -> Any:
    torch.manual_seed(0)
    heads = width // 64
    sizes: dict[str, Any] = {"hidden_size": width, "num_attention_heads": heads, "intermediate_size": 4 * width}
    return BertForMaskedLM(BertConfig(vocab_size=VOCABULARY, num_hidden_layers=layers, **sizes))


def loss_of(model: Any, ids: torch.Tensor, share: float) -> torch.Tensor:
    return model(input_ids=ids, labels=ids).loss * share


def optimizer_of(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


def with_distill(model: Any, ranks: Ranks, how: str) -> Step:
    ranks = copy.copy(ranks)  # settings of its own on the same connections
    if how == "none":
        ranks.size = 1  # the same step, exchanging with nobody
    ranks.settings = ranks.settings.changed(sync="every" if how == "every" else "window")
    sync = GradientSync(ranks, model)
    optimizer = optimizer_of(model)

    def step(window: list[torch.Tensor]) -> None:
        sync.zero()
        total = torch.zeros(1)
        for i, ids in enumerate(window):
            with sync.micro_batch(last=i == len(window) - 1):
                loss = loss_of(model, ids, 1 / len(window))
                loss.backward()
            total += loss.detach()
        sync.all_reduce_gradients(total)
        optimizer.step()

    return step


def ddp(model: Any) -> Step:
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = optimizer_of(wrapped)

    def step(window: list[torch.Tensor]) -> None:
        optimizer.zero_grad()
        for i, ids in enumerate(window):
            with contextlib.nullcontext() if i == len(window) - 1 else wrapped.no_sync():
                loss_of(wrapped, ids, 1 / len(window)).backward()
        optimizer.step()

    return step


def horovod(model: Any, accumulate: int) -> Step:
    import horovod.torch as hvd

    optimizer = hvd.DistributedOptimizer(
        optimizer_of(model), model.named_parameters(), backward_passes_per_step=accumulate
    )

    def step(window: list[torch.Tensor]) -> None:
        optimizer.zero_grad()
        for ids in window:
            loss_of(model, ids, 1 / len(window)).backward()
        optimizer.step()

    return step


def build(variant: str, ranks: Ranks, options: argparse.Namespace) -> Step:
    model = make_model(options.width, options.layers)
    who, _, how = variant.partition(" ")
    if who != "wrapper":
        return with_distill(model, ranks, how or who)
    return ddp(model) if ranks.name == "ddp" else horovod(model, options.accumulate)


def _steps(options: argparse.Namespace) -> None:
    """On one rank: seconds by variant; a variant's turn is one step, from barrier to barrier."""
    # Between emulated hosts each is the only rank of its host, yet all share this machine's cores.
    ranks = join_ranks(BackendConfig(name=options.engines, device="cpu", threads=1, timeout=300.0))
    steps = {variant: build(variant, ranks, options) for variant in VARIANTS}
    torch.manual_seed(ranks.rank)
    window = [torch.randint(VOCABULARY, (options.rows, options.tokens)) for _ in range(options.accumulate)]
    times: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
    for turn in range(options.rounds + 1):
        for variant in VARIANTS if turn % 2 else VARIANTS[::-1]:
            ranks.barrier()
            began = time.perf_counter()
            steps[variant](window)
            ranks.barrier()
            if turn:
                times[variant].append(time.perf_counter() - began)
    end_rank(ranks, times)


def seconds_of(sync: GradientSync) -> float:
    """The slowest rank's time of one exchange."""
    ranks = sync.ranks
    ranks.sum(torch.zeros(1))  # ranks leave a barrier up to 50 ms apart, and a sum together
    began = time.perf_counter()
    sync.all_reduce_gradients()
    own = torch.zeros(ranks.size, dtype=torch.float64)
    own[ranks.rank] = time.perf_counter() - began
    return float(ranks.sum(own).max())


def _rings(options: argparse.Namespace) -> None:
    """On one rank: seconds of an exchange by `<rings>` and `<rings> bf16`, in turns."""
    numbers = [int(number) for number in options.rings.split(",")]
    ranks = join_ranks(BackendConfig(name=options.engines, device="cpu", rings=max(numbers), timeout=120.0))
    sync = GradientSync(ranks, nn.ParameterList([nn.Parameter(torch.ones(int(options.megabytes * 1e6 / 4)))]))
    variants = [(number, "none") for number in numbers] + [(number, "bf16") for number in numbers if number > 1]
    times: dict[str, list[float]] = {}
    for turn in range(options.rounds + 1):
        for number, compression in variants:
            ranks.rings = number
            ranks.settings = ranks.settings.changed(compression=compression)
            taken = seconds_of(sync)
            if turn:  # the first round opens connections
                times.setdefault(f"{number}{' bf16' * (compression == 'bf16')}", []).append(taken)
    end_rank(ranks, times)


def main() -> None:
    parser = parser_of(__doc__, "exchange")
    parser.add_argument("what", choices=("sync", "rings"))
    parser.add_argument("--networks", default="loopback", help=f"of loopback, {', '.join(NETWORKS)}")
    parser.add_argument("--engines", default="ddp,horovod")
    parser.add_argument("--size", type=int, default=2, help="ranks")
    sizes = {"width": 384, "layers": 10, "rows": 1, "tokens": 64, "accumulate": 50, "megabytes": 64.0, "rounds": 3}
    for name, value in sizes.items():  # 10 layers of 384: 20 M parameters; of gradients: megabytes
        parser.add_argument(f"--{name}", type=type(value), default=value)
    parser.add_argument("--rings", default="1,2,4,8")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        (_steps if options.what == "sync" else _rings)(options)
    given = [part for name in (*sizes, "rings") for part in (f"--{name}", getattr(options, name))]
    results = Results(options.out)
    for network, engine in itertools.product(options.networks.split(","), options.engines.split(",")):
        arguments = (options.what, *given, "--engines", engine, "--rank")
        with Cluster(options.size, None if network == "loopback" else NETWORKS[network]) as cluster:
            # Horovod's own default, since `every` waits for a cycle in each micro-batch.
            times = cluster.run_json("benchmarks.exchange", *arguments, HOROVOD_CYCLE_TIME="1")
        seconds = {name: statistics.median(values) for name, values in times.items()}
        against = "distill every" if options.what == "sync" else next(iter(seconds))
        for name, own in seconds.items():
            ratio = {f"as_fast_as_{against.replace(' ', '_')}": seconds[against] / own}
            about = {"network": network, "engine": engine, "ranks": options.size, options.what: name}
            results.row(**about, seconds=own, **ratio, rounds=times[name], settings=vars(options))
    results.where()


if __name__ == "__main__":
    main()
