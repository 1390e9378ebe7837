"""Checkpoints of a model that is sharded over ranks: each rank writes its parts, and rank 0 what belongs to all."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from distill.distributed import Ranks
from distill.distributed.parts import save_part
from distill.optim.optimizer_state import optimizer_state
from distill.runs.checkpoint import Checkpoints, State, model_tensors
from distill.runs.checkpoint_record import OPTIMIZER, WEIGHTS, part_name
from distill.runs.divergence import weights_are_finite
from distill.runtime.errors import StorageFailed
from distill.runtime.files import atomic, digests, flush_to_disk, remove, write_manifest
from distill.runtime.host import storage_failure


class ShardedCheckpoints(Checkpoints):
    """The folder `checkpoints/`, on storage that all ranks see.

    A checkpoint appears whole or not at all, as that of one process does; it can be read by any number of ranks, and by
    a run that shards nothing.
    """

    by_all_ranks = True

    def __init__(self, ranks: Ranks, folder: Path, keep: int, identity: dict[str, Any]) -> None:
        super().__init__(folder, keep, identity)
        self.ranks = ranks

    def save(self, state: State, model: nn.Module, optimizer: torch.optim.Optimizer) -> bool:
        """As `Checkpoints.save`; all ranks call it, and all get the same answer or error."""
        weights = model_tensors(model)
        if float(self.ranks.sum(torch.tensor(float(not weights_are_finite(weights))))):
            return False
        final = self.path_of(state)
        if self.ranks.broadcast(final.exists()):
            return True
        tensors, numbers = optimizer_state(model, optimizer)
        new = final.with_name(f".{final.name}.parts.new")

        def begin() -> None:
            self.make_room(state, {**weights, **tensors})
            new.mkdir()

        def finish(sha256: dict[str, str]) -> None:
            self.write_record(new, state, weights, tensors, numbers, self.ranks.size)
            write_manifest(new, sha256)
            with atomic(final, durable=True) as target:
                new.rename(target)
            self.prune(state)

        self._on_rank_0(begin)
        rank, size = self.ranks.rank, self.ranks.size
        names = [part_name(name, rank, size) for name in (WEIGHTS, OPTIMIZER)]

        def write() -> dict[str, str]:
            for name, part in zip(names, (weights, tensors), strict=True):
                save_part(new / name, part, rank)
                flush_to_disk(new / name)
            return digests(new, names)

        written: dict[str, str] = {}
        problem = _problem(lambda: written.update(write()), self.folder)
        self.ranks.barrier()  # one may write for longer than the others wait in an exchange
        reports = self.ranks.gather([problem, written])
        if problem := next((problem for problem, _ in reports if problem), ""):
            if rank == 0:
                remove(new)
            raise StorageFailed(problem)
        self._on_rank_0(lambda: finish({name: digest for _, written in reports for name, digest in written.items()}))
        return True

    def _on_rank_0(self, work: Callable[[], None]) -> None:
        """Let rank 0 do `work`. Raises its StorageFailed on all ranks."""
        problem = _problem(work, self.folder) if self.ranks.rank == 0 else ""
        self.ranks.barrier()
        if problem := self.ranks.broadcast(problem):
            raise StorageFailed(problem)


def _problem(work: Callable[[], None], folder: Path) -> str:
    """Do `work`; what storage it lacks, in words, or nothing."""
    try:
        work()
    except Exception as error:
        if (failure := storage_failure(error, str(folder))) is None:
            raise
        return str(failure)
    return ""
