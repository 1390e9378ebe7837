"""An embedding in slices on several ranks: what it looks up, and how it trains as the head that it is tied to."""

from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from distributed import run_ranks
from slices import VOCAB, WIDTH, slice_of
from torch import Tensor

from distill.distributed.row_exchange import embed
from distill.models.language_model import Head
from distill.objective.terms.clm import Clm
from distill.objective.vocabulary import reference_loss, vocabulary_loss
from distill.objective.vocabulary_parallel import sliced_loss

BATCHES = ((1, 4), (0, 4), (3, 2))
PADDING = 30


def train_tied(lengths: tuple[int, ...] | None, padding: int | None) -> None:
    """Raises AssertionError where the slice of this rank gets another gradient than it has in the whole.

    Next words are predicted from tanh of the embedding of each word alone.
    """
    rank, size, random = dist.get_rank(), dist.get_world_size(), torch.Generator().manual_seed(3)
    weight = torch.randn(VOCAB, WIDTH, dtype=torch.float64, generator=random, requires_grad=True)
    ids = [torch.randint(VOCAB, shape, generator=random) for shape in BATCHES]
    for each in ids:
        each[:1, :2] = PADDING
    scales = torch.ones(1, dtype=torch.float64)

    def head(vectors: Tensor, own: Tensor) -> Head:
        return Head(vectors.tanh().flatten(0, -2), own, dtype=torch.float64)

    everything = torch.cat([each.flatten() for each in ids])
    targets = everything.flip(0)
    whole, _ = reference_loss(
        [Clm()], head(F.embedding(everything, weight, padding), weight), None, targets, scales, VOCAB
    )
    (want,) = torch.autograd.grad(whole, weight)

    here = slice_of(VOCAB, rank, size, lengths)
    own = weight.detach()[here].clone().requires_grad_()
    vectors = embed(ids[rank], own, dist.group.WORLD, padding)
    assert torch.equal(vectors, F.embedding(ids[rank], weight))
    begin = sum(each.numel() for each in ids[:rank])
    loss, _ = vocabulary_loss(
        [Clm()], head(vectors, own), None, targets[begin : begin + ids[rank].numel()], scales, VOCAB, False,
        partial(sliced_loss, group=dist.group.WORLD),
    )  # fmt: skip
    loss.backward()
    assert own.grad is not None
    torch.testing.assert_close(own.grad, want[here], rtol=0, atol=1e-12 * float(want.abs().max()))


def in_a_rank() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for lengths in (None, (0, VOCAB, 0), (1, 2, VOCAB - 3)):
        for padding in (None, PADDING):
            train_tied(lengths, padding)
    half = torch.arange(12, dtype=torch.bfloat16).view(6, 2)[2 * dist.get_rank() :][:2]
    assert embed(torch.tensor([[5, 0]]), half, dist.group.WORLD).tolist() == [[[10, 11], [0, 1]]]
    dist.destroy_process_group()


def test_a_tied_embedding_in_slices_trains_as_a_whole_one(tmp_path: Path) -> None:
    """Also of a rank whose batch is empty, and of one without a slice."""
    run_ranks(3, tmp_path, in_a_rank)
