"""What a record has of a student against its baseline: how sure the difference is, and what it closes of the gap.

The gap is the one between the baseline and the teacher. Of a perplexity it is taken in logarithms, in nats a token:
there equal steps are equal factors, while in perplexity itself the first steps of a bad model would count for most.
"""

import math
from collections.abc import Mapping
from typing import Any

LOGARITHMIC = ("perplexity", "pseudo_perplexity")
OF_LABELS = ("classes", "spans")  # tasks for which a teacher with a head has been fine-tuned
FAIR_START = ["student=pretrained", "student.path=MODEL"]
INHERITED = (
    "Both started from layers of a teacher that was fine-tuned for this task, so the baseline has learned from it: "
    f"a fair one, and its student, start from a pre-trained model ({' '.join(FAIR_START)})."
)


def fraction_closed(scores: Mapping[str, float], measure: str, lower_is_better: bool = True) -> float | None:
    """(baseline - student) / (baseline - teacher); None where the baseline is no worse than the teacher.

    Below 0 the student is worse than the baseline, above 1 better than the teacher.

    Args:
        scores: of `teacher`, `student` and `baseline`, finite numbers.
        measure: by its name in the record.
    """
    as_losses = {
        name: math.log(score) if measure in LOGARITHMIC else score if lower_is_better else -score
        for name, score in scores.items()
    }
    gap = as_losses["baseline"] - as_losses["teacher"]
    return (as_losses["baseline"] - as_losses["student"]) / gap if gap > 0 else None


def starts_fine_tuned(identity: Mapping[str, Any]) -> bool:
    """Whether the student of a run with this identity starts from layers of a teacher that has learned its task."""
    return identity.get("student.init") == "layers" and identity.get("objective.task") in OF_LABELS
