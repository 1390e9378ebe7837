"""The objective as the field defines it, in loops over the positions: what the fast ways have to agree with."""

from typing import Any

import numpy as np
import torch
from tiny import VOCAB

from distill.config.settings import ObjectiveConfig
from distill.data.batch import Batch

NAMES = ("soft", "mlm", "cosine")


def kl(teacher: torch.Tensor, student: torch.Tensor, temperature: float, cutoff: float) -> torch.Tensor:
    """T^2 * KL of one position's logits [V]; teacher probabilities below the cut-off share one bucket."""
    p, q = (teacher / temperature).softmax(0), (student / temperature).softmax(0)
    kept = p >= cutoff
    value = sum((p[v] * (p[v] / q[v]).log() for v in range(len(p)) if kept[v]), torch.zeros((), dtype=p.dtype))
    if not kept.all():
        value = value + p[~kept].sum() * (p[~kept].sum() / q[~kept].sum()).log()
    return temperature**2 * value


def attention_of(batch: Batch) -> torch.Tensor:
    """[B, S], 0 at padding."""
    return torch.ones_like(batch.ids) if batch.documents is None else (batch.documents >= 0).long()


def targets_of(batch: Batch) -> dict[int, int]:
    """The token to predict by flat position."""
    return dict(zip(*(values.tolist() for values in batch.labels["mlm"]), strict=True))


def definition(
    settings: ObjectiveConfig, student: Any, teacher: Any | None, batches: list[Batch]
) -> tuple[torch.Tensor, dict[str, float]]:
    """The loss of a whole step as the field defines it: full logits of the models themselves, position by position."""
    values: dict[str, list[torch.Tensor]] = {name: [] for name in NAMES}
    soft, cosine = (settings.component(name).arguments for name in ("soft", "cosine"))
    for batch in batches:
        attention, targets = attention_of(batch), targets_of(batch)
        of_student = student(input_ids=batch.ids, attention_mask=attention, output_hidden_states=True)
        with torch.no_grad():
            asked = teacher if teacher is not None else student
            of_teacher = asked(input_ids=batch.ids, attention_mask=attention, output_hidden_states=True)
        for flat, (row, column) in enumerate(np.ndindex(*batch.ids.shape)):
            if not attention[row, column]:
                continue
            logits, target = of_student.logits[row, column][:VOCAB], targets.get(flat)
            if target is not None:
                values["mlm"].append(-(logits[target] - logits.exp().sum().log()))
            if teacher is not None and (soft["positions"] == "all" or target is not None):
                teacher_logits = of_teacher.logits[row, column][:VOCAB]
                values["soft"].append(kl(teacher_logits, logits, settings.temperature, soft["cutoff"]))
            if teacher is not None and (cosine.get("positions", "all") == "all" or target is not None):
                a, b = of_student.hidden_states[-1][row, column], of_teacher.hidden_states[-1][row, column]
                values["cosine"].append(1 - (a @ b) / (a.norm() * b.norm()))
    means = {n: torch.stack(v).mean() if v else torch.zeros((), dtype=torch.float64) for n, v in values.items()}
    total = torch.stack([settings.terms[name].weight * mean for name, mean in means.items()]).sum()
    return total, {name: float(mean.detach()) for name, mean in means.items()}
