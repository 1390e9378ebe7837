"""Steps with delayed sync against an exchange per micro-batch, and both against DDP's and Horovod's own wrappers.

    python benchmarks/scaling/sync.py                                        # loopback, 2 ranks
    sudo python benchmarks/scaling/sync.py --networks loopback,1gbit         # and between emulated hosts

Every variant trains its own copy of one BERT (cross-entropy, AdamW) on the same batches; within an engine all variants
take turns in one run. `none` exchanges nothing at all: what is left when communication costs nothing.

    distill window    one flat bucket, one exchange per step, as `python -m distill` trains
    distill late      the same, but the exchange begins only after the last backward
    distill every     one exchange per micro-batch: the same with `backend.sync=every`
    wrapper window    DistributedDataParallel with no_sync(); hvd.DistributedOptimizer with backward_passes_per_step
    wrapper every     DistributedDataParallel as it is; hvd.DistributedOptimizer synchronized after each backward
"""

import argparse
import contextlib
import copy
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import BertConfig, BertForMaskedLM

from benchmarks.common import save, table
from benchmarks.scaling.cluster import clusters, compare_engines, end_rank
from distill.config.settings import BackendConfig
from distill.distributed import GradientSync, Ranks, join_ranks

VOCABULARY = 6144
VARIANTS = ("none", "distill window", "distill late", "distill every", "wrapper window", "wrapper every")

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


def none(model: Any, ranks: Ranks) -> Step:
    alone = copy.copy(ranks)
    alone.size = 1  # the same step, exchanging with nobody
    return with_distill(model, alone, "window")


def with_distill(model: Any, ranks: Ranks, how: str) -> Step:
    ranks = copy.copy(ranks)  # settings of its own on the same connections
    ranks.settings = ranks.settings.changed(sync="every" if how == "every" else "window")
    sync = GradientSync(ranks, model)
    optimizer = optimizer_of(model)

    def step(window: list[torch.Tensor]) -> None:
        sync.zero()
        total = torch.zeros(1)
        for i, ids in enumerate(window):
            with sync.micro_batch(last=i == len(window) - 1 and how != "late"):
                loss = loss_of(model, ids, 1 / len(window))
                loss.backward()
            total += loss.detach()
        sync.all_reduce_gradients(total)
        optimizer.step()

    return step


def ddp(model: Any, every: bool) -> Step:
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = optimizer_of(wrapped)

    def step(window: list[torch.Tensor]) -> None:
        optimizer.zero_grad()
        for i, ids in enumerate(window):
            with contextlib.nullcontext() if every or i == len(window) - 1 else wrapped.no_sync():
                loss_of(wrapped, ids, 1 / len(window)).backward()
        optimizer.step()

    return step


def horovod(model: Any, every: bool, accumulate: int) -> Step:
    import horovod.torch as hvd

    optimizer = hvd.DistributedOptimizer(
        optimizer_of(model), model.named_parameters(), backward_passes_per_step=1 if every else accumulate
    )

    def step(window: list[torch.Tensor]) -> None:
        optimizer.zero_grad()
        for ids in window:
            loss_of(model, ids, 1 / len(window)).backward()
            if every:
                optimizer.synchronize()
        with optimizer.skip_synchronize() if every else contextlib.nullcontext():
            optimizer.step()

    return step


def build(variant: str, ranks: Ranks, options: argparse.Namespace) -> Step:
    model = make_model(options.width, options.layers)
    if variant == "none":
        return none(model, ranks)
    who, how = variant.split()
    if who == "distill":
        return with_distill(model, ranks, how)
    if ranks.name == "ddp":
        return ddp(model, how == "every")
    return horovod(model, how == "every", options.accumulate)


def _rank(options: argparse.Namespace) -> None:
    """Seconds by variant; a variant's turn is `steps` steps, from barrier to barrier."""
    # Between emulated hosts each is the only rank of its host, yet all share this machine's cores.
    settings = BackendConfig(name=options.engines, device="cpu", threads=1, timeout=300.0, rings=options.rings)
    ranks = join_ranks(settings)
    variants = options.variants.split(",")
    steps = {variant: build(variant, ranks, options) for variant in variants}
    torch.manual_seed(ranks.rank)
    window = [torch.randint(VOCABULARY, (options.rows, options.tokens)) for _ in range(options.accumulate)]
    times: dict[str, list[float]] = {variant: [] for variant in variants}
    for turn in range(options.rounds + 1):
        for variant in variants if turn % 2 else variants[::-1]:
            ranks.barrier()
            began = time.perf_counter()
            for _ in range(options.steps if turn else 1):
                steps[variant](window)
            ranks.barrier()
            if turn:
                times[variant].append((time.perf_counter() - began) / options.steps)
    end_rank(ranks, times)


def _options() -> argparse.Namespace:
    parser = compare_engines(__doc__)
    parser.add_argument("--variants", default=",".join(VARIANTS))
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--layers", type=int, default=10, help="10 x 384: 20 M parameters")
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=64, help="of a row")
    parser.add_argument("--accumulate", type=int, default=50, help="micro-batches per step")
    parser.add_argument("--steps", type=int, default=1, help="steps of a turn")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rings", type=int, default=1)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    options = _options()
    if options.rank:
        _rank(options)
    names = ("width", "layers", "rows", "tokens", "accumulate", "steps", "rounds", "rings", "variants")
    given = [part for name in names for part in (f"--{name}", getattr(options, name))]
    results, rows = [], []
    for network, engine, cluster in clusters(options):
        # Horovod's own default, since its wrapper and `every` wait for a cycle in each micro-batch.
        times = cluster.run_json("scaling/sync.py", *given, "--engines", engine, "--rank", HOROVOD_CYCLE_TIME="1")
        medians = {variant: statistics.median(values) for variant, values in times.items()}
        results.append({"network": network, "engine": engine, "seconds": times, "medians": medians})
        for variant, seconds in medians.items():
            row = [f"{network}, {engine}", variant, f"{seconds:.2f}"]
            row += [f"{seconds / medians['none']:.3f}" if "none" in medians else "-"]
            row += [f"{medians[many] / seconds:.2f}" if (many := "distill every") in medians else "-"]
            rows.append(row)
            print(" ".join(row), file=sys.stderr, flush=True)
    what = (
        f"{options.layers} x {options.width}, {options.accumulate} micro-batches of {options.rows} x {options.tokens}"
    )
    print(f"\n{options.size} ranks, BERT {what}; seconds per step (medians of {options.rounds})\n")
    print(table(["network, engine", "variant", "s/step", "over none", "times as fast as distill every"], rows))
    save(options.json, {"settings": vars(options) | {"json": None}, "measured": results})


if __name__ == "__main__":
    main()
