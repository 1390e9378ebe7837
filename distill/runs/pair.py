"""The models of a run: its teachers, its student, and the tokenizers that they read text with."""

import copy
import hashlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from distill.config.component import Component
from distill.config.objective import is_zero
from distill.config.settings import Config
from distill.data.batches import Batches
from distill.distributed import Ranks
from distill.distributed.shard import empty_copy, put_together
from distill.evaluation.readers import MeanModel
from distill.evaluation.speed import uncompiled
from distill.models.check import (
    check_packing,
    check_positions,
    check_tokenizers,
    check_vocabulary,
    max_positions,
    set_padding,
)
from distill.models.export_folder import try_export
from distill.models.generation import can_complete
from distill.models.kind import ModelKind
from distill.models.load import load_pretrained, load_tokenizer
from distill.models.loaded import load_weights, model_digest, saved_digest
from distill.models.precision import in_fp32
from distill.models.student import make_student
from distill.models.teacher import teacher_path
from distill.objective.build import bind_terms
from distill.objective.terms import Term, VocabularyTerm
from distill.runs.layer_search import Prediction, find_layers
from distill.runs.refit import refit_student
from distill.runs.setup import layers_are_open, shard_models, start_is_open, with_layers, without_refit
from distill.runs.tokenizers import (
    add_ends_of_answers,
    check_across_tokenizers,
    find_tokenizer,
    reads_conversations,
    reads_same_tokens,
)
from distill.runtime.errors import SettingError
from distill.runtime.progress import counted
from distill.tasks import Task
from distill.teacher.members import Member, load_members, settings_by_member, with_models

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Teachers:
    """The frozen teachers of a run, mostly one, and what their student and they read text with.

    Attributes:
        teachers: empty without one.
        tokenizer: of the training sequences.
        teacher_tokenizer: where the teacher reads with another one.
        vocabulary: the tokens that teachers and student share, the first ones.
        digests: of each teacher, by its setting; of the student too where it starts from a model of the user's.
    """

    teachers: list[Member]
    tokenizer: PreTrainedTokenizerBase
    teacher_tokenizer: PreTrainedTokenizerBase | None
    vocabulary: int
    digests: dict[str, str | None]

    @property
    def first(self) -> Any | None:
        """The model whose layers a student may start from."""
        return self.teachers[0].model if self.teachers else None


@dataclass(frozen=True)
class Pair(Teachers):
    """The teachers of a run with its student as it starts, on this rank.

    Attributes:
        student: None while its layers are still to be chosen, or blocks of it to be refitted.
        kind: of the student.
        terms: of the loss, fitted to these models.
        layers: that student.layers=auto has chosen, and how, with `neurons` and `refit` as `facts.Start` has them.
        skeleton: the student without its weights, where these are sharded over ranks.
        trained_head: whether the student's head was trained, by a loss or before the run.
    """

    student: Any
    kind: ModelKind
    terms: dict[str, Term]
    layers: dict[str, Any] | None = None
    skeleton: Any | None = None
    trained_head: bool = True

    @property
    def teacher(self) -> Any | None:
        """The only teacher, or the mean of several.

        None for none, and where one has no model here or, of several, teaches some sources alone.
        """
        several = len(self.teachers) > 1
        if any(one.model is None or (several and one.of_sources) for one in self.teachers):
            return None
        if several:
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
        if self.skeleton is None:
            return self.student
        with ranks.computing():
            return put_together(self.student, self.skeleton, ranks.rank == 0)


def load_teachers(config: Config, task: Task, terms: dict[str, Term], ranks: Ranks) -> Teachers:
    """The frozen teachers, and the tokenizer of the run: the student's own, the teachers' or a new one.

    Raises:
        SettingError: one does not load, or does not fit the others, the tokenizer or the losses.
    """
    kind = task.teacher_kind(config.student)
    reads_head = any(
        not kind.vocabulary or isinstance(term, VocabularyTerm) or term.teacher_reads.head
        for term in terms.values()
        if term.needs_teacher
    )
    reads_head |= layers_are_open(config.student)  # which are searched for by the teacher's predictions
    # A callable of the user's, and a run that only starts from layers, get it on the host.
    is_placed = config.student.custom is None and any(term.needs_teacher for term in terms.values())
    gpu = ranks.device if is_placed and ranks.device.type == "cuda" else None
    members, shared = load_members(config, kind, ranks.shards_teacher, reads_head, gpu)
    tokenizer = find_tokenizer(config, task, shared)
    reads_same = shared is None or reads_same_tokens(tokenizer, shared, task.kind)
    vocabulary = len(tokenizer) if shared is None or not reads_same else min(len(tokenizer), len(shared))
    if shared is not None and not reads_same:
        check_across_tokenizers(terms, config, shared, tokenizer)
    of_teachers = tokenizer if shared is None or (reads_same and len(shared) == len(tokenizer)) else shared
    for member in with_models(members):
        check_vocabulary(member.model, f"{member.setting} ({member.title})", of_teachers)
        set_padding(member.model, of_teachers)
        if reads_same:  # else it reads other sequences, as long as it takes
            check_positions(member.model, member.setting, config.corpus.sequence_length)
        if member.context:
            _check_context(member, config.corpus.sequence_length, reads_same)
    if (path := config.evaluate.baseline) is not None:
        check_tokenizers(tokenizer, load_tokenizer("evaluate.baseline", path, task.kind), f"evaluate.baseline={path}")
    digests = _digests_of_teachers(config, members, shared)
    return Teachers(members, tokenizer, None if reads_same else shared, vocabulary, digests)


def make_pair(
    config: Config,
    task: Task,
    terms: dict[str, Term],
    teachers: Teachers,
    layers: dict[str, Any] | None,
    ranks: Ranks,
    refitted: Mapping[str, Tensor] = MappingProxyType({}),
) -> Pair:
    """The teachers with the student as it starts, and the losses fitted to them; sharded where the ranks shard them.

    While the student's start is still to be found all stays whole, and the pair only shows, before the text is read,
    whether such a student fits.

    Args:
        layers: as `Pair` has them.
        refitted: weights of the student, by name, that are not the teacher's.

    Raises:
        SettingError: it does not.
    """
    reads_head = any(
        one.student_reads.head or not (one.needs_teacher and one.across_tokenizers) for one in terms.values()
    )
    student = new_student(config, task, teachers, ranks, reads_head)
    if not is_zero(config.objective.on_policy.fraction) and not can_complete(student):
        problem, cure = "the student, a module of yours, has no `generate` of transformers", "take a model of these"
        raise SettingError(problem, setting="objective.on_policy.fraction", cure=cure)
    if refitted:
        student.load_state_dict(refitted, strict=False, assign=True)  # some of its tensors may be the teacher's own
    digests, skeleton = teachers.digests | _digests_of_student(config, student), None
    is_open = start_is_open(config.student, layers)
    if not is_open:
        kinds = task.teacher_kind(config.student), task.kind
        skeleton = shard_models(ranks, teachers.teachers, student, kinds, config.corpus.sequence_length)
    elif ranks.shards_student:
        # It has the teacher's tensors, perhaps on a GPU, beside others in fp32; the passes below need them alike.
        student.to(next(teachers.teachers[0].model.parameters()))
    if task.kind.causal and config.corpus.cross_documents:
        for member in with_models(teachers.teachers):
            with in_fp32(member.model, ranks.device):
                check_packing(member.model, member.setting)
        check_packing(student, "student")
    if not task.kind.vocabulary and not any(term.student_reads.extra for term in terms.values()):
        logger.warning(
            "no loss of this objective trains the student's head for its task: its scores are those of the head that "
            "it began with, which is random where student.path has none"
        )
    fitted = bind_terms(terms, student, teachers.first)
    if teachers.teachers:
        _check_terms(teachers.teachers[0], fitted)
    return Pair(
        **(vars(teachers) | {"digests": digests}),
        student=None if is_open else student,
        kind=task.kind,
        terms=fitted,
        layers=layers,
        skeleton=skeleton,
        trained_head=has_trained_head(config, task.kind, fitted, teachers.teachers),
    )


def new_student(config: Config, task: Task, teachers: Teachers, ranks: Ranks, reads_head: bool) -> Any:
    """The student as it starts, the same whenever it is made. Raises SettingError where it does not fit."""
    torch.manual_seed(config.seed)
    length, tokenizer = config.corpus.sequence_length, teachers.tokenizer
    student = make_student(
        config.student, teachers.first, tokenizer, length, task.kind, ranks.shards_student, reads_head
    )
    check_vocabulary(student, "student", tokenizer)
    _check_sizes(teachers, student)
    set_padding(student, tokenizer)
    if teachers.teachers and teachers.teacher_tokenizer is None and reads_conversations(config):
        add_ends_of_answers(student, teachers.first)
    if (make := config.student.custom) is not None:
        try:  # a student of the user's class has to come back from its folder
            ranks.decide(lambda: try_export(student))
        except SettingError as error:
            raise SettingError(f"student._target_={make.path}: {error}") from None
    return student


def find_start(
    config: Config, task: Task, teachers: Teachers, layers: dict[str, Any] | None, batches: Batches, ranks: Ranks
) -> tuple[Config, dict[str, Any] | None, dict[str, Tensor]]:
    """Find on text what `start_is_open` names: the settings without it, layers as `Pair` has them, refitted weights.

    All ranks call it.
    """
    if layers_are_open(config.student):
        prediction = Prediction(task.kind, task.labels[0], teachers.vocabulary, config.precision.student)
        of_search = config.student.changed(intermediate_size=None)
        layers = find_layers(of_search, teachers.first, prediction, batches, ranks)
        config = with_layers(config, layers)
    if not start_is_open(config.student, layers):
        return config, layers, {}
    found, weights = refit_student(config, task.kind, teachers.first, batches, ranks)
    if found:
        layers = (layers or {}) | found
    return without_refit(config), layers, weights


def _check_sizes(teachers: Teachers, student: Any) -> None:
    """Raises SettingError where special tokens are beyond the vocabulary of one model and not of another one."""
    if teachers.teacher_tokenizer is not None:
        return
    models = {one.setting: one.model for one in with_models(teachers.teachers)} | {"student": student}
    heads = {name: getattr(model, "get_output_embeddings", lambda: None)() for name, model in models.items()}
    sizes = {name: min(len(head.weight), teachers.vocabulary) for name, head in heads.items() if head is not None}
    if len({*sizes.values()}) > 1:
        raise SettingError(
            f"the tokenizer has {teachers.vocabulary} tokens, and of these "
            f"{' and '.join(f'{name} predicts {size}' for name, size in sizes.items())}: choose models that fit"
        )


def has_trained_head(config: Config, kind: ModelKind, terms: dict[str, Term], teachers: list[Member]) -> bool:
    """Whether a head of the student predicts something that was trained, by a loss of the run or before it.

    A head that came with the student stays of use under losses that pair its hidden states with the teacher's; vectors
    of whole sequences leave it behind.
    """
    of_head = [one for one in terms.values() if isinstance(one, VocabularyTerm) or one.student_reads.head]
    if kind.heads or of_head or any(not term.needs_teacher for term in terms.values()):
        return True
    is_new = config.student.is_new or not all(member.has_head for member in teachers)
    return not is_new and not all(term.across_tokenizers for term in terms.values())


def _check_context(member: Member, length: int, reads_same: bool) -> None:
    """Raises SettingError for a context with which sequences of this length are too long, or another tokenizer's."""
    limit, count = max_positions(member.model), len(member.context)
    problem = "" if reads_same else "for a teacher with the student's tokenizer"
    if limit is not None and length + count > limit:
        problem = f"has {count} tokens, with a sequence's {length} more than the teacher's {limit} positions"
    if problem:
        cure = "shorten it, or lower corpus.sequence_length" if reads_same else "leave it out"
        raise SettingError(problem, setting=f"{member.setting}.context", cure=cure)
    logger.info(
        f"{member.setting} reads a context of {counted(count, 'token')} in front of each document, where the student "
        "learns from it; its scores are those without the context"
    )


def _check_terms(first: Member, terms: dict[str, Term]) -> None:
    """Raises SettingError where a loss reads all that the first teacher reads, and that has a context."""
    for name, term in terms.items() if first.context else ():
        if term.teacher_reads.qkv or term.teacher_reads.pooled:
            problem = f"objective.{name} compares all positions, and the teacher has those of its context too"
            cure = f"set objective.{name}.weight=0, or leave it out"
            raise SettingError(problem, setting=f"{first.setting}.context", cure=cure)


def _digests_of_teachers(
    config: Config, members: list[Member], shared: PreTrainedTokenizerBase | None
) -> dict[str, str | None]:
    """Before any is sharded; `shared`: their tokenizer."""
    digests: dict[str, str | None] = {"teacher": None}
    settings = settings_by_member(config)
    for member in members:
        teacher, server = settings[member.name].model, settings[member.name].server
        if server is not None:  # whose weights nobody here has read: `ServedRecorder.check` tells others
            digests[member.setting] = hashlib.sha256(f"served {server.model}".encode()).hexdigest()
        elif (make := teacher.custom) is not None:
            digests[member.setting] = _digest_of_custom(make, member.model, shared)
        else:
            digests[member.setting] = saved_digest(teacher_path(teacher), member.model, shared, config.data.cache)
        if member.context:
            digests[member.setting] = hashlib.sha256(f"{digests[member.setting]} {member.context}".encode()).hexdigest()
    return digests


def _digests_of_student(config: Config, student: Any) -> dict[str, str | None]:
    """Of one that starts from a model of the user's, before it is sharded."""
    if (make := config.student.custom) is not None:
        frozen = [name for name, weight in student.named_parameters() if not weight.requires_grad]
        digest_of_frozen = hashlib.sha256(repr(frozen).encode()).hexdigest()
        return {"student": _digest_of_custom(make, student), "student.frozen": digest_of_frozen}
    return {"student": model_digest(student) if config.student.is_saved else None}


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
    with uncompiled([pair.student]):  # a copy of compiled blocks would compute with the student's weights
        baseline = copy.deepcopy(pair.student) if pair.skeleton is None else empty_copy(pair.skeleton)
    load_weights(baseline, "evaluate.baseline", path)
    return baseline
