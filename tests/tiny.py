"""Small things that tests share: a tokenizer, models of every family, rows of token ids, and a whole training."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForMaskedLM, PreTrainedTokenizerFast

from distill import config as conf
from distill.backends.single import Single
from distill.checkpoint import Checkpoints, State
from distill.data.batches import Batches
from distill.data.collate.mlm import Masker, masker
from distill.models.student import DROPOUTS
from distill.objective.objective import Objective
from distill.train import train

WORDS = [
    "the",
    "of",
    "and",
    "to",
    "in",
    "that",
    "was",
    "he",
    "his",
    "it",
    "with",
    "as",
    "had",
    "for",
    "at",
    "on",
    "be",
    "him",
    "is",
    "all",
    "said",
    "not",
    "so",
    "out",
    "one",
]
PIECES = [f"##{piece}" for piece in ["ing", "ed", "s", "ly", "er", "est", "ness", "ful", "less", "able"]]
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
PAD, UNK, CLS, SEP, MASK = range(5)
VOCAB = len(SPECIAL) + len(WORDS) + len(PIECES)
LENGTH = 12
WIDTH = 32
HIDDEN = {"hidden_size": WIDTH, "num_attention_heads": 4, "intermediate_size": 48}
FIELDS: dict[str, dict[str, Any]] = {
    "bert": HIDDEN,
    "distilbert": {"dim": WIDTH, "n_heads": 4, "hidden_dim": 48},
    "roberta": HIDDEN,
    "modernbert": HIDDEN | {"local_attention": 8, "cls_token_id": CLS, "sep_token_id": SEP},
    "albert": HIDDEN | {"embedding_size": 16},
}


def make_tokenizer(extra: tuple[str, ...] = ()) -> PreTrainedTokenizerFast:
    """WordPiece of whole words, endings marked ## and the five usual special tokens; `extra` words at its end."""
    words = [*SPECIAL, *WORDS, *PIECES, *extra]
    tokenizer = Tokenizer(models.WordPiece({word: number for number, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    special = dict(zip(("pad_token", "unk_token", "cls_token", "sep_token", "mask_token"), SPECIAL, strict=True))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


def make_model(
    family: str = "bert", layers: int = 4, seed: int = 1, vocab: int = VOCAB, dropout: float = 0.0, **fields: Any
) -> Any:
    """A masked language model with weights large enough for its predictions to differ, in evaluation mode."""
    number = "n_layers" if family == "distilbert" else "num_hidden_layers"
    known = {"vocab_size": vocab, "max_position_embeddings": 32, "pad_token_id": PAD, number: layers}
    known |= {name: dropout for name in DROPOUTS if hasattr(AutoConfig.for_model(family), name)}
    special = {"bos_token_id": CLS, "eos_token_id": SEP}
    torch.manual_seed(seed)
    model = AutoModelForMaskedLM.from_config(
        AutoConfig.for_model(family, **{**FIELDS[family], **known, **special, **fields}), dtype=torch.float32
    )
    with torch.no_grad():
        for parameter in model.parameters():  # norms and biases too: what a wrong copy would forget has to show
            parameter.add_(torch.randn_like(parameter) * 0.15)
    return model.eval()


def make_rows(count: int, length: int = LENGTH, seed: int = 3, shortest: int | None = None) -> np.ndarray:
    """[count, length] uint16: [CLS] ids [SEP], padded where a row is shorter; `shortest` None: all are full."""
    random = np.random.default_rng(seed)
    rows = np.full((count, length), PAD, np.uint16)
    for row in rows:
        end = length if shortest is None else int(random.integers(shortest, length + 1))
        row[:end] = [CLS, *random.integers(len(SPECIAL), VOCAB, end - 2), SEP]
    return rows


def make_masker(tokenizer: Any, rows: np.ndarray, **changes: Any) -> Masker:
    return masker(conf.Masking(**changes), tokenizer, np.bincount(rows.reshape(-1), minlength=VOCAB))


def weights_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def assert_close(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], **tolerance: float) -> None:
    assert ours.keys() == theirs.keys()
    for name in ours:
        torch.testing.assert_close(
            ours[name], theirs[name], check_dtype=False, msg=lambda m, n=name: f"{n}: {m}", **tolerance
        )


@dataclass
class Fit:
    """One training through `distill.train.train`, and what it gave its callbacks."""

    folder: Path
    tokenizer: Any
    rows: np.ndarray
    teacher: Any | None = None
    student: Any = None
    objective: conf.Objective = field(default_factory=conf.Objective)
    settings: conf.Train = field(default_factory=lambda: conf.Train(batch_size=4, accumulate=2, epochs=2))
    schedule: conf.Schedule = field(default_factory=conf.Schedule)
    optimizer: Any = None  # called with the student; None: AdamW of distill
    peak: conf.Optimizer = field(default_factory=lambda: conf.Optimizer(lr=1e-2))
    seed: int = 0
    identity: dict[str, Any] = field(default_factory=lambda: {"run": "tiny"})
    backend: Any = None  # None: one process
    on_log: Any = None  # called with this object and the metrics
    logs: list[dict[str, float]] = field(default_factory=list)
    epochs: list[tuple[int, float, dict[str, float]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        from distill import optim

        self.student = self.student if self.student is not None else make_model("distilbert", 2, seed=5).train()
        self.backend = self.backend or Single(conf.Backend(device="cpu"))
        self.backend.prepare(self.student)
        self.made = optim.build(self.student, self.peak) if self.optimizer is None else self.optimizer(self.student)
        self.state = State()
        self.checkpoints = Checkpoints(self.folder, self.settings.keep, self.identity)
        self.batches = Batches(
            self.rows,
            make_masker(self.tokenizer, self.rows, **vars(self.objective.masking)),
            PAD,
            self.settings.batch_size,
            self.settings.accumulate,
            self.seed,
            self.backend.rank,
            self.backend.size,
        )

    def resume(self, path: Path | None = None) -> "Fit":
        newest = path or self.checkpoints.newest()
        assert newest is not None
        self.state = self.checkpoints.load(newest, self.student, self.made)
        return self

    def run(self) -> str:
        return train(
            self.student,
            self.teacher,
            self.batches,
            Objective(self.objective, conf.Precision(), VOCAB),
            self.made,
            self.backend,
            self.state,
            self.settings,
            self.schedule,
            self.peak,
            self.checkpoints,
            self._log,
            lambda state, epochs, losses: self.epochs.append((state.step, epochs, losses)),
        )

    def losses(self) -> list[dict[str, float]]:
        """The logs without what a clock measures."""
        timed = ("seconds", "tokens_per_second", "data_wait")
        return [{name: value for name, value in line.items() if name not in timed} for line in self.logs]

    def _log(self, metrics: dict[str, float]) -> None:
        self.logs.append(metrics)
        if self.on_log is not None:
            self.on_log(self, metrics)


def plain_sgd(lr: float = 0.1) -> dict[str, Any]:
    """Arguments of `Fit` for SGD with a constant rate and without clipping: nothing that hides an error of scale."""
    return {
        "optimizer": lambda model: torch.optim.SGD(model.parameters(), lr=lr),
        "peak": conf.Optimizer(lr=lr, clip=None),
        "schedule": conf.Schedule(kind="constant", warmup=0.0),
    }


def only(**weights: float) -> conf.Objective:
    """An objective with these weights, and 0 for the terms that are not named."""
    whole = conf.Objective(soft=conf.Soft(0.0), mlm=conf.Term(0.0), cosine=conf.Term(0.0))
    for name, weight in weights.items():
        setattr(whole, name, replace(getattr(whole, name), weight=weight))
    return whole
