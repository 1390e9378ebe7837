"""The training steps that `gpu_parts.py` measures in its own process: pairs of models, and what a loop is asked."""

import contextlib
import os
import resource
import statistics
import tempfile
import traceback
import warnings
from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import kl_div, log_softmax
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from benchmarks.step.models import (
    Shape,
    Work,
    batches,
    make_student,
    make_teacher,
    pair_operations,
    wait,
    whole_sequences,
)
from benchmarks.step.training import Plan, Variant, train_by_plan, train_variant
from benchmarks.step.turns import Over
from distill.config.settings import ObjectiveConfig, PrecisionConfig

if TYPE_CHECKING:
    from benchmarks.gpu_parts import Part

COUNTED = 2  # steps whose waits are counted, after those that are timed
SYNCHRONIZING = {"_local_scalar_dense", "nonzero", "equal", "_unique2", "masked_select"}
SKIPPED = (os.path.dirname(torch.__file__), __file__)  # frames below the one that waits


class Waits(contextlib.AbstractContextManager["Waits"]):
    """Counts by place in the source where the host waits for the device.

    On a GPU torch reports them; on a CPU, where nothing waits, these are the operators that would. Some of these are in
    branches that a CPU takes alone (`ON_CPUS` in tests/test_waits.py).
    """

    def __init__(self, device: torch.device) -> None:
        self.on_gpu, self.places = device.type == "cuda", Counter[str]()
        self._seen: Any = None

    def __enter__(self) -> "Waits":
        self._stack = contextlib.ExitStack()
        if self.on_gpu:
            self._seen = self._stack.enter_context(warnings.catch_warnings(record=True))
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
        else:
            self._stack.enter_context(_Operators(self.places))
        return self

    def __exit__(self, *_: object) -> None:
        if self.on_gpu:
            torch.cuda.set_sync_debug_mode("default")
            seen = [w for w in self._seen if "synchronizing" in str(w.message)]
            self.places.update(f"{_shortened(w.filename)}:{w.lineno}" for w in seen)
        self._stack.close()


class _Operators(TorchDispatchMode):
    def __init__(self, places: Counter[str]) -> None:
        super().__init__()
        self.places = places

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name.split("::")[1] in SYNCHRONIZING:
            frames = [f for f in traceback.extract_stack() if not f.filename.startswith(SKIPPED)]
            self.places[f"{_shortened(frames[-1].filename)}:{frames[-1].lineno}"] += 1
        return func(*args, **(kwargs or {}))


def _shortened(path: str) -> str:
    return "/".join(path.split("/")[-3:])


class Loop:
    """Follows a training loop: some steps that warm it up, some that are timed, some whose waits are counted."""

    def __init__(self, part: "Part") -> None:
        self.part, self.marks = part, list[Any]()
        self.steps, self.warm_up, self.rounds = 0, part.sizes.warm_up, part.sizes.rounds
        self.waits, self.peak = Waits(part.device), 0.0

    @property
    def length(self) -> int:
        """The steps that a loop has to be able to make."""
        return self.warm_up + self.rounds + COUNTED + 1

    def after_step(self) -> None:
        """Raises Over after the last step."""
        self.steps += 1
        if self.warm_up <= self.steps <= self.warm_up + self.rounds:
            self.marks.append(self.part.mark())
        if self.steps == self.warm_up and self.part.on_gpu:
            torch.cuda.reset_peak_memory_stats()
        elif self.steps == self.warm_up + self.rounds:
            wait(self.part.device)
            self.peak = self.part.peak() or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
            self.waits.__enter__()
        elif self.steps == self.length - 1:
            self.waits.__exit__(None, None, None)
            raise Over

    def results(self, tokens: int, operations: float, rate: float | None) -> dict[str, Any]:
        """Of one step: its time, tokens and operations a second, the share of the measured rate, memory, waits."""
        seconds = self.part.between(self.marks)
        median = statistics.median(seconds)
        return {
            "seconds": median,
            "fastest": min(seconds),
            "slowest": max(seconds),
            "steps": len(seconds),
            "tokens_per_second": tokens / median,
            "tflops": operations / median / 1e12,
            "mfu": rate and operations / median / rate,
            "peak_gib": self.peak,
            "waits": self.waits.places.total() / COUNTED,
            "places": {place: count / COUNTED for place, count in self.waits.places.most_common(12)},
        }


@dataclass(frozen=True)
class CausalPair:
    """A Qwen3 and a student of half its layers with random weights, on whole sequences; forward divergence alone."""

    config: dict[str, int]
    sequences: int
    length: int

    @property
    def name(self) -> str:
        layers = self.config["num_hidden_layers"]
        width = self.config["hidden_size"]
        return f"Qwen3 {layers} to {layers // 2} layers x {width}, {self.sequences} x {self.length}"

    @property
    def tokens(self) -> int:
        return self.sequences * self.length

    @property
    def operations(self) -> float:
        """Of the matrix products that nothing avoids; half the positions are seen."""
        models = self.models(torch.device("meta"))
        return pair_operations(*models, Work(self.tokens, self.length / 2, self.tokens))

    def halved(self) -> "CausalPair":
        return replace(self, sequences=max(1, self.sequences // 2))

    def models(self, device: torch.device) -> tuple[Any, Any]:
        """Teacher and student, fp32."""
        made = []
        for layers in (self.config["num_hidden_layers"], self.config["num_hidden_layers"] // 2):
            torch.manual_seed(layers)
            config = Qwen3Config(**self.config | {"num_hidden_layers": layers}, tie_word_embeddings=True)
            with torch.device(device):
                made.append(Qwen3ForCausalLM(config))
        return made[0].eval().requires_grad_(False), made[1].train()

    def rows(self, steps: int) -> np.ndarray:
        rng = np.random.default_rng(0)
        return rng.integers(5, self.config["vocab_size"], (steps * self.sequences, self.length), dtype=np.uint32)

    def train(self, name: str, device: torch.device, loop: Loop) -> None:
        teacher, student = self.models(device)
        rows = self.rows(loop.length)
        with contextlib.suppress(Over):
            if name.startswith("distill"):
                source = whole_sequences(rows, self.config["vocab_size"], self.sequences)
                soft = {"weight": 1.0, "positions": "targets", "temperature": 1.0}
                positions = 10**9 if device.type == "cuda" else 0  # with fewer the objective is not compiled
                plan = Plan(ObjectiveConfig(task="clm", soft=soft), _precision(name), positions)
                train_by_plan(source, (teacher, student), plan, loop.length, loop.after_step)
            elif name == "trl":
                _train_with_trl(teacher.bfloat16(), student, rows, self.sequences, loop)
            else:
                self.train_plainly(teacher.bfloat16(), student, torch.from_numpy(rows.astype(np.int64)), loop)

    def train_plainly(self, teacher: Any, student: Any, rows: Tensor, loop: Loop) -> None:
        """As one would write it: autocast, full logits, fused AdamW."""
        optimizer = torch.optim.AdamW(student.parameters(), lr=1e-4, fused=True)
        kind = student.device.type
        for ids in (rows.pin_memory() if kind == "cuda" else rows).split(self.sequences):
            ids = ids.to(student.device, non_blocking=True)
            with torch.autocast(kind, torch.bfloat16):
                with torch.no_grad():
                    wanted = log_softmax(teacher(input_ids=ids, use_cache=False).logits[:, :-1].float(), -1)
                found = log_softmax(student(input_ids=ids, use_cache=False).logits[:, :-1].float(), -1)
                loss = kl_div(found, wanted, reduction="none", log_target=True).sum(-1).mean()
            del found, wanted
            loss.backward()
            torch.nn.utils.clip_grad_norm_(student.parameters(), 5.0)
            optimizer.step()
            optimizer.zero_grad()
            loop.after_step()


def _train_with_trl(teacher: Any, student: Any, rows: np.ndarray, sequences: int, loop: Loop) -> None:
    """GKDTrainer with the forward divergence from full logits, and no sequences of the student's own."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    from benchmarks.step.trl_steps import InOrder, trainer_of

    words = Tokenizer(WordLevel({"[PAD]": 0, "[END]": 1}, unk_token="[PAD]"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]", eos_token="[END]")
    settings = {"use_cpu": student.device.type == "cpu", "bf16": True, "learning_rate": 1e-4, "max_grad_norm": 5.0}
    with tempfile.TemporaryDirectory() as folder:
        settings |= {"output_dir": folder, "per_device_train_batch_size": sequences}
        trainer_of(InOrder, (teacher, student), rows, tokenizer, loop.after_step, **settings).train()


@dataclass(frozen=True)
class MaskedPair:
    """A BERT and a DistilBERT of half its layers, on 15 % masked words; soft targets at all positions."""

    shape: Shape

    @property
    def name(self) -> str:
        return f"BERT {self.shape}"

    @property
    def tokens(self) -> int:
        return self.shape.rows * self.shape.tokens

    @property
    def operations(self) -> float:
        return self.shape.operations(self.tokens)

    def halved(self) -> "MaskedPair":
        return MaskedPair(self.shape._replace(rows=max(1, self.shape.rows // 2)))

    def train(self, name: str, device: torch.device, loop: Loop) -> None:
        pair = make_teacher(self.shape, device), make_student(self.shape, device)
        eager = " eager" * (device.type == "cpu")  # where compiling takes longer than all else
        variant = Variant(name + eager, "all", _precision(name), plain=name == "plain")
        with contextlib.suppress(Over):
            train_variant(batches(self.shape, 1, loop.length), pair, variant, loop.length, loop.after_step)


def _precision(name: str) -> PrecisionConfig:
    form: Any = name.partition("teacher in ")[2] or None
    return PrecisionConfig(student="bf16", teacher="bf16", compile="compiled" in name, quantize_teacher=form)
