"""What a record is made of: the facts of a corpus, of models and their scores, of training, machine and profile.

A value that is not known, or not yet, is None.
"""

from collections.abc import Container
from dataclasses import dataclass, field, replace
from typing import Any

from distill.runs.against_baseline import GapClosed, Resampled
from distill.runs.parts import from_json, stored
from distill.runtime.jsonl import LogLine

Scores = dict[str, dict[str, float | None]]  # by measure and evaluation set


@dataclass(frozen=True)
class Preparation:
    seconds: float | None = None
    tokens_per_second: float | None = None


@dataclass(frozen=True)
class Source:
    """One source of a mixture; `weight` is its fraction of the sequences that are fed."""

    name: str | None = None
    weight: float | None = None
    documents: int | None = None
    tokens: int | None = None
    sequences: int | None = None


@dataclass(frozen=True)
class Corpus:
    """The text: how much there is of it, and what of it could not be read or is there twice."""

    name: str | None = None
    documents: int | None = None
    tokens: int | None = None
    sequences: int | None = None
    sequence_length: int | None = None
    held_out: int | None = field(default=None, metadata=stored(sparse=True))  # sequences of it that no step reads
    fraction_used: float | None = field(default=None, metadata=stored(sparse=True))
    skipped: list[str] = field(default_factory=list)  # `name: reason` of every file that could not be read
    records: int | None = None
    invalid: int | None = None
    first_invalid: list[str] = field(default_factory=list)
    left_out: dict[str, int] = field(default_factory=dict, metadata=stored(sparse=True))
    duplicates: dict[str, int] = field(default_factory=dict, metadata=stored(sparse=True))
    sources: dict[str, Source] = field(default_factory=dict, metadata=stored(sparse=True))
    hub: list[str] = field(default_factory=list, metadata=stored(sparse=True))  # names of data sets on the Hub
    chat_template: str | None = field(default=None, metadata=stored(sparse=True))  # of conversations, in Jinja
    preparation: Preparation = field(default_factory=Preparation)


@dataclass(frozen=True)
class TeacherCache:
    """What a cache of soft targets holds; `kept_mass` is the mean probability of the entries that are kept exactly."""

    key: str = ""
    top_k: int = 0
    sampled: int | None = field(default=None, metadata=stored(sparse=True))
    sample_seed: int | None = field(default=None, metadata=stored(sparse=True))
    positions: int = 0
    bytes: int = 0
    bytes_per_token: float = 0.0
    kept_mass: float | None = None
    seconds: float | None = None
    precision: str | None = None


@dataclass(frozen=True)
class Model:
    """A model and its scores."""

    name: str | None = None
    parameters: int | None = None
    bytes: int | None = None
    tokens_per_second: float | None = None
    scores: Scores = field(default_factory=dict, metadata=stored("*"))

    def score(self, measure: str, data: str) -> float | None:
        return (self.scores.get(measure) or {}).get(data)


@dataclass(frozen=True)
class Published:
    """How a model is published; a folder that states no licence has neither."""

    hub: str | None = field(default=None, metadata=stored(sparse=True))  # its name on the Hub, NAME or OWNER/NAME
    license: str | None = field(default=None, metadata=stored(sparse=True))  # as the Hub calls it, such as apache-2.0


@dataclass(frozen=True)
class Teacher(Model):
    """The teacher, or what several are together; these are the members."""

    published: Published = field(default_factory=Published, metadata=stored(sparse=True))
    members: "dict[str, Teacher]" = field(default_factory=dict, metadata=stored(sparse=True))
    cache: TeacherCache | None = field(default=None, metadata=stored(sparse=True))


@dataclass(frozen=True)
class Origin:
    """Where a student's class comes from."""

    model_class: str = ""  # package.module.Name
    made_by: str | None = None  # the import path of the callable that made it; None: transformers
    causal: bool = False
    has_config: bool = True  # whether it was saved with a configuration, as transformers models are
    call: str | None = None  # the arguments of that callable, as they are written; None: not known
    tokenizer: str | None = field(default=None, metadata=stored(sparse=True))  # its class, where AutoTokenizer fails
    # What of a text was trained where no head was: `states` of its tokens, or one vector by a kind of pooling.
    encodes: str | None = field(default=None, metadata=stored(sparse=True))
    normalizes: bool | None = field(default=None, metadata=stored(sparse=True))


@dataclass(frozen=True)
class ChosenLayers:
    """A choice of layers, the loss of the untrained student with it, and the rules that make that choice."""

    layers: list[Any] = field(default_factory=list)  # numbers, and lists of those whose weights are averaged
    loss: float | None = None
    rules: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class LayerSearch:
    """What `student.layers=auto` has found (`distill.runs.layer_search`)."""

    layers: list[Any] = field(default_factory=list)  # the choice
    teacher: float | None = None  # the loss of the whole teacher, a mean over predicted positions or sequences
    best: list[ChosenLayers] = field(default_factory=list)  # the best choices, in their order
    by_rule: list[ChosenLayers] = field(default_factory=list)  # what the rules choose
    tried: int | None = None  # how many subsets were scored, those of the rules included
    all_subsets: bool = False  # whether these were all there are
    sequences: int | None = None  # of the corpus, on which they were scored
    perplexity: bool = False  # whether the losses are logarithms of perplexities
    seconds: float | None = None
    stopped: bool = False  # whether `student.search_seconds` ended the search


@dataclass(frozen=True)
class Start:
    """What the student was before its first step."""

    init: str | None = None
    source: str | None = field(default=None, metadata=stored("from"))
    published: Published = field(default_factory=Published, metadata=stored(sparse=True))
    layers: list[Any] = field(default_factory=list, metadata=stored(sparse=True))
    search: LayerSearch | None = field(default=None, metadata=stored(sparse=True))


@dataclass(frozen=True)
class Student(Model):
    origin: Origin | None = None
    start: Start = field(default_factory=Start)


@dataclass(frozen=True)
class Term:
    """A loss term; a weight or a temperature that changes over the run is a `Scheduled`."""

    title: str = ""
    weight: "Scheduled | float | None" = None
    temperature: "Scheduled | float | None" = field(default=None, metadata=stored(sparse=True))


@dataclass(frozen=True)
class Scheduled:
    start: float = 0.0
    end: float = 0.0
    shape: str = "linear"


@dataclass(frozen=True)
class Objective:
    kernel: str | None = None
    terms: dict[str, Term] = field(default_factory=dict)


@dataclass(frozen=True)
class Optimizer:
    """The optimizer, and the learning rate of which the schedule takes a fraction."""

    name: str | None = None
    peak_lr: float | None = None
    lr: float | None = None
    scale_lr: str | None = None
    base_batch: int | None = None
    sequences_per_step: int | None = None


@dataclass(frozen=True)
class Measure:
    title: str = ""
    explanation: str = ""
    lower_is_better: bool = True


@dataclass(frozen=True)
class EvaluationSet:
    name: str | None = None
    description: str | None = None
    documents: int | None = None
    sequences: int | None = None
    tokens: int | None = None
    positions: int | None = None
    pseudo_positions: int | None = None
    digest: str | None = field(default=None, metadata=stored(sparse=True))  # of the sequences that are scored


@dataclass(frozen=True)
class Agreement:
    """How often the student's first choice is the teacher's, and the mean KL divergence from the teacher in nats."""

    top1: float | None = None
    kl: float | None = None


@dataclass(frozen=True)
class HistoryPoint:
    """The mean losses since the point before, and the student's scores."""

    epoch: float | None = None
    step: int | None = None
    tokens: int | None = None
    seconds: float | None = None
    loss: dict[str, float | None] = field(default_factory=dict)
    scores: Scores = field(default_factory=dict, metadata=stored("*"))

    def score(self, measure: str, data: str) -> float | None:
        return (self.scores.get(measure) or {}).get(data)

    @classmethod
    def of(cls, line: LogLine) -> "HistoryPoint":
        """A line of history.jsonl."""
        return from_json(cls, line)


@dataclass(frozen=True)
class Best:
    """The evaluation whose student is published (`train.keep_best`), and the last one."""

    measure: str = ""
    data: str = field(default="", metadata=stored("set"))
    lower_is_better: bool = True
    patience: int | None = None  # evaluations without a better one after which the run ends
    step: int | None = None
    score: float | None = None  # of that one
    last_score: float | None = None  # of the last evaluation
    later: int = 0  # evaluations after the best one

    def among(self, points: list[HistoryPoint], steps: Container[int] | None = None) -> "Best":
        """The best of these points; `steps`: those whose student can be published, None: all."""
        has_score = [point for point in points if self.data in point.scores.get(self.measure, {})]
        scored = [(point.step or 0, point.score(self.measure, self.data)) for point in has_score]
        choices = [(score, step) for step, score in scored if score is not None and (steps is None or step in steps)]
        best = min if self.lower_is_better else max
        score, step = best(choices, key=lambda choice: choice[0], default=(None, None))
        later = sum(at > (step or 0) for at, _ in scored)
        return replace(self, step=step, score=score, last_score=scored[-1][1] if scored else None, later=later)


@dataclass(frozen=True)
class CurvePoint:
    step: int | None = None
    tokens: int | None = None
    seconds: float | None = None
    score: float | None = None


@dataclass(frozen=True)
class LearningCurve:
    """Scores on a few sequences while the student trains; `teacher` is the teacher's score on the same."""

    measure: str = ""
    data: str = field(default="", metadata=stored("set"))
    sequences: int | None = None
    teacher: float | None = None
    student: list[CurvePoint] = field(default_factory=list)


@dataclass(frozen=True)
class Baseline(Model):
    """The same student, trained without a teacher in a run of its own; `remarks` name what else differs.

    Attributes:
        learning_rate: where it is not the student's.
    """

    folder: str | None = None
    steps: int | None = None
    history: list[HistoryPoint] = field(default_factory=list)
    curve: LearningCurve | None = None
    objective: Objective = field(default_factory=Objective)
    remarks: list[str] = field(default_factory=list)
    learning_rate: float | None = field(default=None, metadata=stored(sparse=True))
    bootstrap: dict[str, dict[str, Resampled]] = field(default_factory=dict)
    gap_closed: dict[str, dict[str, GapClosed]] = field(default_factory=dict, metadata=stored(sparse=True))


@dataclass(frozen=True)
class Fed:
    """What a source of a mixture has given to the run."""

    sequences: int | None = None
    tokens: float | None = None
    passes: float | None = None


@dataclass(frozen=True)
class Training:
    steps: int | None = None
    epochs: float | None = None
    tokens: int | None = None
    seconds: float | None = None
    tokens_per_second: float | None = None
    data_wait: float | None = None
    threads: int | None = None
    final_loss: dict[str, float | None] = field(default_factory=dict)
    skipped_steps: int | None = None
    overflow_steps: int | None = None
    sources: dict[str, Fed] = field(default_factory=dict, metadata=stored(sparse=True))
    ended_by: str | None = None
    length: dict[str, float | None] | None = None  # the limits in epochs, steps and minutes
    evaluation_seconds: float | None = None


@dataclass(frozen=True)
class Rings:
    asked: int | str | None = None  # a number, or `auto`
    in_force: int | None = None
    engine: str | None = None


@dataclass(frozen=True)
class Backend:
    """The ranks that the run ended with, and what each of them did in a step."""

    name: str | None = None
    ranks: int | None = None
    collective: str | None = None
    rings: Rings = field(default_factory=Rings)
    accumulate: int | None = None
    batch_size: int | None = None
    sequences_per_step: int | None = None
    syncs: int | None = None
    collectives: int | None = None
    bytes_sent: int | None = None


@dataclass(frozen=True)
class Environment:
    python: str | None = None
    torch: str | None = None
    transformers: str | None = None
    distill: str | None = None
    device: str | None = None
    cpu_count: int | None = None
    platform: str | None = None
    git_revision: str | None = None


@dataclass(frozen=True)
class Finding:
    """What a rule has found: the fraction of the time that it takes, and the setting that helps, in a sentence."""

    rule: str = ""
    lost: float = 0.0
    sentence: str = ""
    named: bool = False  # whether it is worth a word


@dataclass(frozen=True)
class StepTimes:
    """Seconds of the steps that are known one by one."""

    mean: float | None = None
    median: float | None = None
    p95: float | None = None
    longest: float | None = None
    steps: int | None = None


@dataclass(frozen=True)
class Profile:
    """Where the time went: seconds by phase, samples of the machine by name."""

    conclusion: str = ""
    findings: list[Finding] = field(default_factory=list)
    bottleneck: str | None = None
    steps: int = 0
    phases: dict[str, float] = field(default_factory=dict)
    step_seconds: StepTimes | None = None
    ranks: int | None = None
    samples: dict[str, list[float]] = field(default_factory=dict)
