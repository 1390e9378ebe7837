"""Chunks of logits on a GPU: by the roofline they are large enough, and the head's gradient is added up in fp32."""

from typing import Any

import pytest
import torch
from heads import BOTH_HEADS, VOCAB, WIDTH, gradients, problem
from torch import Tensor

from distill.objective.chunked import CPU, GPU, _Gradients, _Products


@pytest.mark.parametrize(("vocab", "width", "teacher_width"), [(30_522, 768, 768), (151_936, 896, 1_536)])
def test_a_chunk_computes_for_longer_than_it_reads_its_weights(vocab: int, width: int, teacher_width: int) -> None:
    """By the roofline of an H100 in bf16, 989 TFLOP/s and 3.35 TB/s, for what each chunk reads and writes anew."""
    rows, few = (tiling.budget // (2 * vocab * 2) for tiling in (GPU, CPU))
    products = 2 * rows * vocab * (3 * width + teacher_width) / 989e12
    weights = 2 * vocab * (2 * width + teacher_width)  # the student's head twice, the teacher's once
    traffic = (weights + vocab * width * (4 + 4)) / 3.35e12  # with the gradient in fp32, read and written
    assert products > traffic
    assert vocab < 100_000 or products * few / rows < traffic, "a processor's chunk is too small"


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
    case = problem(dtype=torch.bfloat16)
    got = gradients(case.chunked(tiling=GPU, budget=10 * BOTH_HEADS)[0], case.student)
    monkeypatch.undo()
    assert made[0] == "mm" and set(made[1:]) == {"addmm"}
    widened = gradients(case.chunked(tiling=CPU, budget=10 * BOTH_HEADS)[0], case.student)
    for mine, afterwards, exact in zip(got, widened, case.exact()[2], strict=True):
        error, usual = ((each.double() - exact).norm() / exact.norm() for each in (mine, afterwards))
        assert error < 0.03 and error < 1.1 * usual


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
