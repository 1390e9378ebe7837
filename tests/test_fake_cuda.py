"""The CUDA paths without a GPU: models and batches that only pretend to lie on one, so that a wrong device shows.

Under torch's FakeTensorMode operations compute shapes, formats and devices alone. A tensor that was left on the CPU
raises, and so does whatever would have to wait for the GPU to know a shape. What this cannot show: values, and speed;
`benchmarks/gpu.py` does on a real one. It needs a CUDA build of torch (that of PyPI is one), and no GPU:

    python -m venv /tmp/cuda && /tmp/cuda/bin/pip install torch===2.13.0 -e '.[dev]'
    /tmp/cuda/bin/python -m pytest -m cuda_build
"""

from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import tiny
import torch
import torch.distributed as dist
from fake_gpu import Engine, Watch, move
from families import FAMILIES, depth_fields, make_family
from test_waits import OTHERWISE
from tiny import CLS, PAD, SEP, VOCAB, loop, make_model, make_rows, named_terms
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import _disable_current_modes
from torchmetrics import Metric
from transformers import BertConfig, BertForQuestionAnswering, BertForSequenceClassification, PreTrainedModel
from transformers.utils import import_utils

from distill.config import settings as conf
from distill.data.batch import Batch
from distill.data.batches import Batches
from distill.data.collate.clm import CausalLM
from distill.data.collate.tables import Labelled
from distill.data.sequence_format import SequenceFormat
from distill.data.text_pairs import LabelledSequences
from distill.distributed import ddp, gradient_sync
from distill.distributed.ddp import Ddp
from distill.distributed.fsdp import Fsdp
from distill.distributed.shard import local
from distill.distributed.single import Single
from distill.evaluation.measures import Sums
from distill.evaluation.sets import EvaluationSet
from distill.models.language_model import LAST, LanguageModel, OutputSpec
from distill.models.precision import dtype_of
from distill.objective.build import bind_terms, build_objective, make_terms
from distill.objective.chunked import GPU
from distill.optim import updates as optim
from distill.optim.schedules.constant import Constant
from distill.runs import learning
from distill.runs.setup import blocks_of, setup_student, setup_teacher
from distill.runs.state import State
from distill.runs.step import Window
from distill.runtime.rank import RankInfo
from distill.runtime.signals import Signals
from distill.teacher.cache import CachedTeacher, Layout
from distill.teacher.live import LiveTeacher
from distill.teacher.members import ONLY, Member
from distill.teacher.output import MeanTeacher

pytestmark = [
    pytest.mark.cuda_build,
    pytest.mark.skipif(torch.version.cuda is None, reason="a CPU build of torch knows no CUDA tensors"),
]
CUDA = torch.device("cuda", 0)
PADDED = pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
WAIT = ("train.py", "step")  # the one place of `tests/test_waits.py`
FORMAT = SequenceFormat(None, None, CLS, SEP, None, PAD, 1)
FORMATS = pytest.mark.parametrize("format", ["fp32", "bf16"])


@pytest.fixture(autouse=True)
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Everything made in a test is fake, on a GPU that has bf16."""
    engine = Engine()
    # Starting weights cannot be made of fake tensors.
    monkeypatch.setattr(PreTrainedModel, "init_weights", lambda self: self.tie_weights())
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda *_, **__: True)
    monkeypatch.setattr(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
    monkeypatch.setattr(torch, "inference_mode", lambda on=True: torch.no_grad() if on else nullcontext())
    monkeypatch.setattr(FakeTensor, "__deepcopy__", lambda self, memo: memo.setdefault(id(self), self.clone()))
    monkeypatch.setattr(import_utils, "is_fake_tensor", lambda _: False)  # of such transformers asks for no values
    monkeypatch.setattr(torch._C, "_current_graph_task_id", lambda: 1)  # of checkpoints, which compute again once
    monkeypatch.setattr(torch.Tensor, "backward", lambda self: engine.backward(self))
    monkeypatch.setattr(torch.autograd, "grad", lambda loss, inputs, **_: engine.backward(loss, inputs))
    monkeypatch.setattr(torch.Tensor, "register_hook", lambda self, hook: engine.register_hook(self, hook))
    monkeypatch.setattr(torch.autograd.Variable, "_execution_engine", engine)
    monkeypatch.setattr(torch.nn.Module, "float", lambda self: self)  # models are made in fp32
    plain = torch.nn.Module.to
    monkeypatch.setattr(
        torch.nn.Module, "to", lambda self, *to: (plain if isinstance(self, Metric) else move)(self, *to)
    )
    with FakeTensorMode(allow_non_fake_inputs=True), Watch():
        yield


NONE_SAVED = SimpleNamespace(is_writing=False)  # of checkpoints


def this_process() -> Single:
    made = Single(conf.BackendConfig(device="cpu"))
    made.device = CUDA
    return made


def batches_of(rows: np.ndarray, collator: Any) -> Batches:
    return tiny.make_batches(rows, collator, batch_size=4, accumulate=2)


def masked(tokenizer: Any, padded: bool = True) -> Batches:
    rows = make_rows(8, shortest=5 if padded else None)
    return batches_of(rows, tiny.make_masks(tokenizer, rows))


def causal(_: Any, documents: bool = False) -> Batches:
    """Padded sequences; or each of several documents, of which the last may be padding."""
    rows = make_rows(8, shortest=8)
    rows[:, 3:7:3] = SEP
    return batches_of(rows, CausalLM(FORMAT, packed=documents))


def packed(tokenizer: Any) -> Batches:
    return causal(tokenizer, documents=True)


def labelled(*names: str) -> Any:
    """Batches of examples, of which six have these targets."""
    targets = {name: np.arange(6) % 2 for name in names}
    rows = make_rows(8, shortest=5)
    segments = np.zeros(rows.shape, np.uint8)
    examples = LabelledSequences(sequences=rows, segments=segments, targets=targets, pad_id=PAD, digest="")
    return lambda _: batches_of(rows, Labelled(examples))


def classifier(kind: Any, layers: int) -> Any:
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 24, "num_labels": 2}
    return kind(BertConfig(vocab_size=VOCAB, num_hidden_layers=layers, pad_token_id=PAD, **sizes)).eval()


def precision(format: str) -> conf.PrecisionConfig:
    return conf.PrecisionConfig(student=format, teacher=format, evaluate=format)


def step(
    batches: Batches,
    student: Any,
    teachers: list[Any],
    settings: conf.ObjectiveConfig,
    format: str = "bf16",
    source: Any = None,
    **more: Any,
) -> tuple[loop.Learner, Any, Watch]:
    """A whole step of the loop, as a run takes it, on fake models that lie on the CPU at first.

    `source`: makes the teacher of the frozen ones; None: a live one. `more`: `optimizer`, and `checkpoints` of the
    student; ranks and vocabulary where they are not those of the tests. What learned, its teacher, what was seen.
    """
    ranks, vocab, formats = more.get("ranks") or this_process(), more.get("vocab", VOCAB), precision(format)
    terms = bind_terms(make_terms(settings), student, teachers[0] if teachers else None)
    objective = build_objective(terms, settings, formats, vocab, 1, CUDA)
    frozen = [setup_teacher(model.requires_grad_(False), formats, ranks) for model in teachers]
    teacher = LiveTeacher(frozen[0]) if source is None else source(frozen, objective)
    model = setup_student(student.train(), objective, formats, ranks, more.get("checkpoints", False))
    sync, optimizer = gradient_sync(ranks, model), tiny.optimizer_config(more.get("optimizer", {}))
    learner = loop.Learner(model, sync, optim.build(model, optimizer), Constant(warmup=0.0), optimizer)
    run = tiny.run_of(conf.TrainConfig(batch_size=4, accumulate=2, epochs=2), batches, objective, ranks, NONE_SAVED)
    windows = batches.stream(0, 2, CUDA, teacher.read_ahead)
    first = next(windows)
    training = loop.Training(run, learner, teacher, State(), (), None, None)
    with Watch() as watch:
        result, upcoming = loop.step(training, Window(first, objective.count(first), 0.0), windows, Signals())
    assert result.rank_sums.device == CUDA and result.rank_sums.shape == (len(first), len(terms))
    assert len(upcoming.batches) == len(first)
    return learner, teacher, watch


def test_a_tensor_on_the_wrong_device_raises() -> None:
    """Else none of these tests could fail."""
    with pytest.raises(RuntimeError, match="device"):
        torch.ones(3, device=CUDA) + torch.ones(3)
    with pytest.raises(Exception, match="nonzero"):
        torch.ones(3, device=CUDA).nonzero()
    with Watch() as watch:
        on_gpu = torch.ones(3).to(CUDA, non_blocking=True)
    assert not watch.waits
    with Watch() as watch:
        assert on_gpu.sum().item() == 0
        torch.ones(3).to(CUDA)
        on_gpu.cpu()
    assert watch.waits.total() == 3


class KeptTeacher(CachedTeacher):
    """A cached teacher whose files need not be there."""

    def __init__(self, objective: Any) -> None:
        files: Any = SimpleNamespace(layout=Layout(top_k=4, sampled=0, vocabulary=VOCAB), key="key", num_parts=1)
        super().__init__(files, this_process())
        self.objective = objective

    def read_ahead(self, batch: Batch) -> Batch:
        positions = self.objective.positions(batch)
        count = batch.ids.numel() if positions is None else len(positions)
        entries = {"key.ids": torch.zeros(count, 4, dtype=torch.int32), "key.log_probs": torch.zeros(count, 5)}
        return batch.with_teacher_data(**entries)


@PADDED
@FORMATS
@pytest.mark.parametrize("rows", ["all", "masked"])
@pytest.mark.parametrize("teacher", ["live", "two micro-batches", "several", "cached", "cached, with a cutoff"])
def test_teachers(tokenizer: Any, teacher: str, rows: str, format: str, padded: bool) -> None:
    cached, cutoff = teacher.startswith("cached"), 0.01 if "cutoff" in teacher else 0.0
    more = {"cosine": 0.0} if cached else {"hidden": {"kind": "cosine", "weight": 1.0}, "jsd": {"weight": 1.0}}
    settings = tiny.objective_config(rows=rows, cutoff=cutoff, **more)
    families = ("bert", "distilbert") if teacher == "several" else () if cached else ("bert",)
    models = [make_model(family, 2) for family in families]

    def source(frozen: list[LanguageModel], objective: Any) -> Any:
        if cached:
            return KeptTeacher(objective)
        live = [LiveTeacher(model, 2 if "two" in teacher else 1) for model in frozen]
        return MeanTeacher(live, [1.0, 2.0]) if len(live) > 1 else live[0]

    *_, watch = step(masked(tokenizer, padded), make_model("distilbert", 1), models, settings, format, source)
    assert watch.waits.keys() == {WAIT}


CLM = {"task": "clm", "soft": {"positions": "targets"}, "clm": {}, "cosine": {}}
MLM = {"soft": {"positions": "all"}, "mlm": {}}
RELATIONS = {"relations": {"relation_heads": 4}}
CLASSES = {"task": "classes", "classes": {}, "soft_classes": {}}
SPANS = {"task": "spans", "span": {}, "soft_span": {}}
LAYERS = {"hidden_mse": {"pairs": [[0, 0], [1, 2]]}, "attention_scores": {}}
# Batches, the family or class of teacher and student, terms, and more for `step`.
CASES: dict[str, tuple[Any, Any, dict[str, Any], dict[str, Any]]] = {
    "causal": (causal, "gpt2", CLM, {}),
    "packed": (packed, "llama", CLM, {}),
    "packed, windows": (packed, "qwen2", CLM | LAYERS, {}),
    "fused qkv": (causal, "gpt2", CLM | RELATIONS, {}),
    "fused qkv, masked, windows": (masked, "modernbert", MLM | RELATIONS, {}),
    "grouped heads": (packed, "qwen3", CLM | RELATIONS, {}),
    "pooled": (masked, "roberta", {"pooled": {}, "largest": {"kind": "pooled", "pooling": "max"}}, {}),
    "gradient checkpointing": (packed, "llama", CLM | LAYERS | RELATIONS, {"checkpoints": True}),
    "LAMB": (masked, "albert", MLM | LAYERS, {"optimizer": {"kind": "lamb"}}),
    "classes": (labelled("class"), BertForSequenceClassification, CLASSES, {}),
    "spans": (labelled("span_start", "span_end"), BertForQuestionAnswering, SPANS, {}),
}


def of_layers(model: Any, layers: int) -> Any:
    return make_family(model, **depth_fields(model, layers)) if isinstance(model, str) else classifier(model, layers)


@FORMATS
@pytest.mark.parametrize("name", CASES)
def test_a_step(tokenizer: Any, name: str, format: str) -> None:
    """One wait for the GPU; what is trained in fp32, what is frozen and multiplied in the format that is set."""
    batches, model, terms, more = CASES[name]
    teacher, student, dtype = of_layers(model, 2), of_layers(model, 1), dtype_of(format)
    learner, source, watch = step(batches(tokenizer), student, [teacher], named_terms(**terms), format, **more)
    assert watch.waits.keys() == {WAIT}
    multiplied = {(dtype, dtype), (dtype, torch.float32)}  # the latter gives gradients of the head's weight
    assert watch.products <= multiplied and (dtype, dtype) in watch.products
    frozen = source.model.model.parameters()
    assert {(each.dtype, each.device, each.requires_grad) for each in frozen} == {(dtype, CUDA, False)}
    if format == "bf16":  # the one that the report scores waits on the host
        assert {(each.dtype, each.device.type) for each in teacher.parameters()} == {(torch.float32, "cpu")}
    trained = [*learner.model.parameters()]
    kept = [value for state in learner.optimizer.state.values() for value in state.values()]
    assert {(each.dtype, each.device) for each in (*trained, *kept)} == {(torch.float32, CUDA)}
    assert {(each.grad.dtype, each.grad.device) for each in trained} == {(torch.float32, CUDA)}


@pytest.mark.parametrize("terms", [{}, {"reverse_kl": {}}], ids=["by hand", "by formulas"])
def test_logits_are_never_whole(terms: dict[str, Any]) -> None:
    """Of 8,192 tokens of a large vocabulary: no tensor is larger than the budget, nor in another format."""
    vocab, length, sizes = 151_936, 2048, {"hidden_size": 256, "max_position_embeddings": 2048}
    models = [make_family("qwen3", vocab_size=vocab, **sizes, **depth_fields("qwen3", layers)) for layers in (2, 1)]
    rows = np.random.default_rng(0).integers(5, vocab, (8, length), np.uint32)
    batches = batches_of(rows, CausalLM(FORMAT, packed=False))
    *_, watch = step(batches, models[1], [models[0]], named_terms(**CLM, **terms), vocab=vocab)
    assert watch.largest <= GPU.budget < 4 * length * vocab * 2


SHARDED = {"name": "fsdp", "shard_student": True}
BACKENDS: dict[str, dict[str, Any]] = {
    "ddp": {"name": "ddp"},
    "fsdp": SHARDED,
    "on two hosts": SHARDED | {"shard_size": 2},
    "teacher offloaded": SHARDED | {"offload_teacher": True},
}


@pytest.fixture(params=BACKENDS)
def four_ranks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ddp]:
    """The first of four ranks, whose exchanges end at once, and whose streams do nothing."""
    for name in ("Stream", "Event", "stream", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, MagicMock())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda *_: None)
    monkeypatch.setattr(dist, "broadcast", MagicMock())  # it asks for a driver
    for name in ("open_store", "wait_for_all", "Heartbeat"):
        monkeypatch.setattr(ddp, name, MagicMock())
    monkeypatch.setattr(ddp, "rank_from_env", lambda: RankInfo("", 0, 4, 0, 4))
    monkeypatch.setattr(ddp, "choose_device", lambda *_: CUDA)
    joined = {"rank": 0, "world_size": 4, "store": FakeStore()}
    monkeypatch.setattr(Ddp, "_join", lambda *_: dist.init_process_group("fake", **joined))
    settings = conf.BackendConfig(**BACKENDS[request.param])
    with _disable_current_modes():  # numbers of ranks are values
        ranks = (Fsdp if settings.name == "fsdp" else Ddp)(settings)
    yield ranks
    dist.destroy_process_group()


@pytest.mark.parametrize(
    "more", [{}, {"checkpoints": True}, {"optimizer": {"kind": "lamb"}}], ids=["adamw", "checkpoints", "lamb"]
)
def test_several_ranks(tokenizer: Any, four_ranks: Ddp, more: dict[str, Any]) -> None:
    """One wait a step; each rank keeps its part of weights, gradients and moments in fp32, and computes in bf16."""
    models = [of_layers("llama", layers).to(CUDA) for layers in (2, 1)]
    for model in models if four_ranks.shards else ():
        four_ranks.shard(model, *blocks_of(model), trained=model is models[1])
    terms = named_terms(**CLM, **LAYERS)
    learner, _, watch = step(packed(tokenizer), models[1], models[:1], terms, ranks=four_ranks, **more)
    assert watch.waits.keys() == {WAIT}
    assert watch.products == {(torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32)}
    for weight in learner.model.parameters():
        moments = learner.optimizer.state[weight].values()
        parts = {(each.dtype, each.device) for each in map(local, (weight, weight.grad, *moments))}
        assert parts == {(torch.float32, CUDA)}
        part = four_ranks.mesh.size(-1) if isinstance(four_ranks, Fsdp) else 1
        assert local(weight).numel() == local(weight.grad).numel() == weight.numel() // part


@FORMATS
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family(tokenizer: Any, family: str, format: str) -> None:
    """A teacher's forward on padded sequences."""
    model, batch = setup_teacher(make_family(family), precision(format), this_process()), masked(tokenizer).window(0)[0]
    batch = batch.to(CUDA)
    with torch.no_grad(), Watch() as watch:
        outputs = model(batch.inputs, batch.documents, OutputSpec(True, batch.targets.positions, (0, 1, LAST)))
    assert outputs.head_rows is not None and (not watch.waits or family in OTHERWISE)
    logits = model.logits(outputs.head_rows, VOCAB)
    assert (logits.device, logits.dtype) == (CUDA, dtype_of(format))


@FORMATS
def test_evaluation(tokenizer: Any, monkeypatch: pytest.MonkeyPatch, format: str) -> None:
    """Both measures and the agreement, up to the numbers themselves, which fake tensors do not have."""
    monkeypatch.setattr(Sums, "over_ranks", lambda self: np.full(self._sums.shape, float(self._sums.device == CUDA)))
    data = EvaluationSet("rows", "rows of ids", make_rows(8, shortest=5), 1)
    settings = conf.EvaluateConfig(batch_size=4, pseudo_perplexity=conf.PseudoPerplexityConfig(fraction=0.5))
    evaluator = tiny.make_evaluator(
        settings, tiny.make_masks(tokenizer, data.sequences), precision(format), this_process()
    )
    # Where a score begins they are moved by `.data`, which fake tensors do not follow.
    student, teacher = move(make_model("distilbert", 1), CUDA), move(make_model("bert", 2), CUDA)
    one = {"rows": float(np.exp(1.0))}
    assert evaluator.score(student, "student", [data]) == {"perplexity": one, "pseudo_perplexity": one}
    assert evaluator.agree(student, teacher, [data])["rows"] == {"top1": 1, "kl": 1}


@pytest.mark.parametrize("states", [False, True])
def test_a_teacher_that_a_cache_stands_for_leaves_the_gpu(states: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose weights training has in common with the model that is scored."""
    teacher = move(make_model("bert", 2), CUDA, torch.bfloat16)
    kept: Any = SimpleNamespace(ready=False, layout=SimpleNamespace(states=16 * states), folder="")
    monkeypatch.setattr(learning, "find_caches", lambda _: {ONLY: kept})
    monkeypatch.setattr(
        learning, "settings_by_member", lambda _: {ONLY: MagicMock(precision=precision("bf16"), server=None)}
    )
    monkeypatch.setattr(learning, "build", lambda recorder, _: recorder.records)
    monkeypatch.setattr(learning, "CachedTeacher", lambda cache, ranks, head: head)
    members = [Member(ONLY, 1.0, teacher, "")]
    run: Any = SimpleNamespace(
        config=None, ranks=this_process(), data=MagicMock(), objective=MagicMock(needs_teacher=True),
        pair=SimpleNamespace(teachers=members, tokenizers=None),
    )  # fmt: skip
    head: Any = learning.FrozenTeachers(run).open()
    assert {weight.device.type for weight in teacher.parameters()} == {"cpu"}
    assert not states or {weight.device for weight in head.parameters()} == {CUDA}
