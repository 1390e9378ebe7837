"""Losses over the vocabulary chunk by chunk: loss and gradients together, no [N, V] tensor kept.

Soft targets and the cross-entropy of tokens have a gradient written by hand, which shares their exponentials; any other
term gets autograd's, inside a block of rows. The tests compare both with the formulas on full logits, in value and
gradient.

Shapes: N rows, n rows of one chunk or block, E width of a head's input, V vocabulary, M terms.
"""

import functools
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from distill.models.language_model import Head
from distill.objective.terms import ALL, VocabularyTerm
from distill.objective.terms.clm import Clm
from distill.objective.terms.mlm import Mlm
from distill.objective.terms.soft import Soft
from distill.runtime.errors import first_line
from distill.teacher.distributions import Distribution, Logits, Mixture, Single, StudentRows, biased

NO_TARGET = -100
ALL_AT_ONCE = 1 << 62


class Tiling(NamedTuple):
    """How the logits are cut on a device.

    Attributes:
        budget: bytes of logits that exist at once. For each chunk both heads are read, and the fp32 gradient of the
            weight is read and written: on a GPU that has to take less time than the chunk's products.
        columns: of fp32 logits, made by one product: wider ones were up to a third slower on CPUs (MKL).
        gradient_rows: of the weight's gradient, added up at a time: in bf16 they are widened while in the cache.
        block: bytes of logits that go through the losses at once: few enough to stay in the processor's cache.
        compiled_block: the same through torch.compile, which visits each row on its own: fewer calls.
        leaves_out_rows: whether rows on which no term acts are left out; the host has to know them, so a GPU would be
            waited for.
        mm_in_fp32: whether products of bf16 or fp16 matrices are added up in the fp32 gradient by the product itself
            (cuBLAS; torch has it for CUDA alone).
    """

    budget: int
    columns: int
    gradient_rows: int
    block: int
    compiled_block: int
    leaves_out_rows: bool
    mm_in_fp32: bool


CPU = Tiling(64 << 20, 512, 1024, 1 << 20, 1 << 22, True, False)
GPU = Tiling(1 << 30, ALL_AT_ONCE, ALL_AT_ONCE, ALL_AT_ONCE, ALL_AT_ONCE, False, True)


class ChunkedLosses:
    """The terms over the vocabulary, in chunks of rows that keep no logits.

    Attributes:
        soft, tokens: the terms with a gradient by hand; None: there is none.
        further: all others, by their formulas and autograd.
        parameters: those of the further terms' modules that are trained.
    """

    def __init__(
        self,
        terms: Sequence[VocabularyTerm],
        vocab: int,
        compiled: bool = False,
        tiling: Tiling | None = None,
        all_rows: bool = False,
    ) -> None:
        """
        Args:
            vocab: how many of the first entries of either head count.
            compiled: run what is written by hand through torch.compile, where there is a compiler.
            tiling: None: that of the device of the rows.
            all_rows: whether rows come that none of these terms acts on.
        """
        self.vocab, self.compiled, self._tiling = vocab, compiled, tiling
        self.soft, self.tokens = by_hand(terms, all_rows)
        self.further = [term for term in terms if term is not self.soft and term is not self.tokens]
        number_of = {id(term): number for number, term in enumerate(terms)}
        self._by_hand = [number_of.get(id(term)) for term in (self.soft, self.tokens)]  # None: there is no such term
        self._by_formulas = [number_of[id(term)] for term in self.further]
        modules = [term.module for term in self.further if term.module is not None]
        parameters = (parameter for module in modules for parameter in module.parameters() if parameter.requires_grad)
        self.parameters: list[Tensor] = list(dict.fromkeys(parameters))  # terms may share a module

    def __call__(
        self, student: Head, teacher: Distribution | None, targets: Tensor, scales: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Sum over the terms of scale * sum over their rows, and the unscaled sums [M], detached.

        Rows without a target are visited where there is a teacher or a term that acts on every row, and else left out.

        Args:
            teacher: of the same rows; None where no term needs a teacher.
            targets: [N] int64, NO_TARGET in a row without one.
            scales: [M]; elementwise work is done in its format, fp32 or float64, whatever that of the products.

        Returns:
            The loss (scalar, differentiable in the student's rows, weight and bias and in `parameters`), and the sums.
        """
        mixture = Mixture.of(teacher if self.soft is not None or self.further else None)
        # Autocast is off while chunks are visited: the formats that it would choose are taken down here.
        mixture = mixture._replace(members=tuple(_with_dtype(member) for member in mixture.members))
        reads_targets = self.tokens is not None or bool(self.further)
        tiling = self._tiling or (CPU if student.rows.device.type == "cpu" else GPU)
        visit = _Visit(self, tiling, _with_dtype(student), mixture, targets if reads_targets else None, scales)
        loss, sums = _InChunks.apply(*student[:3], visit, torch.is_grad_enabled(), *self.parameters)
        return loss, sums

    def losses_of(self, block: "Block", scales: Tensor, of_modules: Sequence[Tensor]) -> Tensor:
        """Losses [M, n] of a block; its logits become the gradient of the scaled losses.

        Args:
            of_modules: where the gradients of `parameters` are added up.
        """
        has_kernel, none = any(number is not None for number in self._by_hand), scales.new_zeros(())
        rows: dict[int | None, Tensor] = {}
        others = block._replace(logits=block.logits.clone()) if has_kernel and self.further else block
        if has_kernel:
            column = None if self.tokens is None or block.targets is None else block.targets[:, None]
            kernel = compiled_kernel if self.compiled else soft_and_tokens
            temperature, cutoff = (1.0, 0.0) if self.soft is None else (self.soft.temperature, self.soft.cutoff)
            single = None if self.soft is None else block.teacher
            of_both = torch.stack([none if number is None else scales[number] for number in self._by_hand])
            found = kernel(block.logits, block.bias, single, column, of_both, temperature, cutoff)
            rows |= zip(self._by_hand, found, strict=True)
        if self.further:
            of_others = torch.stack([scales[number] for number in self._by_formulas])
            rows |= zip(self._by_formulas, self._losses_by_formulas(others, of_others, of_modules), strict=True)
            if has_kernel:
                block.logits.add_(others.logits)
        return torch.stack([rows[number] for number in range(len(scales))])

    def _losses_by_formulas(self, block: "Block", scales: Tensor, of_modules: Sequence[Tensor]) -> Tensor:
        """`losses_of` of the further terms alone."""
        z = biased(block.logits, block.bias, scales.dtype).detach().requires_grad_()
        y = None if block.teacher is None else block.teacher.as_read_by_terms(scales.dtype)
        targets = block.targets
        if targets is None:
            targets = torch.full((len(z),), NO_TARGET, device=z.device)
        with torch.enable_grad():
            losses = torch.stack([on_its_rows(term, term.losses(z, y, targets), targets) for term in self.further])
            loss, inputs = (scales[:, None] * losses).sum(), [z, *self.parameters]
            # A term need not use all of its module at once.
            gradient, *parts = torch.autograd.grad(loss, inputs, materialize_grads=bool(self.parameters))
        block.logits.copy_(gradient)
        for total, part in zip(of_modules, parts, strict=True):
            total.add_(part)
        return losses.detach()


class Block(NamedTuple):
    """Some rows of a chunk, few enough for the processor's cache.

    Attributes:
        logits: [n, V], before the bias.
        targets: [n]; None where no row has one.
    """

    logits: Tensor
    bias: Tensor | None
    teacher: Single | None
    targets: Tensor | None


def by_hand(terms: Sequence[VocabularyTerm], all_rows: bool = False) -> tuple[Soft | None, Mlm | Clm | None]:
    """The terms that the kernel takes: soft targets, and a cross-entropy of masked or next tokens.

    A class that inherits from these may compute something else. The kernel has soft targets in every row that is
    visited, so a soft term of masked positions is not for it where further rows are visited for others' sake.
    """
    all_rows = all_rows or any(term.positions == ALL for term in terms)
    soft = next((term for term in terms if type(term) is Soft and (term.positions == ALL) == all_rows), None)
    tokens = next((term for term in terms if isinstance(term, Mlm | Clm) and type(term) in (Mlm, Clm)), None)
    return soft, tokens


def on_its_rows(term: VocabularyTerm, losses: Tensor, targets: Tensor) -> Tensor:
    """[n] -> [n], 0 in the rows that do not carry the term."""
    return losses if term.positions == ALL else torch.where(targets == NO_TARGET, torch.zeros_like(losses), losses)


class _InChunks(torch.autograd.Function):
    """Gradients are made in forward, while the logits are there; backward only scales them."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None, visit: "_Visit", with_gradient: bool, *_: Tensor
    ) -> tuple[Tensor, Tensor]:
        with torch.autocast(rows.device.type, enabled=False):
            sums, gradients = visit([need and with_gradient for need in ctx.needs_input_grad[:3]])
        ctx.save_for_backward(*gradients)
        ctx.mark_non_differentiable(sums)
        return (sums * visit.scales).sum(), sums

    @staticmethod
    def backward(ctx: Any, upstream: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        gradients: Sequence[Tensor | None] = ctx.saved_tensors
        # 1 is the usual case; elsewhere asking means waiting. In place: the head's gradient is as large as its weight.
        if upstream.device.type != "cpu" or upstream.item() != 1:
            gradients = [None if gradient is None else gradient.mul_(upstream) for gradient in gradients]
        return *gradients[:3], None, None, *gradients[3:]


@dataclass(frozen=True)
class _Visit:
    """One visit of all rows, in chunks."""

    losses: ChunkedLosses
    tiling: Tiling
    student: Head
    teacher: Mixture  # without members where no term reads one
    targets: Tensor | None  # [N]; None: no row has one
    scales: Tensor  # [M]; its dtype is that of the elementwise part

    def __call__(self, wanted: list[bool]) -> tuple[Tensor, list[Tensor | None]]:
        """Sums [M], and gradients of the scaled loss: of rows, weight and bias where they are wanted, of modules."""
        order, num_rows, num_targets = self._arrange()
        chunk, size = self._chunk_rows(num_rows), self._block_rows()
        products = self._products(self.student, order, chunk)
        teachers = [self._chunks_of(member, order, chunk) for member in self.teacher.members]
        mixture = self.teacher if order is None else self.teacher.rows(order)
        targets = self.targets if self.targets is None or order is None else self.targets[order]
        gradients = _Gradients(self.student, products, self.scales.dtype, self.tiling, wanted)
        of_modules = [torch.zeros_like(parameter) for parameter in self.losses.parameters]
        sums = self.scales.new_zeros(len(self.scales))
        for start, stop in pieces(0, num_rows, chunk):
            logits, members = products(start, stop), [chunk_of(start, stop) for chunk_of in teachers]
            for low, high in pieces(start, stop, size):
                here = slice(low - start, high - start)
                capped = None if self.student.softcap is None else logits[here].clone()
                known = [member.rows(here) for member in members]
                parts = mixture.rows(slice(low, high)).combined(known, self.scales.dtype)
                on = targets[low:high] if targets is not None and low < num_targets else None
                sums += self._averaged(Block(logits[here], products.bias, None, on), parts, of_modules).sum(1)
                if capped is not None and self.student.softcap is not None:  # the gradient passes through the cap
                    logits[here].mul_(1 - (capped / self.student.softcap).square())
            gradients.add(start, stop, logits)
        return sums, [*gradients.result(order), *of_modules]

    def _averaged(
        self, block: Block, teachers: Sequence[tuple[float, Single | None]], of_modules: Sequence[Tensor]
    ) -> Tensor:
        """A block's losses and gradient, each the mean over several teachers by their weights, which add up to 1."""
        if len(teachers) == 1:
            return self.losses.losses_of(block._replace(teacher=teachers[0][1]), self.scales, of_modules)
        gradient, losses = torch.zeros_like(block.logits, dtype=self.scales.dtype), []
        for weight, teacher in teachers:
            part = block._replace(logits=block.logits.clone(), teacher=teacher)
            losses.append(weight * self.losses.losses_of(part, weight * self.scales, of_modules))
            gradient += part.logits
        block.logits.copy_(gradient)
        return torch.stack(losses).sum(0)

    def _arrange(self) -> tuple[Tensor | None, int, int]:
        """An order of the rows, those with a target first, how many there are, and how many of them have a target.

        Rows without a target are left out where no term acts on them, or all rows come in their own order.
        """
        num_rows = len(self.student.rows)
        if not self.tiling.leaves_out_rows:
            return None, num_rows, 0 if self.targets is None else num_rows
        has_target = torch.zeros(num_rows, dtype=torch.bool) if self.targets is None else self.targets != NO_TARGET
        with_target, without = has_target.nonzero()[:, 0], (~has_target).nonzero()[:, 0]
        if not self.teacher.members and all(term.positions != ALL for term in self.losses.further):
            without = without[:0]
        order = torch.cat([with_target, without])
        return order, len(order), len(with_target)

    def _chunk_rows(self, num_rows: int) -> int:
        """Rows per chunk: as many as the budget allows, but the chunks all alike."""
        members = self.teacher.members
        formats = [_matrix_dtype(head) for head in (self.student, *members) if isinstance(head, Head)]
        formats += [self.scales.dtype] * (len(members) > 1)  # of the mean of several
        row_bytes = self.losses.vocab * sum(dtype.itemsize for dtype in formats)
        num_chunks = min(num_rows, math.ceil(num_rows * row_bytes / self.tiling.budget))
        return math.ceil(num_rows / max(1, num_chunks)) or 1

    def _block_rows(self) -> int:
        """Rows of a chunk that go through the losses at once."""
        by_rows = self.losses.compiled and not self.losses.further
        num_bytes = self.tiling.compiled_block if by_rows else self.tiling.block
        return max(1, num_bytes // (self.losses.vocab * self.scales.dtype.itemsize))

    def _chunks_of(self, teacher: Head | Single, order: Tensor | None, chunk: int) -> Callable[[int, int], Single]:
        """What gives the distribution of a teacher for the rows [start, stop) of the order."""
        if not isinstance(teacher, Head):
            ordered = teacher if order is None else teacher.rows(order)
            return lambda start, stop: ordered.rows(slice(start, stop))
        products = self._products(teacher, order, chunk)
        return lambda start, stop: Logits(products(start, stop), products.bias)

    def _products(self, head: Head, order: Tensor | None, chunk: int) -> "_Products":
        rows = head.rows if order is None else head.rows[order]
        return _Products(head._replace(rows=rows), chunk, self.losses.vocab, self.scales.dtype, self.tiling.columns)


class _Products:
    """Applies a head's weight to chunks of its rows, into one buffer that every chunk uses again."""

    def __init__(self, head: Head, chunk: int, vocab: int, accurate: torch.dtype, columns: int) -> None:
        """`accurate`: the format of the bias. `columns`: of fp32 logits that one product makes."""
        dtype = _matrix_dtype(head)
        self.rows = head.rows.to(dtype)
        self.weight = (head.weight if head.rounded is None else head.rounded)[:vocab].to(dtype)
        self.bias = None if head.bias is None else head.bias[:vocab].detach().to(accurate)
        self.cap = head.cap
        size = len(self.weight)  # smaller than `vocab` where a tokenizer has more tokens than the model
        self.columns = list(pieces(0, size, columns if dtype == torch.float32 else size))
        self.buffer = torch.empty(chunk, size, dtype=dtype, device=self.rows.device)

    def __call__(self, start: int, stop: int) -> Tensor:
        """[stop - start, vocab], without the bias."""
        out = self.buffer[: stop - start]
        for low, high in self.columns:
            torch.mm(self.rows[start:stop], self.weight[low:high].t(), out=out[:, low:high])
        return self.cap(out)


class _Gradients:
    """Sums over the chunks, for rows, weight and bias; weight and bias in fp32 or better where chunks are added up."""

    def __init__(
        self, student: Head, products: _Products, accurate: torch.dtype, tiling: Tiling, wanted: list[bool]
    ) -> None:
        self.student, self.products, self.accurate, self.wanted = student, products, accurate, wanted
        self.rows = torch.empty_like(products.rows)
        self.weight = self.bias = self.product = torch.empty(0)
        num_columns, width = products.weight.shape
        piece = min(tiling.gradient_rows, num_columns)
        self.pieces = list(pieces(0, num_columns, piece))
        is_half = products.rows.dtype in (torch.bfloat16, torch.float16)
        self.mm_in_fp32 = tiling.mm_in_fp32 and is_half and accurate == torch.float32
        if wanted[1]:
            make = torch.empty if len(products.rows) else torch.zeros  # the first chunk writes all of it
            self.weight = make(num_columns, width, dtype=accurate, device=products.rows.device)
            self.product = products.rows.new_empty(0 if self.mm_in_fp32 else piece, width)

    def add(self, start: int, stop: int, gradient: Tensor) -> None:
        """Take in the gradient [n, V] with respect to the logits of rows [start, stop); chunks come in order."""
        if self.wanted[0]:
            torch.mm(gradient, self.products.weight, out=self.rows[start:stop])
        if self.wanted[1]:
            self._add_weight(gradient, self.products.rows[start:stop], first=start == 0)
        if self.wanted[2]:
            bias = gradient.sum(0).to(self.accurate)  # in the format of the gradient: ten times as fast on the CPU
            self.bias = bias if start == 0 else self.bias.add_(bias)

    def _add_weight(self, gradient: Tensor, rows: Tensor, first: bool) -> None:
        """In pieces of the vocabulary: products in bf16 are widened while the processor's cache still holds them."""
        for low, high in self.pieces:
            part, columns = self.weight[low:high], gradient[:, low:high].t()
            if self.mm_in_fp32 and first:
                torch.mm(columns, rows, out_dtype=part.dtype, out=part)
            elif self.mm_in_fp32:
                torch.addmm(part, columns, rows, out_dtype=part.dtype, out=part)
            elif self.product.dtype == self.accurate:
                torch.mm(columns, rows, out=part) if first else part.addmm_(columns, rows)
            else:
                product = torch.mm(columns, rows, out=self.product[: high - low])
                part.copy_(product) if first else part.add_(product)

    def result(self, order: Tensor | None) -> list[Tensor | None]:
        """All three in the format, size and order of the tensors they belong to; None: not wanted."""
        rows = self.rows
        if order is not None:
            rows = rows.new_zeros(self.student.rows.shape).index_copy_(0, order, rows)
        gradients = zip((rows, self.weight, self.bias), self.student[:3], self.wanted, strict=True)
        return [_fit(value, like) if like is not None and is_needed else None for value, like, is_needed in gradients]


def _fit(value: Tensor, like: Tensor) -> Tensor:
    """`value` in the format of `like`, with zeros for the entries of a padded vocabulary."""
    if value.shape == like.shape:
        return value.to(like.dtype)
    padded = torch.zeros_like(like)
    padded[: len(value)] = value.view(-1, *like.shape[1:])
    return padded


def _with_dtype(teacher: Any) -> Any:
    """A head in the number format of the matrix product; anything else as it is."""
    return teacher._replace(dtype=_matrix_dtype(teacher)) if isinstance(teacher, Head) else teacher


def _matrix_dtype(head: Head) -> torch.dtype:
    device = head.rows.device.type
    if head.dtype is not None:
        return head.dtype
    if torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return torch.promote_types(head.rows.dtype, head.weight.dtype)


def pieces(start: int, stop: int, size: int) -> Iterator[tuple[int, int]]:
    """[start, stop) cut into pieces of at most `size`, at least 1."""
    return ((low, min(low + size, stop)) for low in range(start, stop, max(size, 1)))


def soft_and_tokens(
    logits: Tensor,
    bias: Tensor | None,
    teacher: Single | None,
    targets: Tensor | None,
    scales: Tensor,
    temperature: float,
    cutoff: float,
) -> Tensor:
    """The kernel: both losses [2, n] of a block's rows; `logits` [n, V] becomes the gradient of the scaled losses.

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
        loss, gradient = teacher.soft_targets(StudentRows(z, top, v, temperature), scales[0] * temperature, cutoff)
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
    """Cross-entropy [n, 1] of logits x and weight * its gradient; w = exp(x - top); no target: weight 0, any loss.

    The gradient is softmax(x) - one_hot(target).
    """
    mass = w.sum(-1, keepdim=True)
    loss = mass.log() + (top - x.gather(1, targets.clamp(min=0)))
    gradient = w * (weight / mass)
    columns = torch.arange(x.shape[1], device=x.device)
    return loss, torch.where(columns == targets, gradient - weight, gradient)


class Compiled:
    """The kernel through torch.compile; as it is, after one warning, where there is no compiler.

    Its tensors are all that may change from call to call without another compilation.
    """

    def __init__(self) -> None:
        self.works = True  # until it fails: without a compiler every call would try for seconds

    @functools.cached_property
    def function(self) -> Callable[..., Tensor]:
        return torch.compile(soft_and_tokens, dynamic=True)

    def __call__(self, *arguments: Any) -> Tensor:
        if not self.works:
            return soft_and_tokens(*arguments)
        try:
            return self.function(*map(_whole, arguments))
        except torch.OutOfMemoryError:
            raise  # as it is, the block needs more memory, and not less
        except Exception as error:  # a missing compiler and inductor's faults have many faces, before the first write
            self.works = False
            warnings.warn(f"the objective runs without torch.compile: {first_line(error)}", stacklevel=2)
            return soft_and_tokens(*arguments)


def _whole(value: Any) -> Any:
    """Slices would be compiled for every new offset; these are tensors of their own over the same memory."""
    if isinstance(value, tuple):  # a distribution
        return type(value)(*map(_whole, value))
    return from_dlpack(value) if isinstance(value, Tensor) else value


compiled_kernel = Compiled()
