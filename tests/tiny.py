"""Small things that tests share: a tokenizer, models of every family, rows of token ids, and a whole training."""

from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from pydantic import ValidationError
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForMaskedLM, PreTrainedTokenizerFast

from distill import train as loop
from distill.config import settings as conf
from distill.config.errors import parse, setting_error_of
from distill.data.batch import PADDING, Batch
from distill.data.batches import Batches, StepShape
from distill.data.collate.mlm import MaskedLM, masked_lm
from distill.data.order import FullShuffle
from distill.data.sequence_store import recorded
from distill.distributed import gradient_sync
from distill.distributed.single import Single
from distill.evaluation.evaluator import Evaluator
from distill.evaluation.measures import Scoring
from distill.models.kernels.attention import use_batched_products
from distill.models.kernels.dropout import replace_dropout
from distill.models.language_model import LAST, LanguageModel, OutputSpec
from distill.models.student import dropout_names
from distill.objective.build import bind_terms, build_objective, make_terms
from distill.objective.objective import Objective
from distill.objective.trainable import Trainable
from distill.optim import updates as optim
from distill.optim.schedule import Schedule
from distill.optim.schedules.constant import Constant
from distill.optim.schedules.linear import Linear
from distill.runs.callbacks import RunLog
from distill.runs.checkpoint import Checkpoints
from distill.runs.facts import HistoryPoint
from distill.runs.periodic_evaluation import is_due
from distill.runs.run import Run
from distill.runs.state import State
from distill.runs.trackers import Tracker
from distill.tasks import find_task
from distill.teacher.live import LiveTeacher
from distill.teacher.output import NoTeacher, Teacher

WORDS = [
    "the", "of", "and", "to", "in", "that", "was", "he", "his", "it", "with", "as", "had",
    "for", "at", "on", "be", "him", "is", "all", "said", "not", "so", "out", "one",
]  # fmt: skip
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
    known |= dict.fromkeys(dropout_names(AutoConfig.for_model(family)), dropout)
    special = {"bos_token_id": CLS, "eos_token_id": SEP}
    torch.manual_seed(seed)
    model = AutoModelForMaskedLM.from_config(
        AutoConfig.for_model(family, **{**FIELDS[family], **known, **special, **fields}), dtype=torch.float32
    )
    with torch.no_grad():
        for parameter in model.parameters():  # norms and biases too: what a wrong copy would forget has to show
            parameter.add_(torch.randn_like(parameter) * 0.15)
    return model.eval()


def new_student() -> Any:
    return make_model("distilbert", 1, seed=5).train()


def make_rows(count: int, length: int = LENGTH, seed: int = 3, shortest: int | None = None) -> np.ndarray:
    """[count, length] uint16: [CLS] ids [SEP], padded where a row is shorter; `shortest` None: all are full."""
    random = np.random.default_rng(seed)
    rows = np.full((count, length), PAD, np.uint16)
    for row in rows:
        end = length if shortest is None else int(random.integers(shortest, length + 1))
        row[:end] = [CLS, *random.integers(len(SPECIAL), VOCAB, end - 2), SEP]
    return rows


def make_masks(tokenizer: Any, rows: np.ndarray, **changes: Any) -> MaskedLM:
    """Masks by these settings, which are not checked: a share of 1, too, leaves nothing to chance."""
    assert changes.keys() <= conf.MaskingConfig.model_fields.keys()
    masking = conf.MaskingConfig.model_construct(**changes)
    return masked_lm(masking, tokenizer, np.bincount(rows.reshape(-1), minlength=VOCAB))


def make_batches(
    rows: np.ndarray, collator: Any, batch_size: int, accumulate: int = 1, seed: int = 0, **more: Any
) -> Batches:
    """Rows in the random order of this seed, where no `order` is given; `more`: `static`, and fields of `StepShape`.

    A step has `accumulate` micro-batches of each rank, where `more` does not give its `sequences`.
    """
    more.setdefault("sequences", batch_size * accumulate * more.get("size", 1))
    order, static = more.pop("order", FullShuffle(len(rows), seed)), more.pop("static", False)
    return Batches(rows, collator, order, StepShape(batch_size, **more), seed, static)


def make_evaluator(
    settings: conf.EvaluateConfig, collator: Any, precision: conf.PrecisionConfig, ranks: Any, task: str = "mlm"
) -> Evaluator:
    """What scores models of a task with this vocabulary."""
    scoring = Scoring(collator, make_tokenizer(), settings, ranks)
    return Evaluator(scoring, find_task(task).passes(scoring), precision)


def corpus_config(**flat: Any) -> conf.CorpusConfig:
    """The corpus settings by the names of the command line: `corpus_config(kind="text", path=..., heldout=0.1)`."""
    return parse(conf.CorpusConfig, flat, "corpus")


def text_config(**flat: Any) -> conf.Config:
    """Settings of the groups `corpus` and `data` by their names: `text_config(kind="text", path=..., cache=...)`."""
    data = {name: flat.pop(name) for name in conf.DataConfig.model_fields if name in flat}
    return conf.Config(corpus=corpus_config(**flat), data=conf.DataConfig(**data))


def parts(config: conf.Config) -> tuple[conf.CorpusConfig, conf.DataConfig]:
    """The two groups."""
    return config.corpus, config.data


def changed(config: conf.Config, **flat: Any) -> conf.Config:
    """The same settings with some of these groups changed, by their names."""
    for name, value in flat.items():
        config = change(config, f"{'data' if name in conf.DataConfig.model_fields else 'corpus'}.{name}", value)
    return config


def change(settings: Any, name: str, value: Any, path: str = "") -> Any:
    """The same settings with one of them changed, by its dotted name on the command line.

    Args:
        path: of the section in the whole of the settings.

    Raises:
        SettingError: a value that the section refuses.
    """
    first, _, rest = name.partition(".")
    if isinstance(settings, dict):
        return settings | {first: change(settings[first], rest, value, f"{path}.{first}") if rest else value}
    if rest:
        return settings.changed(**{first: change(getattr(settings, first), rest, value, f"{path}.{first}".lstrip("."))})
    try:
        return settings.changed(**{first: value})
    except ValidationError as error:
        raise setting_error_of(error, type(settings), path) from error


def optimizer_config(values: dict[str, Any]) -> conf.OptimizerConfig:
    """The optimizer settings by the names of the command line."""
    return parse(conf.OptimizerConfig, values, "optimizer")


def schedule_config(values: dict[str, Any]) -> Any:
    """What makes the schedule of these settings."""
    return parse(conf.ScheduleConfig, values, "schedule").make


def objective_config(
    soft: Any = 5.0,
    mlm: Any = 2.0,
    cosine: Any = 1.0,
    rows: str = "all",
    cutoff: float = 0.0,
    temperature: Any = 2.0,
    cosine_rows: str = "all",
    **more: Any,
) -> conf.ObjectiveConfig:
    """The three terms of DistilBERT with these weights, and `more` terms and settings as a recipe would write them.

    A weight or temperature may be {"start": ..., "end": ...}.
    """
    given: dict[str, Any] = {
        "soft": {"weight": soft, "temperature": temperature, "positions": rows, "cutoff": cutoff},
        "mlm": {"weight": mlm},
        "cosine": {"weight": cosine, "positions": cosine_rows},
        **more,
    }
    return named_terms(**given, temperature=temperature)


def named_terms(**flat: Any) -> conf.ObjectiveConfig:
    """An objective with these terms and settings alone, by their names on the command line."""
    return parse(conf.ObjectiveConfig, flat, "objective")


def only(**weights: Any) -> conf.ObjectiveConfig:
    """An objective with these weights, and 0 for the terms that are not named."""
    return objective_config(**{"soft": 0.0, "mlm": 0.0, "cosine": 0.0, **weights})


def make_objective(
    settings: conf.ObjectiveConfig,
    student: Any,
    teacher: Any | None,
    precision: conf.PrecisionConfig | None = None,
    vocab: int = VOCAB,
) -> Objective:
    """The objective for a pair, not compiled."""
    terms = bind_terms(make_terms(settings), student, teacher)
    return build_objective(terms, settings, precision or conf.PrecisionConfig(), vocab, 1, torch.device("cpu"))


def loss_of(
    objective: Objective,
    student: Any,
    teacher: Any | None,
    batches: list[Batch],
    counts: torch.Tensor | None = None,
    precision: conf.PrecisionConfig | None = None,
) -> tuple[torch.Tensor, dict[str, float]]:
    """The loss of one window, and the sums of its terms by name; `counts` None: those of the window."""
    formats = precision or conf.PrecisionConfig()
    model = Trainable(LanguageModel(student, formats.student), objective.modules())
    asked = NoTeacher() if teacher is None else LiveTeacher(LanguageModel(teacher, formats.teacher))
    dtype = torch.promote_types(next(student.parameters()).dtype, torch.float32)
    scales = objective.scales(objective.count(batches) if counts is None else counts, torch.device("cpu"), dtype)
    loss, sums = torch.zeros((), dtype=dtype), torch.zeros_like(scales)
    for batch, output in zip(batches, asked.outputs(batches, objective.teacher_spec), strict=True):
        part, part_sums = objective(model, output, batch, scales)
        loss, sums = loss + part, sums + part_sums
    return loss, objective.by_name(sums.tolist())


def step_of(student: Any, objective: Objective, teacher: Teacher, window: list[Batch]) -> tuple[float, torch.Tensor]:
    """Loss and whole gradient of a step that a teacher of any kind is read in."""
    model, total = Trainable(LanguageModel(student), objective.modules()), 0.0
    window = [teacher.read_ahead(batch) for batch in window]
    scales = objective.scales(objective.count(window), torch.device("cpu"))
    for batch, output in zip(window, teacher.outputs(window, objective.teacher_spec), strict=True):
        loss, _ = objective(model, output, batch, scales)
        loss.backward()
        total += float(loss.detach())
    return total, torch.cat([p.grad.flatten() for p in student.parameters() if p.grad is not None])


def hidden_states(
    model: Any, ids: torch.Tensor, attention: torch.Tensor | None, precision: str = "fp32"
) -> torch.Tensor:
    """ids [B, S] -> last hidden state [B, S, H]."""
    spec = OutputSpec(False, None, (LAST,))
    return LanguageModel(model, precision)({"input_ids": ids}, documents_of(attention), spec).hidden[LAST]


def all_logits(model: Any, ids: torch.Tensor, attention: torch.Tensor | None, precision: str = "fp32") -> torch.Tensor:
    """ids [B, S] -> logits [B * S, V]."""
    reader = LanguageModel(model, precision)
    return reader.logits(reader({"input_ids": ids}, documents_of(attention), OutputSpec(True)).head_rows, VOCAB)


def documents_of(attention: torch.Tensor | None) -> torch.Tensor | None:
    """What `LanguageModel` takes instead of an attention mask [B, S]."""
    return None if attention is None else torch.where(attention.bool(), 0, PADDING)


def weights_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def assert_close(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], **tolerance: float) -> None:
    assert actual.keys() == expected.keys()
    for name in actual:
        torch.testing.assert_close(
            actual[name], expected[name], check_dtype=False, msg=lambda m, n=name: f"{n}: {m}", **tolerance
        )


@dataclass
class Fit:
    """One training through `distill.train.train`; it keeps its metrics and is its own evaluation."""

    folder: Path
    tokenizer: Any
    rows: np.ndarray
    teacher: Any | None = None
    student: Any = None
    objective: conf.ObjectiveConfig = field(default_factory=objective_config)
    settings: conf.TrainConfig = field(default_factory=lambda: conf.TrainConfig(batch_size=4, accumulate=2, epochs=2))
    schedule: Schedule = field(default_factory=Linear)
    optimizer: Any = None  # called with all that is trained; None: AdamW of distill
    optimizer_settings: conf.OptimizerConfig = field(default_factory=lambda: conf.OptimizerConfig(lr=1e-2))
    seed: int = 0
    identity: dict[str, Any] = field(default_factory=lambda: {"run": "tiny"})
    ranks: Any = None  # None: one process
    keyed_dropout: bool = False  # as on the CPU in a real run
    evaluations: conf.EvaluateConfig = field(default_factory=conf.EvaluateConfig)
    snapshots: Any = None
    precision: str = "fp32"  # of both models
    checkpoints: bool = False  # student.gradient_checkpointing
    on_log: Any = None  # called with this object and the metrics
    logs: list[dict[str, float]] = field(default_factory=list)
    epochs: list[tuple[int, float, dict[str, float]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.student = self.student if self.student is not None else make_model("distilbert", 2, seed=5).train()
        if self.keyed_dropout:
            use_batched_products(self.student, plain=True)
            replace_dropout(self.student)
        self.ranks = self.ranks or Single(conf.BackendConfig(device="cpu"))
        self.terms = make_objective(self.objective, self.student, self.teacher)
        student = LanguageModel(self.student, self.precision, checkpoints=self.checkpoints)
        self.model = Trainable(student, self.terms.modules())
        self.sync = gradient_sync(self.ranks, self.model)
        self.made = (
            optim.build(self.model, self.optimizer_settings) if self.optimizer is None else self.optimizer(self.model)
        )
        self.state = State()
        self.checkpoints = Checkpoints(self.folder, self.settings.keep, self.identity, self.ranks)
        masks, steps, ranks = dict(self.objective.masking), self.settings, self.ranks
        shape = {"rank": ranks.rank, "size": ranks.size, "equal_windows": ranks.equal_windows}
        shape["sequences"] = steps.sequences(ranks.size)
        collator = make_masks(self.tokenizer, self.rows, **masks)
        self.batches = make_batches(self.rows, collator, steps.batch_size, seed=self.seed, **shape)

    def resume(self, path: Path | None = None) -> "Fit":
        newest = path or self.checkpoints.newest()
        assert newest is not None
        self.checkpoints.check(newest)
        self.state = self.checkpoints.load(newest, self.model, self.made)
        return self

    def run(self) -> str:
        asks = self.teacher is not None and self.terms.needs_teacher
        learner = loop.Learner(self.model, self.sync, self.made, self.schedule, self.optimizer_settings)
        teacher = LiveTeacher(LanguageModel(self.teacher, self.precision)) if asks else NoTeacher()
        run = run_of(self.settings, self.batches, self.terms, self.ranks, self.checkpoints)
        log = FitLog(self, run)
        callbacks = (log,) if self.snapshots is None else (log, self.snapshots)
        evaluation: Any = self
        return loop.train(loop.Training(run, learner, teacher, self.state, callbacks, evaluation, None))

    def losses(self) -> list[dict[str, float]]:
        """The logs without what a clock measures."""
        timed = ("seconds", "tokens_per_second", "data_wait")
        return [{name: value for name, value in line.items() if name not in timed} for line in self.logs]

    def mean_mlm(self, steps: tuple[int, ...]) -> float:
        """The mean of the masked-word loss over the targets of several steps, by what was logged of each."""
        counts = [sum(len(b.labels["mlm"].positions) for b in self.batches.window(step - 1)) for step in steps]
        values = [line["loss/mlm"] for line in self.logs if line["step"] in steps]
        return float(np.average(values, weights=counts))

    def due(self, step: int) -> bool:
        return is_due(self.evaluations, step, self.batches.steps_per_epoch)

    def evaluate(self, state: State, losses: dict[str, float]) -> HistoryPoint:
        self.epochs.append((state.step, state.step / self.batches.steps_per_epoch, losses))
        return HistoryPoint()


def run_of(settings: conf.TrainConfig, batches: Batches, objective: Objective, ranks: Any, checkpoints: Any) -> Any:
    """As much of a `Run` as the loop asks for."""
    folder: Any = SimpleNamespace(checkpoints=checkpoints)
    config: Any = conf.Config(train=settings)
    return Run(
        config=config, formats={}, task=None, pair=None, data=SimpleNamespace(batches=batches), objective=objective,
        identity={}, baseline=None, folder=folder, ranks=ranks,
    )  # type: ignore[arg-type]  # fmt: skip


class FitLog(RunLog):
    """Keeps the lines of metrics with the training."""

    def __init__(self, fit: Fit, run: Any) -> None:
        super().__init__(run, fit.state, Tracker())
        self.progress.close()
        self.fit = fit

    def write(self, metrics: dict[str, float]) -> None:
        self.fit.logs.append(metrics)
        if self.fit.on_log is not None:
            self.fit.on_log(self.fit, metrics)


def plain_sgd(lr: float = 0.1) -> dict[str, Any]:
    """Arguments of `Fit` for SGD with a constant rate and without clipping: nothing that hides an error of scale."""
    return {
        "optimizer": lambda model: torch.optim.SGD(model.parameters(), lr=lr),
        "optimizer_settings": conf.OptimizerConfig(lr=lr, clip=None),
        "schedule": Constant(warmup=0.0),
    }


def records(ids: Any, loss_mask: Any = True, inner: Any = False) -> np.ndarray:
    """Tokens of sources with prompts."""
    tokens = recorded(np.array(ids))
    tokens["loss_mask"], tokens["inner"] = loss_mask, inner
    return tokens


def all_of(sequences: Any) -> np.ndarray:
    """All sequences of a store, [N, S]."""
    return sequences[np.arange(len(sequences))]
