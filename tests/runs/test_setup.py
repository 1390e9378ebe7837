"""Formats and kernels of a run: what `auto` is, kept on resume and alike on all ranks; one switch for kernels."""

import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import torch
from job import Shelf, assert_alike, results
from torch._dynamo.utils import counters

from distill.config.settings import BackendConfig, PrecisionConfig
from distill.distributed.single import Single
from distill.models.kind import MASKED
from distill.models.language_model import LAST, LanguageModel, OutputSpec
from distill.runs import setup

AUTO = PrecisionConfig(student="auto", teacher="auto")


class OtherRanks(Single):
    """Rank 0 of several, whose others multiply in bf16 so many times as fast as in fp32."""

    def __init__(self, *others: float) -> None:
        super().__init__(BackendConfig(device="cpu"))
        self.others, self.size = others, 1 + len(others)

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor + torch.tensor([0.0, *self.others])

    def broadcast(self, value: Any) -> Any:
        return value


def choose(speedup: float, *others: float, recorded: dict[str, str] | None = None) -> PrecisionConfig:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(setup, "bf16_speedup", lambda device: speedup)
        return setup.choose_precision(AUTO, recorded or {}, OtherRanks(*others))


@pytest.mark.parametrize(
    ("speedups", "expected", "words"),
    [
        ((1.9,), "bf16", "multiplies 1.9 times as fast"),
        ((0.6,), "fp32", "multiplies 0.6 times as fast"),
        ((0.0,), "fp32", "only emulates bf16"),
        ((1.9, 1.8), "bf16", "1.8"),
        ((1.9, 0.6), "fp32", "0.6"),  # of several ranks the slowest decides for all
    ],
)
def test_auto_takes_bf16_where_it_is_faster_on_all_ranks(
    speedups: tuple[float, ...], expected: str, words: str, lines: list[str]
) -> None:
    chosen = choose(*speedups)
    assert (chosen.student, chosen.teacher, chosen.evaluate) == (expected, expected, "fp32")
    assert len(lines) == 1 and f"precision=auto: {expected}" in lines[0] and words in lines[0]


def test_a_resumed_run_stays_in_its_formats() -> None:
    recorded = {"student": "bf16", "teacher": "bf16", "evaluate": "fp32"}
    assert choose(0.6, recorded=recorded).student == "bf16"
    assert setup.choose_precision(PrecisionConfig(), recorded, OtherRanks()).student == "fp32", "what is given wins"


def test_a_run_says_records_and_keeps_its_formats(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, arguments = shelf.root / "auto", ("precision=auto", "train.steps=4")
    monkeypatch.setattr(setup, "bf16_speedup", lambda device: 1.9)
    assert shelf.run(folder, *arguments) == 0
    newest = sorted((folder / "checkpoints").iterdir())[-1]
    assert json.loads((newest / "state.json").read_text())["precision"]["student"] == "bf16"
    assert results(folder)["precision"]["student"] == "bf16"
    (folder / "results.json").unlink()
    monkeypatch.setattr(setup, "bf16_speedup", lambda device: 0.6)  # as after a move to another machine
    assert shelf.run(folder, *arguments) == 0
    assert results(folder)["precision"]["student"] == "bf16"


def hidden_and_gradient(model: LanguageModel) -> torch.Tensor:
    """Hidden states of two layers and the gradient of all that they depend on, flat."""
    inputs = {"input_ids": torch.from_numpy(tiny.make_rows(4)).long()}
    model.zero_grad()
    hidden = model(inputs, None, OutputSpec(layers=(1, LAST))).hidden
    (hidden[1].square().sum() + hidden[LAST].sum()).backward()
    found = [*hidden.values(), *(p.grad for p in model.parameters() if p.grad is not None)]
    return torch.cat([each.detach().flatten() for each in found])


@pytest.mark.slow
def test_an_encoder_is_one_graph_however_often_its_blocks_are_called() -> None:
    """What torch.compile captures of 6 calls of ALBERT's block is what it captures of 2; of BERT it is the whole."""
    captured = []
    for family, layers in (("albert", 2), ("albert", 6), ("bert", 2)):
        model = LanguageModel(tiny.make_model(family, layers, seed=2).train())
        before = hidden_and_gradient(model)
        setup.compile_encoder(model.model)
        torch._dynamo.reset()
        counters.clear()
        torch.testing.assert_close(hidden_and_gradient(model), before, rtol=1e-4, atol=1e-4)
        captured.append(dict(counters["stats"]))
    assert captured[0] == captured[1] and all(each["unique_graphs"] == 1 for each in captured)
    assert "forward" in vars(model.model.base_model)


def test_a_compiled_encoder_gives_layers_that_were_not_asked_for_at_first(monkeypatch: pytest.MonkeyPatch) -> None:
    model = LanguageModel(tiny.make_model("bert", 2))
    inputs = {"input_ids": torch.from_numpy(tiny.make_rows(4)).long()}
    specs = [OutputSpec(layers=(LAST,)), OutputSpec(layers=(1, LAST)), OutputSpec(layers=(0,))]
    expected = [model(inputs, None, spec).hidden for spec in specs]
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    setup.compile_encoder(model.model)
    for spec, hidden in zip(specs, expected, strict=True):
        found = model(inputs, None, spec).hidden
        assert found.keys() == hidden.keys()
        assert all(torch.equal(found[layer], hidden[layer]) for layer in hidden)
    torch._dynamo.reset()


@pytest.mark.parametrize(("dropout", "formats", "atol"), [(0.0, "fp32", 2e-4), (0.1, "bf16", 3e-3)])
def test_one_switch_turns_all_kernels_off(
    dropout: float, formats: str, atol: float, shelf: Shelf, tmp_path: Path
) -> None:
    """Torch's own kernels give the same student, but for rounding: these make a run faster and nothing else."""
    common = [f"student.dropout={dropout}", f"precision={formats}", "train.steps=4"]
    common.append("evaluate.pseudo_perplexity.fraction=0")
    for kernels in ("auto", "plain"):
        assert shelf.run(tmp_path / kernels, *common, f"precision.kernels={kernels}") == 0
    assert_alike(tmp_path / "auto", tmp_path / "plain", atol=atol)
    scores = [results(tmp_path / kernels)["student"]["perplexity"]["heldout"] for kernels in ("auto", "plain")]
    assert scores[0] == pytest.approx(scores[1], rel=1e-3 if formats == "fp32" else 2e-2)


def test_ranks_meet_before_they_shard(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hosts may be minutes apart in loading their models."""
    calls: list[str] = []
    for name in ("return_large_tensors", "check_model", "check_finite"):
        monkeypatch.setattr(setup, name, lambda *_: None)
    ranks: Any = SimpleNamespace(shards=True, shards_teacher=True, shards_student=False)
    ranks.barrier, ranks.shard = lambda: calls.append("barrier"), lambda *_, **__: calls.append("shard")
    member: Any = SimpleNamespace(model=tiny.make_model("bert", 1), setting="teacher")
    assert setup.shard_models(ranks, [member], None, (MASKED, MASKED), tiny.LENGTH) is None
    assert calls == ["barrier", "shard"]


def test_a_model_without_a_list_of_blocks_has_none() -> None:
    """Also where its configuration names a number of layers: `check_model` refuses it in one line."""
    flat = SimpleNamespace(config=SimpleNamespace(num_hidden_layers=2), base_model=torch.nn.Linear(2, 2))
    assert setup.blocks_of(flat) == ([], 0)
    assert setup.blocks_of(SimpleNamespace(base_model=torch.nn.Linear(2, 2))) == ([], 0)
    blocks, calls = setup.blocks_of(tiny.make_model("albert", 3))
    assert (len(blocks), calls) == (1, 3)
