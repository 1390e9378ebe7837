"""student.layers=auto: which layers are found, by which loss, and that the run starts from them."""

import json
import math
import shutil
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from families import make_family
from job import Shelf, assert_same, interrupted, metrics, results
from tiny import PAD, VOCAB, make_batches, make_model, make_rows, make_tokenizer
from torch.nn.functional import cosine_similarity

from distill.config.settings import BackendConfig, MaskingConfig, StudentConfig
from distill.data.batch import Batch
from distill.data.collate.clm import CausalLM
from distill.data.collate.mlm import masked_lm
from distill.data.collate.tables import Labelled
from distill.data.sequence_format import causal_format
from distill.data.text_pairs import LabelledSequences
from distill.distributed.single import Single
from distill.models.kind import CAUSAL, CLASSES, MASKED
from distill.models.layers import RULES
from distill.models.student import from_layers
from distill.runs.facts import LayerSearch
from distill.runs.layer_search import Losses, Prediction, find_layers, search_layers
from distill.runtime.errors import SettingError
from distill.runtime.files import remove, write_manifest

AUTO = ("student.layers=auto", "student.num_layers=2")


class Costs:
    """In place of losses: each layer that is missing costs something, and some choices have a loss of their own."""

    num_sequences, perplexity, refusal = 7, True, "keep layer 0 first"

    def __init__(self, costs: Sequence[float], losses: Any = lambda chosen: None, influence: Any = None) -> None:
        self.costs, self.losses, self.asked = costs, losses, list[tuple[int, ...]]()
        self.turns = influence or costs  # what each layer costs is what it does to its input

    def __call__(self, chosen: tuple[int, ...]) -> float:
        self.asked.append(chosen)
        own = self.losses(chosen)
        return 1 + sum(self.costs[n] for n in range(len(self.costs)) if n not in chosen) if own is None else own

    def influence(self, chosen: tuple[int, ...]) -> list[float]:
        return [self.turns[layer] for layer in chosen]


def search(score: Costs, count: int, seconds: float | None = None) -> LayerSearch:
    return search_layers(len(score.costs), count, score, seconds)  # type: ignore[arg-type]


def test_of_few_subsets_the_best_of_all_is_found() -> None:
    """Layer 1 costs least by itself, but a great deal together with any other one: removal would lose it first."""
    costs = Costs([0.3, 0.1, 0.2, 0.25], lambda chosen: 9.0 if len(chosen) == 2 and 1 not in chosen else None)
    found = search(costs, 2)
    assert found.layers == [0, 1] == found.best[0].layers and found.all_subsets and found.tried == 6
    assert len(costs.asked) == len(set(costs.asked))  # none is scored twice


def test_of_many_subsets_one_layer_after_another_is_removed() -> None:
    score = Costs([5.0, 4.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 3.0])
    found = search(score, 3)
    assert found.layers == [0, 1, 11] and not found.all_subsets and not found.stopped and found.teacher == 1.0
    removals, rules = 5 * 8 + 7 + 6 + 5 + 4, 3  # eight at a time, or all there are; what the rules add to them
    assert found.tried == removals + rules and len(score.asked) == found.tried + 1  # the whole model
    assert {rule for each in found.by_rule for rule in each.rules} == {*RULES}


FIRST_SIX = (0, 1, 2, 3, 4, 5)


@pytest.mark.parametrize(
    "score",
    [
        # Influence alone would remove layer 2, scores keep it.
        Costs([1.0, 1.0, 9.0, 1.0, 1.0, 1.0, *[0.1] * 6], influence=[1.0, 1.0, 0.0, 1.0, 1.0, 1.0, *[0.1] * 6]),
        # Each of the first six seems to cost nothing, until all of them are gone: a rule is better than removals.
        Costs([0.0] * 6 + [1.0] * 6, lambda chosen: 0.5 if chosen == FIRST_SIX else None),
    ],
)
def test_scores_decide_and_not_influence_alone(score: Costs) -> None:
    assert search(score, 6).layers == [*FIRST_SIX]


@pytest.mark.parametrize(("available", "count", "layers"), [(24, 6, [*range(18, 24)]), (8, 4, [0, 1, 2, 3])])
def test_when_the_time_is_up_the_search_ends_with_what_it_has(available: int, count: int, layers: list[int]) -> None:
    """Of a deep teacher all that are too many go at once by influence, which is right where they cost alike."""
    score = Costs([number / 10 for number in range(available)])
    found = search(score, count, seconds=1e-9)
    assert found.stopped and not found.all_subsets
    assert len(score.asked) == 2 and found.layers == layers


@pytest.mark.parametrize(("available", "count"), [(4, 2), (12, 4)])
def test_what_does_not_go_into_the_student_is_left_out_and_nothing_at_all_is_refused(
    available: int, count: int
) -> None:
    costs = [0.0, *[1.0] * (available - 1)]
    found = search(Costs(costs, lambda chosen: None if chosen[0] == 0 else math.inf), count)
    assert found.layers[0] == 0
    assert all(each.loss is not None and math.isfinite(each.loss) for each in [*found.best, *found.by_rule])
    with pytest.raises(SettingError, match="keep layer 0 first"):
        search(Costs(costs, lambda chosen: math.inf), count)


@pytest.mark.parametrize("family", ["bert", "gpt2", "deberta-v2"])  # how blocks are given their input, and give it
def test_the_influence_of_a_layer_is_how_far_it_turns_its_input(family: str) -> None:
    model, tokenizer = (
        make_family(family, **{"n_layer" if family == "gpt2" else "num_hidden_layers": 3}),
        make_tokenizer(),
    )
    tokenizer.eos_token = tokenizer.sep_token
    kind, label, collator = MASKED, "mlm", masked_lm(MaskingConfig(), tokenizer, np.ones(len(tokenizer), np.int64))
    if family == "gpt2":
        kind, label, collator = CAUSAL, "clm", CausalLM(causal_format(tokenizer), packed=False)
    ids = np.random.default_rng(0).integers(5, 40, (6, 16)).astype(np.uint16)
    settings, batches = StudentConfig(layers="auto", dropout=0.0), [*make_batches(ids, collator, batch_size=6).first(6)]
    score = Losses(settings, model, Prediction(kind, label, 40, "fp32"), batches, torch.device("cpu"))
    made = from_layers(settings, model, [0, 2], kind, alias=True).eval()
    with torch.no_grad():
        states = made.base_model(batches[0].ids, output_hidden_states=True).hidden_states
    turned = [float(1 - cosine_similarity(*pair, dim=-1).mean()) for pair in pairwise(states)]
    found = score.influence((0, 2))
    assert found[0] == pytest.approx(turned[0], abs=1e-5)
    assert family == "gpt2" or found[1] == pytest.approx(turned[1], abs=1e-5)  # whose last state is normalised


@pytest.fixture(scope="module")
def searched(shelf: Shelf) -> Path:
    """A run whose student starts from the layers that were found."""
    assert shelf.run(shelf.root / "auto-layers", *AUTO) == 0
    return shelf.root / "auto-layers"


def layers_of(folder: Path) -> list[int]:
    return results(folder)["student"]["start"]["layers"]


def test_the_losses_are_those_of_the_students_that_start_there(shelf: Shelf, searched: Path) -> None:
    """The first step of training reports the same loss, of the same rows with the same masks."""
    found, layers = results(searched)["student"]["start"]["search"], layers_of(searched)
    assert found["layers"] == layers == found["best"][0]["layers"]
    assert found["all_subsets"] and found["tried"] == 6 and found["perplexity"]
    assert found["best"][0]["loss"] <= min(each["loss"] for each in found["by_rule"])
    rows = ["train.batch_size=60", "train.accumulate=1", "train.epochs=null", "train.steps=1"]
    for number, each in enumerate(found["best"][:2]):
        folder = shelf.root / f"untrained-{number}"
        assert shelf.run(folder, *rows, f"student.layers={each['layers']}", "student.dropout=0") == 0
        assert metrics(folder)[0]["loss/mlm"] == pytest.approx(each["loss"], rel=1e-5)
    assert "Layer selection" in (searched / "report.md").read_text()
    assert json.loads((searched / "layers.json").read_text())["layers"] == layers
    assert shelf.run(shelf.root / "named", f"student.layers={layers}") == 0
    assert_same(shelf.root / "named", searched)


def test_a_run_that_goes_on_keeps_its_layers(shelf: Shelf, searched: Path, lines: list[str]) -> None:
    """Whatever a search would give now, as on another machine: the folder of the checkpoint says what they were."""
    folder = interrupted(searched, shelf.root / "auto-resumed")
    other = json.loads((folder / "layers.json").read_text()) | {"layers": [2, 3]}
    state = folder / "checkpoints" / "step-00000006" / "state.json"
    state.write_text(json.dumps(json.loads(state.read_text()) | {"layers": other}))
    (state.parent / "SHA256SUMS").unlink()
    write_manifest(state.parent)
    before = Path(shutil.copytree(folder, shelf.root / "auto-elsewhere-before"))
    assert shelf.run(folder, *AUTO) == 0
    assert layers_of(folder) == [2, 3]
    assert_same(folder, searched)  # the weights are those of the checkpoint
    start = before / "checkpoints" / "step-00000006"
    assert shelf.run(shelf.root / "auto-elsewhere", *AUTO, f"resume={start}") == 0
    assert layers_of(shelf.root / "auto-elsewhere") == [2, 3]
    assert not any("perplexity of the untrained" in line for line in lines)


@pytest.mark.slow
@pytest.mark.parametrize("sharded", ["true", "false"])
def test_models_that_are_sharded_between_ranks_are_searched_before(
    sharded: str, shelf: Shelf, searched: Path, tmp_path: Path
) -> None:
    """The layers are those of one process, and a run that goes on keeps them."""
    ranks = ("backend=fsdp", "backend.processes=2", "train.accumulate=1", f"backend.shard_teacher={sharded}")
    assert "the whole teacher" in shelf.run_alone(tmp_path, *AUTO, *ranks)
    named = results(tmp_path)
    (tmp_path / "results.json").unlink()
    remove(tmp_path / "checkpoints" / "step-00000008")
    assert "the whole teacher" not in shelf.run_alone(tmp_path, *AUTO, *ranks)
    assert layers_of(tmp_path) == named["student"]["start"]["layers"] == layers_of(searched)
    for measure in ("perplexity", "pseudo_perplexity"):
        assert results(tmp_path)["student"][measure] == pytest.approx(named["student"][measure], rel=1e-3)
        one = results(searched)["student"][measure]["heldout"]
        assert named["student"][measure]["heldout"] == pytest.approx(one, rel=0.02)


def test_where_there_is_nothing_to_search_or_to_score_by() -> None:
    """Layers are all alike where one block is called several times; without any label they are to be named."""
    settings, nothing = StudentConfig(layers="auto", num_layers=2), SimpleNamespace()
    albert, words = make_family("albert", num_hidden_layers=4), Prediction(MASKED, "mlm", 64, "fp32")
    assert find_layers(settings, albert, words, nothing, nothing) == {"layers": [0, 2]}  # type: ignore[arg-type]
    rows = make_rows(12)
    held = LabelledSequences(
        sequences=rows, segments=np.zeros_like(rows), targets={"class": np.zeros(0, np.int64)}, pad_id=PAD, digest=""
    )
    numbers = np.arange(12).reshape(-1, 4)
    collated = [Labelled(held).collate(rows[each].astype(np.int64), np.zeros(4, np.uint64), each) for each in numbers]
    first: list[Batch] = collated
    batches: Any = SimpleNamespace(sequences=rows, first=lambda count: first)
    classes, ranks = Prediction(CLASSES, "class", VOCAB, "fp32"), Single(BackendConfig(device="cpu"))
    with pytest.raises(SettingError, match=r"^student\.layers=auto .* the first 12 sequences .*=even$"):
        find_layers(settings, make_model("bert", 4), classes, batches, ranks)
