"""The models of a run: its teachers, its student, and the tokenizers that they read text with."""

import copy
import hashlib
import logging
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from distill.config.component import Component
from distill.config.settings import Config, StudentConfig
from distill.data.batches import Batches
from distill.distributed import Ranks
from distill.distributed.gather import empty_copy, put_together
from distill.evaluation.readers import MeanModel
from distill.models.check import check_packing, check_positions, check_tokenizers, check_vocabulary, set_padding
from distill.models.custom import load_weights
from distill.models.export_folder import try_export
from distill.models.identity import model_digest, saved_digest
from distill.models.kind import ModelKind
from distill.models.layer_choice import AUTO
from distill.models.load import load_pretrained, load_tokenizer
from distill.models.student import make_student
from distill.models.teacher import STARTS, is_encoder_alone, teacher_path
from distill.objective.build import bind_terms
from distill.objective.terms import Term, VocabularyTerm
from distill.runs.layer_search import Prediction, find_layers
from distill.runs.run_folder import RunFolder
from distill.runs.setup import shard_models, weights_on_disk
from distill.runs.tokenizers import (
    add_ends_of_answers,
    check_across_tokenizers,
    find_tokenizer,
    reads_conversations,
    reads_same_tokens,
)
from distill.runtime.errors import SettingError
from distill.tasks import Task
from distill.teacher.members import Member, load_members, settings_by_member, with_models

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class BuiltStudent:
    """A student as it starts, on this rank."""

    model: Any
    search: dict[str, Any] | None = None  # of student.layers=auto, as `find_layers` gives it
    skeleton: Any | None = None  # the model without its weights, where these are sharded over ranks


@dataclass(frozen=True)
class RunModels:
    """What is known of the models of a run before its sequences are read."""

    teachers: list[Member]
    tokenizer: PreTrainedTokenizerBase
    teacher_tokenizer: PreTrainedTokenizerBase | None  # where the teacher reads with another one
    vocabulary: int  # the tokens that teachers and student share, the first ones
    kind: ModelKind  # of the student
    # Of each teacher, and of the student where it starts from a model of the user's.
    digests: dict[str, str | None]
    student: BuiltStudent | None  # None: its layers are chosen by the sequences (student.layers=auto)
    terms: dict[str, Term]  # of the loss, fitted to these models; where there is no student yet, to none


@dataclass(frozen=True)
class Pair:
    """The teachers of a run, mostly one, and its student, and what they read text with."""

    teachers: list[Member]
    built: BuiltStudent
    tokenizer: PreTrainedTokenizerBase
    teacher_tokenizer: PreTrainedTokenizerBase | None  # where the teacher reads with another one
    vocabulary: int  # the tokens that teachers and student share, the first ones
    kind: ModelKind  # of the student
    terms: dict[str, Term]  # of the loss, fitted to these models
    trained_head: bool = True  # whether the student's head was trained, by a loss or before the run

    @property
    def student(self) -> Any:
        return self.built.model

    @property
    def teacher(self) -> Any | None:
        """The only teacher, or the mean of several; None for none, and where one of them has no model."""
        if len(with_models(self.teachers)) < len(self.teachers):
            return None
        if len(self.teachers) > 1:
            return MeanModel([member.model for member in self.teachers], [member.weight for member in self.teachers])
        return self.teachers[0].model if self.teachers else None

    @property
    def tokenizers(self) -> tuple[PreTrainedTokenizerBase, PreTrainedTokenizerBase] | None:
        """The student's and the teacher's, where they differ."""
        return None if self.teacher_tokenizer is None else (self.tokenizer, self.teacher_tokenizer)

    @property
    def comparable(self) -> bool:
        """Whether teacher and student can be scored on the same sequences: they read and predict the same tokens."""
        has_heads = self.trained_head and all(member.has_head for member in self.teachers)
        return self.teacher_tokenizer is None and has_heads

    @property
    def scored_teachers(self) -> list[Member]:
        """The teachers that have scores on the student's sequences."""
        return with_models(self.teachers) if self.comparable else []

    def whole_student(self, ranks: Ranks) -> Any | None:
        """The student as one model, on rank 0 alone where it is sharded over ranks; all ranks call it."""
        if self.built.skeleton is None:
            return self.student
        return put_together(self.student, self.built.skeleton, ranks.rank == 0)


def load_models(config: Config, terms: dict[str, Term], task: Task, ranks: Ranks) -> RunModels:
    """The frozen teachers, the tokenizer (the teachers', the student's or a new one), and the student.

    Also a student whose layers are still to be chosen is built once, to refuse what does not fit; none of it is kept.
    """
    teacher_kind = task.teacher_kind(config.student)
    reads_head = _reads_head(config, terms, teacher_kind)
    teachers, shared = load_members(config, teacher_kind, ranks.device, ranks.shards_teacher, reads_head)
    first = teachers[0].model if teachers else None
    tokenizer = find_tokenizer(config, task, shared)
    reads_same = shared is None or reads_same_tokens(tokenizer, shared, task.kind)
    teacher_only_tokenizer = None if reads_same else shared
    vocabulary = len(tokenizer) if shared is None or not reads_same else min(len(tokenizer), len(shared))
    own = tokenizer if shared is None or len(shared) == len(tokenizer) else shared
    if teacher_only_tokenizer is not None:
        check_across_tokenizers(terms, config, teacher_only_tokenizer, tokenizer)
    for member in with_models(teachers):
        check_vocabulary(member.model, f"{member.setting} ({member.title})", teacher_only_tokenizer or own)
        set_padding(member.model, teacher_only_tokenizer or own)
        if teacher_only_tokenizer is None:  # else it reads other sequences, as long as it takes
            check_positions(member.model, member.setting, config.corpus.sequence_length)
    encodes = all(term.needs_teacher and term.across_tokenizers for term in terms.values())  # and no head is read
    student = new_student(config, first, tokenizer, task, ranks, not encodes)
    check_vocabulary(student, "student", tokenizer)
    set_padding(student, tokenizer)
    if first is not None and teacher_only_tokenizer is None and reads_conversations(config):
        add_ends_of_answers(student, first)
    _check_sizes(teachers if teacher_only_tokenizer is None else [], student, vocabulary)
    _check_export(config, student, ranks)
    digests = _digests(config, teachers, shared, student)
    layers_are_open = config.student.from_layers and config.student.layers == AUTO
    if layers_are_open and ranks.shards_student:
        # It has the teacher's tensors in their format beside others in fp32; the passes below compute in one.
        student.to(next(teachers[0].model.parameters()).dtype)
    built = (
        None
        if layers_are_open
        else BuiltStudent(student, None, shard_run_models(config, teachers, student, task, ranks))
    )
    if task.kind.causal and config.corpus.cross_documents:
        for member in with_models(teachers):
            check_packing(member.model, member.setting)
        check_packing(student, "student")
    if not task.kind.vocabulary and not any(term.student_reads.extra for term in terms.values()):
        logger.warning(
            "no loss of this objective trains the student's head for its task: its scores are those of the head that "
            "it began with, which is random where student.path has none"
        )
    fitted = bind_terms(terms, student, first)  # also where the student is not kept, to refuse what does not fit
    if (path := config.evaluate.baseline) is not None:
        check_tokenizers(tokenizer, load_tokenizer("evaluate.baseline", path, task.kind), f"evaluate.baseline={path}")
    bound = terms if layers_are_open else fitted
    return RunModels(teachers, tokenizer, teacher_only_tokenizer, vocabulary, task.kind, digests, built, bound)


def _reads_head(config: Config, terms: dict[str, Term], kind: ModelKind) -> bool:
    """Whether the teacher's predictions are read. Raises SettingError where a search for layers alone needs them."""
    if any(isinstance(term, VocabularyTerm) for term in terms.values() if term.needs_teacher):
        return True
    if not (config.student.from_layers and config.student.layers == AUTO):
        return False
    if any(is_encoder_alone(member.model, kind) for member in settings_by_member(config).values()):
        raise SettingError(
            "student.layers=auto searches by the teacher's predictions, and this teacher has no head that makes any: "
            "name the layers, as in student.layers=[0,5,11], or give student.layers=even"
        )
    return True


def new_student(
    config: Config,
    teacher: Any | None,
    tokenizer: PreTrainedTokenizerBase,
    task: Task,
    ranks: Ranks,
    reads_head: bool = True,
) -> Any:
    """The student as it starts, the same whenever it is made; `teacher`: of several the first one."""
    torch.manual_seed(config.seed)
    length = config.corpus.sequence_length
    with weights_on_disk(ranks, config.student):
        return make_student(config.student, teacher, tokenizer, length, task.kind, ranks.shards_student, reads_head)


def _check_sizes(teachers: list[Member], student: Any, vocabulary: int) -> None:
    """Raises SettingError where special tokens are beyond the vocabulary of one model and not of another one."""
    models = {member.setting: member.model for member in with_models(teachers)} | {"student": student}
    heads = {name: getattr(model, "get_output_embeddings", lambda: None)() for name, model in models.items()}
    sizes = {name: min(len(head.weight), vocabulary) for name, head in heads.items() if head is not None}
    if len({*sizes.values()}) > 1:
        raise SettingError(
            f"the tokenizer has {vocabulary} tokens, and of these "
            f"{' and '.join(f'{name} predicts {size}' for name, size in sizes.items())}: choose models that fit"
        )


def _check_export(config: Config, student: Any, ranks: Ranks) -> None:
    """Raises SettingError, on all ranks, for a student of the user's class that its folder will not give back."""
    if (make := config.student.custom) is None:
        return
    try:
        ranks.decide(lambda: try_export(student))
    except SettingError as error:
        raise SettingError(f"student._target_={make.path}: {error}") from None


def shard_run_models(config: Config, teachers: list[Member], student: Any, task: Task, ranks: Ranks) -> Any | None:
    """Shard what the ranks shard; gives the student's skeleton, where it is one of these models."""
    kinds = {"teacher": task.teacher_kind(config.student), "student": task.kind}
    return shard_models(ranks, teachers, student, kinds, config.corpus.sequence_length)


def resolve_layers(
    config: Config, models: RunModels, task: Task, batches: Batches, folder: RunFolder
) -> tuple[Config, Pair]:
    """The pair that trains, and the settings with the layers in place of `student.layers=auto`."""
    built, terms = models.student, models.terms
    if built is None:
        config, search = find_start(config, models, task, batches, folder)
        student = new_student(config, models.teachers[0].model, models.tokenizer, task, folder.ranks)
        # Whole models are needed to choose layers: only now are they sharded.
        built = BuiltStudent(student, search, shard_run_models(config, models.teachers, student, task, folder.ranks))
        terms = bind_terms(terms, built.model, models.teachers[0].model)  # they count its layers
    head = has_trained_head(config, models)
    return config, Pair(
        models.teachers, built, models.tokenizer, models.teacher_tokenizer, models.vocabulary, models.kind, terms, head
    )


def has_trained_head(config: Config, models: RunModels) -> bool:
    """Whether a head of the student predicts something that was trained, by a loss of the run or before it.

    A head that came with the student stays of use under losses that pair its hidden states with the teacher's; vectors
    of whole sequences leave it behind.
    """
    terms = models.terms.values()
    if models.kind.heads or any(isinstance(term, VocabularyTerm) or not term.needs_teacher for term in terms):
        return True
    is_new = config.student.is_new or not all(member.has_head for member in models.teachers)
    return not is_new and not all(term.across_tokenizers for term in terms)


def find_start(
    config: Config, models: RunModels, task: Task, batches: Batches, folder: RunFolder
) -> tuple[Config, dict[str, Any] | None]:
    """Of student.layers=auto: the settings with the layers, and the outcome of the search for them, if there was one.

    A run that resumes has the layers that it began with, which its folder keeps. For a bundled teacher nothing is
    searched unless a number of layers is given.
    """
    settings, teacher = config.student, models.teachers[0].model  # of several the first one
    search = folder.recorded_layers()
    if not search and (layers := _known_start(config, settings)) is not None:
        logger.info(f"student.layers=auto: {layers}, known as the best of {models.teachers[0].title}")
        search = {"layers": layers}
    if not search and folder.start is not None:
        logger.warning(
            "student.layers=auto: the run resumes, but the record of the layers that its student started from is lost, "
            "so the report will not name them"
        )
        return config, None
    if not search:
        prediction = Prediction(models.kind, task.labels[0], models.vocabulary, config.precision.student)
        search = find_layers(settings, teacher, prediction, batches, folder.ranks)
    config = config.changed(student=settings.changed(layers=search["layers"], num_layers=None))
    return config, search if "teacher" in search else None


def _known_start(config: Config, settings: StudentConfig) -> list[int] | None:
    """The layers of a bundled teacher that are known to be the best; None where they are to be searched for."""
    first = next(iter(settings_by_member(config).values())).model
    if settings.num_layers is None and first.bundled and first.path is not None:
        return list(STARTS[first.path])
    return None


def _digests(
    config: Config, teachers: list[Member], shared: PreTrainedTokenizerBase | None, student: Any
) -> dict[str, str | None]:
    """The digests of the teachers, and of a student that starts from a model of the user's, before any is sharded."""
    digests: dict[str, str | None] = {"teacher": None, "student": None}
    settings = settings_by_member(config)
    for member in with_models(teachers):
        teacher = settings[member.name].model
        digests[member.setting] = (
            _digest_of_custom(make, member.model, shared)
            if (make := teacher.custom) is not None
            else saved_digest(teacher_path(teacher), member.model, shared, config.data.cache)
        )
    if (of_student := config.student.custom) is not None:
        digests["student"] = _digest_of_custom(of_student, student)
        frozen = [name for name, weight in student.named_parameters() if not weight.requires_grad]
        digests["student.frozen"] = hashlib.sha256(repr(frozen).encode()).hexdigest()
    elif config.student.is_saved:
        digests["student"] = model_digest(student)
    return digests


def _digest_of_custom(make: Component, model: Any, tokenizer: PreTrainedTokenizerBase | None = None) -> str:
    """The digest of what a callable of the user's made; that of a model in memory is there already."""
    return model_digest(model, tokenizer) if make.in_memory is None else make.in_memory.digest


def load_baseline(config: Config, pair: Pair) -> Any:
    """The student of the run that `evaluate.baseline` names; of a callable of the user's it is of this run's class."""
    path = config.evaluate.baseline or ""
    if config.student.custom is None:
        model = load_pretrained("evaluate.baseline", path, pair.kind)
        check_vocabulary(model, f"evaluate.baseline={path}", pair.tokenizer)
        set_padding(model, pair.tokenizer)
        return model
    skeleton = pair.built.skeleton
    baseline = copy.deepcopy(pair.student) if skeleton is None else empty_copy(skeleton)
    load_weights(baseline, "evaluate.baseline", path)
    return baseline
