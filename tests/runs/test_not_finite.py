"""NaN and infinite numbers in a model: refused at the start where they can be seen, and else laid to who made them."""

import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import VOCAB, Fit, make_model, make_rows, new_student, only

from distill.commands.evaluate import evaluate_models
from distill.config.settings import TrainConfig
from distill.evaluation.evaluator import Evaluator
from distill.models.check import check_finite, check_model
from distill.models.loaded import LoadedModel
from distill.runtime.errors import Diverged, SettingError

WEIGHTS = {
    "bert.encoder.layer.1.output.dense.weight": (0, 0),  # of a layer
    "bert.embeddings.word_embeddings.weight": (VOCAB - 1, 3),  # of one token, and of its row of the tied head
    "cls.predictions.bias": (7,),
}


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("name", WEIGHTS)
def test_a_weight_that_is_not_finite_is_named_at_the_start(name: str, value: float, tokenizer: Any) -> None:
    model = make_model("bert", 2)
    with torch.no_grad():
        model.get_parameter(name)[WEIGHTS[name]] = value
    for read in (lambda: check_model(model, "teacher.path=x"), lambda: LoadedModel.of(model, tokenizer)):
        with pytest.raises(SettingError, match=name) as error:
            read()
        assert error.value.setting in ("teacher.path=x", "model") and "earlier checkpoint" in error.value.cure


def test_a_bias_that_keeps_a_padded_row_from_being_predicted_may_be_infinite() -> None:
    model = make_model("bert", 2)
    with torch.no_grad():
        model.get_output_embeddings().bias[-1] = -math.inf
    check_finite(model, "teacher")
    with torch.no_grad():
        model.bert.encoder.layer[0].output.dense.bias[0] = -math.inf
    with pytest.raises(SettingError):
        check_finite(model, "teacher")


@pytest.mark.parametrize(
    ("broken", "terms", "blamed"),
    [("teacher", {"soft": 1.0}, True), ("teacher", {"cosine": 1.0}, True), ("student", {"soft": 1.0}, False)],
)
def test_who_made_a_loss_that_is_not_finite(
    broken: str,
    terms: dict[str, float],
    blamed: bool,
    tmp_path: Path,
    tokenizer: Any,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As of a model whose weights are finite and whose outputs are not."""
    teacher, student = make_model("bert", 2).requires_grad_(False), new_student()
    with torch.no_grad():
        (teacher if broken == "teacher" else student).get_input_embeddings().weight[9] = math.nan
    train = TrainConfig(batch_size=4, accumulate=2, epochs=None, steps=12, max_nonfinite=2)
    fit = Fit(tmp_path, tokenizer, make_rows(80), teacher, student, only(**terms), train)
    with caplog.at_level(logging.WARNING), pytest.raises(Diverged) as error:
        fit.run()
    assert ("the teacher's own" in str(error.value)) == blamed
    assert not {"optimizer.lr", "precision"} & set(str(error.value).replace("=", " ").split()), (
        "nothing was updated, in fp32"
    )
    skipped = [record.message for record in caplog.records if "is skipped" in record.message]
    assert len(skipped) == 2 and all(("teacher" in line) == blamed for line in skipped)


def test_a_score_that_is_no_number_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inner = Evaluator.score_by_sequence

    def overflowing(self: Evaluator, *arguments: Any) -> Any:
        scores, losses = inner(self, *arguments)
        return {name: dict.fromkeys(by_set, math.nan) for name, by_set in scores.items()}, losses

    monkeypatch.setattr(Evaluator, "score_by_sequence", overflowing)
    Path("text.txt").write_text("The river followed the old road. " * 20)
    source = "evaluate.sources.mine={kind: text, path: text.txt}"
    settings = ["evaluate.sets=[mine]", source, "evaluate.pseudo_perplexity.fraction=0", "data.cache=cache"]
    with pytest.raises(SettingError) as error:
        evaluate_models(["bundled_small"], settings, tmp_path / "scores")
    assert (error.value.setting, error.value.value) == ("model", "bundled_small")
    assert not (tmp_path / "scores").exists()
