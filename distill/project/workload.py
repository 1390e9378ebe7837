"""What a run has to compute, hold, send and read, from its composed settings: numbers alone, for any machine."""

import math
from dataclasses import dataclass

from distill.backends import parse_rings
from distill.config import Config, EvaluateConfig
from distill.errors import SettingError
from distill.objective.build import make_terms
from distill.objective.terms import ALL, Term, VocabularyTerm
from distill.project.model_shape import ModelShape, shape_of
from distill.project.pair import empty_models
from distill.teacher.layout import SMALL_VOCABULARY, layout_of
from distill.teacher.members import settings_by_member

MOST_RINGS = 4  # that `backend.rings=auto` tries
UNKNOWN_SET = 1_000_000  # tokens of an evaluation set, where no setting says how many there are
# Streams through memory of a step for each parameter, 4 bytes each: the gradient is measured and visited, the weight
# and two moments are read and written. LAMB visits weights and updates twice (benchmarks/README.md).
STREAMS = {"adamw": 8, "lamb": 11}


@dataclass(frozen=True)
class Frozen:
    """A teacher in training."""

    shape: ModelShape
    precision: str
    micro_batches: int  # that one forward takes
    cached: int | None  # bytes a position that are read instead; None: it runs


@dataclass(frozen=True)
class Workload:
    """A run, whatever computes it."""

    teachers: tuple[Frozen, ...]  # that training asks
    teacher_head: bool  # whether it asks for logits
    student: ModelShape
    precision: str  # of the student
    length: int  # positions of a row
    positions: float  # of a row that reach the head
    batch_size: int  # rows of a rank and micro-batch, at most
    accumulate: int
    rows_per_step: int | None  # of all ranks; None: batch_size x accumulate x ranks
    epochs: int | None
    steps: int | None
    minutes: float | None
    corpus_rows: int | None  # None: no setting says it
    row_bytes: float  # that are read for a row of training
    backend: str
    sync: str
    compression: str
    rings: int
    shard_student: bool
    shard_teacher: bool
    overlaps: bool  # whether an exchange may begin during backward
    optimizer_streams: int
    save_every: int
    save_bytes: float
    score_epochs: bool  # whether the student is scored after every epoch
    score_every: int | None  # steps after which it is, too
    score_rows: int  # of all sets
    score_copies: float  # forwards of a row for each of these: pseudo-perplexity's
    score_assumed: bool  # whether the number of rows is a guess

    def rows_of_step(self, ranks: int) -> int:
        return self.rows_per_step or self.batch_size * self.accumulate * ranks

    def window(self, ranks: int) -> tuple[int, int]:
        """Micro-batches of a rank between two exchanges, and the rows of each, where ranks have equal shares."""
        if self.rows_per_step is None:
            return self.accumulate, self.batch_size
        rows = math.ceil(self.rows_per_step / ranks)
        micro_batches = math.ceil(rows / self.batch_size)
        return micro_batches, math.ceil(rows / micro_batches)

    def total_steps(self, ranks: int) -> int | None:
        """Steps of the run; None where the clock alone ends it.

        Raises:
            SettingError: it is as long as a corpus of which nobody has said how long that is.
        """
        limits = [self.steps] if self.steps is not None else []
        if self.epochs is not None:
            if self.corpus_rows is not None:
                limits.append(self.epochs * math.ceil(self.corpus_rows / self.rows_of_step(ranks)))
            elif not limits:
                raise SettingError(
                    f"train.epochs={self.epochs}, but the size of the corpus is not known before it is prepared: give "
                    "its tokens as tokens=NUMBER, or set corpus.rows or train.steps"
                )
        return min(limits, default=None)


def workload_of(config: Config, tokens: float | None = None) -> Workload:
    """The run that these settings describe.

    Args:
        tokens: of the corpus, where `corpus.rows` does not say how much of it is used.

    Raises:
        SettingError: models whose sizes cannot be found out.
    """
    terms = make_terms(config.objective)
    models, own = empty_models(config, terms)
    length = config.corpus.tokens.sequence_length
    student = shape_of(own, length, "student")
    teachers = _teachers(config, models, terms, length)
    on_vocabulary = [term for term in terms.values() if isinstance(term, VocabularyTerm)]
    corpus_rows = _corpus_rows(config, length, tokens)
    positions = _positions(config, on_vocabulary, length)
    score_rows, assumed = _score_rows(config, length, tokens)
    settings, backend = config.train, config.backend
    optimizer = "lamb" if "lamb" in config.optimizer.make.path.lower() else "adamw"
    return Workload(
        teachers=teachers,
        teacher_head=any(term.needs_teacher for term in on_vocabulary),
        student=student,
        precision=config.precision.student,
        length=length,
        positions=positions,
        batch_size=settings.batch_size,
        accumulate=settings.accumulate,
        rows_per_step=settings.rows_per_step,
        epochs=settings.epochs,
        steps=settings.steps,
        minutes=settings.minutes,
        corpus_rows=corpus_rows,
        row_bytes=_row_bytes(length, positions, student.vocabulary, teachers),
        backend=backend.name,
        sync=backend.sync,
        compression=backend.compression,
        rings=parse_rings(backend.rings) or MOST_RINGS,
        shard_student=backend.name == "fsdp" and backend.shard_student is not False,
        shard_teacher=backend.name == "fsdp" and backend.shard_teacher is not False,
        overlaps=not config.optimizer.clip_each_rank,
        optimizer_streams=STREAMS[optimizer],
        save_every=settings.save_every,
        save_bytes=12.0 * student.parameters,  # weights and two moments, in fp32
        score_epochs=_scores_epochs(config.evaluate),
        score_every=config.evaluate.every_steps,
        score_rows=sum(score_rows.values()),
        score_copies=_copies(config, score_rows, length),
        score_assumed=assumed,
    )


def _teachers(config: Config, models: dict[str, object], terms: dict[str, Term], length: int) -> tuple[Frozen, ...]:
    """Those that the objective asks; a twin's only gives the layers that it starts from."""
    if not any(term.needs_teacher for term in terms.values()):
        return ()
    found, settings = [], settings_by_member(config)
    for name, model in models.items():
        own = settings[name]
        shape = shape_of(model, length, f"teacher {name}".strip())
        precision, cache = own.precision.teacher, own.teacher.cache
        cached = layout_of(cache, shape.vocabulary).position_bytes if cache.wanted else None
        found.append(Frozen(shape, precision, max(1, own.teacher.micro_batches), cached))
    return tuple(found)


def _corpus_rows(config: Config, length: int, tokens: float | None) -> int | None:
    """Rows that the run is trained on; None where no setting says how many."""
    given = None if tokens is None else max(1, math.ceil((1 - config.corpus.tokens.heldout) * tokens / length))
    limits = [each for each in (config.corpus.rows, given) if each is not None]
    return min(limits, default=None)


def _positions(config: Config, terms: list[VocabularyTerm], length: int) -> float:
    """Positions of a row that reach the head."""
    if not terms:
        return 0.0
    if config.objective.task == "clm" or any(term.rows == ALL for term in terms):
        return float(length)
    masking = config.objective.masking
    return min(masking.share * length, math.inf if masking.most is None else masking.most)


def _row_bytes(length: int, positions: float, vocabulary: int, teachers: tuple[Frozen, ...]) -> float:
    """Ids of a row, and what was kept of the teachers where that is read."""
    kept = sum(each.cached for each in teachers if each.cached is not None)
    return (2 if vocabulary <= SMALL_VOCABULARY else 4) * length + positions * kept


def _scores_epochs(settings: EvaluateConfig) -> bool:
    return settings.every_steps is None if settings.every_epoch is None else settings.every_epoch


def _score_rows(config: Config, length: int, tokens: float | None) -> tuple[dict[str, int], bool]:
    """Rows of each evaluation set, and whether one of them is a guess."""
    rows, assumed = {}, False
    for name in config.evaluate.sets:
        most = config.evaluate.rows_of(name)
        if name == "heldout" and tokens is not None:
            known = math.ceil(config.corpus.tokens.heldout * tokens / length)
        else:
            known, assumed = math.ceil(UNKNOWN_SET / length), assumed or most is None
        rows[name] = known if most is None else min(known, most)
    return rows, assumed


def _copies(config: Config, rows: dict[str, int], length: int) -> float:
    """Masked copies of a row that pseudo-perplexity computes, in the mean of the rows of all sets."""
    if config.objective.task not in ("mlm", "mlm_sop"):
        return 0.0
    positions = sum(count * config.evaluate.share_of(name) for name, count in rows.items())
    return length * positions / max(sum(rows.values()), 1)
