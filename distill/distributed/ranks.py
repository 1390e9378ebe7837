"""The interface between the training loop and the ranks of a run, with everything in it that all backends share."""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn

from distill.config.settings import BackendConfig
from distill.runtime.errors import RankLost, SettingError
from distill.runtime.rank import RankInfo

# Number formats on the wire by `backend.compression`, and what gradients are multiplied by there. fp16 loses its digits
# below 6e-5, where most gradients of one rank lie, and ends at 65,504: with this factor they go from 6e-8 to 64.
WIRE = {"bf16": (torch.bfloat16, 1.0), "fp16": (torch.float16, 1024.0)}


@contextmanager
def naming_lost_rank() -> Iterator[None]:
    """Turn the error of a communication library whose rank is gone into RankLost, in one line."""
    try:
        yield
    except (RankLost, torch.OutOfMemoryError, torch.AcceleratorError):
        raise  # a GPU reports its faults where something waits for it, which may be an exchange
    except RuntimeError as error:
        # Without the line of the library's source, and without its advice.
        reason = re.sub(r"^\[\S+\] *", "", str(error).strip() or type(error).__name__).split(". ")[0].split("\n")[0]
        raise RankLost(f"another rank has ended or does not answer: {reason}") from error


# Of the messages of Gloo and NCCL when a rank is gone, in exchanges that torch makes by itself.
LOST = re.compile(r"gloo/transport|[Cc]onnection (was )?(closed|reset|refused)|Broken pipe|NCCL|Timed out waiting")


@contextmanager
def naming_lost_rank_inside() -> Iterator[None]:
    """`naming_lost_rank` around a computation with exchanges inside, whose other errors are left alone."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, RankLost) or not LOST.search(str(error)):
            raise
        with naming_lost_rank():
            raise


@dataclass
class Traffic:
    """What a rank has exchanged with the others so far.

    Attributes:
        num_syncs: exchanges of the gradient.
        num_collectives: calls of the communication library, of any kind.
        bytes_sent: bytes handed to those calls; a ring carries 2 (size - 1) / size times that per rank.
        exchange_seconds: from the beginning of each exchange of the gradient to its end, added up.
    """

    num_syncs: int = 0
    num_collectives: int = 0
    bytes_sent: int = 0
    exchange_seconds: float = 0.0


# Bytes that are broadcast at a time: Horovod counts them in 32 bits on some machines, and so does MPI.
MESSAGE = 1 << 30


class Ranks:
    """The ranks of one run, seen from one of them.

    All methods raise RankLost when another rank is gone, or has not answered for `backend.timeout` seconds.

    Attributes:
        name: single, ddp, fsdp or horovod.
        engine: the library and transport of the gradients, for the report.
        rank, size: this process among all of them.
        local_rank, local_size: this process among those of its host.
        device: where model and batches of this rank live.
        rings: in use for the exchange of gradients.
        traffic: what this rank has exchanged so far.
    """

    name: str
    engine: str
    equal_windows = False  # whether all ranks have to have the same number of micro-batches in a window
    shards_student = False  # whether each rank holds a part of the student's weights
    shards_teacher = False  # the same of teachers

    def __init__(self, settings: BackendConfig, info: RankInfo, device: torch.device) -> None:
        self.settings = settings
        self.rank, self.size = info.rank, info.size
        self.local_rank, self.local_size = info.local_rank, info.local_size
        self.device = device
        self.rings = settings.rings
        self.traffic = Traffic()

    @property
    def stripes(self) -> int:
        """The parts of a segment that are sent side by side, each on a ring of its own."""
        return self.rings

    @property
    def shards(self) -> bool:
        """Whether any model is sharded."""
        return self.shards_student or self.shards_teacher

    def shard(self, model: nn.Module, blocks: Sequence[nn.Module], calls: int, trained: bool) -> None:
        """Shard the weights of a model over the ranks, in place; only of ranks that shard a model.

        Args:
            blocks: modules in it that are called one after the other, `calls` times in all.
            trained: whether it is the student.
        """
        raise NotImplementedError

    def place(self, model: Any, dtype: torch.dtype) -> Any:
        """The model on this rank's device, in place; one that is sharded is there, and computes in `dtype` from now on.

        Other models compute in another format by autocast or in packed layers, which are chosen later.
        """
        return model.to(self.device)

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum of `tensor` over all ranks, in its own type; the input stays as it is."""
        result = tensor.detach().clone(memory_format=torch.contiguous_format)
        if self.size > 1:
            self.count(result)
            with self.waiting():
                self._sum(result)
        return result

    def broadcast(self, value: Any) -> Any:
        """Rank 0's `value` on every rank.

        That is a tensor (all ranks give one of the same shape and type), or what JSON holds: nothing that comes from
        another process is ever run here, as unpickling it would.
        """
        if self.size == 1:
            return value
        if isinstance(value, Tensor):
            self.broadcast_all([value := value.detach().clone(memory_format=torch.contiguous_format)])
            return value
        data = _as_bytes(value)
        length = self.broadcast(torch.tensor(len(data)))
        data = self.broadcast(data if self.rank == 0 else torch.empty(int(length), dtype=torch.uint8))
        return json.loads(data.numpy().tobytes())

    def gather(self, value: Any) -> list[Any]:
        """The `value` of every rank, by rank, on all of them; what JSON holds."""
        if self.size == 1:
            return [value]
        data = _as_bytes(value)
        lengths = torch.zeros(self.size, dtype=torch.int64)
        lengths[self.rank] = len(data)
        lengths = self.sum(lengths)
        table = torch.zeros(self.size, int(lengths.max()), dtype=torch.int32)  # Horovod sums no bytes
        table[self.rank, : len(data)] = data
        by_rank = self.sum(table).to(torch.uint8)
        return [
            json.loads(row[:length].numpy().tobytes()) for row, length in zip(by_rank, lengths.tolist(), strict=True)
        ]

    def decide(self, work: Callable[[], Any], short: bool = False) -> Any:
        """What `work` gives on rank 0, as JSON holds it, on all ranks; its SettingError too, so that none waits.

        Args:
            short: it takes no longer than ranks wait in an exchange, so that they need no meeting before.
        """
        value, message = None, ""
        if self.rank == 0:
            try:
                value = work()
            except SettingError as error:
                message = str(error)
        if not short:
            self.barrier()  # `work` may take longer than ranks wait in an exchange
        value, message = self.broadcast((value, message))
        if message:
            raise SettingError(message)
        return value

    def agree(self, work: Callable[[], Any]) -> Any:
        """What `work`, which all ranks do, gives on this one; the first SettingError of any rank is raised on all."""
        value, message = None, ""
        try:
            value = work()
        except SettingError as error:
            if self.size == 1:
                raise
            message = str(error)
        self.barrier()  # one may work for longer than the others wait in an exchange
        if first := next(filter(None, self.gather(message)), ""):
            raise SettingError(first)
        return value

    @contextmanager
    def in_lockstep(self, models: Sequence[nn.Module], idle: Callable[[Any], object]) -> Iterator[None]:
        """While it is open ranks may compute different numbers of forwards of the models; all ranks open it together.

        Where models are sharded over the ranks those without work join in the forwards of the others.

        Args:
            idle: computes a forward of one of the models whose outcome is not used.
        """
        yield

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Around forward and backward passes, in which sharded models exchange their weights."""
        yield

    def barrier(self) -> None:
        """Wait until all ranks have come here, however long that takes while they are alive."""
        if self.size > 1:
            self.traffic.num_collectives += 1
            with self.waiting():
                self._barrier()

    def close(self) -> None:
        """Leave the group of ranks once all have come here; nothing but attributes may be used afterwards.

        Not for a rank that fails: `launch.leave` is.
        """
        return None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        # After an error the others may never come to `close`.
        if error is None:
            self.close()

    # For `GradientSync`.

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """A wait for the other ranks."""
        with naming_lost_rank():
            yield

    def count(self, tensor: Tensor) -> None:
        """Count a call of the communication library that carries `tensor`."""
        self.traffic.num_collectives += 1
        self.traffic.bytes_sent += tensor.numel() * tensor.element_size()

    def broadcast_all(self, tensors: list[Tensor]) -> None:
        """Overwrite tensors of any types with those of rank 0, in place; of so many at a time as fill a message."""
        if self.size == 1:
            return
        with torch.no_grad():
            for group in _messages(tensors):
                # As bytes and in one call: no latency per tensor.
                data = torch.cat([tensor.detach().reshape(-1).view(torch.uint8) for tensor in group])
                for part in data.split(MESSAGE):
                    self.count(part)
                    with self.waiting():
                        self._broadcast(part)
                for tensor, values in zip(group, data.split([tensor.nbytes for tensor in group]), strict=True):
                    # A copy, since a slice of bytes need not begin where the element type may begin.
                    tensor.copy_(values.clone().view(tensor.dtype).view_as(tensor))

    def begin_sum(self, parts: Sequence[Tensor], name: str) -> Callable[[], None]:
        """Begin to sum contiguous tensors over all ranks, in place, part i on ring i; returns a function that waits.

        `name` is the same for the same part of every exchange.
        """
        raise NotImplementedError

    # What a backend of several ranks gives; one process never comes here.

    def _barrier(self) -> None:
        """Wait for all ranks."""
        raise NotImplementedError

    def _sum(self, tensor: Tensor) -> None:
        """Sum a contiguous tensor of any type over all ranks, in place."""
        raise NotImplementedError

    def _broadcast(self, data: Tensor) -> None:
        """Overwrite [bytes] uint8 with those of rank 0, in place."""
        raise NotImplementedError


def _as_bytes(value: Any) -> Tensor:
    """`value` as the bytes of its JSON, [n] uint8."""
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def _messages(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Tensors in groups of at most `MESSAGE` bytes, or of one that is larger: no second copy of a whole model."""
    group: list[Tensor] = []
    for tensor in tensors:
        if group and sum(before.nbytes for before in group) + tensor.nbytes > MESSAGE:
            yield group
            group = []
        group.append(tensor)
    if group:
        yield group
