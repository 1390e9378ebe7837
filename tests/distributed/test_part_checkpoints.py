"""Checkpoints that ranks write in parts: whole or absent, read by any number of ranks and by torch, damage is found."""

import itertools
import os
import resource
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from distributed import run_ranks
from safetensors.torch import load_file
from test_divided_training import fit_of, weights
from tiny import assert_close, weights_of
from torch.distributed.checkpoint import HuggingFaceStorageReader

from distill.config.settings import BackendConfig
from distill.distributed import join_ranks
from distill.distributed.single import Single
from distill.runs import checkpoint
from distill.runs.checkpoint import Checkpoints
from distill.runs.state import State
from distill.runtime.errors import Damaged, StorageFailed
from distill.runtime.files import remove

ROUNDING = {"rtol": 1e-5, "atol": 1e-5}  # AdamW divides by what may be small
STEPS = [f"step-0000000{number}" for number in (1, 2, 3, 4)]
# Where a save ends for each rank: what it calls then, for the how many-th time, and whether rank 0 alone is at work.
MOMENTS: list[tuple[Any, str, int, bool]] = [
    (checkpoint, "write_shard", 1, False),
    (checkpoint, "write_shard", 2, False),
    (checkpoint, "write_manifest", 1, True),
    (Path, "rename", 1, True),
]


def make(folder: Path, ranks: Any = None, **settings: Any) -> Any:
    """A training of 4 steps, of 12 and of 6 rows in turns, whatever the number of ranks."""
    shape = {"batch_size": 12, "accumulate": 1} if ranks is None else {"batch_size": 1, "accumulate": 12 // ranks.size}
    return fit_of(folder, "adamw", ranks, epochs=2, **shape, **settings)


def goes_on(fit: Any, start: Path, folder: Path) -> dict[str, torch.Tensor]:
    """The weights at the end of a run that resumes from a checkpoint and saves elsewhere."""
    fit.resume(start)
    fit.folder = fit.checkpoints.folder = folder
    fit.run()
    return weights(fit)


class Killed(BaseException):
    """Stands for the end of a process: nothing cleans up after it."""


@contextmanager
def killed_at(owner: Any, name: str, number: int) -> Iterator[None]:
    """This rank stops where it calls a function for the `number`-th time."""
    before, calls = getattr(owner, name), itertools.count(1)

    def call(*arguments: Any, **named: Any) -> Any:
        if next(calls) == number:
            raise Killed
        return before(*arguments, **named)

    with pytest.MonkeyPatch.context() as patch, suppress(Killed):
        patch.setattr(owner, name, call)
        yield


def check_saves(ranks: Any, fit: Any, overlap: bool) -> None:
    """A save that fails or is killed leaves the other checkpoints and nothing that is taken for one."""

    def names() -> list[str]:
        ranks.barrier()
        found = sorted(path.name for path in fit.folder.iterdir())
        ranks.barrier()
        return found

    def save(step: int) -> bool:
        fit.state.step = step
        is_saved = bool(fit.checkpoints.save(fit.state, fit.model, fit.made, overlap))
        fit.checkpoints.finish()
        return is_saved

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if ranks.rank == 1:  # whose disk is full
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, before[1]))
    with pytest.raises(StorageFailed, match=r"^[^\n]*File too large[^\n]*$"):
        save(6)
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert names() == STEPS
    for owner, name, number, by_rank_0 in MOMENTS:
        # The others wait for rank 0 in the last of four calls, and would be killed by its end.
        waits = by_rank_0 and ranks.rank > 0
        with killed_at(*((Checkpoints, "_on_each", 4) if waits else (owner, name, number))):
            save(5)
        assert len(names()) == 5, "the moment was one inside of save"
        assert [path.name for path in fit.checkpoints.saved()] == STEPS
    assert save(5) and names() == [*STEPS, "step-00000005"]
    if ranks.rank == 0:
        remove(fit.checkpoints.path_of(5))


def on_a_rank(folder: Path) -> dict[str, Any]:
    torch.set_num_threads(1)
    ranks = join_ranks(BackendConfig(name="fsdp", device="cpu", timeout=60.0))
    found: dict[str, Any] = {}
    if ranks.size == 2:
        fit = make(folder / "parts", ranks, async_checkpoints=True)
        fit.run()
        found["from the start"] = weights(fit)
        for overlap in (True, False):
            check_saves(ranks, fit, overlap)
    for kind in ("plain", "parts")[: ranks.size - 1]:
        start, elsewhere = folder / kind / STEPS[0], folder / f"{kind}{ranks.size}"
        found[f"from {kind}"] = goes_on(make(elsewhere / "unused", ranks), start, elsewhere)
    ranks.close()
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict[str, torch.Tensor]:
    fit = make(folder / "plain")
    fit.run()
    return weights_of(fit.model)


@pytest.fixture(scope="module")
def trained(folder: Path, alone: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The weights after four steps of two ranks, whose checkpoints are in `parts`."""
    first, second = run_ranks(2, folder / "out2", on_a_rank, folder)
    for rank in (first, second):
        assert_close(rank["from the start"], alone, **ROUNDING)
        assert_close(rank["from plain"], alone, **ROUNDING)
    return first["from the start"]


@pytest.mark.slow
def test_three_ranks_read_both(trained: Any, folder: Path, alone: dict[str, Any]) -> None:
    for rank in run_ranks(3, folder / "out3", on_a_rank, folder):
        assert_close(rank["from parts"], alone, **ROUNDING)
        assert_close(rank["from plain"], alone, **ROUNDING)


def test_one_process_reads_parts(trained: Any, folder: Path, alone: dict[str, Any]) -> None:
    assert_close(goes_on(make(folder / "c"), folder / "parts" / STEPS[0], folder / "c1"), alone, **ROUNDING)


def test_every_rank_writes_its_share(trained: dict[str, torch.Tensor], folder: Path) -> None:
    """Put one under another they are the tensors of the model; torch reads them with its own reader."""
    saved = folder / "parts" / STEPS[3]
    for stem in ("model", "optimizer"):
        sizes = [(saved / f"{stem}-0000{n}-of-00002.safetensors").stat().st_size for n in (1, 2)]
        assert 0.7 < sizes[0] / sizes[1] < 1.4, sizes
    files = [load_file(saved / f"model-0000{n}-of-00002.safetensors") for n in (1, 2)]
    for name, tensor in trained.items():
        assert torch.equal(torch.cat([file[name] for file in files if name in file]), tensor), name
    read = {name: torch.zeros_like(tensor) for name, tensor in trained.items()}
    dcp.load(read, storage_reader=HuggingFaceStorageReader(str(saved)), no_dist=True)
    assert_close(read, trained, rtol=0, atol=0)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) * 3 // 4] ^= 4
    path.write_bytes(data)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "flip": flip,
    "cut": lambda path: os.truncate(path, path.stat().st_size - 9),
    "lose": Path.unlink,
    "swap": lambda path: shutil.copy(path.parents[2] / "parts" / STEPS[0] / path.name, path),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_to_any_file_is_found(damage: str, trained: Any, folder: Path) -> None:
    whole = folder / "parts" / STEPS[1]
    names = sorted(path.name for path in whole.iterdir())
    assert sum(name.endswith(".safetensors") for name in names) == 4 and len(names) == 6
    checkpoints = Checkpoints(folder, 9, {}, Single(BackendConfig()))
    for name in names:
        copied = Path(shutil.copytree(whole, folder / f"{damage} {name}" / whole.name))
        checkpoints.check(copied)
        DAMAGES[damage](copied / name)
        with pytest.raises(Damaged, match="damaged"):
            checkpoints.check(copied)


def test_ranks_meet_after_each_has_written_its_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One may write for longer than the others wait in an exchange."""
    ranks, calls = Single(BackendConfig(device="cpu", threads=1)), list[str]()

    def noted(name: str, method: Callable[..., Any], *given: Any) -> Any:
        calls.append(name)
        return method(*given)

    for name in ("barrier", "gather"):
        monkeypatch.setattr(ranks, name, partial(noted, name, getattr(ranks, name)))
    monkeypatch.setattr(ranks, "shards_student", True)
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert Checkpoints(tmp_path, 9, {}, ranks).save(State(step=1), model, optimizer)
    assert calls == ["barrier", "gather"] * 4
