"""The hand-written kernel of soft targets and tokens: both losses of a block of rows, and their common gradient.

Shapes: n rows of a block, V vocabulary. `teacher.distributions` has the soft term of each form of a teacher. The
cross-entropy of tokens has the gradient softmax(logits) - one_hot(target).
"""

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from distill.runtime.errors import first_line
from distill.teacher.distributions import Single, StudentRows, biased

NO_TARGET = -100


def soft_and_tokens(
    logits: Tensor,
    bias: Tensor | None,
    teacher: Single | None,
    targets: Tensor | None,
    scales: Tensor,
    temperature: float,
    cutoff: float,
) -> Tensor:
    """Both losses [2, n] of a block's rows; `logits` [n, V] is overwritten with the gradient of the scaled losses.

    bias [V]: of the student's head, still to be added. targets [n, 1]. teacher and targets are None where the block has
    no such term. The sums over the rows are left to the caller: with them inside, inductor's CPU code generation fails
    (torch 2.13).
    """
    z = biased(logits, bias, scales.dtype) / temperature
    top = z.amax(-1, keepdim=True)
    # Exponentials are the cost: both terms share these, and some teachers need none of them.
    shared = targets is not None or (teacher is not None and teacher.reads_exponentials)
    v = (z - top).exp() if shared else z
    soft = tokens = torch.zeros_like(top)
    gradient = torch.zeros_like(top)
    if teacher is not None:
        student = StudentRows(z, top, v, temperature)
        loss, gradient = teacher.soft_targets(student, scales[0] * temperature, cutoff)
        soft = temperature**2 * loss
    if targets is not None:
        w = _at_temperature_one(v, z, top, temperature)
        has_target = (targets != NO_TARGET).to(scales.dtype)
        loss, token_gradient = _cross_entropy(z * temperature, top * temperature, w, targets, scales[1] * has_target)
        tokens = loss * has_target
        gradient = gradient + token_gradient
    logits.copy_(gradient)
    return torch.stack([soft[:, 0], tokens[:, 0]])


def _at_temperature_one(v: Tensor, z: Tensor, top: Tensor, temperature: float) -> Tensor:
    """v = exp(z - top) of logits over the temperature -> exp of the same logits without it."""
    if temperature == 1:
        return v
    return v.square() if temperature == 2 else ((z - top) * temperature).exp()


def _cross_entropy(x: Tensor, top: Tensor, w: Tensor, targets: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Cross-entropy [n, 1] of logits x and weight * its gradient; w = exp(x - top); no target: weight 0, any loss."""
    mass = w.sum(-1, keepdim=True)
    loss = mass.log() + (top - x.gather(1, targets.clamp(min=0)))
    gradient = w * (weight / mass)
    columns = torch.arange(x.shape[1], device=x.device)
    return loss, torch.where(columns == targets, gradient - weight, gradient)


class Compiled:
    """A function of a block's tensors through torch.compile; as it is, after one warning, where there is no compiler.

    Its tensors are all that may change from call to call without another compilation.
    """

    works = True  # all of them, until one fails: without a compiler every call would try for seconds

    def __init__(self, plain: Callable[..., Any]) -> None:
        self.plain = plain

    @functools.cached_property
    def function(self) -> Callable[..., Any]:
        return torch.compile(self.plain, dynamic=True)

    def __call__(self, *arguments: Any) -> Any:
        if not Compiled.works:
            return self.plain(*arguments)
        try:
            return self.function(*map(_whole, arguments))
        except torch.OutOfMemoryError:
            raise  # as it is, the block needs more memory, and not less
        except Exception as error:  # a missing compiler and inductor's faults have many faces, before the first write
            Compiled.works = False
            warnings.warn(f"the objective runs without torch.compile: {first_line(error)}", stacklevel=2)
            return self.plain(*arguments)


def _whole(value: Any) -> Any:
    """Slices would be compiled for every new offset; these are tensors of their own over the same memory."""
    if isinstance(value, tuple):  # a distribution
        return type(value)(*map(_whole, value))
    return from_dlpack(value) if isinstance(value, Tensor) else value


compiled_kernel = Compiled(soft_and_tokens)
