"""Every backend on one to three ranks: gradients for every split, exchanges and their formats, values, and refusals."""

import importlib.util
import math
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed import free_port, run_ranks
from job import composed
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from distill.config.errors import parse
from distill.config.settings import BackendConfig
from distill.distributed import GradientSync, RankLost, Ranks, bucket, join_ranks
from distill.distributed import ranks as messages
from distill.distributed.ddp import Ddp
from distill.distributed.rank_identity import refuse_differing_ranks, refuse_differing_settings
from distill.runs.check import check
from distill.runtime.errors import SettingError

VOCABULARY, WIDTH = 11, 6
ROWS = (8, 8, 3)  # of three steps; the last window is short, so that some ranks have no micro-batch in it
HOROVOD = pytest.mark.skipif(importlib.util.find_spec("horovod") is None, reason="Horovod is not installed")
OF_A_RANK = {"device": "cpu", "threads": 1, "timeout": 60.0}


def make_model(seed: int) -> nn.Sequential:
    """Embedding, a layer, and a head tied to the embedding; its bias is frozen."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, VOCABULARY))
    model[2].weight = model[0].weight
    model[2].bias.requires_grad_(False)
    model.register_buffer("count", torch.tensor([seed, 2 * seed]))
    return model


def make_steps() -> list[tuple[Tensor, Tensor]]:
    """The rows of three steps: token ids and targets, [rows, 5] int64 each; some tokens have no target."""
    random = torch.Generator().manual_seed(7)
    ids, targets = torch.randint(0, VOCABULARY, (2, sum(ROWS), 5), generator=random)
    targets[torch.rand(targets.shape, generator=random) < 0.4] = -100
    return list(zip(ids.split(ROWS), targets.split(ROWS), strict=True))


def loss_of(model: nn.Module, ids: Tensor, targets: Tensor, count: float) -> Tensor:
    return cross_entropy(model(ids).flatten(0, 1), targets.flatten(), reduction="sum") / count


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)


def reference() -> tuple[dict[str, Tensor], list[float]]:
    """Weights after three steps of plain SGD on whole batches, in float64, and the loss of each step."""
    model, losses = make_model(1).double(), []
    optimizer = optimizer_of(model)
    for ids, targets in make_steps():
        optimizer.zero_grad()
        loss = loss_of(model, ids, targets, int((targets >= 0).sum()))
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return model.state_dict(), losses


def train(ranks: Ranks, batch_rows: int) -> Any:
    """Three steps; each rank takes every size-th micro-batch of `batch_rows` rows, the last one may be shorter.

    Gives weights, losses, the traffic, and the bucket of the first window after its first and its last micro-batch.
    """
    model = make_model(1 + ranks.rank)  # other weights on other ranks, which the ranks have to mend
    sync, before = GradientSync(ranks, model), replace(ranks.traffic)
    optimizer, losses, inside = optimizer_of(model), list[float](), list[list[float]]()
    for step in make_steps():
        window = list(zip(*(each.split(batch_rows) for each in step), strict=True))[ranks.rank :: ranks.size]
        count = float(ranks.sum(torch.tensor(sum(int((targets >= 0).sum()) for _, targets in window))))
        sync.zero()
        own = torch.zeros(1)
        for i, batch in enumerate(window):
            with sync.micro_batch(last=i == len(window) - 1):
                loss = loss_of(model, *batch, count)
                loss.backward()
            own += loss.detach()
            if not losses and i in (0, len(window) - 1):
                inside.append(sync.gradients.tolist())
        stats = sync.all_reduce_gradients(own)
        assert stats is not None
        losses.append(float(stats))
        optimizer.step()
    traffic = {name: value - getattr(before, name) for name, value in vars(ranks.traffic).items()}
    return SimpleNamespace(weights=model.state_dict(), losses=losses, inside=inside, before=before.num_syncs, **traffic)


def padded_size() -> int:
    """Elements of the bucket with its tail of 64: each gradient is filled up to a multiple of 16."""
    sizes = [p.numel() for p in make_model(0).parameters() if p.requires_grad]
    return sum((size + 15) // 16 * 16 for size in sizes) + 64


def assert_reference(outcome: Any, near: float = 2e-6) -> None:
    weights, losses = reference()
    assert outcome.losses == pytest.approx(losses, rel=5 * near)
    for name, value in weights.items():
        torch.testing.assert_close(outcome.weights[name].double(), value.double(), rtol=5 * near, atol=near)


# --- what every backend has to do, on one rank


def on_a_rank(settings: BackendConfig) -> tuple[int, str]:
    ranks = join_ranks(settings)
    for sync in ("window", "every"):
        ranks.settings = settings.changed(sync=sync)
        for batch_rows in (4, 2, 1):
            check_training(ranks, train(ranks, batch_rows), batch_rows)
    check_values(ranks)
    check_refusals(ranks)
    ranks.barrier()
    bucket.SEGMENT = 40  # elements: the embedding's gradient and that of the layer are two segments now
    for sync in ("every", "window"):
        ranks.settings = settings.changed(sync=sync)
        assert_reference(train(ranks, 1))
    # Embedding and stats are the last segment, which `all_reduce_gradients` starts.
    assert exchanged_early(ranks) == ([0, ranks.stripes, 0] if ranks.size > 1 else [0, 0, 0])
    ranks.close()
    return ranks.rings, ranks.engine


def check_training(ranks: Ranks, found: Any, batch_rows: int) -> None:
    """The reference's weights; gradients in sync when they should be and not before; the exchanges are counted."""
    assert_reference(found)
    first, *others = ranks.gather({name: value.tolist() for name, value in found.weights.items()})
    assert all(other == first for other in others), "bitwise"
    if ranks.size == 1:
        assert (found.num_syncs, found.num_collectives, found.bytes_sent) == (0, 0, 0)
        return
    every = ranks.settings.sync == "every"
    first, *others = ranks.gather(found.inside if batch_rows == 1 else [])
    for other in others if batch_rows == 1 else ():
        assert (other[0] == first[0]) == every
        assert other[1] != first[1], "the exchange of the last micro-batch is that of `all_reduce_gradients`"
    # One exchange a step, or one for each micro-batch of the rank that has most; and one call for a step's counts.
    most = sum(math.ceil(math.ceil(rows / batch_rows) / ranks.size) for rows in ROWS) if every else len(ROWS)
    calls = most * ranks.rings + len(ROWS) + (found.before == 0)  # and the meeting before the first exchange of all
    assert (found.num_syncs, found.num_collectives) == (most, calls)
    assert found.bytes_sent == most * 4 * padded_size() + 8 * len(ROWS)


def check_values(ranks: Ranks) -> None:
    rank, size = ranks.rank, ranks.size
    triangle, mine = size * (size - 1) // 2, torch.full((2, 3), rank + 1 / 3, dtype=torch.float64)
    torch.testing.assert_close(ranks.sum(mine), torch.full((2, 3), triangle + size / 3, dtype=torch.float64))
    assert (mine == rank + 1 / 3).all(), "the input stays"
    assert ranks.sum(torch.tensor([2**40 + rank, rank])).tolist() == [size * 2**40 + triangle, triangle]
    assert ranks.broadcast(torch.tensor([rank + 0.5], dtype=torch.bfloat16)).item() == 0.5
    assert ranks.broadcast({"rank": rank, "text": "x" * (10 if rank == 0 else 99)}) == {"rank": 0, "text": "x" * 10}
    assert ranks.gather({"rank": rank, "text": "é" * rank}) == [{"rank": n, "text": "é" * n} for n in range(size)]
    types = {1: torch.float64, 3: torch.uint8, 0: torch.float32, 2: torch.bfloat16, 9: torch.int64, 5: torch.float16}
    several = [torch.full((n,), rank + n, dtype=dtype) for n, dtype in types.items()]
    whole, messages.MESSAGE = messages.MESSAGE, 24  # bytes: some tensors share a message, one takes several
    ranks.broadcast_all(several)
    messages.MESSAGE = whole
    assert [tensor.tolist() for tensor in several] == [[n] * n for n in types]


def check_refusals(ranks: Ranks) -> None:
    """Ranks that would train something else are named, on all ranks; misuse of the bucket is an error."""
    second = min(ranks.rank, 1)
    refuse_differing_ranks({"seed": 1}, ranks)
    refuse_differing_settings({"corpus": {"path": str(ranks.rank)}, "data": {"local": str(ranks.rank)}}, ranks)
    if ranks.size > 1:
        more = f" (and {ranks.size - 2} more ranks differ)" if ranks.size > 2 else ""
        with pytest.raises(SettingError) as error:
            refuse_differing_ranks({"seed": second, "corpus.digest": "a"}, ranks)
        assert f"rank 1 would train something else than rank 0{more}: seed is 1 there and 0 on" in str(error.value)
        with pytest.raises(SettingError, match=r"evaluate\.every_steps is 4 there and 3 on rank 0"):
            refuse_differing_settings({"evaluate": {"every_steps": 3 + second}}, ranks)
        with pytest.raises(SettingError, match=r"evaluate\.baseline is a run there and None on rank 0"):
            refuse_differing_settings({"evaluate": {"baseline": "runs/b" if second else None}}, ranks)
    with pytest.raises(ValueError, match="float64"):
        GradientSync(ranks, make_model(0).double())
    model = make_model(0)
    sync = GradientSync(ranks, model)
    model.zero_grad(set_to_none=True)
    with pytest.raises(RuntimeError, match="set_to_none"):
        sync.all_reduce_gradients()


def exchanged_early(ranks: Ranks) -> list[int]:
    """Calls that have begun after each of two micro-batches of a window, and after one without overlap."""
    model, counts = make_model(1), []
    sync = GradientSync(ranks, model)
    sync.zero()
    for last, overlap in ((False, True), (True, True), (True, False)):
        before = ranks.traffic.num_collectives
        with sync.micro_batch(last, overlap):
            loss_of(model, *make_steps()[0], 1.0).backward()
        counts.append(ranks.traffic.num_collectives - before)
        if last:
            sync.all_reduce_gradients()
    return counts


CASES = [
    pytest.param(1, {"name": "single"}, id="single"),
    pytest.param(2, {"name": "ddp"}, id="ddp"),
    pytest.param(3, {"name": "ddp", "rings": 4}, id="ddp-3-ranks-4-rings"),
    pytest.param(2, {"name": "ddp", "collective": "plug_in:counting"}, id="ddp-plug-in"),
    pytest.param(2, {"name": "horovod"}, id="horovod", marks=HOROVOD),
    pytest.param(2, {"name": "horovod", "rings": 2}, id="horovod-2-rings", marks=HOROVOD),
]


@pytest.mark.parametrize(("size", "settings"), CASES)
def test_every_backend(size: int, settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "calls").mkdir()
    monkeypatch.setenv("PLUG_IN_LOG", str(tmp_path / "calls"))
    for rings, engine in run_ranks(size, tmp_path, on_a_rank, BackendConfig(**settings, **OF_A_RANK)):
        assert rings == settings.get("rings", 1)
        assert rings == 1 or str(rings) in engine
    calls = [Counter(path.read_text().splitlines()) for path in (tmp_path / "calls").iterdir()]
    if "collective" in settings:  # all went through it
        assert calls[0] == calls[1] and calls[0][f"allreduce torch.float32 {padded_size()}"] > 20
        assert {call.split()[1] for call in calls[0]} >= {"torch.float32", "torch.float64", "torch.int64"}


# --- gradients in 16 bits on the wire

ABOVE_ONE = {"bf16": 2**-7, "fp16": 2**-10}  # the first number above 1, minus 1
SMALL = 3.3e-7  # below what fp16 holds with all its digits


def compressed(settings: BackendConfig) -> None:
    """Close to the reference with half the bytes, and what each format loses."""
    ranks, format = join_ranks(settings), settings.compression
    outcome = train(ranks, 1)
    assert_reference(outcome, {"bf16": 5e-3, "fp16": 5e-4}[format])
    assert outcome.bytes_sent == 3 * (2 * (padded_size() - 64) + 4 * 64 + 8)
    sync = GradientSync(ranks, make_model(0))

    def exchanged(value: float, stat: float = 1.0) -> tuple[float, float, float]:
        """The sum of gradients that are `value` everywhere: its least and largest, and the stat beside them."""
        sync.zero()
        sync.gradients.fill_(value)
        stats = sync.all_reduce_gradients(torch.tensor([stat]))
        assert stats is not None and sync.gradients.dtype == torch.float32
        return float(sync.gradients.min()), float(sync.gradients.max()), float(stats)

    spacing = ABOVE_ONE[format]
    assert exchanged(1 + spacing) == (2 + 2 * spacing, 2 + 2 * spacing, 2.0)
    assert exchanged(1 + spacing / 4, 70_001.0) == (2.0, 2.0, 140_002.0), "counts and losses stay exact"
    small = exchanged(SMALL)
    assert small[0] == small[1] == pytest.approx(2 * SMALL, rel=spacing)
    # 65 is too much for fp16, and infinite on all ranks, so that all of them skip the step.
    large = 65.0 if format == "bf16" else math.inf
    assert exchanged(30.0 + 5.0 * ranks.rank)[:2] == (large, large)
    ranks.close()


@pytest.mark.parametrize(
    ("name", "rings", "format"),
    [
        ("ddp", 2, "bf16"),
        pytest.param("horovod", 2, "bf16", marks=HOROVOD),
        ("ddp", 1, "fp16"),
        pytest.param("horovod", 1, "fp16", marks=HOROVOD),  # its own ring
    ],
)
def test_16_bits_on_the_wire(name: str, rings: int, format: str, tmp_path: Path) -> None:
    run_ranks(2, tmp_path, compressed, BackendConfig(name=name, rings=rings, compression=format, **OF_A_RANK))


# --- ranks that are lost, and groups that are left


def uneven(settings: BackendConfig) -> None:
    """Rank 0 exchanges, rank 1 has gone."""
    with pytest.raises(ZeroDivisionError), join_ranks(settings) as ranks:
        sync = GradientSync(ranks, make_model(0))
        if ranks.rank == 0:
            with pytest.raises(RankLost):
                sync.all_reduce_gradients()
        raise ZeroDivisionError  # leaves at once instead of waiting for the other in `close`


def test_a_lost_rank_is_an_error_and_no_endless_wait(tmp_path: Path) -> None:
    assert run_ranks(2, tmp_path, uneven, BackendConfig(name="ddp", **OF_A_RANK)) == [None, None]


def test_one_process_leaves_its_group_after_an_error_too() -> None:
    """The next run of the process joins one anew."""
    for _ in range(2):
        with pytest.raises(ZeroDivisionError), join_ranks(BackendConfig(name="fsdp", device="cpu", threads=1)):
            raise ZeroDivisionError
        assert not dist.is_initialized()


@pytest.mark.parametrize(("device", "stripes"), [("cpu", 4), ("cuda", 1)])
def test_nccl_gets_each_segment_whole(device: str, stripes: int) -> None:
    assert Ddp.stripes.fget(SimpleNamespace(device=torch.device(device), rings=4)) == stripes  # type: ignore[attr-defined]


# --- refusals

TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2"}


@pytest.mark.parametrize(
    ("settings", "environment", "line"),
    [
        ({"rings": 4}, {}, "backend.rings=4: one process"),
        ({"compression": "bf16"}, {}, "backend.compression=bf16: one process"),
        ({"processes": 2}, {}, "backend.processes=2: "),
        ({"hosts": "a:2"}, {}, "backend.hosts=a:2: "),
        ({"device": "cuda:99"}, {}, "backend.device=cuda:99: device 99, but torch sees"),
        ({"name": "horovod", "collective": "gloo"}, {}, "backend.collective=gloo: "),
        (
            {"name": "fsdp", "offload_teacher": True, "device": "cpu"},
            {},
            "backend.offload_teacher=true with backend.dev",
        ),
        ({}, TORCHRUN, "backend.name=single: torchrun started 2 processes"),
        ({"name": "ddp", "processes": 3}, TORCHRUN, "backend.processes=3: torchrun started 2"),
        pytest.param(
            {"name": "horovod", "compression": "bf16", "device": "cpu"},
            {"HOROVOD_RANK": "0", "HOROVOD_SIZE": "2"},
            "backend.compression=bf16: Horovod's own allreduce",
            marks=HOROVOD,
        ),
    ],
)
def test_what_a_backend_cannot_do(
    settings: dict[str, Any], environment: dict[str, str], line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in TORCHRUN.keys() | environment.keys():
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SettingError) as error:
        join_ranks(parse(BackendConfig, settings, "backend"))
    assert str(error.value).startswith(line) and "\n" not in str(error.value)


def test_whole_gradients_of_a_student_that_is_not_sharded_may_be_compressed() -> None:
    whole = ["backend=fsdp", "backend.shard_student=false", "backend.compression=bf16", "backend.rings=2"]
    check(composed("+recipe=distilbert_gutenberg", "teacher=pretrained", "teacher.path=x", *whole))


def test_missing_horovod_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where Horovod is installed: CI always builds it, and users without a compiler do not."""
    monkeypatch.setitem(sys.modules, "horovod.torch", None)
    with pytest.raises(SettingError, match=r"python -m distill\.distributed\.install_horovod"):
        join_ranks(BackendConfig(name="horovod"))


ENGINES = {  # that torch does not start, with what a run says of them
    "plug_in:broken": "broken: there is no such network card; give NAME, or MODULE:NAME",
    "no_such_package.part:smddp": "No module named 'no_such_package'; give",
    "smddp": "Unknown",
}


def refused_engines(ports: list[int]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        for (engine, why), port in zip(ENGINES.items(), ports, strict=True):
            patch.setenv("MASTER_PORT", str(port))
            with pytest.raises(SettingError) as error:
                join_ranks(BackendConfig(name="ddp", collective=engine, **OF_A_RANK))
            assert str(error.value).startswith(f"backend.collective={engine} does not start: {why}")


def test_an_engine_that_does_not_start(tmp_path: Path) -> None:
    run_ranks(2, tmp_path, refused_engines, [free_port() for _ in ENGINES])
