"""What a GPU has to hold of a run.

Trained weights are kept in fp32 with their gradients and two moments of the optimizer; what a block keeps for its
backward pass is taken from Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models"
(https://arxiv.org/abs/2205.05198), section 4.1: 34 bytes a token and unit of width in 16-bit formats, where the scores
of the attention are not kept.
"""

from benchmarks.scaling.cost_model.model_shape import ModelShape
from benchmarks.scaling.cost_model.workload import Frozen, Workload

KEPT = 34  # bytes a token and unit of width that a block keeps for its backward pass, in 16-bit formats
CHUNK = 4 * (64 << 20)  # bytes: the logits of both models that exist at once, and their gradients
WIDTHS = {"fp32": 4, "bf16": 2, "fp16": 2}  # bytes of a number


def sharded_teacher_bytes(
    whole: float, outside: float, block: float, inside: float, ranks: int, weight: int = 2
) -> float:
    """The most that a rank holds of a frozen model that is sharded, and of its forward.

    Its part; what is outside of the blocks, whole; two blocks, of which one is computed and the other is being
    gathered; and the inside of one block. While embeddings and head are gathered they exist twice, before there is any
    block.

    Args:
        whole, outside, block: parameters of all, of what is in no block, and of a block.
        inside: numbers that a forward holds inside of a block.
        weight: bytes of a number, of weights and activations alike.
    """
    return weight * (whole / ranks + max(2 * outside, outside + 2 * block + inside))


def sharded_student_bytes(
    whole: float, outside: float, block: float, kept: float, ranks: int, every: bool, gathered: int = 2
) -> float:
    """The most that a rank holds of a trained model that is sharded: parts of weights, moments and gradients in fp32.

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


def needed(work: Workload, ranks: int, rows: int) -> float:
    """Bytes of a GPU that a step takes with micro-batches of so many rows."""
    tokens = float(rows * work.length)
    shape, width = work.student, WIDTHS[work.precision]
    kept = kept_bytes(shape, tokens, work.precision)
    if work.sharded and ranks > 1:
        student = sharded_student_bytes(
            shape.parameters, shape.outside, shape.largest_part, kept, ranks, work.sync == "every", width
        )
    else:
        copies = 0 if work.precision == "fp32" else width  # of the weights in the format of the forward
        student = (16 + copies) * shape.parameters + kept
    teachers = sum(_frozen_bytes(work, teacher, ranks, tokens) for teacher in work.teachers)
    return student + teachers + (CHUNK if work.positions else 0)


def _frozen_bytes(work: Workload, teacher: Frozen, ranks: int, tokens: float) -> float:
    shape, weight = teacher.shape, WIDTHS[teacher.precision]
    inside = tokens * teacher.micro_batches * (2 * shape.width + 3 * shape.inner)
    if work.sharded and ranks > 1:
        return sharded_teacher_bytes(shape.parameters, shape.outside, shape.largest_part, inside, ranks, weight)
    return weight * (shape.parameters + inside)
