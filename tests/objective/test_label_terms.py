"""Losses of labels, with labels and with a teacher, in value, gradient and count against naive float64 loops."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from tiny import LENGTH, PAD, VOCAB, assert_close, loss_of, make_objective, make_rows, named_terms
from torch import Tensor
from transformers import BertConfig, BertForQuestionAnswering, BertForSequenceClassification

from distill.data.batch import Batch, Labels
from distill.data.collate.tables import Labelled
from distill.data.text_pairs import LabelledSequences
from distill.models.language_model import Outputs
from distill.objective.terms.soft_sop import SoftSop
from distill.objective.terms.sop import Sop
from distill.teacher.output import TeacherOutput

ORDERS = [0, 1, 1, 0]


@pytest.mark.parametrize("temperature", [None, 1.0, 3.0])
def test_the_order_of_segments_in_value_gradient_and_count(temperature: float | None) -> None:
    """The label's own cross-entropy where there is no temperature, and else the divergence from the teacher."""

    def outputs(logits: Tensor) -> Outputs:
        return Outputs(None, {}, extra={"sop": logits})

    student, teacher = (torch.randn(4, 2, dtype=torch.float64, requires_grad=first) for first in (True, False))
    labels = {"sop": Labels(torch.arange(4), torch.tensor(ORDERS))}
    batch = Batch({"input_ids": torch.zeros(4, 7, dtype=torch.long)}, None, labels, None, np.arange(4))
    term = Sop() if temperature is None else SoftSop(temperature)
    loss = term.loss_sum(outputs(student), TeacherOutput(None, outputs(teacher)), batch)
    value, gradient = 0.0, []
    for (a, b), known, order in zip(student.tolist(), teacher.tolist(), ORDERS, strict=True):
        t = temperature or 1.0
        q = 1 / (1 + math.exp((a - b) / t))  # of swapped segments
        p = order if temperature is None else 1 / (1 + math.exp((known[0] - known[1]) / t))
        value += t**2 * sum(x * math.log(x / y) for x, y in ((p, q), (1 - p, 1 - q)) if x > 0)
        gradient.append([t * (p - q), t * (q - p)])
    assert term.count(batch) == 4 and loss.item() == pytest.approx(value, rel=1e-9)
    (found,) = torch.autograd.grad(loss, student)
    torch.testing.assert_close(found, torch.tensor(gradient, dtype=torch.float64))


# --- windows in which few rows have labels: each term is the mean over its own rows

COUNT, LABELLED = 7, 3  # rows, of which the first have labels
WINDOW = [[5, 0], [3, 4], [1, 6], [2]]  # rows by micro-batch; the second has no label at all
WEIGHTS = {"label": 0.7, "soft": 2.0, "hidden_mse": 0.5}
JOBS: dict[str, tuple[str, Any, dict[str, Any], np.ndarray]] = {
    "classes": ("classes", BertForSequenceClassification, {"num_labels": 3}, np.array([2, 0, 1])),
    "values": ("classes", BertForSequenceClassification, {"num_labels": 1}, np.array([0.5, -2.0, 3.25])),
    "spans": ("spans", BertForQuestionAnswering, {}, np.array([[1, 2], [0, 0], [2, 3]])),
}


def rows() -> np.ndarray:
    return make_rows(COUNT, shortest=4)


def make_job(name: str) -> tuple[Any, Any, Any, list[Batch]]:
    """Objective, a student and a deeper teacher in float64 and without dropout, and a window."""
    task, kind, fields, targets = JOBS[name]
    made = []
    for seed, layers in ((1, 1), (2, 2)):
        torch.manual_seed(seed)
        sizes = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 24, "initializer_range": 0.4}
        config = BertConfig(vocab_size=VOCAB, num_hidden_layers=layers, pad_token_id=PAD, **sizes, **fields)
        made.append(kind(config).double().eval())
    student, teacher = made[0], made[1].requires_grad_(False)
    label, soft = {"classes": ("classes", "soft_classes"), "spans": ("span", "soft_span")}[task]
    terms = {
        label: {"weight": WEIGHTS["label"]},
        soft: {"weight": WEIGHTS["soft"], "temperature": 3.0},
        "hidden_mse": {"weight": WEIGHTS["hidden_mse"], "pairs": [[1, 2]]},
    }
    ids, segments = rows(), np.zeros((COUNT, LENGTH), np.uint8)
    names, columns = (("span_start", "span_end"), targets.T.copy()) if task == "spans" else (("class",), [targets])
    named = dict(zip(names, columns, strict=True))
    collator = Labelled(LabelledSequences(sequences=ids, segments=segments, targets=named, pad_id=PAD, digest=""))
    window = [
        collator.collate(ids[numbers].astype(np.int64), np.zeros(len(numbers), np.uint64), np.array(numbers))
        for numbers in WINDOW
    ]
    return make_objective(named_terms(task=task, **terms), student, teacher), student, teacher, window


def definition(name: str, student: Any, teacher: Any) -> Tensor:
    """Row by row without padding, by the models themselves; with targets of the first LABELLED rows alone."""

    def distance(known: Tensor, own: Tensor) -> Tensor:
        p, q = (known / 3.0).softmax(0), (own / 3.0).softmax(0)
        return 9.0 * (p * (p / q).log()).sum()

    targets, found = JOBS[name][3], {name: [] for name in WEIGHTS}
    for number, row in enumerate(rows()):
        ids = torch.from_numpy(row[row != PAD].astype(np.int64))[None]
        own, other = (model(input_ids=ids, output_hidden_states=True) for model in (student, teacher))
        found["hidden_mse"] += list((own.hidden_states[1] - other.hidden_states[2])[0].square().mean(-1))
        target = targets[number] if number < LABELLED else None
        if name == "spans":
            heads = [(one.start_logits[0], one.end_logits[0]) for one in (own, other)]
            found["soft"].append(sum(distance(known, end) for end, known in zip(*heads, strict=True)) / 2)
            of_ends = [-end.log_softmax(0) for end in heads[0]]
            right = None if target is None else sum(end[at] for end, at in zip(of_ends, target, strict=True)) / 2
        elif name == "values":
            found["soft"].append((own.logits[0] - other.logits[0]).square()[0])
            right = None if target is None else (own.logits[0, 0] - float(target)) ** 2
        else:
            found["soft"].append(distance(other.logits[0], own.logits[0]))
            right = None if target is None else -own.logits[0].log_softmax(0)[int(target)]
        found["label"] += [] if right is None else [right]
    return sum((WEIGHTS[name] * torch.stack(each).mean() for name, each in found.items()), torch.zeros(()))


def gradient(model: Any) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", JOBS)
def test_value_and_gradient_are_those_of_the_definition(name: str) -> None:
    """Whole, and between ranks of which some have no label at all."""
    objective, student, teacher, window = make_job(name)
    expected = definition(name, student, teacher)
    expected.backward()
    wanted, counts = gradient(student), objective.count(window)
    positions = sum(int((row != PAD).sum()) for row in rows())
    assert counts.tolist() == [LABELLED, COUNT, positions, positions]
    for split in ([window], [window[::2], window[1::2]], [window[:1], window[1:2], window[2:]]):
        student.zero_grad()
        parts = [loss_of(objective, student, teacher, part, counts)[0] for part in split]
        sum(parts).backward()
        assert float(sum(parts).detach()) == pytest.approx(expected.item(), rel=1e-6)
        assert_close(gradient(student), wanted, rtol=1e-5, atol=1e-7)
