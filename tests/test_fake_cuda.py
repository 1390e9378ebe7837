"""The CUDA paths without a GPU: models and batches that only pretend to lie on one, so that a wrong device shows.

Under torch's FakeTensorMode operations compute shapes and devices alone. A tensor that was left on the CPU raises, and
so does whatever would have to wait for the GPU to know a shape. What this cannot show: backward, which asks for the
device itself, values, and speed; `benchmarks/gpu.py` does on a real one. Needs a CUDA build of torch, no GPU:
`python -m pytest -m cuda_build`.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tiny import MASK, VOCAB, loop, make_batches, make_evaluator, make_masks, make_model, make_rows, objective_config
from torch._subclasses.fake_tensor import FakeTensorMode
from torchmetrics import Metric
from transformers import PreTrainedModel

from distill.config import settings as conf
from distill.data.batch import Batch
from distill.data.batches import Batches
from distill.distributed import GradientSync
from distill.distributed.single import Single
from distill.evaluation.masked_copies import Copies, head_rows_at_masks
from distill.evaluation.measures import Sums
from distill.evaluation.sets import EvaluationSet
from distill.models.language_model import LAST, LanguageModel, OutputSpec
from distill.objective.build import bind_terms, build_objective, make_terms
from distill.optim import updates as optim
from distill.runs.setup import setup_student, setup_teacher
from distill.teacher.cache import CachedTeacher, Layout
from distill.teacher.live import LiveTeacher
from distill.teacher.output import MeanTeacher

pytestmark = [
    pytest.mark.cuda_build,
    pytest.mark.skipif(torch.version.cuda is None, reason="a CPU build of torch knows no CUDA tensors"),
]
CUDA = torch.device("cuda", 0)
FORMATS = ["fp32", "bf16"]


@pytest.fixture(autouse=True)
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeTensorMode]:
    """Everything made in a test is fake; autocast is not switched off for want of a GPU, and backward is left out."""
    # Starting weights cannot be made of fake tensors.
    monkeypatch.setattr(PreTrainedModel, "init_weights", lambda _: None)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda *_, **__: True)
    monkeypatch.setattr(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    monkeypatch.setattr(torch.Tensor, "backward", lambda *_: None)
    monkeypatch.setattr(torch.autograd, "grad", lambda _, inputs, **options: tuple(map(torch.zeros_like, inputs)))
    # A fake parameter cannot be moved: models are made where they are to be.
    move = torch.nn.Module.to
    monkeypatch.setattr(torch.nn.Module, "to", lambda self, *to: move(self, *to) if isinstance(self, Metric) else self)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        yield mode


def model_on_gpu(family: str, layers: int) -> Any:
    with CUDA:
        return make_model(family, layers)


def this_process() -> Single:
    made = Single(conf.BackendConfig(device="cpu"))
    made.device = CUDA
    return made


def batches(tokenizer: Any, padded: bool) -> Batches:
    rows = make_rows(8, shortest=5 if padded else None)
    return make_batches(rows, make_masks(tokenizer, rows), batch_size=4, accumulate=2, seed=0)


def on_gpu(window: list[Batch]) -> list[Batch]:
    return [batch.to(CUDA) for batch in window]


def precision(format: str) -> conf.PrecisionConfig:
    return conf.PrecisionConfig(student=format, teacher=format, evaluate=format)


def test_a_tensor_on_the_wrong_device_raises() -> None:
    """Else none of these tests could fail."""
    with pytest.raises(RuntimeError, match="device"):
        torch.ones(3, device=CUDA) + torch.ones(3)
    with pytest.raises(Exception, match="nonzero"):
        torch.ones(3, device=CUDA).nonzero()


@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("kernel", ["fused", "plain"])
@pytest.mark.parametrize("rows", ["all", "masked"])
@pytest.mark.parametrize("teacher_micro_batches", [1, 2])
def test_the_step(
    tokenizer: Any, rows: str, kernel: str, format: str, padded: bool, teacher_micro_batches: int
) -> None:
    settings = objective_config(rows=rows, kernel=kernel, hidden={"kind": "cosine", "weight": 1.0})
    student, teacher = model_on_gpu("distilbert", 1).train(), model_on_gpu("bert", 2)
    terms, ranks = make_terms(settings), this_process()
    terms = bind_terms(terms, student, teacher)
    objective = build_objective(terms, settings, precision(format), VOCAB, 1, CUDA)
    frozen = setup_teacher(teacher, precision(format), ranks)
    model = setup_student(student, objective, precision(format), ranks)
    sync = GradientSync(ranks, model)
    source = batches(tokenizer, padded)
    window = source.window(0)
    counts = objective.count(window)
    optimizer = optim.build(model, conf.OptimizerConfig())
    scales = objective.scales(counts, CUDA)
    sums = loop.accumulate_gradients(
        model, LiveTeacher(frozen, teacher_micro_batches), objective, on_gpu(window), scales, sync
    )
    assert sums.device == CUDA and sums.shape == (2, 4)
    stats = sync.all_reduce_gradients(torch.cat([sums.sum(0), sums.new_tensor([1.0, 2.0])]))
    norm = optim.clip_gradients(model, 1.0)
    assert stats is not None and stats.device == norm.device == CUDA
    optimizer.step()


@pytest.mark.parametrize("cutoff", [0.0, 0.01])
@pytest.mark.parametrize("rows", ["all", "masked"])
def test_a_cached_teacher(tokenizer: Any, rows: str, cutoff: float) -> None:
    settings = objective_config(rows=rows, cosine=0.0, cutoff=cutoff, kernel="fused")
    student = model_on_gpu("distilbert", 1).train()
    terms, ranks = make_terms(settings), this_process()
    terms = bind_terms(terms, student, None)
    objective = build_objective(terms, settings, precision("fp32"), VOCAB, 1, CUDA)
    model = setup_student(student, objective, precision("fp32"), ranks)
    window = []
    for batch in batches(tokenizer, True).window(0):
        positions = objective.positions(batch)
        assert positions is not None
        ids = torch.zeros(len(positions), 4, dtype=torch.int32)
        window.append(batch.with_teacher_data(**{"key.ids": ids, "key.log_probs": torch.zeros(len(positions), 5)}))
    files: Any = SimpleNamespace(layout=Layout(top_k=4, sampled=0, vocabulary=VOCAB), key="key", num_parts=1)
    cached = CachedTeacher(files, ranks)  # what it reads is there already
    scales = objective.scales(objective.count(window), CUDA)
    sums = loop.accumulate_gradients(model, cached, objective, on_gpu(window), scales, GradientSync(ranks, model))
    assert sums.device == CUDA


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("kernel", ["fused", "plain"])
def test_several_teachers(tokenizer: Any, kernel: str, format: str) -> None:
    settings = objective_config(kernel=kernel, jsd={"weight": 1.0})
    student, ranks = model_on_gpu("distilbert", 1).train(), this_process()
    teachers = [model_on_gpu("bert", 2), model_on_gpu("distilbert", 1)]
    objective = build_objective(make_terms(settings), settings, precision(format), VOCAB, 1, CUDA)
    model = setup_student(student, objective, precision(format), ranks)
    live = [LiveTeacher(setup_teacher(teacher, precision(format), ranks)) for teacher in teachers]
    window = batches(tokenizer, True).window(0)
    scales, mean = objective.scales(objective.count(window), CUDA), MeanTeacher(live, [1.0, 2.0])
    sums = loop.accumulate_gradients(model, mean, objective, on_gpu(window), scales, GradientSync(ranks, model))
    assert sums.device == CUDA and sums.shape == (2, 4)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("family", ["bert", "distilbert", "roberta", "albert", "modernbert"])
def test_every_family(tokenizer: Any, family: str, format: str) -> None:
    model = LanguageModel(model_on_gpu(family, 2), format)
    (batch, _) = on_gpu(batches(tokenizer, True).window(0))
    outputs = model(batch.inputs, batch.documents, OutputSpec(True, batch.labels["mlm"].positions, (0, 1, LAST)))
    assert outputs.head_rows is not None
    assert model.logits(outputs.head_rows, VOCAB).device == CUDA


def copies(padded: bool) -> Copies:
    rows = torch.from_numpy(make_rows(3).astype(np.int64)).to(CUDA)
    valid = torch.ones_like(rows, dtype=torch.bool) if padded else None
    numbers = torch.arange(6, device=CUDA) // 2
    return Copies(rows, valid, numbers, numbers + 1, MASK)


@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
@pytest.mark.parametrize("family", ["bert", "distilbert", "roberta", "albert"])
def test_pseudo_perplexity(family: str, padded: bool) -> None:
    rows = head_rows_at_masks(LanguageModel(model_on_gpu(family, 2), "fp32"), copies(padded))
    assert rows.device == CUDA and len(rows) == 6


@pytest.mark.parametrize("format", FORMATS)
def test_evaluation(tokenizer: Any, monkeypatch: pytest.MonkeyPatch, format: str) -> None:
    """Both measures and the agreement, up to the numbers themselves, which fake tensors do not have."""
    monkeypatch.setattr(Sums, "over_ranks", lambda self: np.full(self._sums.shape, float(self._sums.device == CUDA)))
    rows = make_rows(8, shortest=5)
    settings = conf.EvaluateConfig(batch_size=4, pseudo_perplexity=conf.PseudoPerplexityConfig(fraction=0.5))
    evaluator = make_evaluator(settings, make_masks(tokenizer, rows), precision(format), this_process())
    data = EvaluationSet("rows", "rows of ids", rows, 1)
    student, teacher = model_on_gpu("distilbert", 1), model_on_gpu("bert", 2)
    one = {"rows": float(np.exp(1.0))}
    assert evaluator.score(student, "student", [data]) == {"perplexity": one, "pseudo_perplexity": one}
    assert evaluator.agree(student, teacher, [data])["rows"] == {"top1": 1, "kl": 1}


@pytest.mark.parametrize("capability", ["8.0", "9.0"])
def test_the_objective_compiles_for_a_gpu_that_is_not_there(capability: str, tmp_path: Path) -> None:
    """In a process of its own, which has to believe in that GPU to its end."""
    script = Path(__file__).with_name("compile_for_gpu.py")
    environment = {**os.environ, "PYTHONPATH": str(script.parent.parent), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, script, capability], capture_output=True, text=True, env=environment)
    last = (done.stderr.splitlines() or [""])[-1]
    other_names = last.startswith(("ImportError", "ModuleNotFoundError", "AttributeError"))
    if other_names and "distill/objective" not in done.stderr:
        pytest.skip(f"inductor of torch {torch.__version__} has other names: {last}")
    assert done.returncode == 0, done.stderr
    counts = [int(line.split()[-2]) for line in done.stdout.splitlines()]
    assert len(counts) == 4 and min(counts) >= 1
