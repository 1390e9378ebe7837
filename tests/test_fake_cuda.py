"""The CUDA paths without a GPU: models and batches that only pretend to lie on one, so that a wrong device shows.

Under torch's FakeTensorMode operations compute shapes and devices alone. A tensor that was left on the CPU raises, and
so does whatever would have to wait for the GPU to know a shape. What this cannot show: backward, which asks for the
device itself, values, and speed; `benchmarks/gpu.py` does on a real one. Needs a CUDA build of torch, no GPU:
`python -m pytest -m cuda_build`.
"""

from collections.abc import Iterator
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
PADDED = pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
FORMATS = pytest.mark.parametrize("format", ["fp32", "bf16"])


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


def window_of(tokenizer: Any, padded: bool = True) -> list[Batch]:
    rows = make_rows(8, shortest=5 if padded else None)
    return make_batches(rows, make_masks(tokenizer, rows), batch_size=4, accumulate=2, seed=0).window(0)


def precision(format: str) -> conf.PrecisionConfig:
    return conf.PrecisionConfig(student=format, teacher=format, evaluate=format)


def test_a_tensor_on_the_wrong_device_raises() -> None:
    """Else none of these tests could fail."""
    with pytest.raises(RuntimeError, match="device"):
        torch.ones(3, device=CUDA) + torch.ones(3)
    with pytest.raises(Exception, match="nonzero"):
        torch.ones(3, device=CUDA).nonzero()


def with_kept_entries(batch: Batch, objective: Any) -> Batch:
    """What a cached teacher reads, as if it were read."""
    positions = objective.positions(batch)
    count = batch.ids.numel() if positions is None else len(positions)
    entries = {"key.ids": torch.zeros(count, 4, dtype=torch.int32), "key.log_probs": torch.zeros(count, 5)}
    return batch.with_teacher_data(**entries)


@PADDED
@FORMATS
@pytest.mark.parametrize("kernel", ["fused", "auto"])
@pytest.mark.parametrize("rows", ["all", "masked"])
@pytest.mark.parametrize("teacher", ["live", "two micro-batches", "several", "cached", "cached, with a cutoff"])
def test_the_step(tokenizer: Any, teacher: str, rows: str, kernel: str, format: str, padded: bool) -> None:
    cached, cutoff = teacher.startswith("cached"), 0.01 if "cutoff" in teacher else 0.0
    more = {"cosine": 0.0} if cached else {"hidden": {"kind": "cosine", "weight": 1.0}, "jsd": {"weight": 1.0}}
    settings, ranks = objective_config(rows=rows, kernel=kernel, cutoff=cutoff, **more), this_process()
    models = [model_on_gpu("bert", 2), model_on_gpu("distilbert", 1)][: 2 if teacher == "several" else 1]
    student, window = model_on_gpu("distilbert", 1).train(), window_of(tokenizer, padded)
    terms = bind_terms(make_terms(settings), student, None if cached else models[0])
    objective = build_objective(terms, settings, precision(format), VOCAB, 1, CUDA)
    if cached:
        files: Any = SimpleNamespace(layout=Layout(top_k=4, sampled=0, vocabulary=VOCAB), key="key", num_parts=1)
        source: Any = CachedTeacher(files, ranks)
        window = [with_kept_entries(batch, objective) for batch in window]
    else:
        at_once = 2 if "two" in teacher else 1
        live = [LiveTeacher(setup_teacher(model, precision(format), ranks), at_once) for model in models]
        source = MeanTeacher(live, [1.0, 2.0]) if len(live) > 1 else live[0]
    model = setup_student(student, objective, precision(format), ranks)
    sync, optimizer = GradientSync(ranks, model), optim.build(model, conf.OptimizerConfig())
    scales, on_gpu = objective.scales(objective.count(window), CUDA), [batch.to(CUDA) for batch in window]
    sums = loop.accumulate_gradients(model, source, objective, on_gpu, scales, sync)
    assert sums.device == CUDA and sums.shape == (2, len(terms))
    stats = sync.all_reduce_gradients(torch.cat([sums.sum(0), sums.new_tensor([1.0, 2.0])]))
    norm = optim.clip_gradients(model, 1.0)
    assert stats is not None and stats.device == norm.device == CUDA
    optimizer.step()


@FORMATS
@pytest.mark.parametrize("family", ["bert", "distilbert", "roberta", "albert", "modernbert"])
def test_every_family(tokenizer: Any, family: str, format: str) -> None:
    model, batch = LanguageModel(model_on_gpu(family, 2), format), window_of(tokenizer)[0].to(CUDA)
    outputs = model(batch.inputs, batch.documents, OutputSpec(True, batch.labels["mlm"].positions, (0, 1, LAST)))
    assert outputs.head_rows is not None
    assert model.logits(outputs.head_rows, VOCAB).device == CUDA


@PADDED
@pytest.mark.parametrize("family", ["bert", "distilbert", "roberta", "albert"])
def test_pseudo_perplexity(family: str, padded: bool) -> None:
    ids, numbers = torch.from_numpy(make_rows(3).astype(np.int64)).to(CUDA), torch.arange(6, device=CUDA) // 2
    copies = Copies(ids, torch.ones_like(ids, dtype=torch.bool) if padded else None, numbers, numbers + 1, MASK)
    rows = head_rows_at_masks(LanguageModel(model_on_gpu(family, 2), "fp32"), copies)
    assert rows.device == CUDA and len(rows) == 6


@FORMATS
def test_evaluation(tokenizer: Any, monkeypatch: pytest.MonkeyPatch, format: str) -> None:
    """Both measures and the agreement, up to the numbers themselves, which fake tensors do not have."""
    monkeypatch.setattr(Sums, "over_ranks", lambda self: np.full(self._sums.shape, float(self._sums.device == CUDA)))
    data = EvaluationSet("rows", "rows of ids", make_rows(8, shortest=5), 1)
    settings = conf.EvaluateConfig(batch_size=4, pseudo_perplexity=conf.PseudoPerplexityConfig(fraction=0.5))
    evaluator = make_evaluator(settings, make_masks(tokenizer, data.sequences), precision(format), this_process())
    student, teacher = model_on_gpu("distilbert", 1), model_on_gpu("bert", 2)
    one = {"rows": float(np.exp(1.0))}
    assert evaluator.score(student, "student", [data]) == {"perplexity": one, "pseudo_perplexity": one}
    assert evaluator.agree(student, teacher, [data])["rows"] == {"top1": 1, "kl": 1}
