"""Models that only go forward on a CPU: packed layers, one operator for GELU, the last block where it is read."""

from typing import Any

import families
import pytest
import tiny
import torch
from tiny import VOCAB, make_model
from torch import Tensor, nn
from transformers.activations import NewGELUActivation

from distill.config.settings import PrecisionConfig
from distill.models.kernels import FAMILIES, packed_linear
from distill.models.kernels.attention import use_batched_products
from distill.models.kernels.packed_linear import PackedLinear, can_pack, pack_for_evaluation, pack_teacher
from distill.models.known_layers import last_block_at
from distill.models.language_model import LAST, LanguageModel, OutputSpec

CPU = torch.device("cpu")
NO_BF16 = "this processor has no packed products in bf16"  # such as one without AVX-512


def count(model: Any, kind: type[nn.Module]) -> int:
    return sum(type(module) is kind for module in model.modules())


def answers(model: Any, precision: str, padded: bool) -> Tensor:
    """Logits at all positions, float32."""
    ids = torch.from_numpy(tiny.make_rows(4, shortest=5 if padded else None, seed=3)).long()
    with torch.no_grad():
        return tiny.all_logits(model, ids, ids != tiny.PAD if padded else None, precision).float()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("precision", "tolerance", "packs"),
    [("fp32", 1e-6, True), ("fp32", 1e-6, False), ("bf16", 0.02, True), ("bf16", 0.02, False), ("fp16", 0.005, False)],
)
def test_it_answers_as_the_teacher_does(
    family: str, precision: str, tolerance: float, packs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if packs and not can_pack(torch.float32 if precision == "fp32" else torch.bfloat16):
        pytest.skip(NO_BF16)
    if precision != "fp16":  # which this finds out by itself
        monkeypatch.setattr(packed_linear, "can_pack", lambda dtype: packs)
    teacher = families.make_family(family).requires_grad_(False)
    before = {name: tensor.clone() for name, tensor in teacher.state_dict().items()}
    packed = pack_teacher(teacher, PrecisionConfig(teacher=precision), CPU)
    assert (count(packed, PackedLinear) > 0) == packs and count(teacher, PackedLinear) == 0
    for padded in (False, True):
        expected = answers(teacher, "fp32", padded)
        assert (answers(packed, precision, padded) - expected).norm() < tolerance * expected.norm()
    assert all(torch.equal(tensor, before[name]) for name, tensor in teacher.state_dict().items())


@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-5), ("bf16", 0.03)])
def test_evaluation_sees_the_present_weights(precision: str, tolerance: float) -> None:
    if precision == "bf16" and not can_pack(torch.bfloat16):
        pytest.skip(NO_BF16)
    student = make_model("distilbert", 2)
    for _ in range(2):
        packed = pack_for_evaluation(student, PrecisionConfig(evaluate=precision), CPU)
        assert count(packed, PackedLinear) > 0
        expected = answers(student, "fp32", True)
        torch.testing.assert_close(answers(packed, precision, True), expected, rtol=tolerance, atol=tolerance)
        with torch.no_grad():
            for parameter in student.parameters():
                parameter.add_(0.01)


def test_what_evaluation_packs() -> None:
    """A student that has trained attends by other kernels; neither scores nor speeds may owe anything to that."""
    teacher, student, linear = make_model("bert", 1), make_model("bert", 1), nn.Linear(1, 1)
    use_batched_products(student)
    packed = [pack_for_evaluation(model, PrecisionConfig(evaluate="fp32"), CPU) for model in (teacher, student)]
    assert len({model.config._attn_implementation for model in packed}) == 1 and packed[1] is not student
    assert teacher.config._attn_implementation == "sdpa"
    for settings in ({"compile": True}, {"kernels": "plain"}, {"evaluate": "fp16"}):
        assert pack_for_evaluation(student, PrecisionConfig(**settings), CPU) is student
    assert pack_for_evaluation(linear, PrecisionConfig(), CPU) is linear
    gpt2 = families.make_family("gpt2")  # a GPU lays nothing out, but has torch's activation
    copied = pack_for_evaluation(gpt2, PrecisionConfig(), torch.device("cuda"))
    assert copied is not gpt2 and count(copied, PackedLinear) == count(copied, NewGELUActivation) == 0
    assert all(one is other for one, other in zip(gpt2.parameters(), copied.parameters(), strict=True))


@pytest.mark.parametrize("operator", ["gone", "something else", "another activation"])
def test_without_its_private_operators_torchs_own_layers_run(operator: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are no promise of torch: another release may rename them or give them another meaning."""
    right = PackedLinear.forward

    def broken(layer: PackedLinear, x: Tensor) -> Tensor:
        if operator == "gone":
            raise AttributeError("'_OpNamespace' 'mkldnn' object has no attribute '_linear_pointwise'")
        return right(layer, x) if operator == "another activation" and layer.then[0] == "none" else torch.zeros(5, 32)

    monkeypatch.setattr(PackedLinear, "forward", broken)
    can_pack.cache_clear()
    try:
        assert not can_pack(torch.float32)
        packed = pack_teacher(make_model("bert", 1).requires_grad_(False), PrecisionConfig(), CPU)
        assert count(packed, PackedLinear) == 0
    finally:
        can_pack.cache_clear()


# --- GELU


def hidden(model: Any) -> Tensor:
    ids = torch.from_numpy(tiny.make_rows(4)).long()
    return LanguageModel(model)({"input_ids": ids}, None, OutputSpec(layers=(LAST,))).hidden[LAST]


@pytest.mark.parametrize(("fields", "then"), [({}, ("gelu", "tanh")), ({"activation_function": "relu"}, ("none", ""))])
def test_a_packed_gpt2_multiplies_and_activates_at_once(fields: dict[str, str], then: tuple[str, str]) -> None:
    model = families.make_family("gpt2", **fields)
    packed = pack_for_evaluation(model, PrecisionConfig(), CPU)
    assert count(packed, nn.GELU) == 0 and packed.transformer.h[0].mlp.c_fc.then == then
    torch.testing.assert_close(hidden(packed), hidden(model), rtol=1e-5, atol=1e-5)


# --- the last block at selected positions alone

KNOWN = ["bert", "distilbert", "roberta"]
# Not in order; some rows have many, one, or none; nearly all of them; none at all.
POSITIONS = [[37, 3, 24], [0], [3, 4, 11, 24, 30, 37], [59], [*range(24)], [*range(59)], []]


def head_rows(model: Any, padded: bool, positions: list[int], plain: bool) -> Tensor:
    torch.manual_seed(3)
    ids, lengths = torch.randint(8, VOCAB, (5, 12)), torch.tensor([12, 3, 9, 12, 5])
    documents = torch.where(torch.arange(12) < lengths[:, None], 0, -1) if padded else None
    spec = OutputSpec(True, torch.tensor(positions, dtype=torch.int64))
    found = LanguageModel(model, plain=plain)({"input_ids": ids}, documents, spec).head_rows
    assert found is not None
    return found


@pytest.mark.parametrize("family", KNOWN)
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("positions", POSITIONS, ids=len)
def test_values_and_gradients_are_those_of_the_whole_block(family: str, padded: bool, positions: list[int]) -> None:
    model = families.without_dropout(family, num_hidden_layers=3).double().train()
    found, gradients = [], []
    for plain in (True, False):
        model.zero_grad()
        rows = head_rows(model, padded, positions, plain)
        (rows * torch.arange(1, rows.numel() + 1).view_as(rows).sin()).sum().backward()
        found.append(rows.detach())
        # Of what has no part in the outcome: none, or zeros.
        gradients.append({n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()})
    torch.testing.assert_close(found[0], found[1], rtol=1e-10, atol=1e-12)
    tiny.assert_close(gradients[1], gradients[0], rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("family", KNOWN)
@torch.no_grad()
def test_the_last_block_computes_fewer_positions(family: str) -> None:
    """Its feed-forward part sees the fullest row's number of positions, and not the whole length."""
    model, seen = make_model(family, 2), list[int]()
    linear = [m for n, m in model.base_model.named_modules() if n.endswith(("intermediate.dense", "ffn.lin1"))][-1]
    linear.register_forward_hook(lambda module, arguments, output: seen.append(arguments[0].shape[-2]))
    for plain in (True, False):
        head_rows(model, False, POSITIONS[2], plain)
    assert seen == [12, 3]


@torch.no_grad()
def test_where_it_would_be_wrong_the_whole_block_is_computed() -> None:
    def reduces(model: Any, positions: Tensor | None = torch.tensor([1, 5])) -> bool:  # noqa: B008
        with last_block_at(model, positions) as reduced:
            return reduced

    dropping, bert = make_model("bert", 2, dropout=0.1).train(), make_model("bert", 2)
    assert not any(reduces(model) for model in (make_model("modernbert", 2), make_model("albert", 2), dropping))
    assert reduces(bert) and not reduces(bert, None) and "forward" not in vars(bert.bert.encoder.layer[-1])
    reader, ids, positions = LanguageModel(bert), torch.randint(8, VOCAB, (5, 12)), torch.tensor([1, 5])
    whole = reader({"input_ids": ids}, None, OutputSpec(layers=(LAST,))).hidden[LAST]
    for layers in ((LAST,), (2,)):  # who reads the last hidden states gets all of them
        found = reader({"input_ids": ids}, None, OutputSpec(True, positions, layers)).hidden[layers[0]]
        torch.testing.assert_close(found, whole)
    mean = reader({"input_ids": ids}, None, OutputSpec(True, positions, pooled=("mean",))).pooled["mean"]
    torch.testing.assert_close(mean, whole.mean(1))
    last = bert.bert.encoder.layer[-1]
    last.forward = last.forward  # as a compiled block has one
    assert not reduces(bert)
