"""student.refit and student.intermediate_size in runs: the same bits after a kill and on all ranks; the record."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed import run_ranks
from families import depth_fields, make_family
from job import Shelf, assert_alike, assert_same, interrupted, metrics, results
from tiny import make_batches, make_rows, make_tokenizer

from distill.config.settings import BackendConfig, Config, StudentConfig
from distill.data.collate.clm import CausalLM
from distill.data.sequence_format import causal_format
from distill.distributed import join_ranks
from distill.models.kind import CAUSAL, MASKED
from distill.runs.refit import refit_student
from distill.runtime.errors import SettingError

REFIT = ("student.refit=true", "train.epochs=1")
NARROW = ("student.architecture=same", "student.intermediate_size=24", "train.epochs=1")


@pytest.fixture(scope="module")
def refitted(shelf: Shelf) -> Path:
    assert shelf.run(shelf.root / "refitted", *REFIT) == 0
    return shelf.root / "refitted"


def test_a_run_starts_nearer_to_its_teacher_and_says_what_was_done(
    shelf: Shelf, refitted: Path, lines: list[str]
) -> None:
    assert shelf.run(shelf.root / "copied", "train.epochs=1") == 0
    first, of_copy = (metrics(folder)[0]["loss/soft"] for folder in (refitted, shelf.root / "copied"))
    assert first < 0.8 * of_copy
    start, stored = results(refitted)["student"]["start"], json.loads((refitted / "layers.json").read_text())
    (block,) = start["refit"]["blocks"]
    assert start["layers"] == stored["layers"] == [0, 1] and start["refit"] == stored["refit"]
    assert (block["block"], block["layer"]) == (1, 4) and block["after"] < block["before"]
    assert start["refit"]["tokens"] > 60 * 20 and start["refit"]["seconds"] > 0
    assert "refit" not in results(shelf.root / "copied")["student"]["start"]
    assert results(refitted)["identity"]["student.refit"] is True


def test_the_same_bits_again_and_after_a_kill_before_or_behind_a_checkpoint(
    shelf: Shelf, refitted: Path, lines: list[str]
) -> None:
    before = interrupted(refitted, shelf.root / "refit-before", leave=-99)
    assert shelf.run(before, *REFIT) == 0
    assert_same(before, refitted)
    assert any("student.refit: fitting 1 block" in line for line in lines)
    lines.clear()
    behind = interrupted(refitted, shelf.root / "refit-behind")
    assert shelf.run(behind, *REFIT) == 0
    assert_same(behind, refitted)
    assert results(behind)["student"]["start"] == results(refitted)["student"]["start"]
    assert not any("student.refit:" in line for line in lines)
    (behind / "results.json").unlink()
    assert shelf.run(behind, "train.epochs=1") == 2  # a copy now


@pytest.mark.parametrize("fits", ["true", "false"])
def test_a_run_with_fewer_neurons_goes_on_after_a_kill(shelf: Shelf, lines: list[str], fits: str) -> None:
    narrow, folder = (*NARROW, f"student.refit={fits}"), shelf.root / f"narrow-{fits}"
    assert shelf.run(folder, *narrow) == 0
    start, stored = results(folder)["student"]["start"], json.loads((folder / "layers.json").read_text())
    neurons = start["neurons"]
    assert neurons == stored["neurons"] and (neurons["kept"], neurons["of"]) == (24, 64)
    assert ("refit" in start) == (fits == "true") == (neurons["after"] is not None)
    assert neurons["after"] is None or neurons["after"] < neurons["before"]
    assert json.loads((folder / "student" / "config.json").read_text())["intermediate_size"] == 24
    assert any("choosing 24 of" in line for line in lines)
    for leave in (-99, -1):
        lines.clear()
        again = interrupted(folder, shelf.root / f"narrow-{fits}{leave}", leave=leave)
        assert shelf.run(again, *narrow) == 0
        assert_same(again, folder)
        assert results(again)["student"]["start"]["neurons"]["before"] == pytest.approx(neurons["before"])
        assert any("choosing 24 of" in line for line in lines) == (leave == -99)
    assert shelf.run(folder, *narrow, "student.intermediate_size=23") == 2


def refitted_on(
    backend: str, family: str, refit: Any, size: int | None = None
) -> tuple[dict[str, Any], dict[str, torch.Tensor], Any]:
    """What a rank gets, and the teacher's next random number."""
    tokenizer, teacher = make_tokenizer(), make_family(family, **depth_fields(family, 5)).requires_grad_(False)
    tokenizer.bos_token, tokenizer.eos_token = "[CLS]", "[SEP]"
    batches = make_batches(make_rows(24), CausalLM(causal_format(tokenizer), packed=True), batch_size=5)
    config = Config(student=StudentConfig(layers=[0, 2], refit=refit, dropout=0.0, intermediate_size=size))
    torch.manual_seed(7)
    with join_ranks(BackendConfig(name=backend, device="cpu")) as ranks:
        found, weights = refit_student(config, MASKED if family == "bert" else CAUSAL, teacher, batches, ranks)
    return found, weights, torch.rand(1)


@pytest.mark.parametrize(("backend", "size"), [("ddp", None), ("fsdp", None), ("fsdp", 20)])
def test_all_ranks_get_the_same_weights(backend: str, size: int | None, tmp_path: Path) -> None:
    alone, (one, other) = (
        refitted_on("single", "llama", True, size),
        run_ranks(2, tmp_path, refitted_on, backend, "llama", True, size),
    )
    assert len(alone[1]) == (2 if size is None else 18) and alone[0]["refit"]["tokens"] == 24 * 12
    for found in (one, other):
        assert found[1].keys() == alone[1].keys() and found[0] == one[0] and found[2] == alone[2]
        assert all(torch.equal(weight, one[1][name]) for name, weight in found[1].items())
        for name, weight in found[1].items():
            torch.testing.assert_close(weight, alone[1][name], rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["ddp", "fsdp"])
@pytest.mark.parametrize("start", [REFIT, (*NARROW, "student.refit=true")], ids=["refit", "narrow"])
def test_ranks_train_the_student_of_one_process(
    backend: str, start: tuple[str, ...], shelf: Shelf, tmp_path: Path
) -> None:
    alone = tmp_path / "alone"
    assert shelf.run(alone, *start) == 0
    shelf.run_alone(tmp_path / "ranks", *start, f"backend={backend}", "backend.processes=2", "train.accumulate=1")
    assert_alike(tmp_path / "ranks", alone)


def test_auto_is_for_causal_students_of_known_families() -> None:
    assert refitted_on("single", "llama", "auto")[1]
    assert refitted_on("single", "bert", "auto")[:2] == ({}, {})
    assert refitted_on("single", "gemma2", "auto")[:2] == ({}, {})
    found, _, _ = refitted_on("single", "gemma2", "auto", 20)  # whose narrow blocks are fitted by themselves
    assert found["neurons"]["after"] < found["neurons"]["before"] and found["refit"]["blocks"] == []
    assert refitted_on("single", "bert", "auto", 20)[0]["neurons"]["after"] is None
    with pytest.raises(SettingError, match=r"^student\.refit: a Gemma2ForCausalLM .*; set it to false$"):
        refitted_on("single", "gemma2", True)
