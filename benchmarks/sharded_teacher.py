"""A frozen teacher over two hosts: divided weights, a pipeline, or tensor parallelism; seconds and bytes of a forward.

    sudo python benchmarks/sharded_teacher.py                        # emulated hosts with 1 Gbit/s each
    python benchmarks/sharded_teacher.py --network loopback          # no bytes: others use the loopback as well
    python benchmarks/sharded_teacher.py --network none              # the formulas for large teachers alone

Each of two ranks has rows of its own, in micro-batches, and wants the last hidden states of a Llama without head for
them. All variants give the same numbers, which is checked, and take turns in one run.

    alone      each rank has the whole model: the computation without any exchange
    divided    `fully_shard` as backend=fsdp does it, all micro-batches in one forward (teacher.micro_batches)
    pipeline   torch.distributed.pipelining, GPipe, forward only: half the blocks on each rank, which computes them for
               the rows of both; the last rank gives the other one's hidden states back
    tensor     torch's parallelize_module: half of each matrix on each rank, for the rows of both
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from cluster import NETWORKS, Cluster, end_rank
from machine import save, table, title
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import LlamaConfig, LlamaModel

from distill.config.settings import BackendConfig
from distill.distributed import Ranks, join_ranks

VOCABULARY = 1024
VARIANTS = ("alone", "divided", "pipeline", "tensor")
# This rank's rows [B, S] -> their hidden states [B, S, H].
Forward = Callable[[Tensor], Tensor]


def make_model(options: argparse.Namespace) -> Any:
    torch.manual_seed(0)
    width = options.width
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=width, intermediate_size=width * 11 // 4, num_hidden_layers=options.blocks,
        num_attention_heads=width // 64, num_key_value_heads=width // 64, use_cache=False,
    )  # fmt: skip
    return LlamaModel(config).requires_grad_(False).eval()


def alone(model: Any, ranks: Ranks, rows: int) -> Forward:
    return lambda ids: model(input_ids=ids).last_hidden_state


def divided(model: Any, ranks: Ranks, rows: int) -> Forward:
    ranks.shard(model, list(model.layers), len(model.layers), trained=False)
    return lambda ids: model(input_ids=ids).last_hidden_state


class Stage(nn.Module):
    """Half the blocks of a model, the first half with its embeddings, the last one with its last norm."""

    def __init__(self, model: Any, rank: int) -> None:
        super().__init__()
        half = len(model.layers) // 2
        model.layers = model.layers[:half] if rank == 0 else model.layers[half:]
        if rank == 0:
            model.norm = nn.Identity()
        else:
            model.embed_tokens = None
        self.model, self.name = model, "input_ids" if rank == 0 else "inputs_embeds"

    def forward(self, given: Tensor) -> Tensor:
        found: Tensor = self.model(**{self.name: given}).last_hidden_state
        return found


def pipeline(model: Any, ranks: Ranks, rows: int) -> Forward:
    module = Stage(model, ranks.rank)
    schedules: dict[int, Any] = {}

    def forward(ids: Tensor) -> Tensor:
        everyone = _of_all(ids)
        number = len(everyone) // rows
        if number not in schedules:  # a schedule is made for one number of micro-batches
            stage = PipelineStage(module, ranks.rank, ranks.size, ranks.device)
            schedules[number] = ScheduleGPipe(stage, number)
        found = schedules[number].eval(*[everyone] * (ranks.rank == 0))
        if ranks.rank == 0:
            back = torch.empty(*ids.shape, model.config.hidden_size)
            dist.recv(back, 1)
            return back
        dist.send(found[: len(ids)].contiguous(), 0)
        own: Tensor = found[len(ids) :]
        return own

    return forward


def tensor(model: Any, ranks: Ranks, rows: int) -> Forward:
    mesh = init_device_mesh("cpu", (ranks.size,))
    by_columns = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
    by_rows = ("self_attn.o_proj", "mlp.down_proj")
    for block in model.layers:
        plan: dict[str, Any] = {name: ColwiseParallel() for name in by_columns}
        parallelize_module(block, mesh, plan | {name: RowwiseParallel() for name in by_rows})

    def forward(ids: Tensor) -> Tensor:
        found: Tensor = model(input_ids=_of_all(ids)).last_hidden_state
        return found[ranks.rank * len(ids) :][: len(ids)]

    return forward


def _of_all(ids: Tensor) -> Tensor:
    """The rows of all ranks, one rank's after the other's."""
    parts = [torch.empty_like(ids) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, ids)
    return torch.cat(parts)


MAKE = {"alone": alone, "divided": divided, "pipeline": pipeline, "tensor": tensor}


def received() -> int:
    """Bytes that came to this host over the network of the ranks."""
    name = os.environ["GLOO_SOCKET_IFNAME"]
    lines = Path("/proc/net/dev").read_text().splitlines()
    return next(int(line.split(":")[1].split()[0]) for line in lines if line.strip().startswith(f"{name}:"))


@torch.no_grad()
def _rank(options: argparse.Namespace) -> None:
    """Seconds and bytes of a forward by variant and number of micro-batches; the variants take turns."""
    torch.set_num_threads(1)
    ranks = join_ranks(BackendConfig(name="fsdp", device="cpu", timeout=600.0))
    forwards = {name: MAKE[name](make_model(options), ranks, options.rows) for name in VARIANTS}
    torch.manual_seed(ranks.rank)
    found: list[dict[str, Any]] = []
    for number in map(int, options.micro_batches.split(",")):
        ids = torch.randint(VOCABULARY, (number * options.rows, options.tokens))
        seconds: dict[str, list[float]] = {name: [] for name in VARIANTS}
        traffic: dict[str, int] = {}
        outcomes = {}
        for turn in range(options.rounds + (number == 1)):
            for name in VARIANTS if turn % 2 else VARIANTS[::-1]:
                ranks.barrier()
                before, began = received(), time.perf_counter()
                outcomes[name] = forwards[name](ids)
                ranks.barrier()
                traffic[name] = received() - before
                if turn or number > 1:  # the very first one connects the ranks
                    seconds[name].append(time.perf_counter() - began)
        worst = max(float((each - outcomes["alone"]).abs().max()) for each in outcomes.values())
        assert worst < 1e-3, f"the variants differ by {worst}"
        total = ranks.sum(torch.tensor([float(traffic[name]) for name in VARIANTS]))
        mean = dict(zip(VARIANTS, (total / ranks.size).tolist(), strict=True))
        found.append({"micro_batches": number, "seconds": seconds, "bytes": mean, "difference": worst})
    end_rank(ranks, found)


# The arithmetic for hosts of GPUs: bytes of a number, multiplications and additions a second of a GPU that are
# reached in bf16, bytes a second between two hosts for each GPU of them, and inside a host for each GPU.
NUMBER, FLOPS, BETWEEN, INSIDE, PER_HOST = 2, 400e12, 400e9 / 8, 450e9, 8
PIECE = 512  # tokens: smaller micro-batches would leave a GPU idle


def seconds_divided(shape: Any, tokens: int, gpus: int, shared: bool) -> tuple[float, float]:
    """Computing, and gathering the weights once, for a forward of so many tokens on each GPU; the two overlap.

    Args:
        shared: the GPUs of a host gather over all its links together and pass on inside it, as NCCL's rings do; else
            each GPU gathers all weights over its own link.
    """
    hosts = max(1, gpus // PER_HOST)
    weights = NUMBER * shape.whole
    between = weights * (1 - 1 / hosts) / (BETWEEN * (PER_HOST if shared else 1))
    return 2 * shape.whole * tokens / FLOPS, max(between, weights * (1 - 1 / gpus) / INSIDE)


def seconds_tensor(shape: Any, tokens: int) -> float:
    """Exchanging for as many tokens on each GPU, with matrices divided inside each host; nothing overlaps.

    Two sums of all hidden states of the host's rows for each block; an all-reduce moves 2 (n - 1) / n of them.
    """
    return 2 * shape.blocks * 2 * (PER_HOST - 1) * tokens * shape.width * NUMBER / INSIDE


def seconds_pipeline(shape: Any, tokens: int, stages: int) -> tuple[float, float]:
    """Computing with the bubble, and passing hidden states on to the next stage and back to that of the rows.

    The rows of all stages go through each, in micro-batches of `PIECE` tokens for each GPU of a stage. Stages are
    hosts, whose GPUs pass on a part each, or single GPUs.
    """
    flights = stages * max(1, tokens // PIECE)
    compute = 2 * shape.whole * tokens / FLOPS * (flights + stages - 1) / flights
    return compute, 2 * tokens * stages * shape.width * NUMBER / BETWEEN


def arithmetic() -> str:
    """The least time of a forward by each way, beside its computation, for teachers over hosts of 8 GPUs."""
    from sharded_memory import SHAPES

    rows = []
    for name, gpus in (("70 B", 16), ("70 B", 64), ("405 B", 32), ("405 B", 64)):
        for tokens in (512, 2048, 16_384):
            shape, stages = SHAPES[name], gpus // PER_HOST
            compute, together = seconds_divided(shape, tokens, gpus, True)
            _, each = seconds_divided(shape, tokens, gpus, False)
            bubbled, passing = seconds_pipeline(shape, tokens, stages)
            hosts = max(bubbled + seconds_tensor(shape, tokens), passing)
            single = max(seconds_pipeline(shape, tokens, gpus))
            values = [compute, max(compute, together), max(compute, each), single, hosts]
            rows.append([f"{name}, {gpus} GPUs, {tokens:,}", *(f"{value:.2f}" for value in values)])
    head = ["teacher, tokens a GPU and forward", "computing", "divided", "divided, links not shared"]
    return table([*head, "pipeline of GPUs", "pipeline of hosts, tensor inside"], rows)


def measured_table(results: list[dict[str, Any]]) -> str:
    rows = []
    for each in results:
        for name in VARIANTS:
            seconds = statistics.median(each["seconds"][name])
            floor = statistics.median(each["seconds"]["alone"])
            row = [f"{each['micro_batches']}, {name}", f"{seconds:.2f}", f"{seconds / floor:.2f}"]
            rows.append([*row, f"{each['bytes'][name] / 1e6:,.1f}"])
    return table(["micro-batches, variant", "s", "over alone", "MB received by each host"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", default="1gbit", help="1gbit, 1gbit-far, capped, loopback, or none: no run")
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--blocks", type=int, default=12)
    parser.add_argument("--rows", type=int, default=1, help="of a micro-batch")
    parser.add_argument("--tokens", type=int, default=128, help="of a row")
    parser.add_argument("--micro-batches", default="1,4,16", help="of each rank in a forward")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        return _rank(options)
    results: list[dict[str, Any]] = []
    if options.network != "none":
        names = ("width", "blocks", "rows", "tokens", "micro_batches", "rounds")
        given = [part for name in names for part in (f"--{name.replace('_', '-')}", getattr(options, name))]
        with Cluster(2, NETWORKS.get(options.network), limit=1800) as cluster:
            results = cluster.run_json("sharded_teacher.py", *given, "--rank")
        shape = f"{options.blocks} x {options.width}, micro-batches of {options.rows} x {options.tokens}"
        print(f"{title()}; {options.network}, 2 ranks, {shape}; medians of {options.rounds}\n")
        print(measured_table(results), "\n", flush=True)
    print("Seconds of a forward on hosts of 8 GPUs, 400 Gbit/s for each between hosts\n")
    print(arithmetic())
    save(options.json, results)


if __name__ == "__main__":
    main()
