"""The pairs that a step is measured on: their shapes, models with random weights, batches and matrix operations."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import (
    BertConfig,
    BertForMaskedLM,
    DistilBertConfig,
    DistilBertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
)

from distill.config.settings import MaskingConfig, PrecisionConfig
from distill.data.batches import Batches, StepShape
from distill.data.collate.clm import CausalLM
from distill.data.collate.mlm import MaskedLM
from distill.data.order import FullShuffle
from distill.data.sequence_format import SequenceFormat

AfterStep = Callable[[], None]
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


SHAPES = {
    "base": Shape(12, 6, 768, 30522, 8, 128),
    "small": Shape(4, 2, 256, 8192, 16, 128),
    "bundled": Shape(4, 2, 192, 6144, 16, 128),
    "base-512": Shape(12, 6, 768, 30522, 16, 512),
    "tiny": Shape(2, 1, 64, 500, 2, 16),  # to try the script
    "gpt2": Shape(12, 6, 768, 50257, 8, 128, documents=3),
    "gpt2-small": Shape(4, 2, 256, 8192, 16, 128, documents=3),
    "gpt2-small-single": Shape(4, 2, 256, 8192, 16, 128, documents=1),
    "gpt2-512": Shape(12, 6, 768, 50257, 16, 512, documents=3),
    "gpt2-tiny": Shape(2, 1, 64, 500, 2, 16, documents=3),
}


class Variant(NamedTuple):
    name: str
    rows: str  # that carry soft targets: all, masked or targets
    precision: PrecisionConfig
    plain: bool = False


def make_teacher(shape: Shape, device: torch.device) -> Any:
    """A frozen model with random weights: time does not depend on them."""
    torch.manual_seed(0)
    if shape.documents:
        model: Any = _gpt2(shape, shape.teacher_layers)
    else:
        config = BertConfig(
            vocab_size=shape.vocabulary,
            hidden_size=shape.width,
            num_hidden_layers=shape.teacher_layers,
            num_attention_heads=shape.heads,
            intermediate_size=4 * shape.width,
        )
        model = BertForMaskedLM(config)
    return model.to(device).eval().requires_grad_(False)


def make_student(shape: Shape, device: torch.device) -> Any:
    """A model to be trained, with the dropout of its family's configuration, 0.1."""
    torch.manual_seed(1)
    if shape.documents:
        model: Any = _gpt2(shape, shape.student_layers)
    else:
        config = DistilBertConfig(
            vocab_size=shape.vocabulary,
            dim=shape.width,
            n_layers=shape.student_layers,
            n_heads=shape.heads,
            hidden_dim=4 * shape.width,
        )
        model = DistilBertForMaskedLM(config)
    return model.to(device).train()


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
    size = (steps * accumulate * shape.rows, shape.tokens)
    rng = np.random.default_rng(0)
    rows = rng.integers(5, shape.vocabulary, size, dtype=np.uint16)
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


def operations(shape: Shape, rows: str) -> float:
    """Matrix operations of one micro-batch that nothing avoids: a forward is 1, a forward with its backward 3."""
    tokens, width = shape.rows * shape.tokens, shape.width
    seen = shape.tokens / 2 if shape.documents else shape.tokens  # keys of a query, documents of a row not counted
    layer = layer_operations(width, 4 * width, seen)
    chosen = {"all": tokens, "masked": round(0.15 * tokens), "targets": shape.rows * (shape.tokens - shape.documents)}
    head = 2 * width * (shape.vocabulary + (0 if shape.documents else width))
    return float(tokens * layer * (shape.teacher_layers + 3 * shape.student_layers) + chosen[rows] * head * (1 + 3))


def layer_operations(width: int, inner: int, seen: float) -> float:
    """Matrix operations of a block for one token.

    8 H^2 of the attention's products, 4 H I of the feed-forward layer, and 4 H for each position that the token sees.

    The plain formula for encoders such as BERT.
    """
    return 8 * width**2 + 4 * width * inner + 4 * seen * width
