"""student.layers=auto: which layers are found, by which loss, and that the run starts from them."""

import json
import math
import shutil
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from families import make_family
from job import Shelf, assert_same, command, metrics, results
from tiny import PAD, VOCAB, make_batches, make_model, make_rows, make_tokenizer

from distill.config.settings import BackendConfig, MaskingConfig, StudentConfig
from distill.data.batch import Batch
from distill.data.collate.clm import CausalLM
from distill.data.collate.mlm import masked_lm
from distill.data.collate.tables import Classes
from distill.data.sequence_format import causal_format
from distill.data.text_pairs import ClassSequences
from distill.distributed.single import Single
from distill.models.kind import CAUSAL, CLASSES, MASKED
from distill.models.layer_choice import RULES
from distill.models.student import from_layers
from distill.runs.layer_losses import Losses, Prediction
from distill.runs.layer_removal import Removal
from distill.runs.layer_search import find_layers, remove_layers, score_all, table_of
from distill.runtime.errors import SettingError
from distill.runtime.files import remove


class Costs:
    """In place of losses: each layer that is missing costs something, and some pairs cost more."""

    num_sequences, perplexity, refusal = 7, True, ""

    def __init__(self, costs: Sequence[float], pairs: dict[tuple[int, int], float] | None = None) -> None:
        self.costs, self.pairs, self.asked = costs, pairs or {}, list[tuple[Any, ...]]()

    def __call__(self, chosen: Sequence[Any]) -> float:
        self.asked.append(tuple(map(str, chosen)))
        numbers = [layer for layer in chosen if isinstance(layer, int)]
        missing = [layer for layer in range(len(self.costs)) if layer not in numbers]
        both = sum(cost for pair, cost in self.pairs.items() if set(pair) <= set(missing))
        return 1 + sum(self.costs[layer] for layer in missing) + both

    def record(self, chosen: Sequence[int]) -> list[float]:
        """What each layer costs is what it does to its input."""
        return [self.costs[layer] for layer in chosen]

    def influence_of_runs(self, length: int) -> list[float]:
        return [sum(self.costs[start : start + length]) for start in range(1, len(self.costs) - length + 1)]


def test_of_few_subsets_the_best_of_all_is_found() -> None:
    # Layer 1 costs least by itself, but a great deal together with any other one: greedy removal would lose it first.
    costs = Costs([0.3, 0.1, 0.2, 0.25], {(0, 1): 9.0, (1, 2): 9.0, (1, 3): 9.0})
    found = score_all(4, 2, costs)  # type: ignore[arg-type]
    assert found.layers == [0, 1]
    assert found.all_subsets and found.tried == 6 and found.best[0].layers == found.layers
    assert len(costs.asked) == len(set(costs.asked))  # none is scored twice


def test_of_many_subsets_one_layer_after_another_is_taken_away() -> None:
    costs = [5.0, 4.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 3.0]
    score = Costs(costs)
    found = remove_layers(12, 3, score)  # type: ignore[arg-type]
    assert found.layers == [0, 1, 11] and not found.all_subsets and not found.stopped
    assert found.tried < math.comb(12, 3) and len(score.asked) - 2 == found.tried  # whole model, means
    assert {rule for each in found.by_rule for rule in each.rules} == set(RULES)
    assert found.teacher == 1.0


def test_a_layer_with_little_influence_that_costs_much_stays() -> None:
    """Influence alone would take layer 2 away, scores keep it."""

    class Misleading(Costs):
        def record(self, chosen: Sequence[int]) -> list[float]:
            return [0.0 if layer == 2 else cost for layer, cost in zip(chosen, super().record(chosen), strict=True)]

    found = remove_layers(12, 6, Misleading([1.0, 1.0, 9.0, 1.0, 1.0, 1.0, *[0.1] * 6]))  # type: ignore[arg-type]
    assert found.layers == [0, 1, 2, 3, 4, 5]


def test_an_exchange_finds_what_removals_alone_miss() -> None:
    """Layers 10 and 11 cost least each, and much when both are gone; by then the shortlist has taken one of them."""
    costs, pairs = [4.0] * 5 + [1.0, 1.1, 1.2, 1.3, 1.4, 0.1, 0.2], {(10, number): 1.15 for number in range(5, 10)}
    score = Costs(costs, pairs)
    removal = Removal(12, 6, score)
    removal.begin()
    greedy = removal._reduce(tuple(range(12)))
    removal.run()
    best = min((choice for choice in removal.losses if len(choice) == 6), key=removal.losses.__getitem__)
    assert removal.losses[best] < removal.losses[greedy]
    assert best == min(combinations(range(12), 6), key=score)


def test_when_the_time_is_up_the_layers_of_least_influence_go() -> None:
    """A clock that goes on by a second with each look at it: of 24 layers few were scored."""
    ticks, score = iter(range(10**6)), Costs([number / 10 for number in range(24)])
    removal = Removal(24, 6, score, deadline=30, clock=lambda: next(ticks))
    removal.begin()
    removal.run()
    assert tuple(range(18, 24)) in removal.losses and removal.is_over
    assert len(score.asked) < 40


def test_where_time_is_short_fewer_removals_are_scored() -> None:
    """A score takes a second: of 18 removals with eight scores each about 140 s, with two about 50."""

    class Slow(Costs):
        now = 0.0

        def __call__(self, chosen: Sequence[Any]) -> float:
            self.now += 1.0
            return super().__call__(chosen)

    took = []
    for deadline in (math.inf, 60.0):
        score = Slow([number / 10 for number in range(24)])
        removal = Removal(24, 6, score, deadline, clock=lambda score=score: score.now)  # type: ignore[misc]
        removal.begin()
        removal.run()
        assert tuple(range(18, 24)) in removal.losses
        took.append(score.now)
    assert took[1] <= 61 < took[0]


def test_a_search_that_its_seconds_end_says_so() -> None:
    found = remove_layers(24, 12, Costs([1.0] * 24), seconds=1e-9)  # type: ignore[arg-type]
    assert found.stopped and len(found.layers) == 12 and "student.search_seconds" in table_of(found)[0]
    shallow = score_all(8, 4, Costs([1.0] * 8), seconds=1e-9)  # type: ignore[arg-type]
    assert shallow.stopped and not shallow.all_subsets and len(shallow.layers) == 4


def test_few_sequences_sort_out_what_all_decide() -> None:
    """On few sequences layer 2 looks a little better than layer 1, which it is not."""
    costs = [5.0, 1.0, 0.9] + [0.1 * number for number in range(5)]
    score, rough = Costs(costs), Costs([*costs[:1], 0.9, 1.0, *costs[3:]])
    found = score_all(8, 4, score, rough)  # type: ignore[arg-type]
    assert found.layers == score_all(8, 4, Costs(costs)).layers  # type: ignore[arg-type]
    assert len(score.asked) < 20 < len(rough.asked) and found.tried >= len(set(rough.asked))
    assert found.best[0].loss == Costs(costs)(found.layers)


def test_a_rule_that_is_better_than_removals_is_taken() -> None:
    """Of 12 layers each of the first six seems to cost nothing, until all of them are gone."""

    class Traps(Costs):
        def __call__(self, chosen: Sequence[Any]) -> float:
            numbers = {layer for layer in chosen if isinstance(layer, int)}
            return 0.5 if numbers == set(range(6)) else super().__call__(chosen)

    found = remove_layers(12, 6, Traps([0.0] * 6 + [1.0] * 6))  # type: ignore[arg-type]
    assert found.layers == [0, 1, 2, 3, 4, 5] and found.best[0].loss == 0.5


def test_what_does_not_go_into_the_student_is_left_out_and_nothing_at_all_is_refused() -> None:
    class Refusing(Costs):
        refusal = "keep layer 0 first"

        def __call__(self, chosen: Sequence[Any]) -> float:
            return super().__call__(chosen) if chosen[0] == self.needed else math.inf

    refusing = Refusing([0.1, 0.5, 0.2, 0.3])
    refusing.needed = 0  # type: ignore[attr-defined]
    found = score_all(4, 2, refusing)  # type: ignore[arg-type]
    assert found.layers == [0, 1]
    deep = Refusing([0.0, *[1.0] * 11])
    deep.needed = 0  # type: ignore[attr-defined]
    removed = remove_layers(12, 4, deep)  # type: ignore[arg-type]
    assert removed.layers[0] == 0
    assert all(math.isfinite(each.loss) for each in [*found.best, *found.by_rule, *removed.best, *removed.by_rule])
    for attempt in (refusing, deep):
        attempt.needed = 99  # type: ignore[attr-defined]
    with pytest.raises(SettingError, match="keep layer 0 first"):
        score_all(4, 2, refusing)  # type: ignore[arg-type]
    with pytest.raises(SettingError, match="keep layer 0 first"):
        remove_layers(12, 4, deep)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "family", ["bert", "distilbert", "roberta", "deberta-v2", "gpt2", "llama", "gemma2", "modernbert"]
)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_losses_from_recorded_layers_are_those_without(family: str, precision: str) -> None:
    """Bit for bit, whatever the two choices share; the influence of a layer is that of its hidden states."""
    names = {"gpt2": "n_layer", "distilbert": "n_layers"}
    depth: dict[str, Any] = {names.get(family, "num_hidden_layers"): 5}
    if family == "gemma2":
        depth["layer_types"] = ["sliding_attention", "full_attention", "full_attention", "sliding_attention"] * 2
        depth["layer_types"] = depth["layer_types"][:5]
    model = make_family(family, **depth).eval()
    causal = family in ("gpt2", "llama", "gemma2")
    kind, label = (CAUSAL, "clm") if causal else (MASKED, "mlm")
    ids = np.random.default_rng(0).integers(5, 40, (6, 16)).astype(np.uint16)
    tokenizer = make_tokenizer()
    tokenizer.eos_token = tokenizer.sep_token
    collator = (
        CausalLM(causal_format(tokenizer), packed=False) if causal
        else masked_lm(MaskingConfig(), tokenizer, np.ones(len(tokenizer), np.int64))
    )  # fmt: skip
    settings, cpu = StudentConfig(layers="auto", dropout=0.0), torch.device("cpu")
    batches = list(make_batches(ids, collator, batch_size=3).first(6))
    prediction = Prediction(kind, label, 40, precision)
    plain, fast = (Losses(settings, model, prediction, batches, cpu) for _ in range(2))
    fast.record((0, 1, 2, 3, 4))
    choices = [(0, 1, 2, 3, 4), (0, 1, 3, 4), (0, 2, 4), (0, 1, 2)]
    assert [fast(choice) for choice in choices] == [plain(choice) for choice in choices]
    influence = fast.record((0, 1, 3, 4))
    assert influence == plain.record((0, 1, 3, 4)) and all(0 <= value <= 2 for value in influence)
    assert fast((0, 1, 4)) == plain((0, 1, 4)) != plain((0, 1, 3, 4))
    assert fast.influence_of_runs(1) == pytest.approx(influence[1:], abs=1e-6)


def test_a_list_in_place_of_a_layer_gives_the_mean_of_their_weights() -> None:
    teacher, settings = make_model("bert", 4), StudentConfig(architecture="distilbert")
    made = from_layers(settings, teacher, [[0, 1], 3], MASKED, alias=False)
    blocks = teacher.bert.encoder.layer
    first, second = (blocks[number].attention.self.query.weight for number in (0, 1))
    found = made.distilbert.transformer.layer
    torch.testing.assert_close(found[0].attention.q_lin.weight, (first + second) / 2)
    assert torch.equal(found[1].attention.q_lin.weight, blocks[3].attention.self.query.weight)


@pytest.fixture(scope="module")
def searched(shelf: Shelf) -> Path:
    """A run whose student starts from the layers that were found."""
    folder = shelf.root / "auto-layers"
    assert shelf.run(folder, "student.layers=auto", "student.num_layers=2") == 0
    return folder


def test_the_losses_are_those_of_the_students_that_start_there(shelf: Shelf, searched: Path) -> None:
    """The first step of training reports the same loss, of the same rows with the same masks."""
    start = results(searched)["student"]["start"]
    found = start["search"]
    assert found["layers"] == start["layers"] == found["best"][0]["layers"]
    assert found["all_subsets"] and found["tried"] == 6 and found["perplexity"]
    assert found["best"][0]["loss"] <= min(each["loss"] for each in found["by_rule"] if "averaged" not in each["rules"])
    rows = ["train.batch_size=60", "train.accumulate=1", "train.epochs=null", "train.steps=1"]
    for number, each in enumerate(found["best"][:2]):
        folder = shelf.root / f"untrained-{number}"
        assert shelf.run(folder, *rows, f"student.layers={each['layers']}", "student.dropout=0") == 0
        assert metrics(folder)[0]["loss/mlm"] == pytest.approx(each["loss"], rel=1e-5)


def test_the_report_shows_the_table(searched: Path) -> None:
    report = (searched / "report.md").read_text()
    assert "Layer selection" in report and "the whole teacher" in report and "every second" in report
    assert (
        json.loads((searched / "layers.json").read_text())["layers"] == results(searched)["student"]["start"]["layers"]
    )


def test_naming_the_layers_that_were_found_gives_the_same_student(shelf: Shelf, searched: Path) -> None:
    folder = shelf.root / "named"
    assert shelf.run(folder, f"student.layers={results(searched)['student']['start']['layers']}") == 0
    assert_same(folder, searched)


@pytest.mark.slow
def test_several_ranks_find_the_same(shelf: Shelf, searched: Path) -> None:
    folder = shelf.root / "auto-ranks"
    ranks = ["backend=ddp", "backend.processes=2", "train.accumulate=1"]
    process = command(*shelf.arguments(folder, "student.layers=auto", "student.num_layers=2", *ranks))
    _, errors = process.communicate(timeout=500)
    assert process.returncode == 0, errors
    assert results(folder)["student"]["start"]["layers"] == results(searched)["student"]["start"]["layers"]
    assert errors.count("student.layers=auto: perplexity") == 1  # rank 0 alone speaks


def test_a_run_that_goes_on_keeps_its_layers(shelf: Shelf, searched: Path, lines: list[str]) -> None:
    """Whatever a search would give now, as on another machine: the folder of the checkpoint says what they were."""
    folder, arguments = shelf.root / "auto-resumed", ["student.layers=auto", "student.num_layers=2"]
    shutil.copytree(searched, folder)
    (folder / "results.json").unlink()
    remove(folder / "checkpoints" / "step-00000008")
    other = json.loads((folder / "layers.json").read_text()) | {"layers": [2, 3]}
    (folder / "layers.json").write_text(json.dumps(other))
    shutil.copytree(folder, shelf.root / "auto-elsewhere-before")
    assert shelf.run(folder, *arguments) == 0
    assert results(folder)["student"]["start"]["layers"] == [2, 3]
    assert_same(folder, searched)  # the weights are those of the checkpoint
    elsewhere = shelf.root / "auto-elsewhere"
    start = shelf.root / "auto-elsewhere-before" / "checkpoints" / "step-00000006"
    assert shelf.run(elsewhere, *arguments, f"resume={start}") == 0
    assert results(elsewhere)["student"]["start"]["layers"] == [2, 3]
    assert not any("perplexity of the untrained" in line for line in lines)


@pytest.mark.parametrize("left", [None, "{", '{"layers": 3}'])
def test_layers_that_nobody_knows_any_more_are_not_made_up(
    shelf: Shelf, searched: Path, lines: list[str], left: str | None, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(searched, folder)
    (folder / "results.json").unlink()
    remove(folder / "checkpoints" / "step-00000008")
    (folder / "layers.json").unlink()
    if left is not None:
        (folder / "layers.json").write_text(left)
    assert shelf.run(folder, "student.layers=auto", "student.num_layers=2") == 0
    assert "layers" not in results(folder)["student"]["start"]
    assert_same(folder, searched)
    assert sum("its student started from is lost" in line for line in lines) == 1


@pytest.mark.slow
@pytest.mark.parametrize("divided", ["true", "false"])
def test_models_that_are_divided_between_ranks_are_searched_before(
    divided: str, shelf: Shelf, searched: Path, tmp_path: Path
) -> None:
    """The layers are those of one process, and a run that goes on keeps them."""
    arguments = shelf.arguments(
        tmp_path, "student.layers=auto", "student.num_layers=2", "backend=fsdp", "backend.processes=2",
        "train.accumulate=1", f"backend.shard_teacher={divided}",
    )  # fmt: skip
    for goes_on in (False, True):
        _, errors = (process := command(*arguments)).communicate(timeout=500)
        assert process.returncode == 0, errors
        start = results(tmp_path)["student"]["start"]
        assert start["layers"] == results(searched)["student"]["start"]["layers"]
        assert ("the whole teacher" in errors) is not goes_on
        if not goes_on:
            named = results(tmp_path)
            (tmp_path / "results.json").unlink()
            remove(tmp_path / "checkpoints" / "step-00000008")
    for measure in ("perplexity", "pseudo_perplexity"):
        assert results(tmp_path)["student"][measure] == pytest.approx(named["student"][measure], rel=1e-3)
        one = results(searched)["student"][measure]["heldout"]
        assert named["student"][measure]["heldout"] == pytest.approx(one, rel=0.02)


def test_layers_are_all_alike_where_one_block_is_called_several_times() -> None:
    settings = StudentConfig(layers="auto", num_layers=2)
    albert = make_family("albert", num_hidden_layers=4)
    nothing: Any = SimpleNamespace()
    assert find_layers(settings, albert, Prediction(MASKED, "mlm", 64, "fp32"), nothing, nothing) == {"layers": [0, 2]}


ON_CLASSES = Prediction(CLASSES, "class", VOCAB, "fp32")


def texts(count: int, labelled: int) -> list[Batch]:
    """Batches of four; those with a label come last."""
    rows = make_rows(count)
    held = ClassSequences(rows, np.zeros_like(rows), np.zeros(labelled, np.int64), PAD, 0, "")
    numbers = np.arange(count)[::-1].reshape(-1, 4)
    return [Classes(held).collate(rows[each].astype(np.int64), np.zeros(4, np.uint64), each) for each in numbers]


def test_where_nothing_that_is_scored_has_a_label_layers_are_to_be_named() -> None:
    settings, ranks = StudentConfig(layers="auto", num_layers=2), Single(BackendConfig(device="cpu"))
    batches: Any = SimpleNamespace(sequences=make_rows(12), first=lambda count: texts(12, 0))
    words = r"^student\.layers=auto scores layers by what is to be predicted, and the first 12 sequences .*=even$"
    with pytest.raises(SettingError, match=words):
        find_layers(settings, make_model("bert", 4), ON_CLASSES, batches, ranks)


def test_few_sequences_without_a_label_sort_out_nothing() -> None:
    settings, cpu = StudentConfig(layers="auto", num_layers=2), torch.device("cpu")
    score = Losses(settings, None, ON_CLASSES, texts(16, 4), cpu)
    assert score.num_targets == 4 and score.of_fewer_sequences(4) is None and score.of_fewer_sequences(5) is None
    fewer = Losses(settings, None, ON_CLASSES, texts(16, 16), cpu).of_fewer_sequences(4)
    assert fewer is not None and fewer.num_targets == fewer.num_sequences == 4
