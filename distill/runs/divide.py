"""Divides the models of a run between its ranks, where the backend does that, and checks them afterwards."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from distill.config.settings import CustomStudentConfig, NewStudentConfig, StudentConfig
from distill.distributed import Ranks
from distill.distributed.gather import skeleton_of
from distill.distributed.weights_file import parameters_in_file
from distill.models.check import check_model
from distill.models.kernels.heap import return_large_tensors
from distill.models.kind import ModelKind
from distill.models.language_model import block_list
from distill.models.protocol import depth_of
from distill.models.student import check_student
from distill.teacher.members import Member


def divide_models(
    ranks: Ranks, teachers: list[Member], student: Any, kinds: dict[str, ModelKind], length: int
) -> Any | None:
    """Divide what the backend divides; these models are checked now, as they could not run before.

    All ranks call it with the same models.

    Args:
        kinds: of the teachers and of the student.
        length: of the rows.

    Returns:
        The student without its weights, where it is divided: what they are put together in for the export.

    Raises:
        SettingError: a model is not read right.
    """
    if ranks.divides:
        return_large_tensors()
    if "teacher" in ranks.divides:
        for member in teachers:
            blocks, calls = blocks_of(member.model)
            ranks.divide(member.model, blocks, calls, trained=False)
            check_model(member.model, member.setting, kinds["teacher"])
    skeleton = None
    if "student" in ranks.divides:
        skeleton = skeleton_of(student)
        ranks.divide(student, *blocks_of(student), trained=True)
        check_student(student, length, kinds["student"])
    return skeleton


def new_weights(ranks: Ranks, settings: StudentConfig) -> AbstractContextManager[None]:
    """Where a new student is to be divided its weights lie in a temporary file until then, and not in the memory.

    Args:
        settings: of the student; saved weights and those of a teacher lie in files already.
    """
    new = "student" in ranks.divides and isinstance(settings, NewStudentConfig | CustomStudentConfig)
    return parameters_in_file() if new else nullcontext()


def blocks_of(model: Any) -> tuple[list[torch.nn.Module], int]:
    """The blocks of a model and how often they are called; none where it has no list of them."""
    depth = depth_of(model)
    if depth is None:
        return [], 0
    return list(block_list(model.base_model, depth)), depth
