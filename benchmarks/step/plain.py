"""The step that Distill is measured against: full logits of both models, boolean selection of the counted positions.

A re-implementation of the loss of the published DistilBERT and DistilGPT2 example. Two of its costs are left out:
targets come aligned with their positions, so no copy of the logits is shifted by one, and GPT-2 makes no cache for a
next token. Documents of one row are kept apart as Distill does it: by position ids, of which transformers makes a mask.
"""

from typing import Any

import torch
from torch.nn.functional import cosine_embedding_loss, cross_entropy, kl_div

from benchmarks.step.models import AfterStep, Variant
from distill.data.batch import Batch
from distill.data.batches import Batches
from distill.models.precision import autocast

TEMPERATURE = 2.0
WEIGHTS = {"soft": 5.0, "mlm": 2.0, "clm": 2.0, "cosine": 1.0}
NO_TARGET = -100


def plain_loss(student: Any, teacher: Any, batch: Batch, variant: Variant) -> torch.Tensor:
    """The loss of one micro-batch, means over its own positions."""
    attended, (task, (positions, values)) = torch.ones_like(batch.ids), next(iter(batch.labels.items()))
    inputs: dict[str, Any] = {**batch.inputs, "output_hidden_states": True}
    inputs |= {"use_cache": False} if task == "clm" else {"attention_mask": attended}
    with torch.no_grad(), autocast(variant.precision.teacher, batch.ids.device):
        teacher_output = teacher(**inputs)
    with autocast(variant.precision.student, batch.ids.device):
        student_output = student(**inputs)
    student_logits, teacher_logits = student_output.logits.float(), teacher_output.logits.float()
    vocabulary = student_logits.shape[-1]
    targets = torch.full_like(batch.ids, NO_TARGET).view(-1)
    targets[positions] = values
    chosen = attended.bool() if variant.rows == "all" else (targets.view_as(batch.ids) != NO_TARGET)
    where = chosen[..., None].expand_as(student_logits)
    student_chosen = student_logits.masked_select(where).view(-1, vocabulary)
    teacher_chosen = teacher_logits.masked_select(where).view(-1, vocabulary)
    log_q, p = (student_chosen / TEMPERATURE).log_softmax(-1), (teacher_chosen / TEMPERATURE).softmax(-1)
    soft = kl_div(log_q, p, reduction="batchmean") * TEMPERATURE**2
    hard = cross_entropy(student_logits.view(-1, vocabulary), targets)
    hidden = [output.hidden_states[-1].float() for output in (student_output, teacher_output)]
    rows = [h.masked_select(attended.bool()[..., None].expand_as(h)).view(-1, h.shape[-1]) for h in hidden]
    cosine = cosine_embedding_loss(rows[0], rows[1], torch.ones(len(rows[0]), device=rows[0].device))
    return WEIGHTS["soft"] * soft + WEIGHTS[task] * hard + WEIGHTS["cosine"] * cosine


def train_plainly(source: Batches, pair: tuple[Any, Any], variant: Variant, steps: int, after_step: AfterStep) -> None:
    """The example's loop."""
    teacher, student = pair
    optimizer = torch.optim.AdamW(student.parameters(), lr=5e-4, eps=1e-6, betas=(0.9, 0.98))
    for window in source.stream(0, steps, student.device):
        for batch in window:
            (plain_loss(student, teacher, batch, variant) / len(window)).backward()
        torch.nn.utils.clip_grad_norm_(student.parameters(), 5.0)
        optimizer.step()
        optimizer.zero_grad()
        after_step()
