"""The objective as the field defines it, in loops over the positions: what the fast ways have to agree with."""

from typing import Any

import numpy as np
import torch
from tiny import VOCAB

from distill.config import Objective, Rows
from distill.data.batches import Batch
from distill.data.collate.mlm import IGNORE
from distill.objective.objective import TERMS


def kl(teacher: torch.Tensor, student: torch.Tensor, temperature: float, cutoff: float) -> torch.Tensor:
    """T^2 * KL of one position's logits [V]; teacher probabilities below the cut-off share one bucket."""
    p, q = (teacher / temperature).softmax(0), (student / temperature).softmax(0)
    kept = p >= cutoff
    value = sum((p[v] * (p[v] / q[v]).log() for v in range(len(p)) if kept[v]), torch.zeros((), dtype=p.dtype))
    if not kept.all():
        value = value + p[~kept].sum() * (p[~kept].sum() / q[~kept].sum()).log()
    return temperature**2 * value


def definition(
    settings: Objective, student: Any, teacher: Any | None, batches: list[Batch]
) -> tuple[torch.Tensor, list[float]]:
    """The loss of a whole step as the field defines it: full logits of the models themselves, position by position."""
    values: dict[str, list[torch.Tensor]] = {name: [] for name in TERMS}
    for batch in batches:
        attention = torch.ones_like(batch.inputs) if batch.attention is None else batch.attention
        ours = student(input_ids=batch.inputs, attention_mask=attention, output_hidden_states=True)
        with torch.no_grad():
            asked = teacher if teacher is not None else student
            theirs = asked(input_ids=batch.inputs, attention_mask=attention, output_hidden_states=True)
        targets = batch.targets.view(batch.inputs.shape)
        for row, place in np.ndindex(*batch.inputs.shape):
            if not attention[row, place]:
                continue
            logits, target = ours.logits[row, place][:VOCAB], int(targets[row, place])
            if target != IGNORE:
                values["mlm"].append(-(logits[target] - logits.exp().sum().log()))
            if teacher is not None and (settings.soft.rows is Rows.all or target != IGNORE):
                taught = theirs.logits[row, place][:VOCAB]
                values["soft"].append(kl(taught, logits, settings.temperature, settings.soft.cutoff))
            if teacher is not None:
                a, b = ours.hidden_states[-1][row, place], theirs.hidden_states[-1][row, place]
                values["cosine"].append(1 - (a @ b) / (a.norm() * b.norm()))
    means = [torch.stack(v).mean() if v else torch.zeros((), dtype=torch.float64) for v in values.values()]
    weights = [getattr(settings, name).weight for name in TERMS]
    total = torch.stack([w * m for w, m in zip(weights, means, strict=True)]).sum()
    return total, [float(m.detach()) for m in means]
