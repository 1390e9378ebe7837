"""A teacher as a GPU has it: one copy, every weight in one format or quantised, beside the model that is scored."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from families import make_family
from tiny import make_evaluator, make_masks, make_model, make_rows

from distill.config.settings import BackendConfig, EvaluateConfig, PrecisionConfig, StudentConfig, TeacherConfig
from distill.distributed.single import Single
from distill.evaluation.readers import MeanModel
from distill.evaluation.sets import EvaluationSet
from distill.models.kernels.frozen import frozen_copy
from distill.models.language_model import LAST, LanguageModel, OutputSpec
from distill.models.loaded import model_digest
from distill.models.student import make_student
from distill.models.teacher import load_teacher
from distill.runs import setup
from distill.runtime.errors import SettingError

CPU = torch.device("cpu")
BF16 = PrecisionConfig(teacher="bf16")


def outputs(model: LanguageModel) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits and the last hidden state of three sequences."""
    ids = torch.randint(5, 40, (3, 12), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        found = model({"input_ids": ids}, None, OutputSpec(head=True, layers=(LAST,)))
        assert found.head_rows is not None
        return model.logits(found.head_rows).float(), found.hidden[LAST]


@pytest.mark.parametrize("family", ["bert", "albert", "distilbert", "gpt2", "llama", "qwen3", "gemma", "gpt_neox"])
def test_a_copy_computes_in_its_format_and_leaves_the_model_as_it_was(family: str) -> None:
    teacher = make_family(family)
    before = {name: tensor.clone() for name, tensor in teacher.state_dict().items()}
    frozen = frozen_copy(teacher, BF16, CPU)
    assert {weight.dtype for weight in frozen.parameters()} == {torch.bfloat16}
    assert len(list(frozen.parameters())) == len(list(teacher.parameters())), "tied weights stay tied"
    kept = {name: buffer.dtype for name, buffer in teacher.named_buffers()}
    assert {name: buffer.dtype for name, buffer in frozen.named_buffers()} == kept
    after = teacher.state_dict()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    exact, _ = outputs(LanguageModel(teacher))
    logits, hidden = outputs(LanguageModel(frozen, "bf16", rounded=True))
    under_autocast, _ = outputs(LanguageModel(teacher, "bf16"))
    assert hidden.dtype == torch.bfloat16
    error, usual = ((each - exact).norm() / exact.norm() for each in (logits, under_autocast))
    assert error < max(0.02, 3 * usual)


class Positions(torch.nn.Module):
    """An encoder that adds a buffer in fp32 to what it looks up."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.linear = torch.nn.Embedding(50, 8), torch.nn.Linear(8, 8)
        self.register_buffer("positions", torch.randn(64, 8))

    def forward(self, input_ids: torch.Tensor, attention_mask: Any = None) -> Any:
        return self.linear(self.embed(input_ids) + self.positions[: input_ids.shape[1]])


class OfUser(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base_model, self.head = Positions(), torch.nn.Linear(8, 50)

    def get_output_embeddings(self) -> torch.nn.Linear:
        return self.head

    def forward(self, input_ids: torch.Tensor, attention_mask: Any = None) -> Any:
        return self.head(self.base_model(input_ids))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Ranks that take the ways of a GPU, for which the processor stands."""
    monkeypatch.setattr(setup, "frozen_copy", lambda model, precision, _: frozen_copy(model, precision, CPU))
    monkeypatch.setattr(setup, "_choose_attention", lambda *_: None)
    return SimpleNamespace(device=torch.device("cuda"))


@pytest.mark.parametrize(("published", "shared"), [(torch.bfloat16, True), (torch.float32, False)])
def test_published_weights_are_there_once_and_give_the_same_numbers(
    published: torch.dtype, shared: bool, tokenizer: Any, gpu: Any, tmp_path: Path
) -> None:
    make_model("bert", 2).to(published).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    settings = TeacherConfig(path=str(tmp_path))
    on_host, teacher = load_teacher(settings)[0], load_teacher(settings, gpu=CPU)[0]
    assert {weight.dtype for weight in teacher.parameters()} == {published}
    assert model_digest(teacher) == model_digest(on_host)
    starts = [make_student(StudentConfig(), model, tokenizer, 12).state_dict() for model in (teacher, on_host)]
    assert all(torch.equal(tensor, starts[1][name]) for name, tensor in starts[0].items())
    frozen = setup.setup_teacher(teacher, BF16, gpu)
    addresses = [[weight.data_ptr() for weight in model.parameters()] for model in (frozen.model, teacher)]
    assert (addresses[0] == addresses[1]) == shared
    data = [EvaluationSet("rows", "", make_rows(8, shortest=5), 1)]
    masks, ranks = make_masks(tokenizer, data[0].sequences), Single(BackendConfig(device="cpu"))
    evaluator = make_evaluator(EvaluateConfig(batch_size=4), masks, PrecisionConfig(kernels="plain"), ranks)
    assert evaluator.score(teacher, "teacher", data) == evaluator.score(on_host, "teacher", data)
    both = [evaluator.score(MeanModel([model, on_host], [0.5, 0.5]), "both", data) for model in (teacher, on_host)]
    assert both[0] == both[1]
    assert [weight.data_ptr() for weight in teacher.parameters()] == addresses[1], "it is left as it was"
    widened = setup.setup_teacher(teacher, PrecisionConfig(), ranks)
    assert torch.equal(outputs(widened)[0], outputs(setup.setup_teacher(on_host, PrecisionConfig(), ranks))[0])


@pytest.mark.parametrize("first", [True, False])
def test_no_digit_is_lost_of_files_in_several_formats(first: bool, tokenizer: Any, tmp_path: Path) -> None:
    """transformers gives all weights the format of one of them."""
    model = make_model("bert", 2)
    for module in model.modules():
        if isinstance(module, torch.nn.LayerNorm) != first:
            module.to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    settings = TeacherConfig(path=str(tmp_path))
    on_host, teacher = load_teacher(settings)[0], load_teacher(settings, gpu=CPU)[0]
    assert all(torch.equal(*pair) for pair in zip(teacher.parameters(), on_host.parameters(), strict=True))


def test_a_model_of_the_users_with_buffers_in_fp32(gpu: Any) -> None:
    placed = setup.setup_teacher(OfUser().eval(), BF16, gpu)
    assert outputs(placed)[1].dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("family", "layer"), [("llama", "model.layers.0.mlp.up_proj"), ("gpt2", "transformer.h.0.mlp.c_fc")]
)
def test_weights_of_linear_layers_in_int8(family: str, layer: str) -> None:
    pytest.importorskip("torchao")
    teacher = make_family(family, tie_word_embeddings=False)
    frozen = frozen_copy(teacher, BF16.changed(quantize_teacher="int8"), CPU)
    assert type(frozen.get_submodule(layer).weight) is not torch.nn.Parameter
    assert type(frozen.get_output_embeddings().weight) is torch.nn.Parameter, "the objective multiplies it"
    exact, _ = outputs(LanguageModel(teacher))
    logits, _ = outputs(LanguageModel(frozen, "bf16", rounded=True))
    assert 0 < (logits - exact).norm() < 0.1 * exact.norm()


def test_without_torchao_one_line_names_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden: Any = None
    monkeypatch.setitem(sys.modules, "torchao.quantization", hidden)
    with pytest.raises(SettingError, match="not installed") as raised:
        frozen_copy(make_family("llama"), BF16.changed(quantize_teacher="int8"), CPU)
    assert raised.value.setting == "precision.quantize_teacher" and "quantized" in raised.value.cure
