"""Compile the objective's elementwise block for a GPU that is not there: `python tests/compile_for_gpu.py 9.0`.

Inductor turns the block into Triton kernels and Triton compiles them for the named compute capability, down to machine
code; nothing is run. Needs a CUDA build of torch, of a version whose compiler can do without a driver (2.15 can). It
rests on private names of inductor, which is why it is a script for a test and no part of the package.
"""

import ast
import sys
from types import SimpleNamespace
from typing import Any

import torch
from torch._dynamo.device_interface import CudaInterface
from torch._inductor import config
from torch._inductor.codecache import PyCodeCache
from torch._inductor.debug import DebugContext
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.graph import GraphLowering
from torch._inductor.runtime import triton_helpers
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from distill.objective.chunked import soft_and_tokens
from distill.teacher.distributions import Logits, TopK

ROWS, VOCAB, KEPT = 64, 30522, 8
PROPERTIES = {
    "name": "a GPU that is not there",
    "multi_processor_count": 108,
    "total_memory": 80 << 30,
    "max_threads_per_multi_processor": 2048,
    "max_threads_per_block": 1024,
    "warp_size": 32,
    "regs_per_multiprocessor": 65536,
    "shared_memory_per_block": 48 << 10,
    "shared_memory_per_block_optin": 163 << 10,
    "L2_cache_size": 40 << 20,
    "is_integrated": 0,
}


def pretend(capability: tuple[int, int]) -> None:
    """Let torch and Triton believe that there is one GPU of this capability."""
    major, minor = capability
    gpu = SimpleNamespace(**PROPERTIES, major=major, minor=minor)
    cuda: Any = torch.cuda
    cuda.is_available, cuda.device_count, cuda.current_device = lambda: True, lambda: 1, lambda: 0
    cuda._lazy_init, cuda.get_device_capability = lambda: None, lambda *_: capability
    cuda._get_device_properties = cuda.get_device_properties = lambda *_: gpu
    for owner in (CudaInterface, CudaInterface.Worker):
        owner.get_device_properties = staticmethod(lambda *_: gpu)
    CudaInterface.is_available = staticmethod(lambda: True)
    CudaInterface.get_compute_capability = staticmethod(lambda *_: 10 * major + minor)
    CudaInterface.get_raw_stream = staticmethod(lambda *_: 0)
    target = GPUTarget("cuda", 10 * major + minor, 32)
    driver.set_active(SimpleNamespace(get_current_target=lambda: target, get_current_device=lambda: 0))
    triton_helpers._skip_gpu_driver_setup.set(True)


def trace(mode: FakeTensorMode, dtype: torch.dtype, kept: bool) -> tuple[torch.fx.GraphModule, list[torch.Tensor]]:
    """The block's operations; both terms, the teacher given by logits or by its kept entries."""

    def block(logits, bias, teacher, teacher_bias, ids, targets, scales):  # type: ignore[no-untyped-def]
        known = TopK(ids, teacher) if kept else Logits(teacher, teacher_bias)
        return soft_and_tokens(logits, bias, known, targets, scales, 2.0, 0.0), logits

    with mode:
        logits = torch.empty(ROWS, VOCAB, dtype=dtype, device="cuda:0")
        bias, scales = (torch.empty(size, device="cuda:0") for size in (VOCAB, 2))
        entries = torch.empty(ROWS, KEPT + 1, device="cuda:0")
        ids, targets = (torch.empty(ROWS, size, dtype=torch.int64, device="cuda:0") for size in (KEPT, 1))
        inputs = [logits, bias, entries if kept else logits.clone(), bias, ids, targets, scales]
        traced = make_fx(torch.func.functionalize(block), decomposition_table=select_decomp_table())(*inputs)
    return traced, inputs


def compile_kernels(mode: FakeTensorMode, traced: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> int:
    """Compile what inductor makes of the operations; the number of kernels."""
    graph = GraphLowering(traced, example_inputs=inputs)
    with V.set_graph_handler(graph), V.set_fake_mode(mode), DebugContext():
        graph.run(*inputs)
        code = graph.codegen()[0].value
    count = 0
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "triton":
            name, source = map(ast.literal_eval, node.args)
            source = source.replace("triton_helpers.set_driver_to_gpu()", "")
            getattr(PyCodeCache.load(source), name).precompile(warm_cache_only=True)
            count += 1
    return count


def main() -> None:
    major, minor = map(int, sys.argv[1].split("."))
    config.compile_threads, config.fx_graph_cache = 1, False
    mode = FakeTensorMode()
    cases = [(dtype, kept) for dtype in (torch.bfloat16, torch.float32) for kept in (False, True)]
    traces = [trace(mode, *case) for case in cases]
    pretend((major, minor))
    for (dtype, kept), traced in zip(cases, traces, strict=True):
        count = compile_kernels(mode, *traced)
        print(f"sm_{major}{minor} {dtype} {'entries' if kept else 'logits'}: {count} kernels", flush=True)


if __name__ == "__main__":
    main()
