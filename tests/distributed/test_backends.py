"""One body for all backends: gradients are in sync when they should be and not before, and counted; rings; refusals."""

import importlib.util
import math
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed import run_ranks
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from distill.config.errors import parse
from distill.config.settings import BackendConfig
from distill.distributed import GradientSync, RankLost, Ranks, bucket, join_ranks
from distill.distributed import ranks as messages
from distill.distributed.ddp import Ddp
from distill.distributed.rank_identity import refuse_differing_ranks, refuse_differing_settings
from distill.runtime.errors import SettingError

VOCABULARY, WIDTH = 11, 6
ROWS = (8, 8, 3)  # of three steps; the last window is short, so that some ranks have no micro-batch in it
HOROVOD = pytest.mark.skipif(importlib.util.find_spec("horovod") is None, reason="Horovod is not installed")


def make_model(seed: int) -> nn.Sequential:
    """Embedding, a layer, and a head tied to the embedding; its bias is frozen."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, VOCABULARY))
    model[2].weight = model[0].weight
    model[2].bias.requires_grad_(False)
    model.register_buffer("count", torch.tensor([seed, 2 * seed]))
    return model


def make_rows() -> list[list[tuple[Tensor, Tensor]]]:
    """Per step its rows: token ids and targets, [length] int64 each, between 1 and 9 of them."""
    random = torch.Generator().manual_seed(7)

    def row() -> tuple[Tensor, Tensor]:
        length = int(torch.randint(1, 10, (1,), generator=random))
        ids, targets = torch.randint(0, VOCABULARY, (2, length), generator=random)
        return ids, targets

    return [[row() for _ in range(count)] for count in ROWS]


def loss_of(model: nn.Module, rows: list[tuple[Tensor, Tensor]], num_targets: float) -> Tensor:
    total = sum(cross_entropy(model(ids), targets, reduction="sum") for ids, targets in rows)
    assert isinstance(total, Tensor)
    return total / num_targets


def reference() -> tuple[dict[str, Tensor], list[float]]:
    """Weights after three steps of plain SGD on whole batches, in float64, and the loss of each step."""
    model, losses = make_model(1).double(), []
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    for rows in make_rows():
        optimizer.zero_grad()
        loss = loss_of(model, rows, sum(len(targets) for _, targets in rows))
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return model.state_dict(), losses


@dataclass
class Outcome:
    weights: dict[str, Tensor]
    losses: list[float]
    num_syncs: int
    num_collectives: int
    bytes_sent: int
    inside: list[Tensor]  # the bucket after the first micro-batch of the first window, and before its end


def train(ranks: Ranks, batch_rows: int) -> Outcome:
    """Three steps; each rank takes every size-th micro-batch of `batch_rows` rows, the last one may be shorter."""
    # Other weights on other ranks, which the ranks have to mend.
    model = make_model(1 + ranks.rank)
    sync = GradientSync(ranks, model)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    before = replace(ranks.traffic)
    losses: list[float] = []
    inside: list[Tensor] = []
    for rows in make_rows():
        batches = [rows[i : i + batch_rows] for i in range(0, len(rows), batch_rows)]
        window = batches[ranks.rank :: ranks.size]
        count = sum(len(targets) for batch in window for _, targets in batch)
        num_targets = float(ranks.sum(torch.tensor(count)))
        sync.zero()
        own = torch.zeros(1)
        for i, batch in enumerate(window):
            with sync.micro_batch(last=i == len(window) - 1):
                loss = loss_of(model, batch, num_targets)
                loss.backward()
            own += loss.detach()
            if not losses and i in (0, len(window) - 1):
                inside.append(sync.gradients.clone())
        stats = sync.all_reduce_gradients(own)
        assert stats is not None
        losses.append(float(stats))
        optimizer.step()
    after = ranks.traffic
    return Outcome(
        model.state_dict(),
        losses,
        after.num_syncs - before.num_syncs,
        after.num_collectives - before.num_collectives,
        after.bytes_sent - before.bytes_sent,
        inside,
    )


SEVERAL = [
    (1, torch.float64),
    (3, torch.uint8),
    (0, torch.float32),
    (2, torch.bfloat16),
    (9, torch.int64),
    (5, torch.float16),
]


def body(settings: BackendConfig) -> dict[str, Any]:
    """What every backend has to do, on one rank."""
    ranks = join_ranks(settings)
    results: dict[str, Any] = {"info": (ranks.rank, ranks.size, ranks.local_rank, ranks.local_size)}
    for sync in ("window", "every"):
        ranks.settings = settings.changed(sync=sync)
        for batch_rows in (4, 2, 1):
            results[f"train/{sync}/{batch_rows}"] = train(ranks, batch_rows)
    rank, mine = ranks.rank, torch.full((2, 3), ranks.rank + 1 / 3, dtype=torch.float64)
    results["sum"] = ranks.sum(mine)
    results["untouched"] = bool((mine == rank + 1 / 3).all())
    results["integers"] = ranks.sum(torch.tensor([2**40 + rank, rank]))
    results["tensor"] = ranks.broadcast(torch.tensor([rank + 0.5], dtype=torch.bfloat16))
    results["object"] = ranks.broadcast({"rank": rank, "text": "x" * (10 if rank == 0 else 99)})
    results["several"] = [torch.full((n,), rank + n, dtype=dtype) for n, dtype in SEVERAL]
    whole, messages.MESSAGE = messages.MESSAGE, 24  # bytes: some tensors share a message, one takes several
    ranks.broadcast_all(results["several"])
    messages.MESSAGE = whole
    results["gathered"] = ranks.gather({"rank": rank, "text": "é" * rank})
    for name, identity in {"alike": {"seed": 1}, "differing": {"seed": min(rank, 1), "corpus.digest": "a"}}.items():
        try:
            refuse_differing_ranks(identity, ranks)
        except SettingError as error:
            results[name] = str(error)
    for name, given in {
        "same settings": {"corpus": {"path": str(rank)}},
        "other settings": {"evaluate": {"every_steps": 3 + min(rank, 1)}},
    }.items():
        try:
            refuse_differing_settings(given, ranks)
        except SettingError as error:
            results[name] = str(error)
    ranks.barrier()
    results["rings"], results["engine"] = ranks.rings, ranks.engine
    try:
        GradientSync(ranks, make_model(0).double())
    except ValueError as error:
        results["refused"] = str(error)
    bucket.SEGMENT = 40  # elements: the embedding's gradient and that of the layer are two segments now
    for sync in ("every", "window"):
        ranks.settings = ranks.settings.changed(sync=sync)
        results[f"segments/{sync}"] = train(ranks, 1)
    results["early"] = early(ranks)
    model = make_model(0)
    sync = GradientSync(ranks, model)
    model.zero_grad(set_to_none=True)
    try:
        sync.all_reduce_gradients()
    except RuntimeError as error:
        results["lost"] = str(error)
    ranks.close()
    return results


def early(ranks: Ranks) -> list[int]:
    """Segments under way after each of two micro-batches of a window, after one without overlap, and at the end."""
    model = make_model(1)
    sync = GradientSync(ranks, model)
    sync.zero()
    counts = []
    for last in (False, True):
        with sync.micro_batch(last):
            loss_of(model, make_rows()[0][:1], 1.0).backward()
        counts.append(len(sync._under_way))
    sync.all_reduce_gradients()
    with sync.micro_batch(last=True, overlap=False):
        loss_of(model, make_rows()[0][:1], 1.0).backward()
    counts.append(len(sync._under_way))
    sync.all_reduce_gradients()
    return [*counts, len(sync._under_way)]


CASES = [
    pytest.param((1, BackendConfig(name="single")), id="single"),
    pytest.param((2, BackendConfig(name="ddp", timeout=60.0)), id="ddp"),
    pytest.param((2, BackendConfig(name="ddp", rings=2, timeout=60.0)), id="ddp-2-rings"),
    pytest.param((3, BackendConfig(name="ddp", rings=4, timeout=60.0)), id="ddp-3-ranks-4-rings"),
    pytest.param((2, BackendConfig(name="ddp", collective="plug_in:counting", timeout=60.0)), id="ddp-plug-in"),
    pytest.param((2, BackendConfig(name="horovod", timeout=60.0)), id="horovod", marks=HOROVOD),
    pytest.param((2, BackendConfig(name="horovod", rings=2, timeout=60.0)), id="horovod-2-rings", marks=HOROVOD),
]


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[BackendConfig, list[Any]]:
    size, settings = request.param
    settings = settings.changed(device="cpu", threads=1)
    if size == 1:
        return settings, [body(settings)]
    return settings, run_ranks(size, tmp_path_factory.mktemp("ranks"), body, settings)


def test_every_split_gives_the_same_weights_and_losses(case: tuple[BackendConfig, list[Any]]) -> None:
    weights, losses = reference()
    for ranks in case[1]:
        for sync in ("window", "every"):
            for batch_rows in (4, 2, 1):
                outcome = ranks[f"train/{sync}/{batch_rows}"]
                assert outcome.losses == pytest.approx(losses, rel=1e-5)
                for name, value in weights.items():
                    torch.testing.assert_close(outcome.weights[name].double(), value.double(), rtol=1e-5, atol=1e-6)


def test_ranks_end_with_identical_weights(case: tuple[BackendConfig, list[Any]]) -> None:
    first, *others = case[1]
    for other in others:
        for key in (key for key in first if key.startswith("train/")):
            for name, value in first[key].weights.items():
                assert torch.equal(value, other[key].weights[name]), (key, name)


def test_gradients_are_in_sync_when_they_should_be_and_not_before(case: tuple[BackendConfig, list[Any]]) -> None:
    first, *others = case[1]
    for other in others:
        window, other_window = (ranks["train/window/1"].inside for ranks in (first, other))
        assert not any(torch.equal(a, b) for a, b in zip(window, other_window, strict=True))
        every, other_every = (ranks["train/every/1"].inside for ranks in (first, other))
        assert torch.equal(every[0], other_every[0])
        # The exchange of the last micro-batch is that of `sum_gradients`.
        assert not torch.equal(every[1], other_every[1])


def test_exchanges_are_counted(case: tuple[BackendConfig, list[Any]]) -> None:
    results = case[1]
    size = len(results)
    for ranks in results:
        stripes = ranks["rings"]
        for batch_rows in (4, 2, 1):
            window, every = ranks[f"train/window/{batch_rows}"], ranks[f"train/every/{batch_rows}"]
            if size == 1:
                assert (window.num_syncs, window.num_collectives, window.bytes_sent) == (0, 0, 0)
                continue
            # Per step one exchange, and one call for the counts.
            assert (window.num_syncs, window.num_collectives) == (3, 3 * stripes + 3)
            assert window.bytes_sent == 3 * (4 * padded_size() + 8)
            # One exchange per micro-batch of the rank that has most of them.
            most = sum(math.ceil(math.ceil(rows / batch_rows) / size) for rows in ROWS)
            assert (every.num_syncs, every.num_collectives) == (most, most * stripes + 3)


def test_the_exchange_begins_during_the_last_backward(case: tuple[BackendConfig, list[Any]]) -> None:
    """In segments, and with the same result; a rank without a micro-batch joins in all the same."""
    weights, losses = reference()
    for ranks in case[1]:
        for sync in ("window", "every"):
            outcome = ranks[f"segments/{sync}"]
            assert outcome.losses == pytest.approx(losses, rel=1e-5)
            for name, value in weights.items():
                torch.testing.assert_close(outcome.weights[name].double(), value.double(), rtol=1e-5, atol=1e-6)
        # Embedding and stats are the last segment, which `sum` starts.
        assert ranks["early"] == ([0, 1, 0, 0] if len(case[1]) > 1 else [0, 0, 0, 0])


def padded_size() -> int:
    """Elements of the bucket with its tail of 64: each gradient is filled up to a multiple of 16."""
    sizes = [p.numel() for p in make_model(0).parameters() if p.requires_grad]
    return sum((size + 15) // 16 * 16 for size in sizes) + 64


def test_sum_broadcast_and_rank_info(case: tuple[BackendConfig, list[Any]]) -> None:
    size = len(case[1])
    triangle = size * (size - 1) // 2
    for rank, ranks in enumerate(case[1]):
        assert ranks["info"] == (rank, size, rank, size)
        assert ranks["untouched"]
        assert ranks["sum"].dtype == torch.float64
        torch.testing.assert_close(ranks["sum"], torch.full((2, 3), triangle + size / 3, dtype=torch.float64))
        assert ranks["integers"].tolist() == [size * 2**40 + triangle, triangle]
        assert ranks["tensor"].item() == 0.5 and ranks["tensor"].dtype == torch.bfloat16
        assert [tensor.tolist() for tensor in ranks["several"]] == [[n] * n for n, _ in SEVERAL]
        assert ranks["object"] == {"rank": 0, "text": "x" * 10}
        assert ranks["gathered"] == [{"rank": rank, "text": "é" * rank} for rank in range(size)]
        assert "alike" not in ranks and "same settings" not in ranks, "paths may differ"
        if size > 1:
            others = f" (and {size - 2} more ranks differ)" if size > 2 else ""
            assert ranks["differing"].startswith(
                f"rank 1 would train something else than rank 0{others}: seed is 1 there and 0 on rank 0:"
            )
            assert "evaluate.every_steps is 4 there and 3 on rank 0" in ranks["other settings"]
        assert "float64" in ranks["refused"] and "set_to_none" in ranks["lost"]


def test_rings_in_force(case: tuple[BackendConfig, list[Any]]) -> None:
    settings, results = case
    for ranks in results:
        assert ranks["rings"] == settings.rings
        if settings.rings == 2:
            assert "2" in ranks["engine"]


def uneven(settings: BackendConfig) -> None:
    """Rank 0 exchanges, rank 1 has gone."""
    with pytest.raises(ZeroDivisionError), join_ranks(settings) as ranks:
        sync = GradientSync(ranks, make_model(0))
        if ranks.rank == 0:
            with pytest.raises(RankLost):
                sync.all_reduce_gradients()
        raise ZeroDivisionError  # leaves at once instead of waiting for the other in `close`


def test_a_lost_rank_is_an_error_and_no_endless_wait(tmp_path: Path) -> None:
    settings = BackendConfig(name="ddp", device="cpu", threads=1, timeout=60.0)
    assert run_ranks(2, tmp_path, uneven, settings) == [None, None], "both have ended by themselves"


def test_one_process_leaves_its_group_after_an_error_too() -> None:
    """The next run of the process joins one anew."""
    for _ in range(2):
        with pytest.raises(ZeroDivisionError), join_ranks(BackendConfig(name="fsdp", device="cpu", threads=1)):
            raise ZeroDivisionError
        assert not dist.is_initialized()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"name": "mpi"}, ["backend.name=mpi", "'single', 'ddp', 'fsdp' or 'horovod'"]),
        ({"rings": "many"}, ["backend.rings=many", "integer"]),
        ({"rings": 0}, ["backend.rings=0"]),
        ({"rings": 4}, ["backend.rings=4", "one process"]),
        ({"sync": "never"}, ["backend.sync=never", "'window' or 'every'"]),
        ({"compression": "fp8"}, ["backend.compression=fp8", "'none', 'bf16' or 'fp16'"]),
        ({"compression": "bf16"}, ["backend.compression=bf16", "one process"]),
        ({"timeout": 0.0}, ["backend.timeout=0"]),
        ({"processes": 2}, ["backend.processes=2", "ddp, fsdp or horovod"]),
        ({"threads": 0}, ["backend.threads=0"]),
        ({"device": "gpu"}, ["backend.device=gpu", "cuda"]),
        ({"device": "cuda:99"}, ["backend.device=cuda:99", "GPU"]),
    ],
)
def test_bad_settings_are_refused_in_one_line(settings: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(SettingError) as caught:
        join_ranks(parse(BackendConfig, settings, "backend"))
    message = str(caught.value)
    assert "\n" not in message and all(word in message for word in words), message


def test_single_refuses_to_be_one_of_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SettingError, match="torchrun started 2 processes"):
        join_ranks(BackendConfig())
    with pytest.raises(SettingError, match=r"backend\.processes=3: torchrun started 2"):
        join_ranks(BackendConfig(name="ddp", processes=3))


@pytest.mark.parametrize(("device", "stripes"), [("cpu", 4), ("cuda", 1)])
def test_nccl_gets_each_segment_whole(device: str, stripes: int) -> None:
    assert Ddp.stripes.fget(SimpleNamespace(device=torch.device(device), rings=4)) == stripes  # type: ignore[attr-defined]


def test_missing_horovod_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where Horovod is installed: CI always builds it, and users without a compiler do not."""
    monkeypatch.setitem(sys.modules, "horovod.torch", None)
    with pytest.raises(SettingError, match=r"python -m distill\.distributed\.install_horovod"):
        join_ranks(BackendConfig(name="horovod"))


@pytest.mark.skipif(importlib.util.find_spec("horovod") is None, reason="Horovod is not installed")
def test_horovod_refuses_bf16_on_its_own_ring(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOROVOD_RANK", "0")
    monkeypatch.setenv("HOROVOD_SIZE", "2")
    with pytest.raises(SettingError, match="bfloat16"):
        join_ranks(BackendConfig(name="horovod", compression="bf16", device="cpu"))
