"""A teacher and a student in memory: their objective on texts, and their scores, for a training loop of your own."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from distill.commands.api.callables import LOSSES, target_of
from distill.commands.api.pair_models import frozen_teacher, student_tokenizer, trainable_student
from distill.commands.api.texts import text_collator, text_sequences
from distill.config.compose import objective_config
from distill.config.rules import refuse_first_position
from distill.config.settings import (
    BackendConfig,
    CustomStudentConfig,
    EvaluateConfig,
    LayersStudentConfig,
    MaskingConfig,
    ObjectiveConfig,
    PrecisionConfig,
    PseudoPerplexityConfig,
    SavedStudentConfig,
    StudentConfig,
)
from distill.config.weight_schedule import WeightSchedule
from distill.data.batch import Batch
from distill.data.sequence_format import IDS
from distill.distributed.single import Single
from distill.evaluation.evaluator import Evaluator, Scores
from distill.evaluation.measures import Scoring
from distill.evaluation.sets import MASKING, EvaluationSet
from distill.models.check import check_positions, check_vocabulary, max_positions
from distill.models.export_folder import export, foreign_file, tokenizer_class
from distill.models.language_model import LanguageModel
from distill.models.layer_choice import AUTO
from distill.models.loaded import LoadedModel, device_of, in_memory, without_bars
from distill.models.student import make_student
from distill.objective.build import bind_terms, check_losses, make_terms
from distill.objective.objective import Objective
from distill.objective.trainable import Trainable
from distill.report.model_card import model_card
from distill.runs import facts
from distill.runs.describe import environment, model_facts, origin_of
from distill.runs.published import published
from distill.runs.record import Record
from distill.runs.tokenizers import how_they_differ, reads_same_tokens, refuse_pairs_of_tokens
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


@dataclass(frozen=True, repr=False, eq=False)
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

    @raising_at_the_call
    def batch(self, texts: Sequence[str], step: int = 0, masking: MaskingConfig | None = None) -> Batch:
        """The texts as one micro-batch with its targets; the masks of a masked model are drawn anew for each step."""
        return self._collated(self._sequences(texts), step, masking)

    @property
    def shares_tokenizer(self) -> bool:
        """Whether both read the same tokens; one may have a few special tokens more, such as [PAD]."""
        return reads_same_tokens(self.student.tokenizer, self.teacher.tokenizer, self.student.kind)

    @property
    def vocabulary(self) -> int:
        """How many tokens the losses are over: the first ones, which both have, or the student's."""
        own = len(self.student.tokenizer)
        return min(own, len(self.teacher.tokenizer)) if self.shares_tokenizer else own

    def _sequences(self, texts: Sequence[str]) -> np.ndarray:
        """Raises SettingError for a token that only one of the two models has."""
        tokenizer = self.student.tokenizer
        sequences = text_sequences(texts, tokenizer, self.student.kind, self.sequence_length)
        ids, pad = np.unique(sequences & IDS), text_collator(tokenizer, self.student.kind, MASKING).pad_id
        if len(beyond := ids[(ids >= self.vocabulary) & (ids != pad)]):
            raise SettingError(
                f"a text has the token {tokenizer.convert_ids_to_tokens(int(beyond[0]))}, which one of the two models "
                f"lacks: they share the first {self.vocabulary} tokens",
                setting="texts",
                cure="take it out of the texts, or load models with one tokenizer",
            )
        return sequences

    def _collated(self, sequences: np.ndarray, step: int, masking: MaskingConfig | None) -> Batch:
        tokenizer, kind = self.student.tokenizer, self.student.kind
        collator = text_collator(tokenizer, kind, (masking or MaskingConfig()).changed(smoothing=0.0))
        numbers = np.arange(len(sequences))
        return collator.collate(sequences, key(self.seed, "texts", step, numbers), numbers).to(self.student.device)

    @raising_at_the_call
    def objective(
        self,
        terms: Mapping[str, Any],
        temperature: float = 2.0,
        masking: MaskingConfig | None = None,
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
        settings = objective_config({"temperature": temperature, **by_name})
        _refuse_schedules(settings)
        made = make_terms(settings)
        labels = find_task("clm" if self.student.kind.causal else "mlm").labels
        for name, term in made.items():
            if term.task and term.task not in labels:
                raise SettingError(
                    f"objective.{name} predicts {term.task}, and the student is a "
                    f"{self.student.kind.noun}: leave it out"
                )
            if heads := [*term.student_reads.extra, *term.teacher_reads.extra]:
                raise SettingError(
                    f"objective.{name} reads a head for {heads[0]}, which no model of a pair has: leave it out"
                )
        if self.student.kind.causal:
            refuse_first_position(made)
        if not self.shares_tokenizer:
            tokenizers = (self.student.tokenizer, self.teacher.tokenizer)
            refuse_pairs_of_tokens(made, how_they_differ("the student", *tokenizers))
        made = bind_terms(made, self.student.model, self.teacher.model)
        weights = {name: term.weight for name, term in settings.terms.items()}
        objective = PairObjective(self, Objective(made, weights, self.vocabulary), masking)
        check_losses(objective.objective, settings, self.student.device)
        return objective

    @raising_at_the_call
    def evaluate(
        self, texts: Mapping[str, Sequence[str]], batch_size: int = 32, pseudo_perplexity_fraction: float = 1.0
    ) -> dict[str, Scores]:
        """Both models on sets of texts, by the measures of a run's report.

        Args:
            texts: by the name of the set.
            pseudo_perplexity_fraction: seeded fraction of the positions that are masked one by one; 0: none.

        Returns:
            Of `teacher` and `student` each measure by set; of `agreement` by set `top1`, the fraction of equal first
            choices, and `kl`, the mean KL(teacher || student) in nats. Of a pair that reads with two tokenizers the
            student's alone: the teacher has no scores on its tokens.

        Raises:
            SettingError: a set without a token.
        """
        tokenizer, kind = self.student.tokenizer, self.student.kind
        sets = [
            EvaluationSet(
                name, name, text_sequences(texts_of_set, tokenizer, kind, self.sequence_length), len(texts_of_set)
            )
            for name, texts_of_set in texts.items()
        ]
        pseudo = PseudoPerplexityConfig(fraction=pseudo_perplexity_fraction, batch_size=batch_size)
        settings = EvaluateConfig(batch_size=batch_size, pseudo_perplexity=pseudo)
        device = self.student.device
        # The backend makes its device the current one; here that is so within the call alone.
        current: Any = torch.cuda.device(device) if device.type == "cuda" else nullcontext()
        backend = BackendConfig(device=str(device), threads=torch.get_num_threads())  # which stay the caller's
        with current, Single(backend, alone=True) as ranks:
            scoring = Scoring(text_collator(tokenizer, kind, MASKING), tokenizer, settings, ranks, sets)
            passes = find_task("clm" if kind.causal else "mlm").passes(scoring)
            evaluator = Evaluator(scoring, passes, PrecisionConfig())
            if not self.shares_tokenizer:
                return {"student": evaluator.score(self.student.model, "student", sets)}
            scores = {name: evaluator.score(part.model, name, sets, keep=name) for name, part in self._models()}
            return {**scores, "agreement": evaluator.agree(self.student.model, self.teacher.model, sets)}

    @raising_at_the_call
    def save(self, folder: str | Path) -> Path:
        """Write the student, its tokenizer and a card into a folder that `distill.load_model` and transformers read.

        Returns:
            The folder.

        Raises:
            SettingError: it cannot be written, or holds something else than a model.
        """
        path = Path(folder).expanduser()
        if path.exists() and (other := path if path.is_file() else foreign_file(path)) is not None:
            raise SettingError(
                f"folder={folder} is not replaced, as it holds {other.name}, which is none of a saved student's files: "
                "give another folder"
            )
        make_folder(path.parent, f"folder={folder}")
        model = self.student.model
        origin = origin_of(model, None, self.student.kind.causal)
        origin = replace(origin, tokenizer=tokenizer_class(self.student.tokenizer, model))
        teacher = model_facts(facts.Teacher, self.teacher.path or type(self.teacher.model).__name__, self.teacher.model)
        record = Record(
            teacher=replace(teacher, published=published(self.teacher.path or None)),
            student=replace(model_facts(facts.Student, type(model).__name__, model), origin=origin),
            corpus=facts.Corpus(sequence_length=self.sequence_length),
            environment=environment(self.student.device),
        )
        export(model, self.student.tokenizer, path, model_card(record))
        return path

    def _models(self) -> Iterator[tuple[str, LoadedModel]]:
        yield from (("teacher", self.teacher), ("student", self.student))

    def __repr__(self) -> str:
        return "\n".join(f"{name}: {part!r}" for name, part in self._models())


def _term_settings(name: str, term: Any) -> dict[str, Any]:
    """What `objective.NAME` holds for a weight, for settings, or for a loss of the caller's."""
    if isinstance(term, int | float):
        return {"weight": term}
    settings = dict(term) if isinstance(term, Mapping) else {"_target_": term}
    target = settings.get("_target_")
    return (
        settings
        if target is None or isinstance(target, str)
        else {**settings, "_target_": target_of(f"{LOSSES}{name}", target)}
    )


def _refuse_schedules(settings: ObjectiveConfig) -> None:
    """Raises SettingError for numbers that change over a run, because a loop of the user's own has no length here."""
    scheduled: dict[str, float | WeightSchedule] = {"objective.temperature": settings.temperature}
    for name, term in settings.terms.items():
        scheduled |= {f"objective.{name}.weight": term.weight, f"objective.{name}.temperature": term.temperature or 0.0}
    for setting, value in scheduled.items():
        if isinstance(value, WeightSchedule):
            raise SettingError(
                f"{setting} is a schedule from {value.start} to {value.end}, which needs the length of a run: "
                "give a number, and make a new objective where it changes"
            )


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
        if self.teacher is None:
            return NoTeacher()
        pair = self.pair
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
            any student, such as `LayersStudentConfig`.
        layers: of the teacher, by number or by rule, as in the setting student.layers but for `auto`, which needs
            sequences to score on; None: every second.
        num_layers: how many a rule takes; None: half of them.
        sequence_length: tokens of a sequence; None: 128, or all that the teacher reads where that is less.
        seed: of what is random in the student, and of the masks. torch's own generator is left as it was.
        device: as `distill.load_model` takes it; both models are there afterwards, in fp32, the teacher frozen.

    Raises:
        SettingError: a model that does not load, or that does not fit the other.
    """
    if student is not None and (layers is not None or num_layers is not None):
        raise SettingError(
            "layers and num_layers are for a student from the teacher's layers: leave them or student out"
        )
    start = _start_of(student, layers, num_layers)
    chosen_device, frozen = device_of(device), frozen_teacher(in_memory("teacher", teacher))
    model, kind = frozen.model, frozen.kind
    length = sequence_length or min(USUAL_LENGTH, max_positions(model) or USUAL_LENGTH)
    tokenizer = student_tokenizer(start, frozen)
    if reads_same_tokens(tokenizer, frozen.tokenizer, kind):
        check_positions(model, "teacher", length)
    if isinstance(start, LoadedModel):
        made, path = trainable_student(start, model, length, kind)
    else:
        with torch.random.fork_rng([]), without_bars():
            torch.default_generator.manual_seed(seed)  # the student is made on the CPU; GPUs keep their generators
            made = make_student(start, model, tokenizer, length, kind)
        path = (start.path if isinstance(start, SavedStudentConfig | CustomStudentConfig) else None) or ""
    check_vocabulary(model, "teacher", frozen.tokenizer)
    check_vocabulary(made, "student", tokenizer)
    return Pair(
        LoadedModel(model.to(chosen_device), frozen.tokenizer, kind, frozen.path),
        LoadedModel(made.to(chosen_device), tokenizer, kind, path),
        length,
        seed,
        not isinstance(start, LoadedModel) and start.gradient_checkpointing,
    )


def _start_of(
    student: InMemoryOrNamed | StudentConfig | None, layers: str | Sequence[int] | None, num_layers: int | None
) -> LoadedModel | StudentConfig:
    """What a student begins from. Raises SettingError for layers that no pair can choose."""
    start: LoadedModel | StudentConfig | str | Path | None = in_memory("student", student)
    if start is None:
        chosen = layers if layers is None or isinstance(layers, str) else list(layers)
        start = LayersStudentConfig(layers=chosen, num_layers=num_layers)
    elif isinstance(start, str | Path):
        start = SavedStudentConfig(path=str(start))
    if isinstance(start, LayersStudentConfig) and start.layers == AUTO:
        raise SettingError("layers=auto scores sequences of a corpus, and there is none here: give numbers or a rule")
    return start
