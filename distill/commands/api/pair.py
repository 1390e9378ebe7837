"""A teacher and a student in memory, and their objective on texts, for a training loop of your own."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from distill.commands.api.objects import LOSSES, target_of
from distill.config.errors import parse
from distill.config.rules import refuse_first_position
from distill.config.settings import MaskingConfig, ObjectiveConfig, StudentConfig, TeacherConfig
from distill.config.weight_schedule import WeightSchedule
from distill.data.batch import Batch
from distill.data.collate.clm import causal_lm
from distill.data.collate.mlm import masked_lm
from distill.data.document import Document
from distill.data.heldout import HeldOut
from distill.data.packing import Packing, SequenceWriter, pack_stretch, plain_tokenizer
from distill.data.sequence_format import IDS, causal_format, masked_format
from distill.models.check import check_model, check_positions, check_vocabulary, max_positions
from distill.models.export_folder import export, foreign_file
from distill.models.kernels.attention import keep_soft_cap
from distill.models.kind import CAUSAL, MASKED, ModelKind
from distill.models.language_model import LanguageModel
from distill.models.layer_choice import AUTO
from distill.models.loaded import LoadedModel, device_of, in_memory, kind_of, without_bars
from distill.models.student import check_student, make_student, tokenizer_of
from distill.models.teacher import load_teacher, teacher_path
from distill.models.ties import settle_ties
from distill.objective.build import bind_terms, check_losses, make_terms
from distill.objective.objective import Objective
from distill.objective.trainable import Trainable
from distill.runs.tokenizers import how_they_differ, reads_same_tokens, refuse_layers, refuse_pairs_of_tokens
from distill.runtime.errors import SettingError, raising_at_the_call
from distill.runtime.files import make_folder
from distill.runtime.seed import key
from distill.tasks import find_task
from distill.teacher.live import LiveTeacher
from distill.teacher.output import NoTeacher, Teacher
from distill.teacher.retokenized import RetokenizedTeacher

USUAL_LENGTH = 128  # tokens of a sequence

InMemoryOrNamed = str | Path | LoadedModel | tuple[nn.Module, PreTrainedTokenizerBase]


@dataclass(frozen=True)
class Losses:
    """The loss of one batch of texts.

    Attributes:
        total: scalar with a gradient, the sum over the terms of weight * mean.
        terms: the mean of each term over its positions, without its weight.
        counts: how many positions each term has.
    """

    total: Tensor
    terms: dict[str, float]
    counts: dict[str, int]


@dataclass(frozen=True, eq=False)
class Pair:
    """A frozen teacher and a student in training mode; mostly they read with one tokenizer, the teacher's.

    Where the student reads with another one, terms compare vectors of whole sequences alone, as `pooled` does, and the
    teacher reads the text of each of the student's sequences.

    Attributes:
        teacher: in evaluation mode, and frozen.
        student: the model to train.
        sequence_length: tokens of a sequence; longer texts fill several.
        seed: of the masks.
        gradient_checkpointing: whether the student's layers are computed again in the backward pass, to save memory.
    """

    teacher: LoadedModel
    student: LoadedModel
    sequence_length: int
    seed: int = 0
    gradient_checkpointing: bool = False

    @property
    def shares_tokenizer(self) -> bool:
        """Whether both read the same tokens; one may have a few special tokens more, such as [PAD]."""
        return reads_same_tokens(self.student.tokenizer, self.teacher.tokenizer, self.student.kind)

    @property
    def vocabulary(self) -> int:
        """How many tokens the losses are over: the first ones, which both have, or the student's."""
        own = len(self.student.tokenizer)
        return min(own, len(self.teacher.tokenizer)) if self.shares_tokenizer else own

    @raising_at_the_call
    def batch(self, texts: Sequence[str], step: int = 0, masking: MaskingConfig | None = None) -> Batch:
        """The texts as one micro-batch with its targets; the masks of a masked model are drawn anew for each step.

        Raises:
            SettingError: no text has a token, or one has a token that only one of the two models has.
        """
        return self._collated(self._sequences(texts), step, masking)

    @raising_at_the_call
    def objective(
        self, terms: Mapping[str, Any], temperature: float = 2.0, masking: MaskingConfig | None = None
    ) -> "PairObjective":
        """The weighted sum of these terms, for texts.

        Args:
            terms: by the name of a file of `distill/objective/terms/`, or a name of yours: a weight, or `weight` with
                further settings, as under `objective` on the command line; of yours also a class, an object or a
                function of logits, alone or as `_target_` beside its settings.
            temperature: of the terms that have one.
            masking: how tokens are masked; None: 15 % of them.

        Raises:
            SettingError: an unknown term, one that does not fit this pair, or follows a schedule.
        """
        kind, tokenizers = self.student.kind, (self.student.tokenizer, self.teacher.tokenizer)
        by_name = {name: _term_settings(name, term) for name, term in terms.items()}
        settings = parse(ObjectiveConfig, {"temperature": temperature, **by_name}, "objective")
        _refuse_schedules(settings)
        made = make_terms(settings)
        labels = find_task("clm" if kind.causal else "mlm").labels
        for name, term in made.items():
            heads = [*term.student_reads.extra, *term.teacher_reads.extra]
            if heads or (term.task and term.task not in labels):
                needs = f"reads a head for {heads[0]}" if heads else f"predicts {term.task}"
                raise SettingError(
                    f"{needs}, and the student is a {kind.noun}", setting=LOSSES + name, cure="leave it out"
                )
        if kind.causal:
            refuse_first_position(made)
        if not self.shares_tokenizer:
            refuse_pairs_of_tokens(made, how_they_differ("the student", *tokenizers))
        weights = {name: term.weight for name, term in settings.terms.items()}
        bound = bind_terms(made, self.student.model, self.teacher.model)
        objective = PairObjective(self, Objective(bound, weights, self.vocabulary), masking)
        check_losses(objective.objective, settings, self.student.device)
        return objective

    @raising_at_the_call
    def save(self, folder: str | Path) -> Path:
        """Write the student and its tokenizer into a folder that transformers and all of Distill read.

        Returns:
            The folder.

        Raises:
            SettingError: it cannot be written, or holds something else than a model.
        """
        path = Path(folder).expanduser()
        if path.exists() and (other := path if path.is_file() else foreign_file(path)) is not None:
            problem = f"not replaced, as it holds {other.name}, which is none of a saved student's files"
            raise SettingError(problem, setting="folder", value=folder, cure="give another folder")
        make_folder(path.parent, f"folder={folder}")
        export(self.student.model, self.student.tokenizer, path)
        return path

    def _sequences(self, texts: Sequence[str]) -> np.ndarray:
        """[N, S] int64, S at most the length: every text in sequences of its own, as a run cuts them, then padding."""
        tokenizer, kind = self.student.tokenizer, self.student.kind
        if isinstance(texts, str):
            raise SettingError("one string", setting="texts", cure="give a list of texts")
        # The command leaves out ends of documents that are shorter; here a batch has all that it is given.
        format = replace(causal_format(tokenizer) if kind.causal else masked_format(tokenizer), shortest=1)
        if self.sequence_length <= format.body:
            problem, cure = "no room for text", "give 128, for example"
            raise SettingError(problem, setting="sequence_length", value=self.sequence_length, cure=cure)
        backend: Any = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise SettingError(f"the tokenizer, a {type(tokenizer).__name__}, is a slow one: give a fast one")
        plain = plain_tokenizer(backend.to_str())
        packing = Packing(plain, len(tokenizer), format, self.sequence_length, False, HeldOut(0.0))
        with BytesIO() as file:
            writer = SequenceWriter(file, packing)
            for text in filter(str.strip, texts):
                pack_stretch(Document("", text), writer, packing)
            flat = np.frombuffer(file.getvalue(), packing.dtype).astype(np.int64)
        sequences = flat.reshape(-1, self.sequence_length)
        if not len(sequences):
            raise SettingError("none of them has a token", setting="texts", cure="give a list of texts")
        ids = np.unique(sequences & IDS)
        if len(beyond := ids[(ids >= self.vocabulary) & (ids != format.pad)]):
            token = tokenizer.convert_ids_to_tokens(int(beyond[0]))
            raise SettingError(
                f"one has the token {token}, which one of the two models lacks: they share the first {self.vocabulary}",
                setting="texts",
                cure="take it out of the texts, or load models with one tokenizer",
            )
        return sequences[:, : int(np.flatnonzero((sequences != format.pad).any(0))[-1]) + 1]

    def _collated(self, sequences: np.ndarray, step: int, masking: MaskingConfig | None) -> Batch:
        tokenizer, numbers = self.student.tokenizer, np.arange(len(sequences))
        drawn = (masking or MaskingConfig()).changed(smoothing=0.0)  # by the counts of a corpus, which texts lack
        counts: Any = np.ones(len(tokenizer), np.int64)
        is_causal = self.student.kind.causal
        collator = causal_lm(tokenizer, packed=False) if is_causal else masked_lm(drawn, tokenizer, counts)
        return collator.collate(sequences, key(self.seed, "texts", step, numbers), numbers).to(self.student.device)


def _term_settings(name: str, term: Any) -> dict[str, Any]:
    """What `objective.NAME` holds for a weight, for settings, or for a loss of the caller's."""
    if isinstance(term, int | float):
        return {"weight": term}
    settings = dict(term) if isinstance(term, Mapping) else {"_target_": term}
    if not isinstance(target := settings.get("_target_"), str | None):
        settings["_target_"] = target_of(f"{LOSSES}{name}", target)
    return settings


def _refuse_schedules(settings: ObjectiveConfig) -> None:
    """Raises SettingError for numbers that change over a run, because a loop of the user's own has no length here."""
    numbers: dict[str, object] = {"temperature": settings.temperature}
    for name, term in settings.terms.items():
        numbers |= {f"{name}.weight": term.weight, f"{name}.temperature": term.temperature}
    for setting, value in numbers.items():
        if isinstance(value, WeightSchedule):
            problem = f"a schedule from {value.start} to {value.end}, which needs the length of a run"
            cure = "give a number, and make a new objective where it changes"
            raise SettingError(problem, setting=LOSSES + setting, cure=cure)


class PairObjective:
    """The objective of a pair on texts: call it, call `backward` on the total, and step an optimizer of yours.

    Attributes:
        objective: what a run uses, on batches.
    """

    def __init__(self, pair: Pair, objective: Objective, masking: MaskingConfig | None) -> None:
        self.pair, self.objective, self.masking = pair, objective, masking
        student = LanguageModel(pair.student.model, checkpoints=pair.gradient_checkpointing)
        self.trainable = Trainable(student, objective.modules()).to(pair.student.device)
        self.teacher = LanguageModel(pair.teacher.model) if objective.needs_teacher else None

    def parameters(self) -> Iterator[nn.Parameter]:
        """What is trained: the student, and projections of terms that have one."""
        return self.trainable.parameters()

    @raising_at_the_call
    def __call__(self, texts: Sequence[str], step: int = 0) -> Losses:
        """The loss of these texts as one batch; `step` draws other masks."""
        sequences, objective = self.pair._sequences(texts), self.objective
        teacher, device = self._reader(sequences), self.pair.student.device
        batch = teacher.read_ahead(self.pair._collated(sequences, step, self.masking)).to(device)
        counts = objective.count([batch])
        (output,) = teacher.outputs([batch], objective.teacher_spec)
        total, sums = objective(self.trainable, output, batch, objective.scales(counts, device))
        means = sums.double().cpu() / counts[: len(sums)].clamp(min=1)
        numbers = {name: int(count) for name, count in objective.by_name(counts.tolist()).items()}
        return Losses(total, objective.by_name(means.tolist()), {name: numbers[name] for name in objective.names})

    def _reader(self, sequences: np.ndarray) -> Teacher:
        """What gives the teacher's outputs for these sequences of the student."""
        pair = self.pair
        if self.teacher is None:
            return NoTeacher()
        if pair.shares_tokenizer:
            return LiveTeacher(self.teacher)
        tokenizers = (pair.student.tokenizer, pair.teacher.tokenizer)
        return RetokenizedTeacher(self.teacher, sequences, *tokenizers, pair.teacher.longest)


@raising_at_the_call
def load_pair(
    teacher: InMemoryOrNamed,
    student: InMemoryOrNamed | StudentConfig | None = None,
    *,
    layers: str | Sequence[int] | None = None,
    num_layers: int | None = None,
    sequence_length: int | None = None,
    seed: int = 0,
    device: str = "auto",
) -> Pair:
    """A teacher and a student, masked or causal, for a training loop of your own. Models in memory are not copied.

    Args:
        teacher: a run folder, a model folder or a name on the Hub; or `bundled_small` or `bundled_deep`, which come
            with the package; or a model in memory, as (model, tokenizer) or as `distill.load_model` gives it.
        student: the same of a saved student; None: a copy of some of the teacher's layers; or settings of
            any student, a `StudentConfig`.
        layers: of the teacher, by number or by rule, as in the setting student.layers but for `auto`, which needs
            sequences to score on; None: every second.
        num_layers: how many a rule takes; None: half of them.
        sequence_length: tokens of a sequence; None: 128, or all that the teacher reads where that is less.
        seed: of what is random in the student, and of the masks. torch's own generator is left as it was.
        device: as `distill.load_model` takes it; both models are there afterwards, in fp32, the teacher frozen.

    Raises:
        SettingError: a model that does not load, or that does not fit the other.
    """
    start = _start_of(in_memory("student", student), layers, num_layers)
    chosen_device, frozen = device_of(device), _frozen_teacher(in_memory("teacher", teacher))
    model, kind = frozen.model, frozen.kind
    length = sequence_length or min(USUAL_LENGTH, max_positions(model) or USUAL_LENGTH)
    tokenizer = _student_tokenizer(start, frozen)
    if reads_same_tokens(tokenizer, frozen.tokenizer, kind):
        check_positions(model, "teacher", length)
    if isinstance(start, LoadedModel):
        made, path = _trainable(start, model, length, kind), start.path
    else:
        with torch.random.fork_rng([]), without_bars():
            torch.default_generator.manual_seed(seed)  # the student is made on the CPU; GPUs keep their generators
            made = make_student(start, model, tokenizer, length, kind)
        path = start.path or ""
    check_vocabulary(model, "teacher", frozen.tokenizer)
    check_vocabulary(made, "student", tokenizer)
    return Pair(
        LoadedModel(model.to(chosen_device), frozen.tokenizer, kind, frozen.path),
        LoadedModel(made.to(chosen_device), tokenizer, kind, path),
        length,
        seed,
        not isinstance(start, LoadedModel) and start.gradient_checkpointing,
    )


def _start_of(student: Any, layers: str | Sequence[int] | None, num_layers: int | None) -> LoadedModel | StudentConfig:
    """What a student begins from. Raises SettingError for layers that no pair can choose."""
    if student is not None and (layers is not None or num_layers is not None):
        raise SettingError(
            "layers and num_layers are for a student from the teacher's layers: leave them or student out"
        )
    if student is None:
        chosen = layers if layers is None or isinstance(layers, str) else list(layers)
        student = StudentConfig(layers=chosen, num_layers=num_layers)
    start: LoadedModel | StudentConfig = student
    if isinstance(student, str | Path):
        start = parse(StudentConfig, {"init": "pretrained", "path": str(student)}, "student")
    if isinstance(start, StudentConfig) and start.from_layers and start.layers == AUTO:
        raise SettingError("layers=auto scores sequences of a corpus, and there is none here: give numbers or a rule")
    return start


def _frozen_teacher(teacher: str | Path | LoadedModel) -> LoadedModel:
    """A frozen masked or causal teacher. Raises SettingError where there is none."""
    if isinstance(teacher, LoadedModel):
        _refuse_kind(teacher.kind, teacher)
        teacher.model.requires_grad_(False).float().eval()
        settle_ties(teacher.model)
        keep_soft_cap(teacher.model)
        check_model(teacher.model, "teacher", teacher.kind)
        return teacher
    settings = parse(TeacherConfig, {"path": str(teacher)}, "teacher")
    _refuse_kind(kind := kind_of("teacher", teacher_path(settings)), teacher)
    with without_bars():
        model, tokenizer, _ = load_teacher(settings, kind)
    return LoadedModel(model, tokenizer, kind, teacher_path(settings))


def _refuse_kind(kind: ModelKind, teacher: object) -> None:
    if kind not in (MASKED, CAUSAL):
        cure = "choose a masked or a causal language model"
        raise SettingError(f"a {kind.noun}", setting="teacher", value=teacher, cure=cure)


def _trainable(student: LoadedModel, teacher: Any, length: int, kind: ModelKind) -> Any:
    """A student in memory, which is trained itself."""
    model = student.model
    if model is teacher:
        raise SettingError("student is the very model of the teacher: give a copy of it, as copy.deepcopy makes one")
    settle_ties(model)
    keep_soft_cap(model)
    check_student(model, length, kind)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        if not student.path:  # else frozen by `load_model`, whatever the model is for
            raise SettingError(
                "student: requires_grad is off in all of its weights, so nothing would be trained: call "
                "requires_grad_(True) on it"
            )
        model.requires_grad_(True)
    return model.float().train()


def _student_tokenizer(student: LoadedModel | StudentConfig, teacher: LoadedModel) -> PreTrainedTokenizerBase:
    """The student's own tokenizer where it has one that differs from the teacher's; else the teacher's.

    Raises:
        SettingError: a student from the teacher's layers has another one, or it is to be trained on a corpus.
    """
    if isinstance(student, LoadedModel):
        tokenizer = student.tokenizer
    elif student.tokenizer == "corpus":
        raise SettingError("student.tokenizer=corpus: no corpus is here to train a tokenizer on: name a folder of one")
    else:
        tokenizer = tokenizer_of(student, teacher.kind) or teacher.tokenizer
    if tokenizer.get_vocab() == teacher.tokenizer.get_vocab():
        return teacher.tokenizer
    if not isinstance(student, LoadedModel):
        named = f"student.tokenizer={student.tokenizer}"
        refuse_layers(student, how_they_differ(named, tokenizer, teacher.tokenizer))
    return tokenizer
