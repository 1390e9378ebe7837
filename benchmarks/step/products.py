"""The matrix products of a step of a causal pair, each timed by itself: what no order of computing avoids."""

import statistics
import time
from collections import Counter
from typing import Any, NamedTuple

import torch
from torch import nn

KINDS = ("forward", "input", "weight")  # a layer's output, and the gradients of its input and of its weight


class Product(NamedTuple):
    """A product of a linear layer (`group` 1), or of so many heads of attention."""

    kind: str
    group: int
    tokens: int
    inner: int
    outer: int

    def make(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Operands as torch's linear layers have them: the weight as it lies is [outer, inner]."""
        x, weight, gradient = (self.tokens, self.inner), (self.outer, self.inner), (self.tokens, self.outer)
        sizes = {"forward": (x, weight), "input": (gradient, weight), "weight": (gradient, x)}[self.kind]
        a, b = (torch.randn((self.group, *size), dtype=dtype) for size in sizes)
        a, b = (a.mT, b) if self.kind == "weight" else (a, b.mT if self.kind == "forward" else b)
        return (a[0], b[0]) if self.group == 1 else (a, b)


def products(teacher: Any, student: Any, sequences: int, length: int) -> Counter[Product]:
    """How often each occurs: forward of the teacher, forward and backward of the student.

    Heads over the vocabulary work at the positions that have a next token. The causal mask leaves half of each product
    of attention, so of its two products, which are equally large, one is counted.
    """
    found = Counter[Product]()
    for model, kinds in ((teacher, KINDS[:1]), (student, KINDS)):
        head, config = model.get_output_embeddings(), model.config
        for module in model.modules():
            if isinstance(module, nn.Linear):
                tokens = sequences * (length - 1 if module is head else length)
                found.update(Product(kind, 1, tokens, module.in_features, module.out_features) for kind in kinds)
        width = config.hidden_size // config.num_attention_heads
        heads = sequences * config.num_attention_heads
        for kind in kinds:
            found[Product(kind, heads, length, width, length)] += config.num_hidden_layers
    return found


class Floor:
    """Seconds of the products in one format."""

    def __init__(self, counts: Counter[Product], dtype: torch.dtype) -> None:
        self.counts, self.dtype = counts, dtype
        self.times: dict[Product, list[float]] = {product: [] for product in counts}

    def measure(self) -> None:
        """Each once, after one that warms up."""
        for product, times in self.times.items():
            a, b = product.make(self.dtype)
            out = torch.matmul(a, b)
            began = time.perf_counter()
            torch.matmul(a, b, out=out)
            times.append(time.perf_counter() - began)

    @property
    def rounds(self) -> int:
        return min(map(len, self.times.values()))

    @property
    def seconds(self) -> float:
        """Of a step, from the medians."""
        return sum(count * statistics.median(self.times[product]) for product, count in self.counts.items())
