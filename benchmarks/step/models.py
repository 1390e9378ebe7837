"""The pairs that a step is measured on: their shapes, models with random weights, batches, and the floor of a step."""

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    DistilBertConfig,
    DistilBertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
)
from transformers.pytorch_utils import Conv1D

from distill.config.settings import MaskingConfig
from distill.data.batches import Batches, StepShape
from distill.data.collate.clm import CausalLM
from distill.data.collate.mlm import MaskedLM
from distill.data.order import FullShuffle
from distill.data.sequence_format import SequenceFormat

END = 0  # the token that ends a document


class Shape(NamedTuple):
    teacher_layers: int
    student_layers: int
    width: int
    vocabulary: int
    rows: int
    tokens: int
    documents: int = 0  # of a row of a causal pair, a GPT-2 and a DistilGPT2; 0: a BERT and a DistilBERT

    @property
    def heads(self) -> int:
        return max(1, self.width // 64)

    @property
    def task(self) -> str:
        return "clm" if self.documents else "mlm"

    def __str__(self) -> str:
        models = f"{self.teacher_layers}x{self.width} -> {self.student_layers}x{self.width}"
        documents = f" of {self.documents} documents" if self.documents > 1 else ""
        return f"{'GPT-2 ' * bool(self.documents)}{models}, V {self.vocabulary}, {self.rows} x {self.tokens}{documents}"

    def operations(self, head_tokens: float) -> float:
        """Of a micro-batch: a forward of the teacher, and a forward and a backward of the student."""
        device, tokens = torch.device("meta"), self.rows * self.tokens
        seen = self.tokens / 2 if self.documents else self.tokens  # keys of a query, documents of a row not counted
        return pair_operations(make_teacher(self, device), make_student(self, device), Work(tokens, seen, head_tokens))


SHAPES = {
    "base": Shape(12, 6, 768, 30522, 8, 128),
    "small": Shape(4, 2, 256, 8192, 16, 128),
    "bundled": Shape(4, 2, 192, 6144, 16, 128),
    "tiny": Shape(2, 1, 64, 500, 2, 16),  # to try the script
    "gpt2": Shape(12, 6, 768, 50257, 8, 128, documents=3),
    "gpt2-tiny": Shape(2, 1, 64, 500, 2, 16, documents=3),
}


def make_teacher(shape: Shape, device: torch.device) -> Any:
    """A frozen model with random weights: time does not depend on them."""
    torch.manual_seed(0)
    with torch.device(device):
        if shape.documents:
            model: Any = _gpt2(shape, shape.teacher_layers)
        else:
            model = BertForMaskedLM(
                BertConfig(
                    vocab_size=shape.vocabulary,
                    hidden_size=shape.width,
                    num_hidden_layers=shape.teacher_layers,
                    num_attention_heads=shape.heads,
                    intermediate_size=4 * shape.width,
                )
            )
    return model.eval().requires_grad_(False)


def make_student(shape: Shape, device: torch.device) -> Any:
    """A model to be trained, with the dropout of its family's configuration, 0.1."""
    torch.manual_seed(1)
    with torch.device(device):
        if shape.documents:
            model: Any = _gpt2(shape, shape.student_layers)
        else:
            model = DistilBertForMaskedLM(
                DistilBertConfig(
                    vocab_size=shape.vocabulary,
                    dim=shape.width,
                    n_layers=shape.student_layers,
                    n_heads=shape.heads,
                    hidden_dim=4 * shape.width,
                )
            )
    return model.train()


def _gpt2(shape: Shape, layers: int) -> Any:
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=shape.vocabulary,
            n_embd=shape.width,
            n_layer=layers,
            n_head=shape.heads,
            n_positions=max(shape.tokens, 128),
            bos_token_id=END,
            eos_token_id=END,
        )
    )


def batches(shape: Shape, accumulate: int, steps: int) -> Batches:
    """Rows of random tokens for so many steps, with the targets of training: 15 % masked words, or the next ones."""
    rng = np.random.default_rng(0)
    rows = rng.integers(5, shape.vocabulary, (steps * accumulate * shape.rows, shape.tokens), dtype=np.uint16)
    if shape.documents:
        for row in rows:  # a document is as long as it happens to be
            row[rng.choice(shape.tokens - 1, shape.documents - 1, replace=False)] = END
        collator: Any = CausalLM(SequenceFormat(None, None, None, END, None, shape.vocabulary, 1), packed=True)
    else:
        maskable = np.arange(shape.vocabulary) >= 5
        uniform = np.ones(shape.vocabulary)
        collator = MaskedLM(MaskingConfig(), 4, 0, maskable, uniform, np.zeros(shape.vocabulary, bool))
    step_shape = StepShape(shape.rows, shape.rows * accumulate)
    return Batches(rows, collator, FullShuffle(len(rows), 0), step_shape, seed=0)


class InOrder(FullShuffle):
    """Sequences in the order in which they lie."""

    def numbers(self, epoch: int, positions: np.ndarray) -> np.ndarray:
        return positions


def whole_sequences(rows: np.ndarray, vocabulary: int, size: int) -> Batches:
    """Steps of so many sequences without padding, every token but the first a target."""
    collator = CausalLM(SequenceFormat(None, None, None, None, None, vocabulary, 1), packed=False)
    return Batches(rows, collator, InOrder(len(rows), 0), StepShape(size, size), seed=0)


class Work(NamedTuple):
    """What a forward has to do: tokens, of which the head works at some, and each of which sees so many others."""

    tokens: float
    seen: float
    head_tokens: float


def operations(model: Any, work: Work) -> float:
    """Matrix operations of a forward that nothing avoids.

    2 for each weight of a linear layer and token, and 4 for each dimension of the queries and position that they see.
    """
    tokens, seen, head_tokens = work
    body, config = {*model.base_model.modules()}, model.config
    linear = [module for module in model.modules() if isinstance(module, nn.Linear | Conv1D)]
    products = sum(module.weight.numel() * (tokens if module in body else head_tokens) for module in linear)
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    attended = tokens * seen * config.num_hidden_layers * config.num_attention_heads * width
    return float(2 * products + 4 * attended)


def pair_operations(teacher: Any, student: Any, work: Work) -> float:
    """Of a step: a forward of the teacher; of the student one, and a backward, which is worth two."""
    return operations(teacher, work) + 3 * operations(student, work)


SQUARE = ((1536, 1536, 1536),)  # a product that suits a CPU
GPU_SQUARE = ((8192, 8192, 8192),)


def matrix_rate(
    dtype: torch.dtype, device: torch.device, sizes: Sequence[tuple[int, int, int]] = (), times: int = 10
) -> float:
    """Operations a second of the fastest of these matrix products, [N, I] by [I, O] each, in so many tries."""
    best = 0.0
    for rows, inner, outer in sizes or (GPU_SQUARE if device.type == "cuda" else SQUARE):
        a, b = (torch.randn(size, device=device).to(dtype) for size in ((rows, inner), (outer, inner)))
        out = torch.empty(rows, outer, dtype=dtype, device=device)
        for _ in range(times):
            wait(device)
            began = time.perf_counter()
            torch.mm(a, b.t(), out=out)
            wait(device)
            best = max(best, 2 * rows * inner * outer / (time.perf_counter() - began))
    return best


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
