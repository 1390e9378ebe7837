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
from job import Shelf, assert_same, command, metrics, results
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
from distill.runs.layer_search import Losses, Prediction, find_layers, search_layers, table_of
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

    def influence(self, chosen: Sequence[int]) -> list[float]:
        """What each layer costs is what it does to its input."""
        return [self.costs[layer] for layer in chosen]


def test_of_few_subsets_the_best_of_all_is_found() -> None:
    # Layer 1 costs least by itself, but a great deal together with any other one: greedy removal would lose it first.
    costs = Costs([0.3, 0.1, 0.2, 0.25], {(0, 1): 9.0, (1, 2): 9.0, (1, 3): 9.0})
    found = search_layers(4, 2, costs)  # type: ignore[arg-type]
    assert found.layers == [0, 1]
    assert found.all_subsets and found.tried == 6 and found.best[0].layers == found.layers
    assert len(costs.asked) == len(set(costs.asked))  # none is scored twice


def test_of_many_subsets_one_layer_after_another_is_removed() -> None:
    costs = [5.0, 4.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 3.0]
    score = Costs(costs)
    found = search_layers(12, 3, score)  # type: ignore[arg-type]
    assert found.layers == [0, 1, 11] and not found.all_subsets and not found.stopped
    removals, rules = 5 * 8 + 7 + 6 + 5 + 4, 3  # eight at a time, or all there are; what the rules add to them
    assert found.tried == removals + rules and len(score.asked) == found.tried + 1  # the whole model
    assert {rule for each in found.by_rule for rule in each.rules} == set(RULES)
    assert found.teacher == 1.0


def test_a_layer_with_little_influence_that_costs_much_stays() -> None:
    """Influence alone would remove layer 2, scores keep it."""

    class Misleading(Costs):
        def influence(self, chosen: Sequence[int]) -> list[float]:
            return [0.0 if layer == 2 else self.costs[layer] for layer in chosen]

    found = search_layers(12, 6, Misleading([1.0, 1.0, 9.0, 1.0, 1.0, 1.0, *[0.1] * 6]))  # type: ignore[arg-type]
    assert found.layers == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize(("available", "count"), [(24, 6), (8, 4)])
def test_when_the_time_is_up_the_search_ends_with_what_it_has(available: int, count: int) -> None:
    """Of a deep teacher all that are too many go at once by influence, which is right where they cost alike."""
    score = Costs([number / 10 for number in range(available)])
    found = search_layers(available, count, score, seconds=1e-9)  # type: ignore[arg-type]
    assert found.stopped and not found.all_subsets and "student.search_seconds" in table_of(found)[0]
    assert len(found.layers) == count and len(score.asked) == 2
    assert found.layers == (list(range(18, 24)) if available == 24 else [0, 1, 2, 3])


def test_a_rule_that_is_better_than_removals_is_taken() -> None:
    """Of 12 layers each of the first six seems to cost nothing, until all of them are gone."""

    class Traps(Costs):
        def __call__(self, chosen: Sequence[Any]) -> float:
            numbers = {layer for layer in chosen if isinstance(layer, int)}
            return 0.5 if numbers == set(range(6)) else super().__call__(chosen)

    found = search_layers(12, 6, Traps([0.0] * 6 + [1.0] * 6))  # type: ignore[arg-type]
    assert found.layers == [0, 1, 2, 3, 4, 5] and found.best[0].loss == 0.5


@pytest.mark.parametrize(("available", "count"), [(4, 2), (12, 4)])
def test_what_does_not_go_into_the_student_is_left_out_and_nothing_at_all_is_refused(
    available: int, count: int
) -> None:
    class Refusing(Costs):
        refusal, needed = "keep layer 0 first", 0

        def __call__(self, chosen: Sequence[Any]) -> float:
            return super().__call__(chosen) if chosen[0] == self.needed else math.inf

    refusing = Refusing([0.0, *[1.0] * (available - 1)])
    found = search_layers(available, count, refusing)  # type: ignore[arg-type]
    assert found.layers[0] == 0
    assert all(each.loss is not None and math.isfinite(each.loss) for each in [*found.best, *found.by_rule])
    refusing.needed = 99
    with pytest.raises(SettingError, match="keep layer 0 first"):
        search_layers(available, count, refusing)  # type: ignore[arg-type]


@pytest.mark.parametrize("family", ["bert", "gpt2", "deberta-v2"])  # how blocks are given their input, and give it
def test_the_influence_of_a_layer_is_how_far_it_turns_its_input(family: str) -> None:
    model = make_family(family, **{"n_layer" if family == "gpt2" else "num_hidden_layers": 3}).eval()
    kind, label = (CAUSAL, "clm") if family == "gpt2" else (MASKED, "mlm")
    tokenizer = make_tokenizer()
    tokenizer.eos_token = tokenizer.sep_token
    collator = (
        CausalLM(causal_format(tokenizer), packed=False) if kind is CAUSAL
        else masked_lm(MaskingConfig(), tokenizer, np.ones(len(tokenizer), np.int64))
    )  # fmt: skip
    ids = np.random.default_rng(0).integers(5, 40, (6, 16)).astype(np.uint16)
    settings, batches = (
        StudentConfig(layers="auto", dropout=0.0),
        list(make_batches(ids, collator, batch_size=6).first(6)),
    )
    score = Losses(settings, model, Prediction(kind, label, 40, "fp32"), batches, torch.device("cpu"))
    made = from_layers(settings, model, [0, 2], kind, alias=True).eval()
    with torch.no_grad():
        states = made.base_model(**batches[0].inputs, output_hidden_states=True).hidden_states
    turned = [float(1 - cosine_similarity(*pair, dim=-1).mean()) for pair in pairwise(states)]
    found = score.influence((0, 2))
    assert found[0] == pytest.approx(turned[0], abs=1e-5)
    assert family == "gpt2" or found[1] == pytest.approx(turned[1], abs=1e-5)  # whose last state is normalised


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
    assert found["best"][0]["loss"] <= min(each["loss"] for each in found["by_rule"])
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
    targets = {"class": np.zeros(labelled, np.int64)}
    held = LabelledSequences(sequences=rows, segments=np.zeros_like(rows), targets=targets, pad_id=PAD, digest="")
    numbers = np.arange(count)[::-1].reshape(-1, 4)
    return [Labelled(held).collate(rows[each].astype(np.int64), np.zeros(4, np.uint64), each) for each in numbers]


def test_where_nothing_that_is_scored_has_a_label_layers_are_to_be_named() -> None:
    settings, ranks = StudentConfig(layers="auto", num_layers=2), Single(BackendConfig(device="cpu"))
    batches: Any = SimpleNamespace(sequences=make_rows(12), first=lambda count: texts(12, 0))
    words = r"^student\.layers=auto scores layers by what is to be predicted, and the first 12 sequences .*=even$"
    with pytest.raises(SettingError, match=words):
        find_layers(settings, make_model("bert", 4), ON_CLASSES, batches, ranks)
