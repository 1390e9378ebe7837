"""Measures of the user's, torchmetrics Metrics: their values by hand, their names, and what is refused early."""

import importlib.util
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from distributed import run_ranks
from families import make_family
from job import composed, distill, environment, results
from test_scores import MODEL, SET, make, silent
from tiny import VOCAB, make_evaluator, make_masks, make_rows, make_tokenizer
from torch import Tensor
from vocabularies import special_ids, vocabulary_of

from distill.config.component import Component
from distill.config.settings import BackendConfig, EvaluateConfig, PrecisionConfig, PseudoPerplexityConfig
from distill.data.collate.clm import CausalLM
from distill.data.collate.tables import Labelled
from distill.data.sequence_format import causal_format
from distill.data.tables import LabelledTexts
from distill.data.text_pairs import class_sequences
from distill.distributed import join_ranks
from distill.distributed.single import Single
from distill.evaluation.evaluator import Evaluator
from distill.evaluation.measures import Measure, Scoring
from distill.evaluation.measures.classes import class_set
from distill.evaluation.measures.tables import TablePass
from distill.evaluation.measures.users import check_measures, refuse_measures
from distill.evaluation.sets import EvaluationSet
from distill.models.language_model import Outputs
from distill.runs.check import check
from distill.runtime.errors import SettingError
from distill.tasks import find_task

HOROVOD = pytest.mark.skipif(importlib.util.find_spec("horovod") is None, reason="Horovod is not installed")
PERPLEXITY = "torchmetrics.text.Perplexity"
ACCURACY = "torchmetrics.classification.MulticlassAccuracy"


def measures(**targets: str | tuple[str, dict[str, Any]]) -> dict[str, Component]:
    given = {name: (each, {}) if isinstance(each, str) else each for name, each in targets.items()}
    return {name: Component(f"evaluate.measures.{name}", *each) for name, each in given.items()}


def written(chosen: dict[str, Component]) -> dict[str, Any]:
    """Measures as a recipe has them."""
    return {name: {"_target_": one.path, **one.arguments} for name, one in chosen.items()}


def accuracy(target: str, **arguments: Any) -> dict[str, Component]:
    return measures(accuracy=(target, arguments))


def evaluator(tokenizer: Any, chosen: dict[str, Component], batch_size: int = 32, ranks: Any = None) -> Evaluator:
    settings = EvaluateConfig(
        batch_size=batch_size, measures=written(chosen), pseudo_perplexity=PseudoPerplexityConfig(fraction=1.0)
    )
    ranks = ranks or Single(BackendConfig(device="cpu"))
    return make_evaluator(settings, make(tokenizer).scoring.collator, PrecisionConfig(), ranks)


def by_hand(tokenizer: Any) -> tuple[Tensor, Tensor]:
    """Logits and targets of all positions that perplexity scores, by the model alone."""
    logits, targets = [], []
    for batch in make(tokenizer).scoring.batches(SET, silent):
        with torch.no_grad():
            every = MODEL(batch.ids, attention_mask=(batch.ids != tokenizer.pad_token_id).long()).logits
        logits.append(every.flatten(0, 1)[batch.targets.positions])
        targets.append(batch.targets.targets)
    return torch.cat(logits), torch.cat(targets)


@pytest.mark.parametrize("batch_size", [1, 4, 32])
def test_values_are_those_of_a_loop_by_hand(tokenizer: Any, batch_size: int) -> None:
    chosen = measures(
        hits=("own_metrics.Hits", {"best": 12}),
        of_torchmetrics=PERPLEXITY,
        top3=(ACCURACY, {"num_classes": VOCAB, "top_k": 3, "average": "micro"}),
        median="own_metrics.MedianLogit",
    )
    made = evaluator(tokenizer, chosen, batch_size)
    assert [measure.name for measure in made.measures] == ["perplexity", "pseudo_perplexity", *chosen]
    logits, targets = by_hand(tokenizer)
    ranks = [sorted(row.tolist(), reverse=True).index(float(row[t])) for row, t in zip(logits, targets, strict=True)]
    scores = made.score(MODEL, "student", [SET])
    assert 0 < sum(rank < 12 for rank in ranks) < len(ranks)
    assert scores["hits"]["small"] == pytest.approx(sum(rank < 12 for rank in ranks) / len(ranks))
    assert scores["top3"]["small"] == pytest.approx(sum(rank < 3 for rank in ranks) / len(ranks))
    assert scores["of_torchmetrics"]["small"] == pytest.approx(scores["perplexity"]["small"], rel=1e-5)
    chosen_logits = sorted(float(row[t]) for row, t in zip(logits, targets, strict=True))
    assert scores["median"]["small"] == pytest.approx(float(np.median(chosen_logits)), rel=1e-5)
    without = evaluator(tokenizer, {}, batch_size).score(MODEL, "student", [SET])
    assert {name: scores[name] for name in without} == without, "measures of the user's change no other"


def test_titles_and_directions_are_those_of_the_metric(tokenizer: Any) -> None:
    chosen = measures(hits="own_metrics.Hits", loss_of_words=PERPLEXITY, two=("own_metrics.hits_of_two", {}))
    hits, perplexity, two = evaluator(tokenizer, chosen).measures[2:]
    assert hits == Measure("hits", "Best hits", "the share of targets among the best", lower_is_better=False)
    assert perplexity == Measure("loss_of_words", "Loss of words", "Perplexity at the same positions")
    assert two == replace(hits, name="two")


def test_of_causal_models_they_read_the_tokens_of_perplexity() -> None:
    tokenizer = vocabulary_of("gpt2")
    ids = np.random.default_rng(4).integers(5, 40, (11, 12)).astype(np.uint16)
    settings = EvaluateConfig(batch_size=3, stride=5, measures=written(measures(other=PERPLEXITY)))
    collator = CausalLM(causal_format(tokenizer), True)
    scoring = Scoring(collator, tokenizer, settings, Single(BackendConfig(device="cpu")))
    made = Evaluator(scoring, find_task("clm").passes(scoring), PrecisionConfig())
    model = make_family("gpt2", **special_ids(tokenizer))
    scores = made.score(model, "model", [EvaluationSet("set", "", ids, 1)])
    assert scores["other"]["set"] == pytest.approx(scores["perplexity"]["set"], rel=1e-5)


# --- classes and values --------------------------------------------------------------------------------------------


class Outcomes:
    """Stands for a model: its head gives what a table says for the first word of a row."""

    def __init__(self, table: Tensor) -> None:
        self.table = table

    def __call__(self, inputs: dict[str, Tensor], documents: Any, spec: Any) -> Outputs:
        return Outputs(None, {}, extra={"class": self.table[inputs["input_ids"][:, 1]]})


def table_scoring(labels: np.ndarray, classes: tuple[str, ...], chosen: dict[str, Component], draw: Any) -> Scoring:
    """What a set of 40 texts is scored by."""
    tokenizer = vocabulary_of("bert")
    texts = [chr(97 + number) for number in draw.integers(0, 26, 40)]
    examples = LabelledTexts("made", texts, None, labels, classes)
    rows = class_sequences(examples, tokenizer, 8, "corpus.sequence_length")
    data = replace(class_set("table", examples, rows), collator=Labelled(rows))
    settings = EvaluateConfig(batch_size=7, measures=written(chosen))
    return Scoring(data.collator, tokenizer, settings, Single(BackendConfig(device="cpu")), [data], ("class",))


def table_scores(labels: np.ndarray, classes: tuple[str, ...], chosen: dict[str, Component], width: int) -> Any:
    """Values of a set of 40 texts by a model that knows nothing, and its outputs for them [40, width]."""
    draw = np.random.default_rng(1)
    scoring = table_scoring(labels, classes, chosen, draw)
    (data,) = scoring.sets
    model = Outcomes(torch.from_numpy(draw.normal(size=(len(scoring.tokenizer), width))).float())
    return TablePass(scoring).score(model, data, silent), model.table[data.sequences[:, 1].astype(np.int64)]  # type: ignore[arg-type]


def test_of_classes_they_read_logits_and_labels() -> None:
    labels = np.random.default_rng(0).integers(0, 3, 40)
    chosen = measures(
        mine=(ACCURACY, {"num_classes": 3, "average": "micro"}), best_two=("own_metrics.Hits", {"best": 2})
    )
    values, outputs = table_scores(labels, ("a", "b", "c"), chosen, 3)
    right = float((outputs.argmax(-1).numpy() == labels).mean())
    assert values["mine"] == pytest.approx(right) and values["accuracy"] == pytest.approx(100 * right)
    best = [label in row.topk(2).indices for row, label in zip(outputs, labels, strict=True)]
    assert values["best_two"] == pytest.approx(sum(best) / 40)


def test_of_values_they_read_predictions_and_values() -> None:
    labels = np.random.default_rng(0).normal(size=40)
    values, outputs = table_scores(labels, (), measures(error="torchmetrics.regression.MeanSquaredError"), 1)
    assert values["error"] == pytest.approx(float(((outputs[:, 0].numpy() - labels) ** 2).mean()), rel=1e-5)


def test_a_value_that_is_no_number_is_logged_with_its_measure_and_set(lines: list[str]) -> None:
    values, _ = table_scores(np.ones(40), (), measures(mine="own_metrics.OfNone"), 1)
    assert np.isnan(values["mine"])
    assert lines == ["evaluate.measures.mine: it gives nan on table, so there is no score of it"]


def test_questions_have_no_logits_and_targets_for_them() -> None:
    with pytest.raises(SettingError, match=r"accuracy\._target_=own_metrics\.Hits reads logits and targets, which"):
        refuse_measures(accuracy("own_metrics.Hits"), "questions with answers")


# --- ranks ---------------------------------------------------------------------------------------------------------

OF_RANKS = measures(
    hits=("own_metrics.Hits", {"best": 12}),
    other=PERPLEXITY,
    top3=(ACCURACY, {"num_classes": VOCAB, "top_k": 3}),
    median="own_metrics.MedianLogit",
    widest="own_metrics.Longest",
)
NUM_ROWS = (15, 2, 1)  # of the sets: in the last one only one of the ranks has a sequence


def on_a_rank(settings: BackendConfig) -> tuple[dict[str, dict[str, float]], int]:
    """Scores by one rank, and how often it has called for an exchange."""
    torch.set_num_threads(1)
    ranks = join_ranks(settings)
    rows = [make_rows(number, shortest=11, seed=number) for number in NUM_ROWS]
    masks = make_masks(make_tokenizer(), rows[0], mlm_probability=0.5)
    chosen = EvaluateConfig(
        batch_size=4, measures=written(OF_RANKS), pseudo_perplexity=PseudoPerplexityConfig(fraction=0.0)
    )
    made = make_evaluator(chosen, masks, PrecisionConfig(), ranks)
    sets = [EvaluationSet(f"{len(each)} rows", "", each, 1) for each in rows]
    scores = made.score(MODEL, "student", sets)
    plain = make_evaluator(chosen.changed(measures={}), masks, PrecisionConfig(), ranks)
    before = ranks.traffic.num_collectives
    plain.score(MODEL, "student", sets)
    count = ranks.traffic.num_collectives - before
    ranks.close()
    return scores, count


@pytest.mark.parametrize("name", ["ddp", pytest.param("horovod", marks=HOROVOD)])
def test_two_ranks_give_the_values_of_one(name: str, tmp_path: Any) -> None:
    alone, _ = on_a_rank(BackendConfig(device="cpu"))
    assert all(values.keys() == {f"{number} rows" for number in NUM_ROWS} for values in alone.values())
    settings = BackendConfig(name=name, device="cpu", threads=1, timeout=60.0)
    for scores, exchanges in run_ranks(2, tmp_path, on_a_rank, settings):
        assert scores.keys() == alone.keys() == {"perplexity", *OF_RANKS}
        for measure, values in alone.items():
            assert scores[measure] == pytest.approx(values, rel=1e-5), measure
        assert exchanges == len(NUM_ROWS), "perplexity takes one for each set"


@pytest.mark.slow
def test_torchmetrics_is_imported_where_models_are_scored_and_not_before() -> None:
    modules = "distill.job, distill.commands.evaluate, distill.runs.check"
    program = f"import sys, {modules}; print('torchmetrics' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], env=environment(), capture_output=True, text=True)
    assert done.stdout.strip() == "False", done.stderr


# --- refusals ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "measure", "words"),
    [
        ("loss", accuracy("own_metrics.Hits"), ["results use the name loss already"]),
        ("two words", accuracy("own_metrics.Hits"), ["letters, digits and underscores"]),
        ("accuracy", accuracy("own_metrics.Nothing"), ["_target_=own_metrics.Nothing", "imported"]),
        ("accuracy", accuracy("own_metrics.Hits", worst=1), ["accuracy.worst: no setting", "best"]),
        ("accuracy", accuracy("own_metrics.Hits", best="all"), ["accuracy.best", "all"]),
        ("accuracy", accuracy("own_parts.Triangle"), ["_target_=own_parts.Triangle is no Metric", "torchmetrics"]),
    ],
)
def test_what_cannot_be_a_measure_is_refused_early(name: str, measure: dict[str, Component], words: list[str]) -> None:
    with pytest.raises(SettingError) as error:
        check_measures({name: measure["accuracy"]})
    text = str(error.value)
    assert "\n" not in text and all(word in text for word in ["evaluate.measures.accuracy", *words]), text


@pytest.mark.parametrize(
    ("measure", "words"),
    [
        (accuracy("own_metrics.no_metric"), ["gives no Metric", "subclass of torchmetrics.Metric"]),
        (accuracy("own_metrics.Undecided"), ["which of two values is better", "higher_is_better"]),
        (accuracy("own_metrics.Pair"), ["its value is 2 numbers"]),
        (accuracy(ACCURACY, num_classes=3), [f"does not fit logits [N, {VOCAB}] and targets [N]", "give it arguments"]),
        (accuracy("torchmetrics.text.BLEUScore"), ["does not fit logits", "write a subclass"]),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_scored(
    tokenizer: Any, measure: dict[str, Component], words: list[str]
) -> None:
    with pytest.raises(SettingError) as error:
        evaluator(tokenizer, measure)
    text = str(error.value)
    assert "\n" not in text and all(word in text for word in ["evaluate.measures.accuracy._target_=", *words]), text


@pytest.mark.parametrize("given", ["{kind: accuracy}", "{_target_: null}"])
def test_a_measure_needs_a_target(given: str) -> None:
    with pytest.raises(
        SettingError, match=r"evaluate\.measures\.mine: names no callable.*evaluate\.measures\.mine\._target_"
    ):
        composed(f"+evaluate.measures.mine={given}")


def test_the_checks_of_a_run_look_at_measures() -> None:
    check(composed("+evaluate.measures.mine._target_=own_metrics.Hits", "+evaluate.measures.mine.best=2"))
    check(composed(f"+evaluate.measures.mine._target_={ACCURACY}", "+evaluate.measures.mine.num_classes=9"))
    with pytest.raises(SettingError, match=r"evaluate\.measures\.mine\._target_=own_metrics\.Nothing"):
        check(composed("+evaluate.measures.mine._target_=own_metrics.Nothing"))


def test_the_name_of_a_measure_of_the_task_is_taken() -> None:
    """It would replace the task's own, which has a percentage, by a fraction."""
    labels, classes = np.random.default_rng(0).integers(0, 3, 40), ("a", "b", "c")
    scoring = table_scoring(labels, classes, accuracy(ACCURACY, num_classes=3), np.random.default_rng(1))
    with pytest.raises(SettingError, match=r"^evaluate\.measures\.accuracy: this task measures accuracy itself"):
        Evaluator(scoring, [TablePass(scoring)], PrecisionConfig())


def test_a_measure_without_a_number_does_not_end_the_run(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    more = ["train.steps=2", "+evaluate.measures.mine._target_=own_metrics.OfNone"]
    assert distill("+recipe=smoke", *more, f"hydra.run.dir={folder}") == 0
    assert results(folder)["student"]["mine"] == {"heldout": None} and (folder / "student").is_dir()
