"""Checkpoints that are either whole or absent: saved atomically, verified when read, pruned to the newest few.

Each rank that saves writes one shard of the weights and one of the optimizer's state, in safetensors with the header of
torch's distributed checkpoint (DCP), whose reader gives any number of ranks what each needs. DCP's writer is not used:
it holds a file's bytes in memory once more, and its ranks wait in a collective while the slowest of them writes. Nor
are its state dicts of optimizers, for which an optimizer without a state takes a step.
"""

import copy
import json
import re
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from distill.distributed import Ranks
from distill.distributed.shard import is_first_replica, local
from distill.optim.optimizer_state import SLOT, has_slot, optimizer_state, restore_optimizer
from distill.runs.facts import Best, HistoryPoint
from distill.runs.identity import refuse_other_settings
from distill.runs.state import State
from distill.runtime.errors import Damaged, SettingError, StorageFailed
from distill.runtime.files import (
    MANIFEST,
    check_digests,
    digests,
    flush_to_disk,
    quarantine,
    read_manifest,
    remove,
    write_manifest,
)
from distill.runtime.host import require_room, storage_failure
from distill.runtime.jsonl import read_lines

FORMAT = 8  # of the record; a change of its fields is another one
RECORD, SUFFIX = "state.json", ".safetensors"
STEMS = ("model", "optimizer")  # of the files with the weights, and with the state of the optimizer
HISTORY = "history.jsonl"  # in the folder of the run: a line for each evaluation

Parts = dict[str, tuple[Tensor, Sequence[int]]]  # what a rank writes of tensors by name, and where that begins in each


class Checkpoints:
    """The folder `checkpoints/` of a run.

    Rank 0 saves what all ranks hold. Where each holds a shard of the student they save together, on storage that all of
    them see. A checkpoint of either kind can be read by any number of ranks, sharded or not.
    """

    def __init__(self, folder: Path, keep: int, identity: dict[str, Any], ranks: Ranks) -> None:
        """`identity`: what must match to resume from a checkpoint (settings and corpus)."""
        self.folder, self.keep, self.identity, self.ranks = folder, keep, identity, ranks
        self._kept: dict[str, Any] = {"precision": {}, "layers": None, "began_from": None}
        self._choice: Best | None = None
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        # What the thread writes, and what gives that its name.
        self._under_way: tuple[Future[dict[str, str]], Callable[[], None]] | None = None

    def begin(self, choice: Best | None = None, **kept: Any) -> None:
        """Take in what is known once a run is about to train.

        Args:
            choice: by which measure the checkpoint of the best evaluation stays, however many others follow it.
            kept: what each checkpoint keeps for a resume: `precision`, the number formats and threads in force,
                `layers` that student.layers=auto has chosen, and `began_from`, the checkpoint that `resume` has named.
        """
        self._kept, self._choice = self._kept | kept, choice

    def saved(self, after: int = -1) -> list[Path]:
        """All of later steps that are there by their names, oldest first; those that were renamed have other names."""
        by_step = self.by_step()
        return [by_step[step] for step in sorted(by_step) if step > after]

    def by_step(self) -> dict[int, Path]:
        return {step: path for path in self.folder.glob("step-*") if (step := step_of(path)) is not None}

    def newest(self) -> Path | None:
        return next(reversed(self.saved()), None)

    def path_of(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}"

    def save(self, state: State, model: nn.Module, optimizer: torch.optim.Optimizer, overlap: bool = False) -> bool:
        """Write all that is trained, flush it to the disk, rename: a kill at any moment leaves the older ones whole.

        The newest one that a later loss has shown to be good stays, however many others follow it. All ranks that save
        call it, and get the same answer or error.

        Args:
            overlap: come back once all is copied to the host's memory; a thread writes it, `finish` gives it its name.

        Returns:
            Whether it is or will be there: no run could resume from weights that are not finite, so none are written.

        Raises:
            StorageFailed: there is no room for it, or the one before could not be written.
        """
        self.finish()
        weights, final = model_tensors(model), self.path_of(state.step)
        new = final.with_name(f".{final.name}.new")
        found = self._on_each(lambda: [weights_are_finite(weights), final.exists()])
        if not all(finite for finite, _ in found):
            return False
        if found[0][1]:  # written before an interrupted evaluation: nothing has changed since
            return True
        slots, numbers = optimizer_state(model, optimizer)
        self._on_first(lambda: self._make_room(new, {**weights, **slots}))
        shards = [parts_of(tensors, self.ranks.rank == 0) for tensors in (weights, slots)]
        if overlap:
            writing = self._thread.submit(self._write_shards, new, copied_to_host(shards))
            self._under_way = writing, partial(self._complete, new, copy.deepcopy(state), numbers, writing.result)
        else:
            self._complete(new, state, numbers, lambda: self._write_shards(new, shards))
        return True

    @property
    def is_writing(self) -> bool:
        """Whether the thread of this rank is still at a checkpoint."""
        return self._under_way is not None and not self._under_way[0].done()

    def finish(self) -> None:
        """Wait for the checkpoint that is being written, if there is one, and give it its name.

        All ranks that save call it together: the thread exchanges nothing with other ranks, as its messages would mix
        with those of the training. Raises StorageFailed as `save` does.
        """
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            under_way[1]()

    def _complete(self, new: Path, state: State, numbers: dict[str, Any], write: Callable[[], dict[str, str]]) -> None:
        """Let each rank write its files, or wait for them, and give the checkpoint its name once all are there."""
        shards = self._on_each(write)
        self._on_first(lambda: self._publish(new, state, numbers, shards))

    def _make_room(self, new: Path, tensors: dict[str, Tensor]) -> None:
        """Remove what was left half-written. Raises StorageFailed where there is no room for a checkpoint of these."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self._remove_half_written()
        require_room(self.folder, sum(tensor.nbytes for tensor in tensors.values()), f"the checkpoint {new.stem[1:]}")
        new.mkdir()

    def _remove_half_written(self) -> None:
        for half_written in self.folder.glob(".step-*.new"):
            remove(half_written)

    def _write_shards(self, new: Path, shards: Sequence[Parts]) -> dict[str, str]:
        """Write and flush what this rank writes of weights and optimizer; gives the digests of its files by name."""
        rank, size = (self.ranks.rank, self.ranks.size) if self.ranks.shards_student else (0, 1)
        which = "" if size == 1 else f"-{rank + 1:05d}-of-{size:05d}"
        names = [f"{stem}{which}{SUFFIX}" for stem in STEMS]
        for name, parts in zip(names, shards, strict=True):
            write_shard(new / name, parts)
            flush_to_disk(new / name)
        return digests(new, names)

    def _publish(self, new: Path, state: State, numbers: dict[str, Any], shards: list[dict[str, str]]) -> None:
        """Write the record and the digests beside the shards, flush all that is new, and give the folder its name."""
        record = {"format": FORMAT, "state": asdict(state), "identity": self.identity, "optimizer": numbers}
        (new / RECORD).write_text(json.dumps(record | self._kept, indent=1), encoding="utf-8")
        write_manifest(new, {name: digest for shard in shards for name, digest in shard.items()})
        for written in (new / RECORD, new / MANIFEST, new):
            flush_to_disk(written)
        new.rename(self.path_of(state.step))
        flush_to_disk(self.folder)
        self.prune(state)

    def _on_first(self, work: Callable[[], None]) -> None:
        """Let rank 0 do `work`, while the others that save wait. Raises as `_on_each` does."""
        self._on_each(lambda: work() if self.ranks.rank == 0 else None)

    def _on_each(self, work: Callable[[], Any]) -> list[Any]:
        """What `work` gives on each rank that saves, as JSON holds it.

        Raises:
            StorageFailed: on all of them, what storage one of them lacks; what is half-written is removed.
        """
        result, problem = None, ""
        try:
            result = work()
        except Exception as error:
            if (failure := storage_failure(error, str(self.folder))) is None:
                raise
            problem = str(failure)
        reports = [(result, problem)]
        if self.ranks.shards_student:
            self.ranks.barrier()  # one may write for longer than the others wait in an exchange
            reports = self.ranks.gather((result, problem))
        if first := next((problem for _, problem in reports if problem), ""):
            with suppress(OSError):  # of a file system that fails: what it failed at is the error to report
                if self.ranks.rank == 0:
                    self._remove_half_written()
            raise StorageFailed(first)
        return [result for result, _ in reports]

    def best(self) -> Best | None:
        """The best evaluation so far whose checkpoint is there; None where the run chooses none. Rank 0 reads it."""
        if self._choice is None:
            return None
        points = [HistoryPoint.model_validate(line) for line in read_lines(self.folder.parent / HISTORY)]
        return self._choice.among(points, self.by_step())

    def prune(self, state: State) -> None:
        """Remove the older ones, but for the newest that is known to be good, and that of the best evaluation."""
        by_step, best = self.by_step(), self.best()
        good = max((step for step in by_step if step < state.last_good_step), default=None)
        for step in sorted(by_step)[: -self.keep]:
            if step != good and (best is None or step != best.step):
                remove(by_step[step])

    def rename_diverged(self, last_good_step: int) -> None:
        """Rename the checkpoints of a training that may have diverged by then to `diverged-step-N`.

        Args:
            last_good_step: as in `State`; the checkpoints before it are good.
        """
        diverged = self.saved(after=last_good_step - 1)
        for earlier in self.folder.glob("diverged-step-*") if diverged else []:
            remove(earlier)
        for path in diverged:
            quarantine(path, "diverged")

    def check(self, path: Path) -> None:
        """Compare the files of a checkpoint with their digests; all ranks call it.

        Each file is read once, by one rank; of a student that is not sharded by one on each machine, as machines may
        see it by disks or caches of their own.

        Raises:
            Damaged: on all ranks, what any of them has found.
        """
        ranks = self.ranks
        share = (ranks.rank, ranks.size) if ranks.shards_student else (ranks.local_rank, ranks.local_size)
        reasons = ranks.gather(ranks.agree(lambda: damage_of(path, *share)))
        if first := next(filter(None, reasons), ""):
            raise Damaged(path, first)

    def load(self, path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> State:
        """Put weights and optimizer back as they were saved in a checkpoint, which `check` has found whole.

        Raises SettingError for one of other settings or another student; nothing has changed then.
        """
        record, stored, weights = read_record(path), stored_tensors(path), model_tensors(model)
        refuse_other_settings(record["identity"], self.identity, f"resume={path}", resumes=True)
        slots = {name: tensor for name, tensor in stored.items() if SLOT in name}
        shapes, here = ({name: list(one.shape) for name, one in each.items()} for each in (stored, weights))
        names = sorted((shapes.keys() - slots.keys()) | here.keys())
        if (other := next((name for name in names if shapes.get(name) != here.get(name)), None)) is not None:
            raise SettingError(
                f"resume={path} holds other weights than this student has ({other} has the shape {shapes.get(other)} "
                f"there, and {here.get(other)} here): take the releases and the settings that wrote it, or start "
                "another run with hydra.run.dir=DIR"
            )
        if other := next(
            (key for key in {**slots, **record["optimizer"]} if not has_slot(model, optimizer, key)), None
        ):
            raise SettingError(
                f"resume={path} holds {other} of an optimizer, which {type(optimizer).__name__} does not train here: "
                "restore its code, or start another run with hydra.run.dir=DIR"
            )
        memory = {name: memory_for(tensor, weights.get(name.rpartition(SLOT)[0])) for name, tensor in slots.items()}
        read_tensors(path, {**weights, **memory})  # weights in place
        restore_optimizer(model, optimizer, memory, record["optimizer"])
        return State.of(record["state"])


def step_of(folder: Path) -> int | None:
    """The step of a checkpoint or a snapshot by its name; None where that is another."""
    match = re.fullmatch(r"step-(\d+)", folder.name)
    return int(match[1]) if match else None


def weights_are_finite(tensors: dict[str, Tensor]) -> bool:
    """Whether every weight is a number, of sharded ones this rank's part; integer buffers always are."""
    return all(bool(local(tensor).isfinite().all()) for tensor in tensors.values() if tensor.is_floating_point())


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters (tied ones once) and the buffers that belong to the state."""
    persistent = model.state_dict(keep_vars=True)
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in persistent}
    return {name: tensor.detach() for name, tensor in {**dict(model.named_parameters()), **buffers}.items()}


def parts_of(tensors: dict[str, Tensor], first: bool) -> Parts:
    """This rank's parts of tensors; `first`: and those that are not sharded, which one rank writes for all."""
    parts: Parts = {}
    for name, tensor in tensors.items():
        part, begin = tensor, (0,) * tensor.ndim
        if isinstance(tensor, DTensor):
            _, begin = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
            part = tensor.to_local()
        if first or (isinstance(tensor, DTensor) and part.numel() and is_first_replica(tensor)):
            parts[name] = part.detach(), begin
    return parts


def copied_to_host(shards: Sequence[Parts]) -> list[Parts]:
    """Copies that no later step changes; those from a GPU are all under way before the one wait, to pinned memory."""
    copies: list[Parts] = []
    for parts in shards:
        copies.append({})
        for name, (part, begin) in parts.items():
            host = torch.empty(part.shape, dtype=part.dtype, pin_memory=part.is_cuda)
            copies[-1][name] = host.copy_(part, non_blocking=True), begin
    for device in {part.device for parts in shards for part, _ in parts.values() if part.is_cuda}:
        torch.cuda.synchronize(device)
    return copies


def write_shard(path: Path, parts: Parts) -> None:
    """Write a file that DCP reads, whatever device the parts are on."""
    tensors = {}
    for name, (part, _) in parts.items():
        host = part.cpu().contiguous()
        is_view = host.untyped_storage().nbytes() != host.nbytes  # safetensors writes no part of a larger tensor
        tensors[name] = host.clone() if is_view else host
    offsets = {name: {"saved_offsets": list(begin)} for name, (_, begin) in parts.items()}
    save_file(tensors, path, {"format": "pt", "DCP_SHARDING_INFO": json.dumps(offsets)})  # the names that DCP reads


def stored_tensors(folder: Path) -> dict[str, Tensor]:
    """The tensors of a checkpoint by name, without their values: of type and shape, on the meta device."""
    metadata: dict[str, Any] = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    return {name: torch.empty(of.size, dtype=of.properties.dtype, device="meta") for name, of in metadata.items()}


def read_tensors(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Fill tensors, sharded or not, from the shards in a folder, however many ranks have written them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that no group of ranks is used, which is meant
        dcp.load(tensors, storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=True)


def memory_for(stored: Tensor, like: Tensor | None) -> Tensor:
    """Memory for a tensor of a checkpoint: sharded as `like` where it has its shape, else whole and on the CPU."""
    if isinstance(like, DTensor) and stored.shape == like.shape:
        return torch.zeros_like(like, dtype=stored.dtype)
    return torch.zeros(stored.shape, dtype=stored.dtype)


def read_record(path: Path) -> dict[str, Any]:
    """The record of a checkpoint that is whole. Raises SettingError where another release has written it."""
    record: dict[str, Any] = json.loads((path / RECORD).read_bytes())
    if record.get("format") != FORMAT:
        raise SettingError(
            f"resume={path} has checkpoint format {record.get('format')}, which this release cannot read: use the "
            "release that wrote it, or start another run with hydra.run.dir=DIR"
        )
    return record


def damage_of(path: Path, number: int, num_readers: int) -> str:
    """What differs from the digests of a checkpoint; empty where nothing does.

    Args:
        number, num_readers: of so many that read at the same time this one reads its share of the files.
    """
    try:
        expected = read_manifest(path)
        names = sorted(expected)
        if names != sorted([RECORD, *(file.name for file in path.glob(f"*{SUFFIX}"))]):
            return f"{MANIFEST} does not list the files that are there"
        check_digests(path, {name: expected[name] for name in names[number::num_readers]})
    except Damaged as damage:
        return damage.reason
    return ""
