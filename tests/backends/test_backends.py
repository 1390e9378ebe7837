"""One body for all backends: gradients are in sync when they should be and not before, and counted; rings; refusals."""

import importlib.util
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed import run_ranks
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from distill.backends import RankLost, Workers, bucket, build
from distill.backends.place import Place, find_place, first_host, meeting_point
from distill.backends.rings import choose_rings
from distill.config import Backend
from distill.errors import SettingError

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


def train(workers: Workers, batch_rows: int) -> Outcome:
    """Three steps; each rank takes every size-th micro-batch of `batch_rows` rows, the last one may be shorter."""
    # Other weights on other ranks: `prepare` has to mend that.
    model = make_model(1 + workers.rank)
    workers.prepare(model)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    before = (workers.num_syncs, workers.num_collectives, workers.bytes_sent)
    losses: list[float] = []
    inside: list[Tensor] = []
    for rows in make_rows():
        batches = [rows[i : i + batch_rows] for i in range(0, len(rows), batch_rows)]
        window = batches[workers.rank :: workers.size]
        count = sum(len(targets) for batch in window for _, targets in batch)
        num_targets = float(workers.sum(torch.tensor(count)))
        workers.zero_gradients()
        own = torch.zeros(1)
        for i, batch in enumerate(window):
            with workers.sync(last=i == len(window) - 1):
                loss = loss_of(model, batch, num_targets)
                loss.backward()
            own += loss.detach()
            if not losses and i in (0, len(window) - 1):
                inside.append(workers.gradients.clone())
        riders = workers.sum_gradients(own)
        assert riders is not None
        losses.append(float(riders))
        optimizer.step()
    after = (workers.num_syncs, workers.num_collectives, workers.bytes_sent)
    return Outcome(model.state_dict(), losses, *(b - a for a, b in zip(before, after, strict=True)), inside)


def body(settings: Backend) -> dict[str, Any]:
    """What every backend has to do, on one rank."""
    workers = build(settings)
    results: dict[str, Any] = {"place": (workers.rank, workers.size, workers.local_rank, workers.local_size)}
    for sync in ("window", "every"):
        workers.settings = replace(settings, sync=sync)
        for batch_rows in (4, 2, 1):
            results[f"train/{sync}/{batch_rows}"] = train(workers, batch_rows)
    rank, mine = workers.rank, torch.full((2, 3), workers.rank + 1 / 3, dtype=torch.float64)
    results["sum"] = workers.sum(mine)
    results["untouched"] = bool((mine == rank + 1 / 3).all())
    results["integers"] = workers.sum(torch.tensor([2**40 + rank, rank]))
    results["tensor"] = workers.broadcast(torch.tensor([rank + 0.5], dtype=torch.bfloat16))
    results["object"] = workers.broadcast({"rank": rank, "text": "x" * (10 if rank == 0 else 99)})
    workers.barrier()
    results["rings"], results["engine"] = workers.rings, workers.engine
    try:
        workers.prepare(make_model(0).double())
    except ValueError as error:
        results["refused"] = str(error)
    bucket.SEGMENT = 40  # elements: the embedding's gradient and that of the layer are two segments now
    for sync in ("every", "window"):
        workers.settings = replace(workers.settings, sync=sync)
        results[f"segments/{sync}"] = train(workers, 1)
    results["early"] = early(workers)
    model = make_model(0)
    workers.prepare(model)
    model.zero_grad(set_to_none=True)
    try:
        workers.sum_gradients()
    except RuntimeError as error:
        results["lost"] = str(error)
    workers.close()
    return results


def early(workers: Workers) -> list[int]:
    """Segments under way after each of two micro-batches of a window, and after the exchange."""
    model = make_model(1)
    workers.prepare(model)
    workers.zero_gradients()
    counts = []
    for last in (False, True):
        with workers.sync(last):
            loss_of(model, make_rows()[0][:1], 1.0).backward()
        counts.append(len(workers._under_way))
    workers.sum_gradients()
    return [*counts, len(workers._under_way)]


CASES = [
    pytest.param((1, Backend(name="single")), id="single"),
    pytest.param((2, Backend(name="ddp", timeout=60.0)), id="ddp"),
    pytest.param((2, Backend(name="ddp", rings="2", timeout=60.0)), id="ddp-2-rings"),
    pytest.param((3, Backend(name="ddp", rings="auto", timeout=60.0)), id="ddp-3-ranks-auto"),
    pytest.param((2, Backend(name="horovod", timeout=60.0)), id="horovod", marks=HOROVOD),
    pytest.param((2, Backend(name="horovod", rings="2", timeout=60.0)), id="horovod-2-rings", marks=HOROVOD),
    pytest.param((2, Backend(name="horovod", rings="auto", timeout=60.0)), id="horovod-auto", marks=HOROVOD),
]


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Backend, list[Any]]:
    size, settings = request.param
    settings = replace(settings, device="cpu", threads=1)
    if size == 1:
        return settings, [body(settings)]
    return settings, run_ranks(size, tmp_path_factory.mktemp("ranks"), body, settings)


def test_every_split_gives_the_same_weights_and_losses(case: tuple[Backend, list[Any]]) -> None:
    weights, losses = reference()
    for ranks in case[1]:
        for sync in ("window", "every"):
            for batch_rows in (4, 2, 1):
                outcome = ranks[f"train/{sync}/{batch_rows}"]
                assert outcome.losses == pytest.approx(losses, rel=1e-5)
                for name, value in weights.items():
                    torch.testing.assert_close(outcome.weights[name].double(), value.double(), rtol=1e-5, atol=1e-6)


def test_ranks_end_with_identical_weights(case: tuple[Backend, list[Any]]) -> None:
    first, *others = case[1]
    for other in others:
        for key in (key for key in first if key.startswith("train/")):
            for name, value in first[key].weights.items():
                assert torch.equal(value, other[key].weights[name]), (key, name)


def test_gradients_are_in_sync_when_they_should_be_and_not_before(case: tuple[Backend, list[Any]]) -> None:
    first, *others = case[1]
    for other in others:
        window, other_window = (ranks["train/window/1"].inside for ranks in (first, other))
        assert not any(torch.equal(a, b) for a, b in zip(window, other_window, strict=True))
        every, other_every = (ranks["train/every/1"].inside for ranks in (first, other))
        assert torch.equal(every[0], other_every[0])
        # The exchange of the last micro-batch is that of `sum_gradients`.
        assert not torch.equal(every[1], other_every[1])


def test_exchanges_are_counted(case: tuple[Backend, list[Any]]) -> None:
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


def test_the_exchange_begins_during_the_last_backward(case: tuple[Backend, list[Any]]) -> None:
    """In segments, and with the same result; a rank without a micro-batch joins in all the same."""
    weights, losses = reference()
    for ranks in case[1]:
        for sync in ("window", "every"):
            outcome = ranks[f"segments/{sync}"]
            assert outcome.losses == pytest.approx(losses, rel=1e-5)
            for name, value in weights.items():
                torch.testing.assert_close(outcome.weights[name].double(), value.double(), rtol=1e-5, atol=1e-6)
        # Embedding and riders are the last segment, which `sum_gradients` starts.
        assert ranks["early"] == ([0, 1, 0] if len(case[1]) > 1 else [0, 0, 0])


def padded_size() -> int:
    """Elements of the bucket with its tail of 64: each gradient is filled up to a multiple of 16."""
    sizes = [p.numel() for p in make_model(0).parameters() if p.requires_grad]
    return sum((size + 15) // 16 * 16 for size in sizes) + 64


def test_sum_broadcast_and_place(case: tuple[Backend, list[Any]]) -> None:
    size = len(case[1])
    triangle = size * (size - 1) // 2
    for rank, ranks in enumerate(case[1]):
        assert ranks["place"] == (rank, size, rank, size)
        assert ranks["untouched"]
        assert ranks["sum"].dtype == torch.float64
        torch.testing.assert_close(ranks["sum"], torch.full((2, 3), triangle + size / 3, dtype=torch.float64))
        assert ranks["integers"].tolist() == [size * 2**40 + triangle, triangle]
        assert ranks["tensor"].item() == 0.5 and ranks["tensor"].dtype == torch.bfloat16
        assert ranks["object"] == {"rank": 0, "text": "x" * 10}
        assert "float64" in ranks["refused"] and "set_to_none" in ranks["lost"]


def test_rings_in_force(case: tuple[Backend, list[Any]]) -> None:
    settings, results = case
    for ranks in results:
        if settings.rings == "auto":
            assert ranks["rings"] in (1, 2, 4) and ranks["rings"] == results[0]["rings"]
        else:
            assert ranks["rings"] == int(settings.rings)
        if settings.rings == "2":
            assert "2" in ranks["engine"]


def compressed(settings: Backend) -> tuple[dict[str, Tensor], list[float], int, str]:
    workers = build(settings)
    outcome = train(workers, 1)
    gradients = workers.gradients.clone()
    workers.zero_gradients()
    workers.gradients.fill_(1 + 2**-12)  # lost in bfloat16
    riders = workers.sum_gradients(torch.tensor([70_001.0]))
    assert riders is not None and riders.item() == 70_001 * workers.size  # riders are not
    assert workers.gradients.eq(workers.size).all() and gradients.dtype == torch.float32
    workers.close()
    return outcome.weights, outcome.losses, outcome.bytes_sent, workers.engine


@pytest.mark.parametrize("name", ["ddp", pytest.param("horovod", marks=HOROVOD)])
def test_bf16_on_the_wire(name: str, tmp_path: Path) -> None:
    settings = Backend(name=name, rings="2", compression="bf16", device="cpu", threads=1, timeout=60.0)
    expected, losses = reference()
    for weights, own_losses, bytes_sent, _ in run_ranks(2, tmp_path, compressed, settings):
        assert own_losses == pytest.approx(losses, rel=1e-2)
        for key, value in expected.items():
            torch.testing.assert_close(weights[key].double(), value.double(), rtol=0.05, atol=0.01)
        assert bytes_sent == 3 * (2 * (padded_size() - 64) + 4 * 64 + 8)


def uneven(settings: Backend) -> None:
    """Rank 0 exchanges, rank 1 has gone."""
    with pytest.raises(ZeroDivisionError), build(settings) as workers:
        workers.prepare(make_model(0))
        if workers.rank == 0:
            with pytest.raises(RankLost):
                workers.sum_gradients()
        raise ZeroDivisionError  # leaves at once instead of waiting for the other in `close`


def test_a_lost_rank_is_an_error_and_no_endless_wait(tmp_path: Path) -> None:
    run_ranks(2, tmp_path, uneven, Backend(name="ddp", device="cpu", threads=1, timeout=3.0))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (Backend(name="mpi"), ["backend.name=mpi", "single, ddp or horovod"]),
        (Backend(rings="many"), ["backend.rings=many", "auto"]),
        (Backend(rings="0"), ["backend.rings=0"]),
        (Backend(rings="4"), ["backend.rings=4", "one process"]),
        (Backend(sync="never"), ["backend.sync=never", "window or every"]),
        (Backend(compression="fp8"), ["backend.compression=fp8", "bf16"]),
        (Backend(compression="bf16"), ["backend.compression=bf16", "one process"]),
        (Backend(timeout=0.0), ["backend.timeout=0"]),
        (Backend(processes=2), ["backend.processes=2", "ddp or horovod"]),
        (Backend(threads=0), ["backend.threads=0"]),
        (Backend(device="gpu"), ["backend.device=gpu", "cuda"]),
        (Backend(device="cuda:99"), ["backend.device=cuda:99", "GPUs"]),
    ],
)
def test_bad_settings_are_refused_in_one_line(settings: Backend, words: list[str]) -> None:
    with pytest.raises(SettingError) as caught:
        build(settings)
    message = str(caught.value)
    assert "\n" not in message and all(word in message for word in words), message


def test_single_refuses_to_be_one_of_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SettingError, match="torchrun started 2 processes"):
        build(Backend())
    with pytest.raises(SettingError, match=r"backend\.processes=3: torchrun started 2"):
        build(Backend(name="ddp", processes=3))


@pytest.mark.skipif(importlib.util.find_spec("horovod") is not None, reason="Horovod is installed")
def test_missing_horovod_names_the_command() -> None:
    with pytest.raises(SettingError, match=r"python -m distill\.backends\.install_horovod"):
        build(Backend(name="horovod"))


@pytest.mark.skipif(importlib.util.find_spec("horovod") is None, reason="Horovod is not installed")
def test_horovod_refuses_bf16_on_its_own_ring(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOROVOD_RANK", "0")
    monkeypatch.setenv("HOROVOD_SIZE", "2")
    with pytest.raises(SettingError, match="bfloat16"):
        build(Backend(name="horovod", compression="bf16", device="cpu"))


PLACES = [
    ({}, None),
    ({"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}, Place("torchrun", 3, 4, 1, 2)),
    ({"RANK": "3", "WORLD_SIZE": "4"}, Place("torchrun", 3, 4, 0, 1)),
    (
        {"HOROVOD_RANK": "1", "HOROVOD_SIZE": "2", "HOROVOD_LOCAL_RANK": "1", "HOROVOD_LOCAL_SIZE": "2"},
        Place("horovodrun", 1, 2, 1, 2),
    ),
    (
        {
            "SLURM_PROCID": "17",
            "SLURM_STEP_NUM_TASKS": "20",
            "SLURM_LOCALID": "1",
            "SLURM_NODEID": "2",
            "SLURM_STEP_TASKS_PER_NODE": "8(x2),4",
        },
        Place("Slurm", 17, 20, 1, 4),
    ),
    ({"SLURM_PROCID": "0", "SLURM_NTASKS": "20"}, None),  # the shell of a batch script
    (
        {
            "OMPI_COMM_WORLD_RANK": "5",
            "OMPI_COMM_WORLD_SIZE": "8",
            "OMPI_COMM_WORLD_LOCAL_RANK": "1",
            "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
        },
        Place("Open MPI", 5, 8, 1, 4),
    ),
    ({"PMI_RANK": "5", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"}, Place("MPI", 5, 8, 1, 4)),
]


@pytest.mark.parametrize(("environment", "place"), PLACES)
def test_places_of_all_launchers(environment: dict[str, str], place: Place | None) -> None:
    assert find_place(environment) == place


def test_meeting_points() -> None:
    slurm = {"SLURM_JOB_ID": "4711", "SLURM_STEP_ID": "1", "SLURM_STEP_NODELIST": "gpu[03-07,9],login"}
    address, port = meeting_point(Place("Slurm", 0, 8, 0, 4), slurm)
    assert address == "gpu03" and 20_000 <= port < 32_000
    assert (address, port) == meeting_point(Place("Slurm", 7, 8, 3, 4), slurm)
    told = {"MASTER_ADDR": "head", "MASTER_PORT": "1234"}
    assert meeting_point(Place("Open MPI", 0, 8, 0, 4), told) == ("head", 1234)
    assert meeting_point(Place("Open MPI", 0, 4, 0, 4), {})[0] == "127.0.0.1"
    with pytest.raises(SettingError, match="MASTER_ADDR"):
        meeting_point(Place("Open MPI", 0, 8, 0, 4), {})


@pytest.mark.parametrize(
    ("nodes", "first"), [("a", "a"), ("a,b", "a"), ("n[1-3]", "n1"), ("n[07,9]-ib,x", "n07-ib"), ("c2-d[1,2]", "c2-d1")]
)
def test_first_host_of_a_node_list(nodes: str, first: str) -> None:
    assert first_host(nodes) == first


@pytest.mark.parametrize(
    ("seconds", "rings"),
    [
        ({1: 1.0, 2: 0.95, 4: 0.92}, 1),  # a gain below a tenth
        ({1: 1.0, 2: 0.55, 4: 0.545}, 2),  # as good as the fastest, with fewer connections
        ({1: 3.1, 2: 1.55, 4: 0.9}, 4),
        ({1: 1.0, 2: 1.2, 4: 1.3}, 1),
    ],
)
def test_auto_takes_more_rings_only_where_they_pay(seconds: dict[int, float], rings: int) -> None:
    first = dict.fromkeys(seconds, True)

    def measured(number: int) -> float:
        if first[number]:
            first[number] = False
            return 1e-9 if number == 4 else 1e9  # the first round does not count
        return seconds[number]

    assert choose_rings(measured) == (rings, seconds)


def test_auto_measures_again_where_that_is_cheap() -> None:
    """Two lucky exchanges on four rings decide nothing among fifteen rounds of milliseconds."""
    calls = dict.fromkeys((1, 2, 4), 0)

    def measured(number: int) -> float:
        calls[number] += 1
        return 0.001 if number == 4 and calls[4] in (2, 5) else 0.01

    assert choose_rings(measured)[0] == 1
    assert calls == dict.fromkeys((1, 2, 4), 16)
