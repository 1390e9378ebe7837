"""What a GPU has to hold of a run, and which settings would let a run fit that does not.

Trained weights are kept in fp32 with their gradients and two moments of the optimizer; what a block keeps for its
backward pass is taken from Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models"
(https://arxiv.org/abs/2205.05198), section 4.1: 34 bytes a token and unit of width in 16-bit formats, where the scores
of the attention are not kept.
"""

from dataclasses import replace

from distill.project.machines import Machine
from distill.project.model_shape import ModelShape
from distill.project.workload import Frozen, Workload

KEPT = 34  # bytes a token and unit of width that a block keeps for its backward pass, in 16-bit formats
CHUNK = 4 * (64 << 20)  # bytes: the logits of both models that exist at once, and their gradients
WIDTHS = {"fp32": 4, "bf16": 2, "fp16": 2, "int8": 1}  # bytes of a number


def divided_teacher_bytes(
    whole: float, outside: float, block: float, inside: float, ranks: int, weight: int = 2
) -> float:
    """The most that a rank holds of a frozen model that is divided, and of its forward.

    Its part; what is outside of the blocks, whole; two blocks, of which one is computed and the other is being
    gathered; and the inside of one block. While embeddings and head are gathered they exist twice, before there is any
    block.

    Args:
        whole, outside, block: parameters of all, of what is in no block, and of a block.
        inside: numbers that a forward holds inside of a block.
        weight: bytes of a number, of weights and activations alike.
    """
    return weight * (whole / ranks + max(2 * outside, outside + 2 * block + inside))


def divided_student_bytes(
    whole: float, outside: float, block: float, kept: float, ranks: int, every: bool, gathered: int = 2
) -> float:
    """The most that a rank holds of a trained model that is divided: parts of weights, moments and gradients in fp32.

    With `sync=window` the gradients are whole from the first micro-batch on; with `sync=every` this rank's part stays,
    and those of two blocks are whole for a moment.

    Args:
        kept: bytes that the blocks keep for the backward pass.
        gathered: bytes of a number of gathered weights.
    """
    parts = 4 * whole * (3 + every) / ranks
    gradients = 4 * (outside + 2 * block if every else whole)
    return parts + gradients + gathered * (outside + 2 * block) + kept


def kept_bytes(shape: ModelShape, tokens: float, precision: str) -> float:
    """Bytes that a forward of so many tokens keeps for its backward pass."""
    return KEPT / 2 * WIDTHS[precision] * tokens * shape.layers * shape.width


def needed(work: Workload, ranks: int, rows: int, student: str, teachers: tuple[str, ...]) -> float:
    """Bytes of a GPU that a step takes with micro-batches of so many rows.

    Args:
        student, teachers: the number formats of their forwards.
    """
    tokens = float(rows * work.length)
    shape, kept = work.student, kept_bytes(work.student, tokens, student)
    if work.shard_student and ranks > 1:
        every = work.sync == "every"
        found = divided_student_bytes(
            shape.parameters, shape.outside, shape.largest_part, kept, ranks, every, WIDTHS[student]
        )
    else:
        copies = 0 if student == "fp32" else WIDTHS[student]  # of the weights in the format of the forward
        found = (16 + copies) * shape.parameters + kept
    return (
        found
        + sum(
            _frozen_bytes(work, each, ranks, tokens, precision)
            for each, precision in zip(work.teachers, teachers, strict=True)
        )
        + (CHUNK if work.positions else 0)
    )


def _frozen_bytes(work: Workload, teacher: Frozen, ranks: int, tokens: float, precision: str) -> float:
    if teacher.cached is not None:
        return 0.0
    shape, weight = teacher.shape, WIDTHS[precision]
    inside = tokens * teacher.micro_batches * (2 * shape.width + 3 * shape.inner)
    if work.shard_teacher and ranks > 1:
        outside, part = shape.outside, shape.largest_part
        return divided_teacher_bytes(shape.parameters, outside, part, inside, ranks, max(weight, 2))
    return weight * (shape.parameters + inside)


def cures(work: Workload, machine: Machine, ranks: int, student: str, teachers: tuple[str, ...]) -> list[str]:
    """Settings with which the run would fit, the least change first; empty where none of them helps."""
    rows = work.window(ranks)[1]
    divided = replace(work, backend="fsdp", shard_student=True, shard_teacher=True)
    every = replace(divided, sync="every")
    found = []
    for name, changed in (("", work), ("backend=fsdp", divided), ("backend=fsdp backend.sync=every", every)):
        if changed == work and name:
            continue
        fitting = _largest_batch(changed, machine, ranks, rows, student, teachers)
        if fitting == rows and name:
            found.append(name)
            break
        if fitting:
            factor = -(-rows // fitting)
            more = "" if work.rows_per_step else f" train.accumulate={work.accumulate * factor}"
            found.append(f"{name} train.batch_size={fitting}{more}".strip())
    return found


def _largest_batch(
    work: Workload, machine: Machine, ranks: int, rows: int, student: str, teachers: tuple[str, ...]
) -> int:
    """The most rows of a micro-batch that fit, of those that halve `rows`; 0 where not even one does."""
    while rows and needed(work, ranks, rows, student, teachers) > machine.memory:
        rows //= 2
    return rows
