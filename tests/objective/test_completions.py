"""Prompts carry no loss and still decide the loss of their completions, whatever kernel computes it."""

from typing import Any

import numpy as np
import pytest
import torch
from families import byte_pairs, make_family
from tiny import PAD, SEP, VOCAB, loss_of, make_objective, objective_config, records
from torch.nn.functional import cross_entropy, kl_div

from distill.data.batch import Batch
from distill.data.collate.clm import CausalLM
from distill.data.sequence_format import causal_format
from distill.data.sequence_store import ids_of

LENGTH = 16


def rows() -> np.ndarray:
    """Two conversations and padding; a row of a prompt alone; one conversation of several turns over a whole row."""
    random = np.random.default_rng(5)
    ids, is_target = random.integers(5, VOCAB, (3, LENGTH)), np.ones((3, LENGTH), bool)
    ids[0, 6] = ids[0, 12] = SEP
    ids[0, 13:] = PAD
    for row, prompts in ((0, [*range(3), *range(7, 10)]), (1, range(LENGTH)), (2, [0, 1, 2, 6, 7, 8, 9])):
        is_target[row, list(prompts)] = False
    return records(ids, is_target)


def batch_of(ids: np.ndarray) -> Batch:
    return CausalLM(causal_format(byte_pairs()), True).collate(ids, np.zeros(len(ids), np.uint64), np.arange(len(ids)))


def completions(ids: np.ndarray) -> list[tuple[int, int, int]]:
    """(row, where its conversation begins, position) of every token that counts and has a token before it."""
    found = []
    for row, line in enumerate(ids.tolist()):
        begin = 0
        for at, (id_, is_target, _) in enumerate(line):
            if id_ == PAD:
                break
            if at > begin and is_target:
                found.append((row, begin, at))
            begin = at + 1 if id_ == SEP else begin
    return found


def naive(student: Any, teacher: Any, ids: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean cross-entropy and mean soft loss at T = 2, each token from its conversation alone."""
    plain = torch.from_numpy(ids_of(ids))
    hard, soft = [], []
    for row, begin, at in completions(ids):
        seen = plain[row, begin:at][None]
        own, other = (model(input_ids=seen).logits[0, -1, :VOCAB] for model in (student, teacher))
        hard.append(cross_entropy(own, plain[row, at]))
        log_p, log_q = (other.detach() / 2).log_softmax(-1), (own / 2).log_softmax(-1)
        soft.append(4 * kl_div(log_q, log_p, log_target=True, reduction="sum"))
    return torch.stack(hard).mean(), torch.stack(soft).mean()


@pytest.mark.parametrize("split", [1, 3])
def test_loss_and_gradient_are_of_completions_alone(split: int) -> None:
    """In one micro-batch, or in three of which one has nothing to predict."""
    student, teacher = make_family("gpt2"), make_family("gpt2", n_head=2)
    student.requires_grad_(True)
    ids = rows()
    settings = objective_config(soft=5.0, mlm=0.0, cosine=0.0, rows="targets", clm={"weight": 2.0})
    settings = settings.changed(task="clm")
    objective = make_objective(settings, student, teacher)
    batches = [batch_of(part) for part in np.split(ids, split)]
    assert [len(batch.targets.positions) for batch in batches] == [
        len(completions(part)) for part in np.split(ids, split)
    ]
    assert split == 1 or len(batches[1].targets.positions) == 0
    loss, _ = loss_of(objective, student, teacher, batches)
    loss.backward()
    found = {name: weight.grad.clone() for name, weight in student.named_parameters()}
    student.zero_grad()
    hard, soft = naive(student, teacher, ids)
    (5 * soft + 2 * hard).backward()
    torch.testing.assert_close(loss, 5 * soft + 2 * hard)
    for name, weight in student.named_parameters():
        torch.testing.assert_close(found[name], weight.grad, rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")
