"""Scores against plain loops in float64, of one model or the mean of several, for every batch size and padding."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from tiny import MASK, PAD, SPECIAL, VOCAB, change, make_evaluator, make_model, make_rows, text_config
from torch import nn
from torchmetrics.text import Perplexity as PerplexityOfTorchmetrics
from transformers import BertModel

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
from distill.evaluation import measures
from distill.evaluation.evaluator import Evaluator
from distill.evaluation.masked_copies import Copies, head_rows_at_masks
from distill.evaluation.measures import SetScores, Sums, exp, token_losses
from distill.evaluation.pseudo_perplexity import SinglePass
from distill.evaluation.readers import MeanModel, MeanReader
from distill.evaluation.sets import MASKING, SEED, EvaluationSet, load_sets
from distill.evaluation.speed import tokens_per_second
from distill.models.language_model import LanguageModel
from distill.runtime.errors import SettingError
from distill.runtime.seed import key

ROWS = make_rows(15, shortest=4)
SET = EvaluationSet("small", "a small set", ROWS, 3)
MODEL = make_model("distilbert", 2)
NAMES = ("perplexity", "pseudo_perplexity")


def silent(_: int) -> None:
    return None


def make(tokenizer: Any, batch_size: int = 32, share: float = 1.0, copies: int = 64) -> Evaluator:
    single = PseudoPerplexityConfig(fraction=share, batch_size=copies)
    masks = masked_lm(MASKING, tokenizer, np.bincount(ROWS.reshape(-1), minlength=VOCAB))
    settings = EvaluateConfig(batch_size=batch_size, pseudo_perplexity=single)
    return make_evaluator(settings, masks, PrecisionConfig(evaluate="fp32"), Single(BackendConfig(device="cpu")))


def scored(evaluator: Evaluator, name: str, model: Any, data: EvaluationSet) -> SetScores:
    """What the pass of one measure finds out about one model on one set."""
    (run,) = (each for each in evaluator.passes if each.measures[0].name == name)
    with evaluator.readers.opened(model) as reader:
        return run.score(reader, data, silent)


def perplexity(evaluator: Evaluator, model: Any, data: EvaluationSet = SET) -> float:
    return scored(evaluator, "perplexity", model, data).values["perplexity"]


def pseudo_perplexity(evaluator: Evaluator, model: Any, data: EvaluationSet = SET) -> float:
    return scored(evaluator, "pseudo_perplexity", model, data).values["pseudo_perplexity"]


def positions(evaluator: Evaluator, data: EvaluationSet = SET) -> np.ndarray:
    """Those that pseudo-perplexity scores."""
    (run,) = (each for each in evaluator.passes if isinstance(each, SinglePass))
    return run.positions(data)


def exact(ids: np.ndarray, *models: Any) -> torch.Tensor:
    """Log-probabilities [S, V] of one sequence without its padding, in float64: of `MODEL`, or of the mean of these."""
    found = []
    for model in models or (MODEL,):
        model.double()
        with torch.no_grad():
            found.append(model(input_ids=torch.from_numpy(ids[None])).logits[0].softmax(-1)[:, :VOCAB])
        model.float()
    return (sum(found) / len(found)).log()


def masked(tokenizer: Any, number: int) -> tuple[np.ndarray, np.ndarray]:
    """The fixed mask of one sequence: inputs and targets, without padding."""
    row = ROWS[number : number + 1, : int((ROWS[number] != PAD).sum())].astype(np.int64)
    inputs, targets = make(tokenizer).scoring.collator.mask(row, key(SEED, "evaluation mask", np.array([number])))
    return inputs[0], targets[0]


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


def several() -> list[Any]:
    """Of two families, widths of the head's input and sizes of the embedding."""
    return [make_model("albert", 2, seed=3, vocab=VOCAB + 9), make_model("bert", 2, seed=4)]


@pytest.mark.parametrize("models", [[MODEL], several()], ids=["one", "the mean of two"])
def test_perplexities_are_those_of_plain_loops(models: list[Any], tokenizer: Any, capsys: Any) -> None:
    losses: list[float] = []
    for number in range(len(ROWS)):
        inputs, targets = masked(tokenizer, number)
        log_p = exact(inputs, *models)
        losses += [-float(log_p[place, target]) for place, target in enumerate(targets) if target != IGNORE]
    singly: list[float] = []
    for row in ROWS.astype(np.int64):
        row = row[row != PAD]
        for place in np.flatnonzero(row >= len(SPECIAL)):
            hidden = row.copy()
            hidden[place] = MASK
            singly.append(-float(exact(hidden, *models)[place, row[place]]))
    evaluator = make(tokenizer)
    model = models[0] if len(models) == 1 else MeanModel(models, [0.5, 0.5])
    scores, described = evaluator.score(model, "student", [SET]), evaluator.describe(SET)
    assert scores["perplexity"]["small"] == pytest.approx(math.exp(np.mean(losses)), rel=1e-5)
    assert scores["pseudo_perplexity"]["small"] == pytest.approx(math.exp(np.mean(singly)), rel=1e-5)
    assert (described["positions"], described["pseudo_positions"]) == (len(losses), len(singly))
    assert "student, perplexity on small" in capsys.readouterr().err


def test_agreement_is_that_of_a_plain_loop(tokenizer: Any) -> None:
    student, teacher = MODEL, make_model("bert", 2, seed=8)
    same, kl, count = 0, 0.0, 0
    for number in range(len(ROWS)):
        inputs, targets = masked(tokenizer, number)
        log_q, log_p = exact(inputs, student), exact(inputs, teacher)
        for place in np.flatnonzero(targets != IGNORE):
            same += int(log_q[place].argmax() == log_p[place].argmax())
            pairs = zip(log_p[place].tolist(), log_q[place].tolist(), strict=True)
            kl += sum(math.exp(p) * (p - q) for p, q in pairs)
            count += 1
    for batch_size in (1, 4, 32):
        got = make(tokenizer, batch_size).agree(student, teacher, [SET])["small"]
        assert got == {"top1": same / count, "kl": pytest.approx(kl / count, rel=2e-5)}
    assert kl > 0


@pytest.mark.parametrize("family", ["bert", "roberta", "modernbert", "albert"])
def test_scores_hang_neither_on_batch_size_nor_on_padding(tokenizer: Any, family: str) -> None:
    model = make_model(family, 2)
    wide = EvaluationSet("small", "wider", np.pad(ROWS, ((0, 0), (0, 9)), constant_values=PAD), 3)
    expected = [scored(make(tokenizer), name, model, SET) for name in NAMES]
    for batch_size, copies, data in ((1, 1, SET), (4, 7, SET), (4, 7, wide), (32, 500, wide)):
        for name, whole in zip(NAMES, expected, strict=True):
            got = scored(make(tokenizer, batch_size, copies=copies), name, model, data)
            assert got.values[name] == pytest.approx(whole.values[name], rel=2e-6) and got.positions == whole.positions


def test_ranks_share_the_positions(tokenizer: Any) -> None:
    whole, parts = pseudo_perplexity(make(tokenizer), MODEL), list[list[float]]()
    for rank in range(3):
        evaluator = make(tokenizer, copies=8)
        evaluator.ranks.rank, evaluator.ranks.size = rank, 3
        evaluator.ranks.barrier = lambda: None  # type: ignore[method-assign]
        evaluator.ranks.sum = lambda sums: parts.append(sums[:, -1].tolist()) or sums  # type: ignore[method-assign]
        pseudo_perplexity(evaluator, MODEL)
    counts = [count for _, count in parts]
    assert sum(counts) == len(positions(make(tokenizer))) and max(counts) - min(counts) <= 8
    assert math.exp(sum(total for total, _ in parts) / sum(counts)) == pytest.approx(whole, rel=1e-6)


def test_the_fraction_of_the_positions_is_seeded(tokenizer: Any) -> None:
    data = EvaluationSet("large", "a larger set", make_rows(800, 20), 1)
    every, tenth = (positions(make(tokenizer, share=share), data) for share in (1.0, 0.1))
    assert len(every) == 800 * 18 and np.array_equal(tenth, positions(make(tokenizer, share=0.1), data))
    assert abs(len(tenth) / len(every) - 0.1) < 4.5 * math.sqrt(0.1 * 0.9 / len(every))
    assert set(tenth) <= set(positions(make(tokenizer, share=0.3), data)) <= set(every)
    assert not np.isin(data.sequences.reshape(-1)[tenth], range(len(SPECIAL))).any()
    # A fair draw: its score is near that of all positions.
    small = EvaluationSet("x", "", data.sequences[:60], 1)
    few, all_ = (pseudo_perplexity(make(tokenizer, share=share), MODEL, small) for share in (0.3, 1.0))
    assert few == pytest.approx(all_, rel=0.25) and few != all_
    # Of a short text 16 positions where the fraction draws none: those that a larger one draws first.
    least = positions(make(tokenizer, share=1e-9))
    assert len(least) == 16 and (np.diff(least) > 0).all()
    drawn = (positions(make(tokenizer, share=share)) for share in np.linspace(0.01, 1, 100))
    assert set(least) <= set(next(some for some in drawn if len(some) >= 16))
    without = make(tokenizer, share=0.0).score(MODEL, "student", [SET])
    assert without.keys() == {"perplexity"}, "0 switches the measure off"


def test_scoring_leaves_model_and_training_as_they_were(tokenizer: Any) -> None:
    model, evaluator = make_model("distilbert", 2, dropout=0.5).train(), make(tokenizer)
    before, torch_state = tiny.weights_of(model), torch.get_rng_state()
    first, second = (perplexity(evaluator, model) for _ in range(2))
    assert first == second, "dropout would make them differ"
    pseudo_perplexity(evaluator, model), tokens_per_second(evaluator, [model], SET)
    assert model.training and torch.equal(torch_state, torch.get_rng_state())
    tiny.assert_close(tiny.weights_of(model), before, rtol=0, atol=0)
    model(input_ids=torch.tensor([[2, 7, 3]])).logits.sum().backward()  # no tensor of inference mode has stayed


def test_what_has_no_score_and_hopeless_models(tokenizer: Any) -> None:
    """Certain of the wrong word, or nan: a number for the report, not an error at the end of a long run."""
    empty, evaluator = EvaluationSet("empty", "", np.array([[2, 3, 0, 0], [0, 0, 0, 0]], np.uint16), 1), make(tokenizer)
    scores = evaluator.score(MODEL, "student", [empty])
    assert math.isnan(scores["perplexity"]["empty"]) and "pseudo_perplexity" not in scores
    described = evaluator.describe(empty)
    assert (described["positions"], described["pseudo_positions"], described["tokens"]) == (0, 0, 2)
    model = make_model("distilbert", 1)
    for bias in (600.0, 725.0, 5000.0, math.nan):
        with torch.no_grad():
            model.vocab_projector.bias[1] = bias
        value = perplexity(evaluator, model)
        assert math.isnan(value) if math.isnan(bias) else value > 1e200


@pytest.mark.parametrize("name", NAMES)
def test_a_model_with_more_rows_than_tokens_is_scored_by_its_own_probabilities(
    name: str, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that nothing predicts by a logit of 0 each: of a bias of -inf, the model without them scores the same."""
    model, evaluator = make_model("distilbert", 2, vocab=VOCAB + 24), make(tokenizer)
    padded = scored(evaluator, name, model, SET).values[name]
    monkeypatch.setattr(measures, "LOGITS_BYTES", 8 * VOCAB * 3)  # chunks of logits change nothing
    assert scored(evaluator, name, model, SET).values[name] == pytest.approx(padded, rel=1e-6)
    with torch.no_grad():
        model.get_output_embeddings().bias[VOCAB:] = -math.inf
    assert scored(evaluator, name, model, SET).values[name] < 0.9 * padded
    mean = MeanReader(MeanModel([model, make_model("bert", 1)], [0.5, 0.5]), "fp32")
    logits = mean.logits(torch.randn(3, sum(mean.widths)))
    assert logits.shape == (3, VOCAB + 24)
    torch.testing.assert_close(logits.exp().sum(-1), torch.ones(3))


# --- masked copies


def make_copies(count: int, padded: bool, num_rows: int = 3, length: int = 14) -> Copies:
    """`count` copies of `num_rows` sequences, some masked at their first or last position; padded to unlike lengths."""
    torch.manual_seed(7)
    rows = torch.randint(len(SPECIAL), VOCAB, (num_rows, length))
    lengths = torch.randint(2, length + 1, (num_rows,)) if padded else torch.full((num_rows,), length)
    valid = torch.arange(length) < lengths[:, None]
    rows[~valid] = PAD
    row = torch.randint(num_rows, (count,))
    column = (torch.rand(count) * lengths[row]).long()
    column[::5], column[1::5] = 0, lengths[row[1::5]] - 1
    return Copies(rows, valid if padded else None, row, column, MASK)


class Doubled(BertModel):
    """Not known to the letter: such models run in full."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        out = super().forward(*args, **kwargs)
        out.last_hidden_state = 2 * out.last_hidden_state
        return out


@pytest.mark.parametrize("family", ["bert", "distilbert", "roberta", "modernbert", "albert", "doubled"])
@pytest.mark.parametrize("layers", [1, 2, 4])
@pytest.mark.parametrize("padded", [False, True])
@torch.no_grad()
def test_each_copy_has_the_logits_of_its_own_forward(family: str, layers: int, padded: bool) -> None:
    model = make_model("bert" if family == "doubled" else family, layers)
    if family == "doubled":
        model.bert.__class__ = Doubled
    reader = LanguageModel(model)
    for count in (1, 7, 64):
        copies = make_copies(count, padded)
        found = reader.logits(head_rows_at_masks(reader, copies), VOCAB)
        for logits, row, column in zip(found, copies.row, copies.column, strict=True):
            ids = copies.sequences[row][copies.sequences[row] != PAD].clone()
            ids[column] = MASK
            torch.testing.assert_close(logits, model(input_ids=ids[None]).logits[0, column], rtol=1e-5, atol=4e-5)


@pytest.mark.parametrize("family", ["bert", "distilbert"])
@torch.no_grad()
def test_less_is_computed_than_in_the_full_forward(family: str) -> None:
    """The last layer works on one position a copy, the first projects each sequence once."""
    model, copies = make_model(family, 3), make_copies(60, padded=False, num_rows=2)
    seen: dict[nn.Module, int] = {}

    def count(module: nn.Module, inputs: tuple[torch.Tensor, ...], _: torch.Tensor) -> None:
        seen[module] = seen.get(module, 0) + inputs[0].numel() // inputs[0].shape[-1]

    for module in model.base_model.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(count)
    head_rows_at_masks(LanguageModel(model), copies)
    layers = model.bert.encoder.layer if family == "bert" else model.distilbert.transformer.layer
    every = 60 * copies.sequences.shape[1]
    computed = [{seen[module] for module in layer.modules() if module in seen} for layer in layers]
    assert computed == [{every, copies.sequences.numel() + 60}, {every}, {60}]


# --- sets


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    monkeypatch.delenv("DISTILL_DATA", raising=False)
    text = tmp_path / "books"
    text.mkdir()
    for number in range(8):
        (text / f"{number}.txt").write_text("\n\n".join(" ".join(tiny.WORDS[number:]) for _ in range(6)))
    sources = {"heldout": {"kind": "heldout"}, "own": {"kind": "text", "path": str(text)}}
    sources |= {"wikitext2": {"kind": "wikitext"}}
    settings = {"kind": "text", "path": str(text), "sequence_length": 16, "heldout": 0.25, "workers": 1}
    return text_config(**settings, cache=str(tmp_path / "cache")).changed(
        teacher=TeacherConfig(),
        evaluate=EvaluateConfig(
            sets=["heldout", "own"], sources={name: SourceConfig(**each) for name, each in sources.items()}
        ),
    )


def test_sets_are_loaded_by_name(config: Config, tokenizer: Any) -> None:
    (heldout, own), left_out = load_sets(config, tokenizer)
    assert (heldout.name, own.name, left_out) == ("heldout", "own", [])
    assert own.num_sequences > heldout.num_sequences > 0
    assert own.sequences.shape[1] == 16 and own.documents == 8
    few, again = (load_sets(change(config, "evaluate.max_sequences", 2), tokenizer)[0] for _ in range(2))
    assert [data.num_sequences for data in few] == [2, 2] and np.array_equal(few[1].sequences, again[1].sequences)


def test_sets_that_are_not_to_be_had(config: Config, tokenizer: Any) -> None:
    config = change(config, "evaluate.sets", ["own", "wikitext2"])
    with pytest.raises(SettingError) as error:
        load_sets(config, tokenizer)
    assert all(word in str(error.value) for word in ("wikitext2", "evaluate.missing=skip", "DISTILL_DATA"))
    sets, left_out = load_sets(change(config, "evaluate.missing", Missing.skip), tokenizer)
    assert [data.name for data in sets] == ["own"] and len(left_out) == 1 and "wikitext2" in left_out[0]
