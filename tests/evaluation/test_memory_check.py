"""A batch of evaluation that memory does not hold is refused before the first step."""

from collections.abc import Callable

import pytest
import torch
from tiny import make_evaluator, make_masks, make_model, make_rows, make_tokenizer

from distill.config.settings import BackendConfig, EvaluateConfig, PrecisionConfig, PseudoPerplexityConfig
from distill.distributed.single import Single
from distill.evaluation.evaluator import Evaluator
from distill.evaluation.masked_copies import Copies, head_rows_at_masks
from distill.evaluation.sets import EvaluationSet
from distill.evaluation.speed import check_memory, try_once
from distill.models.language_model import LanguageModel
from distill.runtime.errors import SettingError

BACKEND = Single(BackendConfig(device="cpu"))


def allocate() -> None:
    torch.empty(2**62, dtype=torch.uint8)


def raise_like_a_gpu() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


def not_to_be_run() -> None:
    raise AssertionError


@pytest.mark.parametrize(("run", "least"), [(allocate, 0), (raise_like_a_gpu, 0), (not_to_be_run, 10**15)])
def test_a_lack_of_memory_has_one_line(run: Callable[[], None], least: int) -> None:
    with pytest.raises(SettingError, match=r"^evaluate\.batch_size=7: a batch of evaluation takes .*; lower it$"):
        try_once(run, least, "evaluate.batch_size=7", BACKEND)


def evaluator_of(share: float = 1.0) -> Evaluator:
    settings = EvaluateConfig(batch_size=4, pseudo_perplexity=PseudoPerplexityConfig(fraction=share, batch_size=64))
    masks = make_masks(make_tokenizer(), make_rows(8))
    return make_evaluator(settings, masks, PrecisionConfig(evaluate="fp32"), BACKEND)


def set_of(length: int) -> EvaluationSet:
    return EvaluationSet(f"of {length}", "made up", make_rows(6, length), 1)


def test_the_set_with_the_longest_rows_is_rehearsed(monkeypatch: pytest.MonkeyPatch) -> None:
    student = make_model("distilbert", 2)
    largest = 4 * 32 * (8 + 4 * student.config.hidden_size)  # ids and one layer's output
    monkeypatch.setattr("distill.evaluation.speed.available", lambda ranks: largest - 1)
    evaluator = evaluator_of(share=0.0)
    check_memory(evaluator, [student], [set_of(8)])
    with pytest.raises(SettingError, match=r"evaluate\.batch_size=4: a batch of evaluation takes"):
        check_memory(evaluator, [student], [set_of(8), set_of(32)])


def test_the_batch_of_pseudo_perplexity_is_rehearsed(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def rows_of(model: LanguageModel, copies: Copies) -> torch.Tensor:
        seen.append(len(copies.row))
        return head_rows_at_masks(model, copies)

    student, evaluator = make_model("distilbert", 2), evaluator_of()
    monkeypatch.setattr("distill.evaluation.pseudo_perplexity.head_rows_at_masks", rows_of)
    check_memory(evaluator, [student, student], [set_of(32)])
    assert seen == [64, 64]
    monkeypatch.setattr("distill.evaluation.pseudo_perplexity.head_rows_at_masks", lambda *_: allocate())
    with pytest.raises(SettingError, match=r"evaluate\.pseudo_perplexity\.batch_size=64: .* more memory than there is"):
        check_memory(evaluator, [student], [set_of(32)])
