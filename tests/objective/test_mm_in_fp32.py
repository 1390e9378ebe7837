"""The gradient of a head in bf16 on a GPU: products that are added up in fp32 as they are made."""

from typing import Any

import pytest
import torch
from heads import BOTH_HEADS, VOCAB, WIDTH, gradients, problem
from torch import Tensor

from distill.objective.chunked import CPU, GPU, _Gradients, _Products


def test_the_head_s_gradient_is_that_of_products_widened_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch has these products for CUDA alone: here stand-ins multiply in fp32, which is closer to the exact sum."""
    made: list[str] = []
    mm, addmm = torch.mm, torch.addmm

    def in_fp32(name: str, product: Any) -> Any:
        def called(*given: Tensor, out_dtype: torch.dtype | None = None, out: Tensor) -> Tensor:
            if out_dtype is None:
                return mm(*given, out=out)
            made.append(name)
            assert out_dtype == out.dtype == torch.float32 and given[-1].dtype == torch.bfloat16
            return product(*[each.float() for each in given], out=out)

        return called

    monkeypatch.setattr(torch, "mm", in_fp32("mm", mm))
    monkeypatch.setattr(torch, "addmm", in_fp32("addmm", addmm))
    found, exact = problem(dtype=torch.bfloat16), problem(dtype=torch.float64)
    got = gradients(found.fused(tiling=GPU, budget=10 * BOTH_HEADS)[0], found.student)
    monkeypatch.undo()
    assert made[0] == "mm" and set(made[1:]) == {"addmm"}
    after = gradients(found.fused(tiling=CPU, budget=10 * BOTH_HEADS)[0], found.student)
    want = gradients(exact.plain()[0], exact.student)
    for mine, widened, reference in zip(got, after, want, strict=True):
        error, error_after = ((each.double() - reference).norm() / reference.norm() for each in (mine, widened))
        assert error < 0.03 and error < 1.1 * error_after


@pytest.mark.parametrize("first", [True, False])
def test_torch_has_these_products(first: bool) -> None:
    """Checked without values, on the meta device, which has their signatures and shapes."""
    student = problem(dtype=torch.bfloat16).student
    with torch.device("meta"):
        rows, weight = (
            torch.empty(shape, dtype=torch.bfloat16) for shape in (student.rows.shape, student.weight.shape)
        )
    products = _Products(
        student._replace(rows=rows, weight=weight, bias=None, dtype=rows.dtype), 41, VOCAB, torch.float32, VOCAB
    )
    sums = _Gradients(student, products, torch.float32, GPU, [True, True, False])
    sums.add(0 if first else 20, 41, torch.empty(41 if first else 21, VOCAB, dtype=torch.bfloat16, device="meta"))
    assert sums.weight.shape == (VOCAB, WIDTH) and sums.weight.dtype == torch.float32
    assert sums.product.numel() == 0, "no second matrix of that size in bf16"
