"""A batch of evaluation that memory does not hold is refused before the first step."""

from pathlib import Path

import pytest
import torch
from job import Shelf, whole_run
from tiny import VOCAB, make_evaluator, make_masks, make_model, make_rows, make_tokenizer

from distill.config.settings import BackendConfig, EvaluateConfig, PrecisionConfig, PseudoPerplexityConfig
from distill.distributed.single import Single
from distill.evaluation.evaluator import Evaluator
from distill.evaluation.measures.masked_copies import Copies, head_rows_at_masks
from distill.evaluation.memory_check import check_memory, try_once
from distill.evaluation.sets import EvaluationSet
from distill.models.language_model import LanguageModel
from distill.runtime.errors import SettingError

SETTING = "evaluate.batch_size"
BACKEND = Single(BackendConfig(device="cpu"))


def test_what_is_sure_to_be_too_much_is_not_tried() -> None:
    with pytest.raises(SettingError, match=r"evaluate\.batch_size=7: .* takes 1e\+06 GB at least"):
        try_once(lambda: pytest.fail("it was tried"), 10**15, SETTING, 7, BACKEND)


def allocate() -> None:
    torch.empty(2**62, dtype=torch.uint8)


def raise_like_a_gpu() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


@pytest.mark.parametrize("run", [allocate, raise_like_a_gpu])
def test_a_lack_of_memory_has_one_line(run: object) -> None:
    with pytest.raises(SettingError, match=r"evaluate\.batch_size=7: .* lower it"):
        try_once(run, 0, SETTING, 7, BACKEND)  # type: ignore[arg-type]


def test_other_errors_stay_as_they_are() -> None:
    def broken() -> None:
        raise RuntimeError("shapes do not fit")

    with pytest.raises(RuntimeError, match="shapes"):
        try_once(broken, 0, SETTING, 7, BACKEND)


def test_a_run_is_refused_before_its_first_step(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    folder = shelf.root / "rehearsed"
    monkeypatch.setattr("distill.evaluation.memory_check.available", lambda ranks: 1_000_000)
    assert shelf.run(folder, "evaluate.batch_size=64") == 2
    assert "evaluate.batch_size=64: a batch of evaluation takes" in capfd.readouterr().err
    assert not list((folder / "checkpoints").glob("*"))


def evaluator_of(share: float = 1.0) -> Evaluator:
    settings = EvaluateConfig(batch_size=4, pseudo_perplexity=PseudoPerplexityConfig(fraction=share, batch_size=64))
    masks = make_masks(make_tokenizer(), make_rows(8))
    return make_evaluator(settings, masks, PrecisionConfig(evaluate="fp32"), BACKEND)


def set_of(length: int) -> EvaluationSet:
    return EvaluationSet(f"of {length}", "made up", make_rows(6, length), 1)


def test_the_set_with_the_longest_rows_is_rehearsed(monkeypatch: pytest.MonkeyPatch) -> None:
    student = make_model("distilbert", 2)
    largest = 4 * 32 * (8 + 4 * student.config.hidden_size)  # ids and one layer's output
    assert largest > 4 * 8 * (8 + 4 * (student.config.hidden_size + VOCAB))  # those and the logits of the short set
    monkeypatch.setattr("distill.evaluation.memory_check.available", lambda ranks: largest - 1)
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
    monkeypatch.setattr("distill.evaluation.measures.pseudo_perplexity.head_rows_at_masks", rows_of)
    check_memory(evaluator, [student, student], [set_of(32)])
    assert seen == [64, 64]
    message = r"evaluate\.pseudo_perplexity\.batch_size=64: a batch of evaluation"
    monkeypatch.setattr("distill.evaluation.measures.pseudo_perplexity.head_rows_at_masks", lambda *_: allocate())
    with pytest.raises(SettingError, match=message + r" takes more memory than there is; lower it"):
        check_memory(evaluator, [student], [set_of(32)])
    least = 4 * 32 * (8 + 4 * (student.config.hidden_size + VOCAB))
    assert least < 64 * 32 * (8 + 4 * student.config.hidden_size)
    monkeypatch.setattr("distill.evaluation.memory_check.available", lambda ranks: least)
    with pytest.raises(SettingError, match=message + r" takes .* GB at least"):
        check_memory(evaluator, [student], [set_of(32)])


def test_the_teacher_of_a_baseline_is_not_tried(shelf: Shelf, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It has given layers alone, so that it is not on the device of the run, on a GPU."""
    tried: list[int] = []
    monkeypatch.setattr(whole_run, "check_memory", lambda evaluator, models, sets: tried.append(len(models)))
    for name, settings in (("student", []), ("baseline", ["objective=mlm"])):
        assert shelf.run(tmp_path / name, "train.steps=1", *settings) == 0
    assert tried == [2, 1]
