"""student.intermediate_size: a student whose MLPs have fewer neurons than those of its teacher.

One pass of the teacher over text gives the second moments of each MLP's neurons, G = Z'SZ [F, F], where z_t [F] is
what its last projection W_0 [F, H] reads at position t, with a bias as a neuron that is always 1, and s_t is
1 / mean(block's output^2), because a few positions have states a hundred times as large as all others. The neurons
that stay, K, are those that add most to the output, by |w_j| sqrt(G_jj); Minitron (Muralidharan et al. 2024) scores
them by their activations alone. A refit lets them make up for the others:

    min_W  sum_t s_t |z_t[K] W - z_t W_0|^2 + lambda |W - W_0[K]|^2

G and W_0 alone give the solution, so all blocks are fitted beside one another, on the teacher's own states.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from distill.data.batch import Batch
from distill.models.blocks import block_list, depth_of
from distill.models.language_model import LAST, LanguageModel, OutputSpec
from distill.models.mlp import projected, projection_of, take_neurons, weight_of
from distill.models.precision import at_least_fp32
from distill.models.refit import solve

PENALTY = 0.01  # lambda, of G's mean diagonal; 0.1 and 0.001 were as good
MOST_BYTES = 2**31  # of all G at a time: where there are more the text is read again


class Narrowed(NamedTuple):
    """A block of the teacher with fewer neurons: its weights by name, and |error| / |what its MLP adds|."""

    layer: int
    weights: dict[str, Tensor]
    before: float  # as copied
    after: float


def passes(layers: list[int], width: int) -> list[list[int]]:
    """The layers whose G [F, F] are summed together, in one pass over the text."""
    count = max(1, MOST_BYTES // (4 * width**2))
    return [layers[first : first + count] for first in range(0, len(layers), count)]


@torch.no_grad()
def narrow(
    teacher: LanguageModel, layers: list[int], block: Any, batches: list[Batch], fits: bool
) -> Iterator[Narrowed]:
    """These blocks of the teacher, with as many neurons as `block` has.

    Args:
        block: of the student.
        batches: the text, on the teacher's device. Every position counts but padding.
        fits: whether the neurons that stay make up for the others; else they are copies.
    """
    blocks, like = block_list(teacher.model.base_model, depth_of(teacher.model)), block.state_dict()
    name = projection_of(block)
    assert name is not None, "the student was made"
    kept_width, width = (len(weight_of(one.get_submodule(name))) for one in (block, blocks[0]))
    for some in passes(layers, width):
        moments = _moments(teacher, {layer: blocks[layer] for layer in some}, name, batches)
        for layer in some:
            projection: Any = blocks[layer].get_submodule(name)
            moment = moments.pop(layer)
            old = at_least_fp32(weight_of(projection))
            kept = (moment.diagonal()[:width].sqrt() * old.norm(dim=1)).topk(kept_width).indices.sort().values
            weights = take_neurons(blocks[layer].state_dict(), like, kept, width)
            if projection.bias is not None:
                old = torch.cat([old, projection.bias.to(old)[None]])
                kept = torch.cat([kept, kept.new_tensor([width])])
            copied = new = old[kept]
            if fits:
                new = solve(moment[kept][:, kept].double(), (moment[kept] @ old).double(), copied.double(), PENALTY)
                weights |= projected(name, projection, new[:kept_width], new[kept_width:])
            before, after = (_error(moment, old, kept, each.to(old)) for each in (copied, new))
            fp32 = {part: weight.detach().float().contiguous().clone() for part, weight in weights.items()}
            yield Narrowed(layer, fp32, before, after)


def _moments(teacher: LanguageModel, blocks: dict[int, Any], name: str, batches: list[Batch]) -> dict[int, Tensor]:
    """G of these blocks in fp32, with a row and column for a bias."""
    read, moments, counted = dict[int, Tensor](), dict[int, Tensor](), list[Tensor | None]()

    def reads(layer: int, _: Any, inputs: tuple[Tensor, ...]) -> None:
        read[layer] = inputs[0]

    def gives(layer: int, projection: Any, _: Any, __: Any, output: Any) -> None:
        state = output if isinstance(output, Tensor) else output[0]
        z, state = (at_least_fp32(part.reshape(-1, part.shape[-1])) for part in (read.pop(layer), state))
        if (rows := counted[-1]) is not None:
            z, state = z[rows], state[rows]
        z = z if projection.bias is None else torch.cat([z, torch.ones_like(z[:, :1])], 1)
        z = z * state.square().mean(1, keepdim=True).rsqrt()
        with torch.autocast(z.device.type, enabled=False):  # which the teacher may run under
            moments[layer] = z.T @ z if layer not in moments else moments[layer].addmm_(z.T, z)

    with ExitStack() as hooks:
        for layer, block in blocks.items():
            projection = block.get_submodule(name)
            hooks.callback(projection.register_forward_pre_hook(partial(reads, layer)).remove)
            hooks.callback(block.register_forward_hook(partial(gives, layer, projection)).remove)
        for batch in batches:
            counted.append(None if batch.documents is None else (batch.documents >= 0).flatten())
            teacher(batch.inputs, batch.documents, OutputSpec(layers=(LAST,)))
    return moments


def _error(moment: Tensor, old: Tensor, kept: Tensor, weight: Tensor) -> float:
    """sqrt(sum s |z[K] W - z W_0|^2 / sum s |z W_0|^2)."""
    lost = old.clone()
    lost[kept] -= weight
    squared, of_all = ((each * (moment @ each)).sum() for each in (lost, old))
    return float((squared.clamp(min=0) / of_all).sqrt())
