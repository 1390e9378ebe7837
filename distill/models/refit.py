"""student.refit: blocks that stand before a gap make up for the teacher's layers that are missing there.

Of a block only the projection that ends its MLP changes: W [F, H], with its bias as a row whose input is 1, since what
the missing layers add on average is the easiest to make up for. The block is linear in W given the projection's input
z_t [F] at position t, so this is ridge regression towards the old weights:

    min_W  sum_t s_t |z_t W - y_t|^2 + lambda |W - W_0|^2     (Z'SZ + lambda I) W = Z'SY + lambda W_0

y_t is what the teacher has behind the missing layers, less what the student has there without the projection; s_t is
1 / mean(teacher's state^2), because a few positions have states a hundred times as large as all others; lambda is a
fraction of the mean diagonal of Z'SZ. ReplaceMe (Shopkhoev et al. 2025) fits a matrix [H, H] to the MLP's output, a
special case. The gaps are closed in order, each through the blocks that were refitted before it.

In a post-norm family, such as BERT, states are the sums before a block's last norm, and that norm becomes the one of
the last missing layer: then equal sums are equal states.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from distill.config.settings import StudentConfig
from distill.data.batch import Batch
from distill.models.blocks import block_list, depth_of
from distill.models.kind import ModelKind
from distill.models.language_model import LAST, LanguageModel, OutputSpec
from distill.models.layers import block_prefix
from distill.models.mlp import projected, projection_of, weight_of
from distill.models.precision import at_least_fp32
from distill.models.student import from_layers
from distill.runtime.errors import SettingError

PENALTY = 0.1  # lambda, of the mean diagonal: 0.01 was worse by 1 % on books and 3 % on other text
TOP = 0.8  # of the layers: a gap behind it stays, where a refit gained nothing on books and lost on other text
# Names in blocks of transformers of a post-norm family's norm of the sum.
NORMS = ("output.LayerNorm", "output_layer_norm")
LINEAR = 1e-2  # the part of what a projection adds to the sum that may be no multiple of its output


class Start(NamedTuple):
    """What a student begins with: layers of its teacher, and weights by name that are not the teacher's."""

    settings: StudentConfig
    chosen: list[int]
    weights: dict[str, Tensor]


class Fitted(NamedTuple):
    """Weights by name of the student's block before the teacher's layer `end`; |error| / |state|, as copied and now."""

    block: int
    end: int
    weights: dict[str, Tensor]
    before: float
    after: float


def gaps_of(chosen: list[int], teacher: Any) -> list[tuple[int, int]]:
    """`block` and `end` of the gaps to close, in order; none where one block is all layers, as in ALBERT."""
    depth = teacher.config.num_hidden_layers if block_prefix(teacher) is not None else 0
    ends = enumerate(zip(chosen, [*chosen[1:], depth], strict=True))
    return [(block, end) for block, (layer, end) in ends if end > layer + 1 and layer < TOP * depth]


def refit(start: Start, teacher: Any, kind: ModelKind, precision: str, batches: list[Batch]) -> Iterator[Fitted]:
    """Close the gaps of a student, in order; no weight of the teacher changes.

    `precision` is that of the forwards: products are in fp32, and solved in fp64. The batches are on its device.

    Raises:
        SettingError: the family is not known, or states are not finite.
    """
    settings, chosen, narrowed = start
    made = {name: weight.to(batches[0].ids.device) for name, weight in narrowed.items()}

    def cut(settings: StudentConfig, layers: list[int]) -> LanguageModel:
        model = from_layers(settings, teacher, layers, kind, alias=True)
        return LanguageModel(model.to(batches[0].ids.device).eval(), precision)

    for block, end in gaps_of(chosen, teacher):
        student = cut(settings, chosen[: block + 1])
        student.model.load_state_dict(made, strict=False, assign=True)
        whole = cut(settings.changed(intermediate_size=None), [*range(end)])
        weights, before, after = fit(student, whole, batches)
        prefix = f"{block_prefix(student.model)}{block}."
        fitted = Fitted(block, end, {prefix + name: weight for name, weight in weights.items()}, before, after)
        made |= fitted.weights
        yield fitted


@torch.no_grad()
def fit(student: LanguageModel, teacher: LanguageModel, batches: list[Batch]) -> tuple[dict[str, Tensor], float, float]:
    """Fit the last block of a cut student to the last one of a cut teacher: weights by name in it, errors as `Fitted`.

    Every position counts but padding. That of the first token has a state like no other, a hundred times as large, to
    which all others attend: left out of the fit it is lost (perplexity of SmolLM2 with 20 of 30 layers on books: 100 as
    copied, 2,099 without the first positions, 73 with them).
    """
    block, name, norm = last_block(student.model)
    layer: Any = block.get_submodule(name)
    factor, old = factor_of(student, batches[0]), weight_of(layer).double()
    features = len(old)
    old = old if layer.bias is None else torch.cat([old, layer.bias.double()[None]])
    gram, moment, squares, count = old.new_zeros(len(old), len(old)), torch.zeros_like(old), old.new_zeros(()), 0
    for batch in batches:
        (z, output, total), (_, _, target) = read_end(student, batch), read_end(teacher, batch)
        y = (target - total) / factor + output
        z = z if layer.bias is None else torch.cat([z, torch.ones_like(z[:, :1])], 1)
        scale = factor**2 / target.square().mean(1, keepdim=True)
        gram += z.T @ (scale * z)
        moment += z.T @ (scale * y)
        squares += (scale * y.square()).sum()
        count += y.numel()
    new = solve(gram, moment, old, PENALTY)

    def error(weight: Tensor) -> float:
        summed = squares - 2 * (weight * moment).sum() + (weight * (gram @ weight)).sum()
        return float((summed.clamp(min=0) / count).sqrt())

    weights = projected(name, layer, new[:features], new[features:])
    if norm is not None:
        of_teacher = last_block(teacher.model)[0].get_submodule(norm)
        weights |= {f"{norm}.{part}": weight.clone() for part, weight in of_teacher.named_parameters()}
    fp32 = {part: weight.detach().float().contiguous() for part, weight in weights.items()}
    return fp32, error(old), error(new)


def solve(gram: Tensor, moment: Tensor, old: Tensor, penalty: float) -> Tensor:
    """The W of the equations above: gram Z'SZ [F, F], moment Z'SY [F, H], old W_0 [F, H], in fp64."""
    strength = penalty * gram.diagonal().mean()
    system = gram + strength * torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
    factor, failed = torch.linalg.cholesky_ex(system)
    new = torch.cholesky_solve(moment + strength * old, factor)
    if failed or not new.isfinite().all():
        raise _refused("states are not finite", "check the teacher, or set precision=fp32")
    return new


def last_block(model: Any) -> tuple[Any, str, str | None]:
    """A model's last block, and the names in it of its MLP's last projection and of a post-norm family's norm."""
    block = block_list(model.base_model, depth_of(model))[-1]
    modules, name = dict(block.named_modules()), projection_of(block)
    if name is None:
        raise _refused(f"no projection that is known ends a block of a {type(model).__name__}")
    return block, name, next((norm for norm in NORMS if norm in modules), None)


def _refused(problem: str, cure: str = "set it to false") -> SettingError:
    return SettingError(problem, setting="student.refit", cure=cure)


def factor_of(model: LanguageModel, batch: Batch) -> float:
    """What the projection's output is multiplied by before it is added: 1, but for Granite.

    Where a norm stands in between, as in Gemma 2, the sum is not linear in it, which is refused.
    """
    _, output, total = read_end(model, batch)
    added = total - read_end(model, batch, without=True)[2]
    factor = float((added * output).sum() / output.square().sum())
    if (added - factor * output).norm() > LINEAR * added.norm():
        raise _refused(f"a {type(model.model).__name__} does not add the output of its MLP's projection as it is")
    return factor


def read_end(model: LanguageModel, batch: Batch, without: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """z [T, F], z W [T, H] and the last block's sum [T, H], or that `without` z W, in fp32, at positions that count."""
    block, name, norm = last_block(model.model)
    seen: dict[str, Tensor] = {}

    def gives(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor | None:
        seen.update(z=inputs[0], output=output)
        return torch.zeros_like(output) if without else None

    def ended(_: nn.Module, inputs: tuple[Tensor, ...], output: Any) -> None:
        seen["sum"] = inputs[0] if norm is not None else output if isinstance(output, Tensor) else output[0]

    with ExitStack() as hooks:
        hooks.callback(block.get_submodule(name).register_forward_hook(gives).remove)
        hooks.callback(block.get_submodule(norm or "").register_forward_hook(ended).remove)
        model(batch.inputs, batch.documents, OutputSpec(layers=(LAST,)))
    everywhere = torch.ones_like(batch.ids, dtype=torch.bool)
    kept = everywhere if batch.documents is None else batch.documents >= 0
    z, output, total = (at_least_fp32(seen[part].view(*kept.shape, -1)[kept]) for part in ("z", "output", "sum"))
    return z, output, total
