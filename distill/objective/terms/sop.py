"""Sentence order prediction: the cross-entropy of whether two segments are swapped."""

from distill.models.language_model import OutputSpec
from distill.objective.terms.classes import Classes


class Sop(Classes):
    """Cross-entropy of the order of each sequence's segments, in nats (Lan et al., "ALBERT", 2020, section 3.1)."""

    title = "Order of segments (SOP)"
    task = "sop"
    student_reads = OutputSpec(extra=("sop",))
