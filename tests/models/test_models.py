"""Loading, and the pieces of a model: they must give what the model itself gives, or be refused."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from tiny import CLS, LENGTH, PAD, VOCAB, make_model, make_rows, make_tokenizer
from torch import nn

from distill.config import Teacher
from distill.errors import SettingError
from distill.models.load import (
    check_family,
    check_pair,
    check_tokenizers,
    head_rows,
    hidden_states,
    load_pretrained,
    load_teacher,
    load_tokenizer,
    logits,
    output_embedding,
    size,
)

FAMILIES = ("bert", "distilbert", "roberta", "modernbert", "albert")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "bert"
    make_model("bert", 2).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


def refusal(error: pytest.ExceptionInfo[SettingError]) -> str:
    text = str(error.value)
    assert "\n" not in text and text
    return text


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("padded", [False, True])
def test_pieces_give_the_models_own_logits(family: str, padded: bool) -> None:
    model = make_model(family)
    ids = torch.from_numpy(make_rows(5, shortest=4 if padded else None).astype("int64"))
    attention = ids != PAD if padded else None
    with torch.no_grad():
        own = model(input_ids=ids, attention_mask=attention, output_hidden_states=True)
        hidden = hidden_states(model, ids, attention)
        assert hidden.shape == (5, LENGTH, tiny.WIDTH)
        real = ids.reshape(-1) != PAD
        pieces = logits(model, hidden.flatten(0, 1)[real], VOCAB)
        torch.testing.assert_close(pieces, own.logits.flatten(0, 1)[real], rtol=1e-5, atol=1e-5)
        fewer = logits(model, hidden.flatten(0, 1)[real], VOCAB - 7)
        torch.testing.assert_close(fewer, pieces[:, : VOCAB - 7])
    assert float(pieces.std()) > 0.1, "the check would not see a missing piece"
    check_family(model, "student")
    assert model.training is False


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_through_the_pieces_are_the_models_own(family: str) -> None:
    model = make_model(family, 2)
    ids = torch.from_numpy(make_rows(3).astype("int64"))
    model(input_ids=ids).logits.square().mean().backward()
    own = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    logits(model, hidden_states(model, ids, None).flatten(0, 1), VOCAB).square().mean().backward()
    tiny.assert_close({n: p.grad for n, p in model.named_parameters() if p.grad is not None}, own, rtol=1e-4, atol=1e-6)


def test_check_keeps_the_training_mode() -> None:
    model = make_model("bert", 1).train()
    check_family(model, "student")
    assert model.training


def test_a_head_that_computes_something_else_is_refused() -> None:
    model = make_model("bert", 1)
    transform = model.cls.predictions.transform
    forward = transform.forward
    model.cls.predictions.register_forward_pre_hook(lambda module, inputs: (inputs[0] * 2 + 1,))
    with pytest.raises(SettingError) as error:
        check_family(model, "student")
    assert "student" in refusal(error) and "BertForMaskedLM" in refusal(error)
    assert transform.forward == forward


def test_unknown_family_is_refused_unless_it_brings_its_own_head() -> None:
    model = make_model("bert", 1)
    own = model.cls.predictions.transform
    model.config.model_type = "mystery"
    with pytest.raises(SettingError) as error:
        check_family(model, "student.path=x")
    assert "mystery" in refusal(error) and "head_rows" in refusal(error) and "modernbert" in refusal(error)
    model.head_rows = own
    check_family(model, "student")
    rows = torch.randn(3, tiny.WIDTH)
    torch.testing.assert_close(head_rows(model, rows), own(rows))


class Plain(nn.Module):
    """The least that a model of one's own has to offer; no transformers model."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.output = nn.Embedding(VOCAB, 8), nn.Linear(8, VOCAB)

    @property
    def base_model(self) -> Any:
        from types import SimpleNamespace

        return lambda input_ids, attention_mask: SimpleNamespace(last_hidden_state=self.embedding(input_ids))

    def get_output_embeddings(self) -> nn.Module:
        return self.output

    def head_rows(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden.tanh()

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.output(self.embedding(input_ids).tanh())


def test_a_module_of_ones_own_will_do() -> None:
    check_family(Plain(), "student")
    assert output_embedding(Plain())[0].shape == (VOCAB, 8)


def test_size_counts_tied_weights_once() -> None:
    model = make_model("bert", 1)
    names = {p.data_ptr(): p.numel() for p in model.parameters()}
    assert size(model) == (sum(names.values()), 4 * sum(names.values()))
    assert size(model.bfloat16())[1] == 2 * sum(names.values())


def test_teacher_loads_frozen_and_in_fp32(saved: Path, tmp_path: Path) -> None:
    half = tmp_path / "half"
    shutil.copytree(saved, half)
    make_model("bert", 2).bfloat16().save_pretrained(half)
    for folder in (saved, half):
        model, tokenizer, name = load_teacher(Teacher("pretrained", str(folder)))
        assert name == str(folder) and tokenizer.get_vocab() == make_tokenizer().get_vocab()
        assert not model.training and not any(p.requires_grad for p in model.parameters())
        assert {p.dtype for p in model.parameters()} == {torch.float32}
    ids = torch.tensor([[CLS, 7, 8, 9]])
    own = load_teacher(Teacher("pretrained", str(saved)))[0]
    torch.testing.assert_close(own(ids).logits, make_model("bert", 2)(ids).logits.detach())


def test_a_run_folder_stands_for_its_student(saved: Path, tmp_path: Path) -> None:
    shutil.copytree(saved, tmp_path / "run" / "student")
    assert load_teacher(Teacher("pretrained", str(tmp_path / "run")))[0].config.num_hidden_layers == 2


def test_no_teacher() -> None:
    assert load_teacher(Teacher("none")) == (None, None, "")


@pytest.mark.parametrize(
    ("teacher", "words"),
    [
        (Teacher("borrowed"), ("teacher.kind=borrowed", "embedded, pretrained, none")),
        (Teacher("pretrained"), ("teacher.path=null",)),
        (Teacher("pretrained", "/nowhere/at/all"), ("teacher.path=/nowhere/at/all",)),
    ],
)
def test_impossible_teachers_are_refused(teacher: Teacher, words: tuple[str, ...]) -> None:
    with pytest.raises(SettingError) as error:
        load_teacher(teacher)
    assert all(word in refusal(error) for word in words)


def test_damaged_weights_are_refused(saved: Path, tmp_path: Path) -> None:
    shutil.copytree(saved, tmp_path / "cut")
    weights = tmp_path / "cut" / "model.safetensors"
    for content in (weights.read_bytes()[:-100], b"no weights"):
        weights.write_bytes(content)
        with pytest.raises(SettingError) as error:
            load_pretrained("teacher.path", str(tmp_path / "cut"))
        assert f"teacher.path={tmp_path / 'cut'}" in refusal(error)


def test_a_model_without_a_trained_head_is_refused(tmp_path: Path) -> None:
    """transformers would fill the gap with random weights: a teacher that teaches noise."""
    make_model("bert", 1).bert.save_pretrained(tmp_path / "headless")
    with pytest.raises(SettingError) as error:
        load_pretrained("teacher.path", str(tmp_path / "headless"))
    assert "cls.predictions" in refusal(error)


def test_a_causal_model_is_refused(tmp_path: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=1, n_head=1, vocab_size=50)).save_pretrained(tmp_path)
    with pytest.raises(SettingError) as error:
        load_pretrained("teacher.path", str(tmp_path))
    assert "masked language model" in refusal(error)


def test_tokenizers_that_do_not_fit_are_refused(saved: Path, tmp_path: Path) -> None:
    with pytest.raises(SettingError) as error:
        load_tokenizer("teacher.path", str(tmp_path))
    assert f"teacher.path={tmp_path}" in refusal(error)
    maskless = make_tokenizer()
    maskless.mask_token = None
    maskless.save_pretrained(tmp_path / "maskless")
    with pytest.raises(SettingError) as error:
        load_tokenizer("student.path", str(tmp_path / "maskless"))
    assert "mask token" in refusal(error)


def test_pairs_that_do_not_fit_are_refused(tokenizer: Any, teacher: Any) -> None:
    check_pair(teacher, make_model("distilbert", 1), tokenizer, cosine=True)
    check_pair(teacher, make_model("bert", 1, vocab=VOCAB + 24), tokenizer, cosine=True)  # padded for speed
    check_pair(None, make_model("bert", 1), tokenizer, cosine=True)
    with pytest.raises(SettingError) as error:
        check_pair(teacher, make_model("bert", 1, vocab=VOCAB - 1), tokenizer, cosine=False)
    assert "student" in refusal(error) and str(VOCAB - 1) in refusal(error) and str(VOCAB) in refusal(error)
    narrow = make_model("bert", 1, hidden_size=16)
    check_pair(teacher, narrow, tokenizer, cosine=False)
    with pytest.raises(SettingError) as error:
        check_pair(teacher, narrow, tokenizer, cosine=True)
    assert "objective.cosine.weight" in refusal(error) and "32 and 16" in refusal(error)


def test_other_vocabularies_are_refused_by_name(tokenizer: Any) -> None:
    check_tokenizers(tokenizer, make_tokenizer(), "x")
    with pytest.raises(SettingError) as error:
        check_tokenizers(tokenizer, make_tokenizer(("whale",)), "student.path=folder/of/student")
    assert "student.path=folder/of/student" in refusal(error) and f"({VOCAB + 1} tokens)" in refusal(error)
