"""A teacher and a student in memory, and their objective on texts, for a training loop of your own."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Number
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerBase

from distill.commands.api.objects import LOSSES, plain, target_of, that_learns
from distill.config.component import TARGET, InMemory
from distill.config.errors import parse
from distill.config.models import BUNDLED
from distill.config.objective import WeightSchedule
from distill.config.settings import Config, CorpusConfig, MaskingConfig, ObjectiveConfig, StudentConfig, TeacherConfig
from distill.data.batch import Batch
from distill.data.collate.clm import causal_lm
from distill.data.collate.mlm import masked_lm
from distill.models.check import check_positions, check_vocabulary
from distill.models.export_folder import export, foreign_file
from distill.models.kind import CAUSAL, MASKED
from distill.models.language_model import LanguageModel
from distill.models.layers import AUTO
from distill.models.loaded import LoadedModel, device_of, in_memory, kind_of
from distill.models.student import make_student, tokenizer_of
from distill.models.teacher import load_teacher, teacher_path
from distill.objective.build import bind_terms, check_losses, make_terms
from distill.objective.objective import Objective
from distill.objective.trainable import Trainable
from distill.runs.check import check
from distill.runs.tokenizers import reads_same_tokens, refuse_pairs_of_tokens, refuse_tokens_beyond
from distill.runtime.errors import SettingError, raising_at_the_call
from distill.runtime.files import make_folder
from distill.runtime.seed import key
from distill.teacher.live import LiveTeacher, RetokenizedTeacher
from distill.teacher.output import NoTeacher, Teacher

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
        by_name = {name: _term_settings(name, term) for name, term in terms.items()}
        given = {"task": "clm" if self.student.kind.causal else "mlm", "temperature": temperature, **by_name}
        settings = parse(ObjectiveConfig, given, LOSSES)
        for name, chosen in settings.terms.items():
            if isinstance(chosen.weight, WeightSchedule) or settings.schedule_of(name) is not None:
                problem, cure = "a schedule needs the length of a run", "give numbers, and make a new objective later"
                raise SettingError(problem, setting=f"{LOSSES}.{name}", cure=cure)
        check(Config(objective=settings, teacher=TeacherConfig(path=BUNDLED[0])))  # as of a run with some teacher
        made = make_terms(settings)
        if not self.shares_tokenizer:
            refuse_pairs_of_tokens(self.student.tokenizer, self.teacher.tokenizer, made, from_layers=False)
        weights = {name: term.weight for name, term in settings.terms.items()}
        bound = bind_terms(made, self.student.model, self.teacher.model)
        objective = PairObjective(self, Objective(bound, weights, self.vocabulary), masking or MaskingConfig())
        check_losses(objective.objective, settings, self.student.device)
        return objective

    @raising_at_the_call
    def save(self, folder: str | Path) -> Path:
        """Write the student and its tokenizer into a folder, which transformers and all of Distill read; gives it.

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


def _term_settings(name: str, term: Any) -> dict[str, Any]:
    """What `objective.NAME` holds for a weight, for settings, or for a loss of the caller's."""
    if isinstance(term, Number):
        return {"weight": plain(term, f"{LOSSES}.{name}")}
    settings = dict(term) if isinstance(term, Mapping) else {TARGET: term}
    if not isinstance(target := settings.get(TARGET), str | None):
        settings[TARGET] = target_of(f"{LOSSES}.{name}", target)
    return settings


class PairObjective:
    """The objective of a pair on texts: call it, call `backward` on the total, and step an optimizer of yours.

    Attributes:
        objective: what a run uses, on batches.
    """

    def __init__(self, pair: Pair, objective: Objective, masking: MaskingConfig) -> None:
        self.pair, self.objective, self.shares_tokenizer = pair, objective, pair.shares_tokenizer
        student = LanguageModel(pair.student.model, checkpoints=pair.gradient_checkpointing)
        self.trainable = Trainable(student, objective.modules()).to(pair.student.device)
        self.teacher = LanguageModel(pair.teacher.model)
        tokenizer, counts = pair.student.tokenizer, np.ones(len(pair.student.tokenizer), np.int64)
        is_causal = pair.student.kind.causal
        self.collator = causal_lm(tokenizer, packed=False) if is_causal else masked_lm(masking, tokenizer, counts)

    def parameters(self) -> Iterator[nn.Parameter]:
        """What is trained: the student, and projections of terms that have one."""
        return self.trainable.parameters()

    @raising_at_the_call
    def __call__(self, texts: Sequence[str], step: int = 0) -> Losses:
        """The loss of these texts as one batch; `step` draws other masks.

        Raises:
            SettingError: there is no text, or one has a token that only one of the two models has.
        """
        objective, device = self.objective, self.pair.student.device
        sequences = self.sequences(texts)
        teacher, batch = self._teacher(sequences), self.batch(sequences, step)
        batch = teacher.read_ahead(batch).to(device)
        counts = objective.count([batch])
        (output,) = teacher.outputs([batch], objective.teacher_spec)
        total, sums = objective(self.trainable, output, batch, objective.scales(counts, device))
        means = sums.double().cpu() / counts[: len(sums)].clamp(min=1)
        by_name = objective.by_name(counts.tolist())
        return Losses(total, objective.by_name(means.tolist()), {name: int(by_name[name]) for name in objective.names})

    def sequences(self, texts: Sequence[str]) -> np.ndarray:
        """[N, S] int64, as the student's tokenizer encodes and cuts the texts; a long one fills several sequences."""
        tokenizer, length = self.pair.student.tokenizer, self.pair.sequence_length
        end = tokenizer.eos_token if self.pair.student.kind.causal else ""
        ended = [] if isinstance(texts, str) else [text + end for text in texts if text.strip()]
        if not ended:
            raise SettingError("no text is in it", setting="texts", cure="give a list of texts")
        encoded = tokenizer(ended, truncation=True, max_length=length, return_overflowing_tokens=True)["input_ids"]
        rows = [torch.tensor(ids) for ids in encoded]
        sequences = pad_sequence(rows, batch_first=True, padding_value=self.collator.pad_id).numpy()
        refuse_tokens_beyond(self.objective.vocab, np.bincount(sequences.ravel()), [], self.collator)
        return sequences

    def batch(self, sequences: np.ndarray, step: int) -> Batch:
        """Sequences [N, S] as one micro-batch with its targets; `step` draws other masks."""
        numbers = np.arange(len(sequences))
        return self.collator.collate(sequences, key(self.pair.seed, "texts", step, numbers), numbers)

    def _teacher(self, sequences: np.ndarray) -> Teacher:
        """What gives the teacher's outputs for these sequences of the student."""
        student, teacher = self.pair.student, self.pair.teacher
        if not self.objective.needs_teacher:
            return NoTeacher()
        if self.shares_tokenizer:
            return LiveTeacher(self.teacher)
        return RetokenizedTeacher(self.teacher, sequences, student.tokenizer, teacher.tokenizer, teacher.longest)


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
    target_device, held, start = device_of(device), in_memory("teacher", teacher), in_memory("student", student)
    if isinstance(held, LoadedModel) and isinstance(start, LoadedModel) and held.model is start.model:
        raise SettingError("student is the very model of the teacher: give a copy of it, as copy.deepcopy makes one")
    frozen, settings = _frozen(held), _student_settings(start, layers, num_layers)
    kind, tokenizer = frozen.kind, _tokenizer(settings, frozen)
    length = sequence_length or min(USUAL_LENGTH, frozen.longest or USUAL_LENGTH)
    parse(CorpusConfig, {"sequence_length": length}, "corpus")
    if reads_same_tokens(tokenizer, frozen.tokenizer, kind):
        check_positions(frozen.model, "teacher", length)
    with torch.random.fork_rng([]):
        torch.default_generator.manual_seed(seed)  # the student is made on the CPU; GPUs keep their generators
        made = make_student(settings, frozen.model, tokenizer, length, kind)
    check_vocabulary(frozen.model, "teacher", frozen.tokenizer)
    check_vocabulary(made, "student", tokenizer)
    trained = LoadedModel(made.to(target_device), tokenizer, kind, getattr(start, "path", settings.path) or "")
    frozen.model.to(target_device)
    return Pair(frozen, trained, length, seed, settings.gradient_checkpointing)


def _frozen(teacher: Any) -> LoadedModel:
    """A teacher in memory, or named. Raises SettingError where it is neither a masked nor a causal model."""
    settings = parse(TeacherConfig, _settings_of(teacher, learns=False), "teacher")
    path = teacher.path if isinstance(teacher, LoadedModel) else teacher_path(settings)
    kind = teacher.kind if isinstance(teacher, LoadedModel) else kind_of("teacher", path)
    if kind not in (MASKED, CAUSAL):
        cure = "choose a masked or a causal language model"
        raise SettingError(f"a {kind.noun}", setting="teacher", value=teacher, cure=cure)
    model, tokenizer, _ = load_teacher(settings, kind)
    return LoadedModel(model, tokenizer, kind, path)


def _student_settings(student: Any, layers: str | Sequence[int] | None, num_layers: int | None) -> StudentConfig:
    """Where a student starts. Raises SettingError for layers that no pair can choose."""
    if student is None:
        chosen = {"layers": layers if isinstance(layers, str | None) else [*layers], "num_layers": num_layers}
        student = parse(StudentConfig, chosen, "student")
    elif layers is not None or num_layers is not None:
        problem = "layers and num_layers are for a student from the teacher's layers"
        raise SettingError(f"{problem}: leave them or student out")
    elif not isinstance(student, StudentConfig):
        student = parse(StudentConfig, _settings_of(student, learns=True), "student")
    if student.from_layers and student.layers == AUTO:
        raise SettingError("layers=auto scores sequences of a corpus, and there is none here: give numbers or a rule")
    if student.from_layers and (of_text := student.given("refit", "intermediate_size")):
        name, value = next(iter(of_text.items()))
        problem, cure = "reads sequences of a corpus, and there is none here", "leave it out, or call distill.distill"
        raise SettingError(problem, setting=f"student.{name}", value=value, cure=cure)
    return student


def _settings_of(model: Any, learns: bool) -> dict[str, Any]:
    """The settings of a model in memory, or of a saved one; `learns`: of a student."""
    if not isinstance(model, LoadedModel):
        return {"path": str(model)} | ({"init": "pretrained"} if learns else {})

    def made() -> Any:
        return that_learns(model.model) if learns else model.model

    return {TARGET: InMemory(type(model.model).__name__, "", made, model.tokenizer)}


def _tokenizer(student: StudentConfig, teacher: LoadedModel) -> PreTrainedTokenizerBase:
    """The student's own tokenizer where it differs from the teacher's, else that one."""
    if student.tokenizer == "corpus":
        raise SettingError("student.tokenizer=corpus: no corpus is here to train a tokenizer on: name a folder of one")
    own = tokenizer_of(student, teacher.kind) or teacher.tokenizer
    if own.get_vocab() == teacher.tokenizer.get_vocab():
        return teacher.tokenizer
    refuse_pairs_of_tokens(own, teacher.tokenizer, {}, student.from_layers)
    return own
