"""Soft targets for the order of segments: the teacher's probabilities of either order."""

from distill.models.language_model import OutputSpec
from distill.objective.terms.soft_classes import SoftClasses


class SoftSop(SoftClasses):
    """T^2 KL(teacher || student) of the order of each sequence's segments, both at temperature T; see `losses.soft`."""

    title = "Soft order of segments"
    task = "sop"
    student_reads = teacher_reads = OutputSpec(extra=("sop",))
