"""Windows in which few rows have labels: each term is the mean over its own rows, against a naive float64 loop."""

from typing import Any

import numpy as np
import pytest
import torch
from tiny import LENGTH, PAD, VOCAB, assert_close, loss_of, make_objective, make_rows, named_terms
from torch import Tensor
from transformers import BertConfig, BertForQuestionAnswering, BertForSequenceClassification

from distill.data.batch import Batch
from distill.data.collate.tables import Labelled
from distill.data.text_pairs import LabelledSequences

COUNT, LABELLED = 7, 3  # rows, of which the first have labels
WINDOW = [[5, 0], [3, 4], [1, 6], [2]]  # rows by micro-batch; the second has no label at all
WEIGHTS = {"label": 0.7, "soft": 2.0, "hidden_mse": 0.5}
SHORTEST = 4


def rows() -> np.ndarray:
    return make_rows(COUNT, shortest=SHORTEST)


def make_pair(kind: Any, **fields: Any) -> tuple[Any, Any]:
    """A student and a deeper teacher, in float64 and without dropout."""
    made = []
    for seed, layers in ((1, 1), (2, 2)):
        torch.manual_seed(seed)
        sizes = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 24, "initializer_range": 0.4}
        config = BertConfig(vocab_size=VOCAB, num_hidden_layers=layers, pad_token_id=PAD, **sizes, **fields)
        made.append(kind(config).double().eval())
    return made[0], made[1].requires_grad_(False)


def objective(task: str, student: Any, teacher: Any) -> Any:
    label, soft = {"classes": ("classes", "soft_classes"), "spans": ("span", "soft_span")}[task]
    given = {
        "task": task,
        label: {"weight": WEIGHTS["label"]},
        soft: {"weight": WEIGHTS["soft"], "temperature": 3.0},
        "hidden_mse": {"weight": WEIGHTS["hidden_mse"], "pairs": [[1, 2]]},
    }
    return make_objective(named_terms(**given), student, teacher)


def kl(teacher: Tensor, student: Tensor) -> Tensor:
    p, q = (teacher / 3.0).softmax(0), (student / 3.0).softmax(0)
    return 9.0 * (p * (p / q).log()).sum()


def definition(task: str, student: Any, teacher: Any, targets: np.ndarray) -> Tensor:
    """Row by row without padding, by the models themselves; `targets` of the first LABELLED rows alone."""
    values: dict[str, list[Tensor]] = {name: [] for name in WEIGHTS}
    for number, row in enumerate(rows()):
        ids = torch.from_numpy(row[row != PAD].astype(np.int64))[None]
        own, other = (model(input_ids=ids, output_hidden_states=True) for model in (student, teacher))
        values["hidden_mse"] += list((own.hidden_states[1] - other.hidden_states[2])[0].square().mean(-1))
        if task == "spans":
            pairs = [(one.start_logits[0], one.end_logits[0]) for one in (own, other)]
            ends = list(zip(*pairs, strict=True))
            values["soft"].append(torch.stack([kl(known, found) for found, known in ends]).mean())
            if number < LABELLED:
                found = [-end.log_softmax(0)[targets[number, at]] for at, (end, _) in enumerate(ends)]
                values["label"].append(torch.stack(found).mean())
            continue
        found, known = own.logits[0], other.logits[0]
        regression = len(found) == 1
        values["soft"].append((found - known).square()[0] if regression else kl(known, found))
        if number < LABELLED:
            target = targets[number]
            right = (found[0] - float(target)) ** 2 if regression else -found.log_softmax(0)[int(target)]
            values["label"].append(right)
    return sum((WEIGHTS[name] * torch.stack(each).mean() for name, each in values.items()), torch.zeros(()))


def collated(task: str, targets: np.ndarray) -> list[Batch]:
    ids, segments = rows(), np.zeros((COUNT, LENGTH), np.uint8)
    names, columns = (("span_start", "span_end"), targets.T.copy()) if task == "spans" else (("class",), [targets])
    named = dict(zip(names, columns, strict=True))
    collator = Labelled(LabelledSequences(sequences=ids, segments=segments, targets=named, pad_id=PAD, digest=""))
    return [
        collator.collate(ids[numbers].astype(np.int64), np.zeros(len(numbers), np.uint64), np.array(numbers))
        for numbers in WINDOW
    ]


def gradient(model: Any) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


CASES: dict[str, tuple[str, Any, dict[str, Any], np.ndarray]] = {
    "classes": ("classes", BertForSequenceClassification, {"num_labels": 3}, np.array([2, 0, 1])),
    "values": ("classes", BertForSequenceClassification, {"num_labels": 1}, np.array([0.5, -2.0, 3.25])),
    "spans": ("spans", BertForQuestionAnswering, {}, np.array([[1, 2], [0, 0], [2, 3]])),
}


@pytest.mark.parametrize("case", CASES)
def test_value_and_gradient_are_those_of_the_definition(case: str) -> None:
    task, kind, fields, targets = CASES[case]
    student, teacher = make_pair(kind, **fields)
    terms, window = objective(task, student, teacher), collated(task, targets)
    expected = definition(task, student, teacher, targets)
    expected.backward()
    wanted = gradient(student)
    counts = terms.count(window)
    positions = sum(int((row != PAD).sum()) for row in rows())
    assert counts.tolist() == [LABELLED, COUNT, positions, positions]
    for shares in ([window], [window[::2], window[1::2]], [window[:1], window[1:2], window[2:]]):
        student.zero_grad()  # whole, and between ranks of which some have no label at all
        parts = [loss_of(terms, student, teacher, share, counts)[0] for share in shares]
        for part in parts:
            part.backward()
        assert float(sum(parts).detach()) == pytest.approx(expected.item(), rel=1e-6)
        assert_close(gradient(student), wanted, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("case", CASES)
def test_a_window_without_any_label_learns_from_the_teacher_alone(case: str) -> None:
    task, kind, fields, targets = CASES[case]
    student, teacher = make_pair(kind, **fields)
    terms, window = objective(task, student, teacher), collated(task, targets)[1:2]
    loss, sums = loss_of(terms, student, teacher, window)
    label = terms.names[0]
    assert sums[label] == 0 and terms.count(window)[0] == 0 and float(loss.detach()) > 0
    loss.backward()
    assert all(each.isfinite().all() for each in gradient(student).values())
    terms.weights[label] = 0.0
    before = gradient(student)
    student.zero_grad()
    loss_of(terms, student, teacher, window)[0].backward()
    assert_close(before, gradient(student), rtol=0, atol=0)
