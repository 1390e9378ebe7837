"""Measures of the user's, torchmetrics Metrics: their values by hand, over ranks, and what is refused early."""

import importlib.util
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from distributed import run_ranks
from test_scores import MODEL, SET, make, silent
from tiny import VOCAB, make_evaluator, make_masks, make_rows, make_tokenizer
from torch import Tensor
from vocabularies import vocabulary_of

from distill.config.component import Component
from distill.config.settings import BackendConfig, EvaluateConfig, PrecisionConfig, PseudoPerplexityConfig
from distill.data.collate.tables import Labelled
from distill.data.tables import LabelledTexts
from distill.data.text_pairs import class_sequences
from distill.distributed import join_ranks
from distill.distributed.single import Single
from distill.evaluation.classes import OF_TABLES, ClassSet
from distill.evaluation.evaluator import Evaluator
from distill.evaluation.labelled import TablePass
from distill.evaluation.measures import Measure, Scoring
from distill.evaluation.sets import EvaluationSet
from distill.evaluation.users import UserMeasures, check_measures
from distill.models.language_model import Outputs
from distill.runtime.errors import SettingError

HOROVOD = pytest.mark.skipif(importlib.util.find_spec("horovod") is None, reason="Horovod is not installed")
ACCURACY = "torchmetrics.classification.MulticlassAccuracy"
ALONE = Single(BackendConfig(device="cpu"))


def target(path: str, **arguments: Any) -> dict[str, Any]:
    return {"_target_": path, **arguments}


def evaluator(tokenizer: Any, batch_size: int = 32, **measures: Any) -> Evaluator:
    pseudo = PseudoPerplexityConfig(fraction=1.0)
    settings = EvaluateConfig(batch_size=batch_size, measures=measures, pseudo_perplexity=pseudo)
    return make_evaluator(settings, make(tokenizer).scoring.collator, PrecisionConfig(), ALONE)


@pytest.mark.parametrize("batch_size", [4, 32])
def test_values_are_those_of_a_loop_by_hand(tokenizer: Any, batch_size: int) -> None:
    own = OWN | {"top3": target(ACCURACY, num_classes=VOCAB, top_k=3, average="micro")}
    made = evaluator(tokenizer, batch_size, **own)
    assert [measure.name for measure in made.measures] == ["perplexity", "pseudo_perplexity", *own]
    assert made.measures[2] == Measure("hits", "Best hits", "the share of targets among the best", False)
    assert made.measures[4] == Measure("top3", "Top3", "MulticlassAccuracy at the same positions", False)
    ranks, chosen = [], []
    for batch in make(tokenizer).scoring.batches(SET, silent):
        with torch.no_grad():
            every = MODEL(batch.ids, attention_mask=(batch.ids != tokenizer.pad_token_id).long()).logits
        for row, label in zip(every.flatten(0, 1)[batch.targets.positions], batch.targets.targets, strict=True):
            chosen.append(float(row[label]))
            ranks.append(int((row > row[label]).sum()))
    scores = made.score(MODEL, "student", [SET])
    assert 0 < sum(rank < 12 for rank in ranks) < len(ranks)
    assert scores["hits"]["small"] == pytest.approx(sum(rank < 12 for rank in ranks) / len(ranks))
    assert scores["top3"]["small"] == pytest.approx(sum(rank < 3 for rank in ranks) / len(ranks))
    assert scores["median"]["small"] == pytest.approx(float(np.median(chosen)), rel=1e-5)
    without = evaluator(tokenizer, batch_size).score(MODEL, "student", [SET])
    assert {name: scores[name] for name in without} == without, "measures of the user's change no other"


# --- classes and values --------------------------------------------------------------------------------------------


def table_scores(labels: np.ndarray, classes: tuple[str, ...], width: int, **measures: Any) -> tuple[Any, Tensor]:
    """Values of a set of 40 texts by a model that knows nothing, and its outputs for them [40, width]."""
    tokenizer, draw = vocabulary_of("bert"), np.random.default_rng(1)
    texts = [chr(97 + number) for number in draw.integers(0, 26, 40)]
    rows = class_sequences(LabelledTexts("made", texts, None, labels, classes), tokenizer, 8, "length")
    given = {"labels": labels, "classes": classes, "measures": OF_TABLES[bool(classes)]}
    data = ClassSet("table", "", rows.sequences, 40, collator=Labelled(rows), **given)
    settings = EvaluateConfig(batch_size=7, measures=measures)
    scoring = Scoring(data.collator, tokenizer, settings, ALONE, [data], ("class",))
    of_first_word = torch.from_numpy(draw.normal(size=(len(tokenizer), width))).float()

    def model(inputs: dict[str, Tensor], documents: Any, spec: Any) -> Outputs:
        return Outputs(None, {}, extra={"class": of_first_word[inputs["input_ids"][:, 1]]})

    run: Any = Evaluator(scoring, [TablePass(scoring)], PrecisionConfig()).passes[0]
    return run.score(model, data, silent).values, of_first_word[data.sequences[:, 1].astype(np.int64)]


def test_of_classes_they_read_logits_and_labels() -> None:
    labels = np.random.default_rng(0).integers(0, 3, 40)
    mine, best = target(ACCURACY, num_classes=3, average="micro"), target("own_metrics.Hits", best=2)
    values, outputs = table_scores(labels, ("a", "b", "c"), 3, mine=mine, best_two=best)
    right = float((outputs.argmax(-1).numpy() == labels).mean())
    assert values["mine"] == pytest.approx(right) and values["accuracy"] == pytest.approx(100 * right)
    among = [label in row.topk(2).indices for row, label in zip(outputs, labels, strict=True)]
    assert values["best_two"] == pytest.approx(sum(among) / 40)
    with pytest.raises(SettingError, match=r"^evaluate\.measures\.accuracy: this task measures accuracy itself"):
        table_scores(labels, ("a", "b", "c"), 3, accuracy=mine)


def test_of_values_they_read_predictions_and_values(lines: list[str]) -> None:
    labels = np.random.default_rng(0).normal(size=40)
    own = {"error": target("torchmetrics.regression.MeanSquaredError"), "none": target("own_metrics.OfNone")}
    values, outputs = table_scores(labels, (), 1, **own)
    assert values["error"] == pytest.approx(float(((outputs[:, 0].numpy() - labels) ** 2).mean()), rel=1e-5)
    assert np.isnan(values["none"])
    assert lines == ["evaluate.measures.none: it gives nan on table, so there is no score of it"]


# --- ranks ---------------------------------------------------------------------------------------------------------

OWN = {"hits": target("own_metrics.Hits", best=12), "median": target("own_metrics.MedianLogit")}
OF_RANKS = OWN | {"top3": target(ACCURACY, num_classes=VOCAB, top_k=3), "widest": target("own_metrics.Longest")}
NUM_ROWS = (15, 2, 1)  # of the sets: in the last one only one of the ranks has a sequence


def on_a_rank(settings: BackendConfig) -> tuple[dict[str, dict[str, float]], int]:
    """Scores by one rank, and how often it has called for an exchange."""
    torch.set_num_threads(1)
    ranks = join_ranks(settings)
    rows = [make_rows(number, shortest=11, seed=number) for number in NUM_ROWS]
    masks, single = make_masks(make_tokenizer(), rows[0], mlm_probability=0.5), PseudoPerplexityConfig(fraction=0.0)
    chosen = EvaluateConfig(batch_size=4, measures=OF_RANKS, pseudo_perplexity=single)
    sets = [EvaluationSet(f"{len(each)} rows", "", each, 1) for each in rows]
    scores = make_evaluator(chosen, masks, PrecisionConfig(), ranks).score(MODEL, "student", sets)
    plain = make_evaluator(chosen.changed(measures={}), masks, PrecisionConfig(), ranks)
    before = ranks.traffic.num_collectives
    plain.score(MODEL, "student", sets)
    count = ranks.traffic.num_collectives - before
    ranks.close()
    return scores, count


@pytest.mark.parametrize("name", ["ddp", pytest.param("horovod", marks=HOROVOD)])
def test_two_ranks_give_the_values_of_one(name: str, tmp_path: Any) -> None:
    alone, _ = on_a_rank(BackendConfig(device="cpu"))
    settings = BackendConfig(name=name, device="cpu", threads=1, timeout=60.0)
    for scores, exchanges in run_ranks(2, tmp_path, on_a_rank, settings):
        assert scores.keys() == alone.keys() == {"perplexity", *OF_RANKS}
        for measure, values in alone.items():
            assert len(values) == len(NUM_ROWS) and scores[measure] == pytest.approx(values, rel=1e-5), measure
        assert exchanges == 2 * len(NUM_ROWS), "perplexity takes one for each set, and a meeting before it"


# --- refusals ------------------------------------------------------------------------------------------------------


def test_a_list_that_each_rank_has_longer_or_shorter_is_refused() -> None:
    """Each of its tensors would be an exchange."""
    ranks: Any = SimpleNamespace(size=2, device=torch.device("cpu"))
    settings = {"m": Component("evaluate.measures.m", "own_metrics.Apart", {})}
    with pytest.raises(SettingError, match=r"keeps values as a list.*dist_reduce_fx='cat'"):
        UserMeasures(settings, VOCAB, ranks)


@pytest.mark.parametrize(
    ("name", "measure", "words"),
    [
        ("loss", target("own_metrics.Hits"), "results use the name loss already"),
        ("top1", target("own_metrics.Hits"), "results use the name top1 already"),
        ("two words", target("own_metrics.Hits"), "letters, digits and underscores"),
        ("mine", target("own_metrics.Nothing"), "imported"),
        ("mine", target("own_metrics.Hits", worst=1), "mine.worst: no setting"),
        ("mine", target("own_parts.Triangle"), "_target_=own_parts.Triangle is no Metric"),
        # What shows only when it is made, before anything is scored.
        ("mine", target("own_metrics.no_metric"), "gives no Metric"),
        ("mine", target("own_metrics.Undecided"), "higher_is_better"),
        ("mine", target("own_metrics.Pair"), "its value is 2 numbers"),
        ("mine", target(ACCURACY, num_classes=3), f"does not fit logits [N, {VOCAB}] and targets [N]"),
        ("mine", target("torchmetrics.text.BLEUScore"), "write a subclass"),
    ],
)
def test_what_cannot_be_a_measure_is_refused_early(tokenizer: Any, name: str, measure: Any, words: str) -> None:
    settings = dict(measure)
    with pytest.raises(SettingError) as error:
        check_measures({name: Component("evaluate.measures.mine", settings.pop("_target_"), settings)})
        evaluator(tokenizer, mine=measure)
    assert str(error.value).startswith("evaluate.measures.mine") and words in str(error.value)
