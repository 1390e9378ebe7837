"""Both models as training runs them: where they are, in which kernels, their memory, and where gradients go."""

from typing import Any

from distill.backends import Workers
from distill.config import Precision
from distill.kernels import attention, dropout
from distill.kernels import heap as memory
from distill.kernels import packed_linear as frozen


def place(teacher: Any | None, student: Any, precision: Precision, backend: Workers) -> Any | None:
    """Put both models on this rank's device, the student's gradients into the bucket, and choose their kernels.

    Returns:
        The teacher as training asks it. The report is about the teacher itself.
    """
    on_cpu = backend.device.type == "cpu"
    for model in filter(None, (teacher, student)):
        model.to(backend.device)
    in_training = teacher and frozen.for_training(teacher, precision, backend.device)
    for model in filter(None, (in_training, student)):
        if precision.compile:
            model.base_model.compile()  # and let inductor choose
        elif on_cpu:
            attention.use_batched_products(model)
    if on_cpu:
        memory.keep_freed()
        if not precision.compile:
            dropout.draw_less(student)
    backend.prepare(student)
    return in_training
