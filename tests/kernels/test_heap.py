"""malloc keeps its pages, in a process of its own."""

import platform
import subprocess
import sys

import pytest

FAULTS = """
import resource
import torch
from distill.kernels import heap

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(4):
        kept = [torch.zeros(20_000_000) for _ in range(3)]  # 80 MB each, above every threshold
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

faults()
usual = faults()
heap.retain_heap()
kept = min(faults() for _ in range(4))  # the heap grows first
print(usual, kept)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's malloc")
def test_large_tensors_come_without_page_faults() -> None:
    done = subprocess.run([sys.executable, "-c", FAULTS], capture_output=True, text=True, check=True)
    usual, kept = map(int, done.stdout.split())
    assert usual > 10_000 and kept < usual / 10
