"""Checkpoints that ranks write in parts: whole or absent, read by any number of ranks and by torch, damage is found."""

import itertools
import os
import resource
import shutil
from collections.abc import Callable
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

ROUNDING = {"rtol": 1e-5, "atol": 1e-5}  # AdamW divides by what may be small
STEPS = ["step-00000001", "step-00000002", "step-00000003", "step-00000004"]
# Where a save ends for each rank: what it calls then, for the how many-th time, and whether rank 0 alone is at work.
MOMENTS: dict[str, tuple[Any, str, int, bool]] = {
    "first shard": (checkpoint, "write_shard", 1, False),
    "second shard": (checkpoint, "write_shard", 2, False),
    "manifest": (checkpoint, "write_manifest", 1, True),
    "rename": (Path, "rename", 1, True),
}


def make(folder: Path, ranks: Any = None) -> Any:
    """A training of 4 steps, of 12 and of 6 rows in turns, whatever the number of ranks."""
    size = 1 if ranks is None else ranks.size
    return fit_of(
        folder, "adamw", ranks, batch_size=12 if size == 1 else 1, accumulate=1 if size == 1 else 12 // size, epochs=2
    )


class Killed(BaseException):
    """Stands for the end of a process: nothing cleans up after it."""


@contextmanager
def killed_at(owner: Any, name: str, number: int) -> Any:
    """This rank stops where it calls a function for the `number`-th time."""
    before, calls = getattr(owner, name), itertools.count(1)

    def call(*arguments: Any, **named: Any) -> Any:
        if next(calls) == number:
            raise Killed
        return before(*arguments, **named)

    setattr(owner, name, call)
    try:
        yield
    finally:
        setattr(owner, name, before)


def goes_on(fit: Any, start: Path, folder: Path) -> dict[str, torch.Tensor]:
    """The weights at the end of a run that resumes from a checkpoint and saves elsewhere."""
    fit.resume(start)
    fit.folder = fit.checkpoints.folder = folder
    fit.run()
    return weights(fit)


def save_killed(ranks: Any, fit: Any) -> dict[str, list[str]]:
    """What lies in the folder of checkpoints after the end of all ranks at each moment, and what is taken for one."""
    fit.state.step, found = 5, {}
    for moment, (owner, name, number, by_rank_0) in MOMENTS.items():
        # The others wait for rank 0 in the last of four calls, and would be killed by its end.
        waits = by_rank_0 and ranks.rank > 0
        with (
            suppress(Killed),
            killed_at(*((checkpoint.Checkpoints, "_on_each", 4) if waits else (owner, name, number))),
        ):
            fit.checkpoints.save(fit.state, fit.model, fit.made)
        ranks.barrier()
        found[moment] = [path.name for path in fit.checkpoints.saved()]
        found[f"left by {moment}"] = sorted(path.name for path in fit.folder.iterdir())
        ranks.barrier()
    return found


def save_on_a_full_disk(ranks: Any, fit: Any) -> tuple[str, list[str]]:
    """The error on this rank where the disk of rank 1 is full, and what is left in the folder."""
    fit.state.step, problem = 6, ""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if ranks.rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, before[1]))
    try:
        fit.checkpoints.save(fit.state, fit.model, fit.made)
    except StorageFailed as error:
        problem = str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    ranks.barrier()
    found = sorted(path.name for path in fit.folder.iterdir())
    ranks.barrier()
    return problem, found


def on_a_rank(folder: Path) -> dict[str, Any]:
    torch.set_num_threads(1)
    ranks = join_ranks(BackendConfig(name="fsdp", device="cpu", timeout=60.0))
    found: dict[str, Any] = {}
    plain, parts = folder / "plain" / "step-00000001", folder / "parts" / "step-00000001"
    if ranks.size == 2:
        fit = make(folder / "parts", ranks)
        fit.run()
        found["from the start"] = weights(fit)
        found["full"] = save_on_a_full_disk(ranks, fit)
        found["killed"] = save_killed(ranks, fit)
        found["again"] = fit.checkpoints.save(fit.state, fit.model, fit.made)
        ranks.barrier()
        found["left"] = sorted(path.name for path in fit.folder.iterdir())
    found["from a plain one"] = goes_on(make(folder / "a", ranks), plain, folder / f"a{ranks.size}")
    if ranks.size == 3:
        found["from parts"] = goes_on(make(folder / "b", ranks), parts, folder / "b3")
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
def two_ranks(folder: Path, alone: dict[str, torch.Tensor]) -> list[dict[str, Any]]:
    return run_ranks(2, folder / "out2", on_a_rank, folder)


@pytest.fixture(scope="module")
def saved(two_ranks: list[Any], folder: Path) -> Path:
    return folder / "parts"


def test_a_plain_checkpoint_is_divided(two_ranks: list[Any], alone: dict[str, Any]) -> None:
    for rank in two_ranks:
        assert_close(rank["from the start"], alone, **ROUNDING)
        assert_close(rank["from a plain one"], alone, **ROUNDING)


@pytest.mark.slow
def test_three_ranks_read_both(saved: Path, folder: Path, alone: dict[str, Any]) -> None:
    for rank in run_ranks(3, folder / "out3", on_a_rank, folder):
        assert_close(rank["from parts"], alone, **ROUNDING)
        assert_close(rank["from a plain one"], alone, **ROUNDING)


def test_one_process_reads_parts(saved: Path, folder: Path, alone: dict[str, Any]) -> None:
    assert_close(goes_on(make(folder / "c"), saved / "step-00000001", folder / "c1"), alone, **ROUNDING)


def test_every_rank_writes_its_share(saved: Path) -> None:
    for stem in ("model", "optimizer"):
        sizes = [(saved / "step-00000001" / f"{stem}-0000{n}-of-00002.safetensors").stat().st_size for n in (1, 2)]
        assert 0.7 < sizes[0] / sizes[1] < 1.4, sizes


def test_torch_reads_them_with_its_own_reader(saved: Path, two_ranks: list[Any]) -> None:
    read = {name: torch.zeros_like(tensor) for name, tensor in two_ranks[0]["from the start"].items()}
    dcp.load(read, storage_reader=HuggingFaceStorageReader(str(saved / "step-00000004")), no_dist=True)
    assert_close(read, two_ranks[0]["from the start"], rtol=0, atol=0)


def test_a_full_disk_of_one_rank_ends_all_and_leaves_the_others(two_ranks: list[Any]) -> None:
    for rank in two_ranks:
        problem, left = rank["full"]
        assert "File too large" in problem and "\n" not in problem
        assert left == STEPS


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_kill_leaves_nothing_that_is_taken_for_a_checkpoint(moment: str, two_ranks: list[Any]) -> None:
    for rank in two_ranks:
        assert rank["killed"][moment] == STEPS
        assert len(rank["killed"][f"left by {moment}"]) == 5, "the moment was one inside of save"


def test_the_next_save_clears_up(two_ranks: list[Any]) -> None:
    for rank in two_ranks:
        assert rank["again"] is True
        assert rank["left"] == [*STEPS, "step-00000005"]


def flip(path: Path, _: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) * 3 // 4] ^= 4
    path.write_bytes(data)


def cut(path: Path, _: Path) -> None:
    os.truncate(path, path.stat().st_size - 9)


def lose(path: Path, _: Path) -> None:
    path.unlink()


def swap(path: Path, earlier: Path) -> None:
    shutil.copy(earlier, path)


@pytest.mark.parametrize("damage", [flip, cut, lose, swap])
def test_damage_to_any_file_is_found(damage: Callable[[Path, Path], None], saved: Path, tmp_path: Path) -> None:
    whole = saved / "step-00000002"
    names = sorted(path.name for path in whole.iterdir())
    assert sum(name.endswith(".safetensors") for name in names) == 4 and len(names) == 6
    checkpoints = Checkpoints(tmp_path, 9, {}, Single(BackendConfig()))
    for name in names:
        copied = Path(shutil.copytree(whole, tmp_path / name / whole.name))
        checkpoints.check(copied)
        damage(copied / name, saved / "step-00000001" / name)
        with pytest.raises(Damaged, match="damaged"):
            checkpoints.check(copied)


def test_parts_hold_rows_of_the_whole(saved: Path, two_ranks: list[Any]) -> None:
    """Put one under another they are the tensors of the model, each of which is in the files once."""
    files = [load_file(saved / "step-00000004" / f"model-0000{n}-of-00002.safetensors") for n in (1, 2)]
    for name, tensor in two_ranks[0]["from the start"].items():
        parts = [file[name] for file in files if name in file]
        assert torch.equal(torch.cat(parts), tensor), name


def test_ranks_meet_after_each_has_written_its_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One may write for longer than the others wait in an exchange."""
    ranks, calls = Single(BackendConfig(device="cpu", threads=1)), list[str]()

    def noted(name: str, method: Callable[..., Any], *given: Any) -> Any:
        calls.append(name)
        return method(*given)

    for name in ("barrier", "gather"):
        monkeypatch.setattr(ranks, name, partial(noted, name, getattr(ranks, name)))
    model = torch.nn.Linear(2, 2)
    ranks.shards_student = True
    checkpoints = Checkpoints(tmp_path, 9, {}, ranks)
    assert checkpoints.save(State(step=1), model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert calls == ["barrier", "gather"] * 4
