"""The teacher in int8: what its layers compute, how close it stays to the teacher, and who uses which of the two."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from families import make_family
from job import distill, library
from tiny import make_model, make_rows
from torch import nn

from distill.config.settings import TeacherConfig
from distill.models.check import check_model
from distill.models.kernels import int8
from distill.models.language_model import LanguageModel, OutputSpec
from distill.models.teacher import load_teacher
from distill.runtime.errors import SettingError

CPU = torch.device("cpu")


def able() -> bool:
    try:
        int8.check(CPU)
    except SettingError:
        return False
    return True


needs_int8 = pytest.mark.skipif(not able(), reason="this processor does not multiply int8")


def naive(layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    """Both factors rounded as Jacob et al. 2018 say, and multiplied in float64."""
    weight = layer.weight.detach().double()
    scales = weight.abs().amax(1, keepdim=True) / 127
    weight = (weight / scales.clamp(min=1e-30)).round() * scales
    steps = x.double().abs().amax(-1, keepdim=True) / 127
    product = (x.double() / steps).round() * steps @ weight.T
    return product if layer.bias is None else product + layer.bias.double()


@needs_int8
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("rows", "inner", "outer"), [(1, 8, 8), (7, 33, 5), (64, 192, 768), (130, 768, 192)])
def test_a_layer_is_the_product_of_rounded_factors(rows: int, inner: int, outer: int, bias: bool) -> None:
    torch.manual_seed(rows)
    layer = nn.Linear(inner, outer, bias=bias)
    with torch.no_grad():
        layer.weight[-1] = 0.0
        layer.weight[0] *= 100.0  # a scale for each channel, or this one would drown the others
    x = torch.randn(2, rows, inner) + 0.3
    found, reference = int8.Int8Linear(layer)(x), naive(layer, x)
    assert found.shape == (2, rows, outer) and found.dtype == torch.float32 and not found.requires_grad
    step = x.double().abs().amax(-1, keepdim=True) / 127 * layer.weight.detach().abs().double().amax(1)
    # What lies in the middle may be rounded up or down: one step of one input, here and there.
    assert ((found - reference).abs() <= 1.01 * step + 1e-5).all()
    assert (found - reference).norm() <= 2e-3 * reference.norm()
    exact = nn.functional.linear(x.double(), layer.weight.double(), None if layer.bias is None else layer.bias.double())
    assert (found - exact).norm() <= 0.02 * exact.norm()


@needs_int8
def test_a_position_does_not_depend_on_the_others() -> None:
    torch.manual_seed(0)
    layer, x = int8.Int8Linear(nn.Linear(48, 32)), torch.randn(5, 7, 48)
    x[1] *= 1e4
    x[2, 3] = 0.0
    whole = layer(x)
    assert torch.equal(whole[0], layer(x[0])) and torch.equal(whole[3:, 2], layer(x[3:, 2]))
    assert torch.equal(whole[2, 3], layer.bias)


@needs_int8
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_stays_so(value: float) -> None:
    x = torch.zeros(2, 8)
    x[1, 4] = value
    out = int8.Int8Linear(nn.Linear(8, 4))(x)
    assert torch.isfinite(out[0]).all() and not torch.isfinite(out[1]).any()


@needs_int8
@pytest.mark.parametrize("family", ["bert", "distilbert", "roberta", "modernbert", "albert"])
def test_every_family_keeps_its_head_and_its_teacher(family: str) -> None:
    teacher = make_model(family, 2).requires_grad_(False)
    before = {name: tensor.clone() for name, tensor in teacher.state_dict().items()}
    ids = torch.from_numpy(make_rows(6).astype(np.int64))
    exact = teacher(input_ids=ids).logits
    rounded = int8.quantize(teacher)
    assert not [m for m in rounded.base_model.modules() if type(m) is nn.Linear]
    assert [m for m in teacher.base_model.modules() if type(m) is nn.Linear]
    assert rounded.get_output_embeddings().weight is teacher.get_output_embeddings().weight  # shared, not rounded
    close = rounded(input_ids=ids).logits
    assert not torch.equal(close, exact) and (close - exact).norm() < 0.1 * exact.norm()
    assert torch.equal(teacher(input_ids=ids).logits, exact)
    assert all(torch.equal(tensor, before[name]) for name, tensor in teacher.state_dict().items())
    check_model(rounded, "precision.teacher=int8")


@needs_int8
def test_a_compiled_teacher_gives_a_plain_copy() -> None:
    teacher = make_model("bert", 1).requires_grad_(False)
    ids = torch.from_numpy(make_rows(3).astype(np.int64))
    plain = int8.quantize(teacher)(input_ids=ids).logits
    teacher.base_model.compile(backend="eager")
    assert torch.equal(int8.quantize(teacher)(input_ids=ids).logits, plain)


def answers(model: Any, precision: str, ids: torch.Tensor) -> torch.Tensor:
    """log-probabilities [B * S, V] as training computes them."""
    reader = LanguageModel(model, precision)
    with torch.no_grad():
        rows = reader({"input_ids": ids}, None, OutputSpec(True)).head_rows
        return reader.logits(rows, model.config.vocab_size).double().log_softmax(-1)


TEXT = (
    "It was late in the evening when the old captain came down to the harbour, and the boats lay still upon the water. "
    "He had not spoken to his brother since the winter; now he stood before the door of the house and could not knock. "
    "The light in the window went out, and somewhere behind the hill a dog began to bark at the rising moon. "
)


@needs_int8
def test_the_embedded_teacher_says_nearly_the_same() -> None:
    teacher, tokenizer, _ = load_teacher(TeacherConfig(path="bundled_small"))
    assert tokenizer is not None
    words = tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    ids = torch.tensor(
        [[tokenizer.cls_token_id, *words[at : at + 48], tokenizer.sep_token_id] for at in range(0, 24, 4)]
    )
    ids[:, 3::7] = tokenizer.mask_token_id
    exact, close = answers(teacher, "fp32", ids), answers(int8.quantize(teacher), "int8", ids)
    divergence = (exact.exp() * (exact - close)).sum(-1)
    assert 0 < divergence.mean() < 0.003  # nats; on books it is 0.0003
    assert (exact.argmax(-1) == close.argmax(-1)).double().mean() > 0.97


@needs_int8
def test_a_gpt2_whose_linear_layers_are_transposed() -> None:
    model, ids = make_family("gpt2").requires_grad_(False), torch.from_numpy(make_rows(4)).long()
    rounded = int8.quantize(model)
    assert sum(isinstance(module, int8.Int8Linear) for module in rounded.modules()) == 2 * 4
    exact, close = (each(input_ids=ids).logits.detach() for each in (model, rounded))
    assert 0 < (close - exact).norm() < 0.03 * exact.norm()


@pytest.mark.slow
@needs_int8
def test_training_asks_the_copy_and_evaluation_the_teacher(tmp_path: Path) -> None:
    """A tiny run each way: other losses, near those of the teacher itself, and the very same teacher in the report."""
    books = library(tmp_path / "books")
    runs = {}
    for precision in ("bf16", "int8"):
        folder = tmp_path / precision
        status = distill(
            "+recipe=smoke",
            f"corpus={{kind:gutenberg,path:{books},heldout:0.1,max_sequences:32}}",
            f"data={{cache:{tmp_path / 'cache'},workers:1}}",
            "corpus.sequence_length=32",
            "train={batch_size:4,accumulate:2,steps:2,save_every:2}",
            "evaluate={sets:[heldout],max_sequences:4}",
            f"precision.teacher={precision}",
            f"hydra.run.dir={folder}",
        )
        assert status == 0
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        runs[precision] = lines, json.loads((folder / "results.json").read_text())["teacher"]
    (found, scored), (others, reference) = runs["int8"], runs["bf16"]
    assert len(found) == 2 and all(a["loss/soft"] != b["loss/soft"] for a, b in zip(found, others, strict=True))
    for a, b in zip(found, others, strict=True):
        assert a["loss/soft"] == pytest.approx(b["loss/soft"], rel=0.02)
    assert scored["perplexity"] == reference["perplexity"] and scored["parameters"] == reference["parameters"]
    assert scored["bytes"] == reference["bytes"]


def test_it_is_refused_where_it_cannot_work(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SettingError, match=r"precision\.teacher=int8 is for the CPU.*cuda.*set bf16"):
        int8.check(torch.device("cuda"))
    monkeypatch.setattr(torch.cpu, "_is_vnni_supported", lambda: False)
    with pytest.raises(SettingError, match=r"precision\.teacher=int8: this processor.*set bf16 or fp32"):
        int8.check(CPU)


def test_the_refusal_comes_before_anything_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cpu, "_is_vnni_supported", lambda: False)
    status = distill("+recipe=smoke", "precision.teacher=int8", f"hydra.run.dir={tmp_path / 'run'}")
    assert status == 2 and "precision.teacher=int8" in capfd.readouterr().err
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_an_encoder_without_linear_layers_is_refused() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base_model = nn.Embedding(4, 2)

    with pytest.raises(SettingError, match="no linear layers"):
        int8.quantize(Odd())
