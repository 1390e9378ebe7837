"""malloc keeps its pages, or gives them back, in a process of its own."""

import platform
import subprocess
import sys

import pytest

FAULTS = """
import resource
import torch
from distill.models.kernels import heap

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


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's malloc")
def test_large_tensors_come_without_page_faults() -> None:
    done = subprocess.run([sys.executable, "-c", FAULTS], capture_output=True, text=True, check=True)
    usual, kept = map(int, done.stdout.split())
    assert usual > 10_000 and kept < usual / 10


RESIDENT = """
import torch
from pathlib import Path
from distill.models.kernels import heap

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

def kept_of_freed():
    torch.zeros(5_000_000)  # frees 20 MB: glibc then puts what is smaller on its heap
    before = resident()
    pieces = [torch.ones(size) for _ in range(20) for size in (4_000_000, 500_000)]  # 16 MB and 2 MB in turns
    del pieces[::2]
    return resident() - before - 20 * 2_000_000

usual = kept_of_freed()
heap.return_large_tensors()
print(usual, kept_of_freed())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's malloc")
def test_large_tensors_between_lasting_ones_are_given_back() -> None:
    done = subprocess.run([sys.executable, "-c", RESIDENT], capture_output=True, text=True, check=True)
    usual, returned = map(int, done.stdout.split())
    assert usual > 200_000_000 and returned < 20_000_000, "of 320 MB that were freed"
