"""Scores against plain loops in float64, the same for every batch size and padding; missing sets are refused."""

import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from tiny import MASK, PAD, SPECIAL, VOCAB, change, make_evaluator, make_model, make_rows, text_config
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torchmetrics.text import Perplexity as PerplexityOfTorchmetrics

from distill.config.settings import (
    BackendConfig,
    Config,
    EvaluateConfig,
    Missing,
    PrecisionConfig,
    PseudoPerplexityConfig,
    SourceConfig,
    TeacherConfig,
)
from distill.data.collate.mlm import IGNORE, masked_lm
from distill.distributed.single import Single
from distill.evaluation.evaluator import Evaluator
from distill.evaluation.measures import SetScores, Sums, exp, token_losses
from distill.evaluation.pseudo_perplexity import SinglePass
from distill.evaluation.sets import MASKING, SEED, EvaluationSet, load_sets
from distill.evaluation.speed import tokens_per_second
from distill.runtime.errors import SettingError
from distill.runtime.seed import key

ROWS = make_rows(15, shortest=4)
SET = EvaluationSet("small", "a small set", ROWS, 3)
MODEL = make_model("distilbert", 2)


def silent(_: int) -> None:
    return None


def test_the_mean_is_that_of_torchmetrics() -> None:
    torch.manual_seed(0)
    as_they_are: Any = SimpleNamespace(logits=lambda rows: rows)
    sums = Sums(2, 2, Single(BackendConfig(device="cpu")))
    reference = PerplexityOfTorchmetrics().set_dtype(torch.float64)
    for size in (3, 1, 8):
        logits, targets = 5 * torch.randn(size, VOCAB), torch.randint(VOCAB, (size,))
        losses = token_losses(as_they_are, logits, targets, VOCAB)
        sums.add(torch.arange(size) % 2, losses, torch.ones_like(losses))
        reference.update(logits[None].double(), targets[None])
    (*of_first, loss), (_, _, count) = sums.over_ranks()
    assert exp(loss / count) == pytest.approx(float(reference.compute()), rel=1e-12)
    assert count == 12 and sum(of_first) == pytest.approx(loss)


def make(
    tokenizer: Any, batch_size: int = 32, share: float = 1.0, copies: int = 64, precision: str = "fp32"
) -> Evaluator:
    settings = EvaluateConfig(
        batch_size=batch_size, pseudo_perplexity=PseudoPerplexityConfig(fraction=share, batch_size=copies)
    )
    masks = masked_lm(MASKING, tokenizer, np.bincount(ROWS.reshape(-1), minlength=VOCAB))
    ranks = Single(BackendConfig(device="cpu"))
    return make_evaluator(settings, masks, PrecisionConfig(evaluate=precision), ranks)


def scored(
    evaluator: Evaluator, name: str, model: Any, data: EvaluationSet, done: Callable[[int], None] = silent
) -> SetScores:
    """What the pass of one measure finds out about one model on one set."""
    (run,) = (each for each in evaluator.passes if each.measures[0].name == name)
    with evaluator.readers.opened(model) as reader:
        return run.score(reader, data, done)


def measured(
    evaluator: Evaluator, name: str, model: Any, data: EvaluationSet, done: Callable[[int], None] = silent
) -> float:
    """One measure of one model on one set."""
    return scored(evaluator, name, model, data, done).values[name]


def perplexity(evaluator: Evaluator, model: Any, data: EvaluationSet, done: Callable[[int], None] = silent) -> float:
    return measured(evaluator, "perplexity", model, data, done)


def pseudo_perplexity(
    evaluator: Evaluator, model: Any, data: EvaluationSet, done: Callable[[int], None] = silent
) -> float:
    return measured(evaluator, "pseudo_perplexity", model, data, done)


def agreement(evaluator: Evaluator, student: Any, teacher: Any, data: EvaluationSet) -> dict[str, float]:
    return evaluator.agree(student, teacher, [data])[data.name]


def positions(evaluator: Evaluator, data: EvaluationSet) -> np.ndarray:
    """Those that pseudo-perplexity scores."""
    (run,) = (each for each in evaluator.passes if isinstance(each, SinglePass))
    return run.positions(data)


def exact(ids: np.ndarray, model: Any = MODEL) -> torch.Tensor:
    """Log-probabilities [S, V] of one sequence without its padding, in float64."""
    model.double()
    try:
        with torch.no_grad():
            return model(input_ids=torch.from_numpy(ids[None])).logits[0, :, :VOCAB].log_softmax(-1)
    finally:
        model.float()


def masked(tokenizer: Any, number: int) -> tuple[np.ndarray, np.ndarray]:
    """The fixed mask of one sequence: inputs and targets, without padding."""
    row = ROWS[number : number + 1, : int((ROWS[number] != PAD).sum())].astype(np.int64)
    inputs, targets = make(tokenizer).scoring.collator.mask(row, key(SEED, "evaluation mask", np.array([number])))
    return inputs[0], targets[0]


def test_a_short_text_is_scored_at_sixteen_positions_where_the_fraction_draws_none(tokenizer: Any) -> None:
    """Those that a larger fraction draws first; 0 switches the measure off."""
    few = positions(make(tokenizer, share=1e-9), SET)
    assert len(few) == 16 and (np.diff(few) > 0).all()
    drawn = (positions(make(tokenizer, share=share), SET) for share in np.linspace(0.01, 1, 100))
    assert set(few) <= set(next(some for some in drawn if len(some) >= 16))
    assert math.isfinite(pseudo_perplexity(make(tokenizer, share=1e-9), MODEL, SET))
    assert not any(isinstance(run, SinglePass) and run.size(SET) for run in make(tokenizer, share=0.0).passes)


def test_perplexity_is_that_of_a_plain_loop(tokenizer: Any) -> None:
    total, count = 0.0, 0
    for number in range(len(ROWS)):
        inputs, targets = masked(tokenizer, number)
        log_p = exact(inputs)
        for position, target in enumerate(targets):
            if target != IGNORE:
                total, count = total - float(log_p[position, target]), count + 1
    evaluator = make(tokenizer)
    value = evaluator.score(MODEL, "student", [SET])["perplexity"]["small"]
    assert count == evaluator.describe(SET)["positions"] > len(ROWS)
    assert value == pytest.approx(math.exp(total / count), rel=2e-6)


def test_pseudo_perplexity_is_that_of_a_plain_loop(tokenizer: Any) -> None:
    total, count = 0.0, 0
    for row in ROWS.astype(np.int64):
        row = row[row != PAD]
        for position, token in enumerate(row):
            if token >= len(SPECIAL):
                hidden = row.copy()
                hidden[position] = MASK
                total, count = total - float(exact(hidden)[position, token]), count + 1
    evaluator = make(tokenizer)
    value = evaluator.score(MODEL, "student", [SET])["pseudo_perplexity"]["small"]
    assert count == int((~np.isin(ROWS, range(len(SPECIAL)))).sum())
    assert evaluator.describe(SET)["pseudo_positions"] == count
    assert value == pytest.approx(math.exp(total / count), rel=2e-6)


@pytest.mark.parametrize("family", ["bert", "roberta", "modernbert", "albert"])
def test_scores_hang_neither_on_batch_size_nor_on_padding(tokenizer: Any, family: str) -> None:
    model = make_model(family, 2)
    wide = EvaluationSet("small", "wider", np.pad(ROWS, ((0, 0), (0, 9)), constant_values=PAD), 3)
    names = ("perplexity", "pseudo_perplexity")
    expected = [scored(make(tokenizer), name, model, SET) for name in names]
    for batch_size, copies, data in ((1, 1, SET), (4, 7, SET), (4, 7, wide), (32, 500, wide)):
        other = make(tokenizer, batch_size, copies=copies)
        for name, whole in zip(names, expected, strict=True):
            got = scored(other, name, model, data)
            assert got.values[name] == pytest.approx(whole.values[name], rel=2e-6) and got.positions == whole.positions


def test_ranks_share_the_positions(tokenizer: Any) -> None:
    whole = pseudo_perplexity(make(tokenizer), MODEL, SET)
    parts: list[list[float]] = []
    for rank in range(3):
        evaluator = make(tokenizer, copies=8)
        evaluator.ranks.rank, evaluator.ranks.size = rank, 3

        def own(sums: torch.Tensor) -> torch.Tensor:  # the rank's own share
            parts.append(sums[:, -1].tolist())
            return sums

        evaluator.ranks.sum = own  # type: ignore[method-assign]
        pseudo_perplexity(evaluator, MODEL, SET)
    counts = [count for _, count in parts]
    assert sum(counts) == len(positions(make(tokenizer), SET)) and max(counts) - min(counts) <= 8
    assert math.exp(sum(total for total, _ in parts) / sum(counts)) == pytest.approx(whole, rel=1e-6)


class Largest(TorchDispatchMode):
    """Sees the elements of the largest tensor that any operation makes."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        made = [out] if isinstance(out, torch.Tensor) else [x for x in tree_leaves(out) if isinstance(x, torch.Tensor)]
        self.elements = max([self.elements, *(x.numel() for x in made)])
        return out


def test_pseudo_perplexity_needs_no_more_memory_for_long_or_many_rows(tokenizer: Any) -> None:
    vocab, model = 4096, make_model("distilbert", 2, vocab=4096, max_position_embeddings=512)
    elements = []
    for length, count in ((128, 1), (512, 1), (512, 2)):
        with Largest() as largest:
            data = EvaluationSet("long", "", make_rows(count, length), 1)
            pseudo_perplexity(make(tokenizer, share=0.1, copies=8), model, data)
        elements.append(largest.elements)
    assert elements[0] == elements[1] == elements[2] < 128 * vocab, "no tensor of even one copy's whole logits"


def test_share_of_the_positions_is_seeded(tokenizer: Any) -> None:
    data = EvaluationSet("large", "a larger set", make_rows(800, 20), 1)
    every = positions(make(tokenizer), data)
    tenth = positions(make(tokenizer, share=0.1), data)
    assert len(every) == 800 * 18 and np.array_equal(tenth, positions(make(tokenizer, share=0.1), data))
    assert abs(len(tenth) / len(every) - 0.1) < 4.5 * math.sqrt(0.1 * 0.9 / len(every))
    assert set(tenth) <= set(positions(make(tokenizer, share=0.3), data)) <= set(every)
    assert not np.isin(data.sequences.reshape(-1)[tenth], range(len(SPECIAL))).any()
    # A fair draw: its score is near that of all positions.
    small = EvaluationSet("x", "", data.sequences[:60], 1)
    few, all_ = (pseudo_perplexity(make(tokenizer, share=share), MODEL, small) for share in (0.3, 1.0))
    assert few == pytest.approx(all_, rel=0.25) and few != all_


def test_agreement_is_that_of_a_plain_loop(tokenizer: Any) -> None:
    student, teacher = MODEL, make_model("bert", 2, seed=8)
    same, kl, count = 0, 0.0, 0
    for number in range(len(ROWS)):
        inputs, targets = masked(tokenizer, number)
        log_q, log_p = exact(inputs, student), exact(inputs, teacher)
        for position in np.flatnonzero(targets != IGNORE):
            same += int(log_q[position].argmax() == log_p[position].argmax())
            kl += sum(
                math.exp(p) * (p - q) for p, q in zip(log_p[position].tolist(), log_q[position].tolist(), strict=True)
            )
            count += 1
    for batch_size in (1, 4, 32):
        got = agreement(make(tokenizer, batch_size), student, teacher, SET)
        assert got == {"top1": same / count, "kl": pytest.approx(kl / count, rel=2e-5)}
    assert kl > 0


def test_score_names_sets_and_measures(tokenizer: Any, capsys: pytest.CaptureFixture[str]) -> None:
    other = EvaluationSet("other", "another", ROWS[:4], 1)
    scores = make(tokenizer).score(MODEL, "student", [SET, other])
    assert scores.keys() == {"perplexity", "pseudo_perplexity"}
    assert all(values.keys() == {"small", "other"} for values in scores.values())
    assert "student, perplexity on small" in capsys.readouterr().err
    without = make(tokenizer, share=0.0).score(MODEL, "student", [SET])
    assert without.keys() == {"perplexity"} and without["perplexity"]["small"] == scores["perplexity"]["small"]
    assert make(tokenizer).agree(MODEL, MODEL, [SET, other]).keys() == {"small", "other"}
    assert make(tokenizer).score(MODEL, "student", []) == {"perplexity": {}, "pseudo_perplexity": {}}


def test_scoring_leaves_model_and_training_as_they_were(tokenizer: Any) -> None:
    model = make_model("distilbert", 2, dropout=0.5).train()
    before, torch_state = tiny.weights_of(model), torch.get_rng_state()
    evaluator = make(tokenizer)
    first, second = (perplexity(evaluator, model, SET) for _ in range(2))
    assert first == second, "dropout would make them differ"
    pseudo_perplexity(evaluator, model, SET), tokens_per_second(evaluator, [model], SET)
    assert model.training and torch.equal(torch_state, torch.get_rng_state())
    tiny.assert_close(tiny.weights_of(model), before, rtol=0, atol=0)
    model(input_ids=torch.tensor([[2, 7, 3]])).logits.sum().backward()  # no tensor of inference mode has stayed


def test_rows_without_anything_to_score(tokenizer: Any) -> None:
    empty, evaluator = EvaluationSet("empty", "", np.array([[2, 3, 0, 0], [0, 0, 0, 0]], np.uint16), 1), make(tokenizer)
    scores = evaluator.score(MODEL, "student", [empty])
    assert math.isnan(scores["perplexity"]["empty"]) and "pseudo_perplexity" not in scores
    described = evaluator.describe(empty)
    assert (described["positions"], described["pseudo_positions"], described["tokens"]) == (0, 0, 2)


def test_hopeless_models_have_a_large_score_and_broken_ones_none(tokenizer: Any) -> None:
    """Certain of the wrong word, or nan: a number for the report, not an error at the end of a long run."""
    model = make_model("distilbert", 1)
    for bias, hopeless in ((600.0, True), (725.0, True), (5000.0, True), (math.nan, False)):
        with torch.no_grad():
            model.vocab_projector.bias[1] = bias
        value = perplexity(make(tokenizer), model, SET)
        assert value > 1e200 if hopeless else math.isnan(value)


# --- sets ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    monkeypatch.delenv("DISTILL_DATA", raising=False)
    text = tmp_path / "books"
    text.mkdir()
    for number in range(8):
        (text / f"{number}.txt").write_text("\n\n".join(" ".join(tiny.WORDS[number:]) for _ in range(6)))
    config = text_config(
        kind="text", path=str(text), sequence_length=16, heldout=0.25, cache=str(tmp_path / "cache"), workers=1
    )
    sources = {
        "heldout": SourceConfig(kind="heldout"),
        "own": SourceConfig(kind="text", path=str(text)),
        "wikitext2": SourceConfig(kind="wikitext"),
        "lost": SourceConfig(kind="text", path=str(tmp_path / "lost")),
    }
    return config.changed(
        teacher=TeacherConfig(),
        evaluate=EvaluateConfig(sets=["heldout", "own"], sources=sources),
    )


def test_sets_are_loaded_by_name(config: Config, tokenizer: Any) -> None:
    sets, left_out = load_sets(config, tokenizer)
    assert [data.name for data in sets] == ["heldout", "own"] and left_out == []
    assert (
        sets[1].num_sequences > sets[0].num_sequences > 0
        and sets[1].sequences.shape[1] == 16
        and sets[1].documents == 8
    )
    config = change(config, "evaluate.max_sequences", 2)
    fewer = load_sets(config, tokenizer)[0]
    assert [data.num_sequences for data in fewer] == [2, 2]
    assert np.array_equal(fewer[1].sequences, load_sets(config, tokenizer)[0][1].sequences)


def test_sets_that_are_not_to_be_had(config: Config, tokenizer: Any) -> None:
    config = change(config, "evaluate.sets", ["own", "wikitext2"])
    with pytest.raises(SettingError) as error:
        load_sets(config, tokenizer)
    assert all(word in str(error.value) for word in ("wikitext2", "evaluate.missing=skip", "DISTILL_DATA"))
    config = change(config, "evaluate.missing", Missing.skip)
    sets, left_out = load_sets(config, tokenizer)
    assert [data.name for data in sets] == ["own"] and len(left_out) == 1 and "wikitext2" in left_out[0]
