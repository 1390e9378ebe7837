"""All settings as plain typed dataclasses: what the rest of the package reads, whoever filled them in.

`distill.config.compose` makes them from Hydra's configuration; tests and notebooks may build them directly. The names
are those of the command line, except that `corpus` and `objective` are sorted into parts here: `corpus.path` is
`corpus.source.path`, and `objective.soft.weight` is `objective.terms["soft"].weight`.
"""

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from distill.config.component import Component
from distill.config.corpus import Duplicates, NearConfig
from distill.config.evaluate import EvaluateConfig as EvaluateConfig
from distill.config.evaluate import Missing as Missing
from distill.config.evaluate import PseudoPerplexityConfig as PseudoPerplexityConfig
from distill.config.evaluate import SetConfig as SetConfig
from distill.config.evaluate import SetShare as SetShare
from distill.config.folders import CONF as CONF
from distill.config.folders import RECIPES as RECIPES
from distill.config.profile import ProfileConfig
from distill.config.ramp import Ramp
from distill.config.report import ReportConfig
from distill.config.teacher import MISSING as MISSING
from distill.config.teacher import MemberConfig as MemberConfig
from distill.config.teacher import TeacherCacheConfig as TeacherCacheConfig
from distill.config.teacher import TeacherConfig as TeacherConfig


class OnUsr1(Enum):
    """What SIGUSR1 does besides writing a checkpoint."""

    save = "save"  # nothing: the run goes on
    stop = "stop"  # it ends the run, as SIGTERM does


class DocumentUnit(Enum):
    """What of a plain text file is one document."""

    line = "line"  # a line: the published format of an article a line
    blank = "blank"  # what stands between two blank lines
    file = "file"  # the whole file


@dataclass
class SourceConfig:
    """Where documents come from. `kind` names a file of `distill/data/sources/`."""

    kind: str = MISSING
    path: str | None = None  # file, folder or glob; null: the usual folder under $DISTILL_DATA, then `hub`
    # Column of JSONL, Parquet and Hub data sets; null: `text`, or `messages` of conversations.
    field: str | None = None
    encoding: str | None = None  # of plain text, JSONL and CSV files; null: UTF-8
    document: DocumentUnit | None = None  # of plain text; null: about 1 MiB of whole paragraphs
    prompt: str | None = None  # column of a text before that of `field`, to be read and not predicted (causal models)
    template: str | None = None  # of conversations: one message, by its {role} and {content}
    target_role: str | None = None  # of conversations: whose messages count; null: assistant
    hub: str | None = None  # name of a data set on the Hugging Face Hub
    subset: str | None = None  # its configuration
    split: str = "train"  # of a Hub data set, and of the usual folder under $DISTILL_DATA
    streaming: bool = False  # read a Hub data set without downloading it whole
    share: float = 1.0  # seeded share of the documents that is used


@dataclass
class TokensConfig:
    """How text becomes rows of token ids."""

    sequence_length: int = 128
    cross_documents: bool = False  # rows may run over a document's end
    heldout: float = 0.02  # share of the documents kept for the evaluation set `heldout`
    unreadable: Missing = Missing.skip  # a file that cannot be read: skip it with a count, or stop
    # Share of the records (lines of plain text) that may be bad and left out; the run stops above it.
    max_bad: float = 0.05
    vocab_size: int = 6144  # of the tokenizer, when there is none to take over
    duplicates: Duplicates = Duplicates.count  # documents of the same text: keep, count, drop, or near ones too
    near: NearConfig = field(default_factory=NearConfig)


@dataclass
class CacheConfig:
    """Where rows of token ids are kept, and how many processes make them."""

    cache: str = "~/.cache/distill"
    tokens: str | None = None  # folder or URL of prepared rows, which several hosts fill and read; null: the cache
    shard_bytes: int = 1 << 30  # of rows in one file, about, before compression
    compression: str | None = None  # of prepared rows: zstd, or null for none
    local: str | None = None  # folder on storage of each node itself; token caches are copied there once per node
    local_bytes: int = 16 << 30  # most of them that are there at a time, or of blocks of rows from a URL
    shuffle_bytes: int = 4 << 30  # of rows, not compressed, that are shuffled together; a smaller corpus is as a whole
    workers: int | None = None  # processes that prepare tokens; null: one per core


@dataclass
class CorpusFlags:
    add_prose: bool = False  # the docstrings of installed packages join the corpus
    fallback: bool = False  # without a path, $DISTILL_DATA or `hub`: train on those docstrings alone
    rows: int | None = None  # train on at most this many rows, or labelled examples, a seeded choice
    unknown: float = 0.2  # largest share of the text's tokens that the vocabulary may not know
    # Of fine-tuning with a teacher: file, folder or glob of examples that the teacher labels; they all count.
    unlabelled: str | None = None


@dataclass
class CorpusConfig(CorpusFlags):
    """What the student is trained on."""

    source: SourceConfig | Component = field(default_factory=SourceConfig)
    tokens: TokensConfig = field(default_factory=TokensConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    # Of a mixture, in place of `source`: SourceConfig or Component by name, and what share of the rows each has.
    sources: dict[str, Any] = field(default_factory=dict)
    weights: dict[str, float] = field(default_factory=dict)


@dataclass
class StudentConfig:
    """The model to train. `kind`: layers, config, pretrained, or custom (made by a callable of the user's)."""

    kind: str = MISSING
    architecture: str = "same"  # same (as the teacher) or a transformers model type such as distilbert
    # Teacher layers to start from: auto (those that cost least, by the untrained student's loss), their numbers (a list
    # of some for the mean of their weights), or a rule (every_second, which is also null, even, first, last, ends,
    # averaged).
    layers: Any = None
    num_layers: int | None = None  # how many a rule takes; null: half of the teacher's
    config: dict[str, Any] = field(default_factory=dict)  # fields of the transformers configuration
    # Parts that keep the weights they start with: embeddings, and layers of the student by number, from 0.
    frozen: list[Any] = field(default_factory=list)
    dropout: float | None = None  # null: 0.1, or what a saved model says; not of kind=custom
    # Folder or Hub name, or corpus (trained on it); null: the teacher's. Another one than the teacher's is for losses
    # that need no pair of token rows, such as `pooled`.
    tokenizer: str | None = None
    # Of kind=config: random weights, or neighbours (heads that look at the words beside).
    start: str = "random"
    path: str | None = None
    trust_remote_code: bool = False
    custom: Component | None = None  # of kind=custom


@dataclass
class MaskingConfig:
    """How positions are chosen to be predicted and what replaces them."""

    share: float = 0.15
    mask: float = 0.8  # of the chosen: replaced by the mask token
    keep: float = 0.1  # of the chosen: left as they are; the rest get a random token
    smoothing: float = 0.7  # chosen with p ~ max(count, 1)^-smoothing; 0: all alike
    whole_words: bool = False
    ngrams: int = 1  # up to so many whole words in a row are chosen together, n of them with p ~ 1/n
    most: int | None = None  # positions of a row that are predicted, whatever `share` says; null: no limit
    static: bool = False  # the same masks in every epoch


@dataclass
class TermConfig:
    """One loss term: its weight in the total, and what makes it."""

    weight: float | Ramp
    make: Component
    temperature: Ramp | None = None  # where the setting of that name follows a schedule


@dataclass
class ObjectiveFlags:
    """What is set of the objective as a whole."""

    # plain: readable; fused: one visit, no [rows, vocabulary] tensor kept; auto: fused, compiled where the run is long
    kernel: str = "auto"
    task: str = "mlm"  # what is predicted: masked words (mlm) or the next one (clm); a file of `distill/tasks/`
    masking: MaskingConfig = field(default_factory=MaskingConfig)


@dataclass
class ObjectiveConfig(ObjectiveFlags):
    """total = sum over the terms of weight * mean of the term. Weights and temperatures may follow a schedule."""

    terms: dict[str, TermConfig] = field(default_factory=dict)  # by name; those of weight 0 are left out of training
    temperature: float | Ramp = 2.0


@dataclass
class OptimizerFlags:
    """What is set of every optimizer."""

    lr: float = 5e-4
    # What becomes of lr where a step has other rows than base_batch. linear: it grows with them; sqrt: with their root.
    scale_lr: str = "none"
    base_batch: int | None = None  # rows a step, of all ranks together, that lr is meant for
    clip: float | None = 5.0  # largest norm of the whole gradient
    # Each rank clips the gradient of its own rows before the exchange, which then cannot begin during backward.
    clip_each_rank: bool = False


@dataclass
class OptimizerConfig(OptimizerFlags):
    """What moves the weights; its further settings are arguments of `make`."""

    make: Component = field(default_factory=lambda: Component("optimizer", "distill.optim.optimizers.adamw.Adamw"))


def default_schedule() -> Component:
    return Component("schedule", "distill.optim.schedules.linear.Linear")


@dataclass
class TrainConfig:
    batch_size: int = 16  # rows per rank and micro-batch
    accumulate: int = 50  # micro-batches per step; not read where rows_per_step is given
    # Of one step of all ranks together; null: batch_size x accumulate x ranks. Each rank takes its share of them in as
    # many micro-batches as that needs, so the number of ranks may change from one start of a run to the next.
    rows_per_step: int | None = None
    epochs: int | None = 3
    steps: int | None = None
    minutes: float | None = None
    log_every: int = 1  # steps
    save_every: int = 100  # steps
    keep: int = 2  # newest checkpoints, besides the newest that a later loss has shown to be good
    # Steps after which the student is kept as a model folder: these, and every so many.
    milestones: list[int] | None = None
    milestone_every: int | None = None
    max_nonfinite: int = 10  # skipped steps in a row before the run stops
    # What the loss may be, as a multiple of the first step's, before checkpoints no longer count as good; null: any.
    max_loss_ratio: float | None = 3.0
    max_spike: int = 1000  # steps in a row with a loss beyond that before the run stops
    on_usr1: OnUsr1 = OnUsr1.save  # what SIGUSR1 asks for: a checkpoint, or a checkpoint and the end of this process
    # Threads that prepare batches ahead; 0: none, in the loop; null: by this rank's cores, and up to 16 while the loop
    # waits for storage.
    workers: int | None = None

    @property
    def length(self) -> dict[str, float | None]:
        """The limits of the run by their names."""
        return {"epochs": self.epochs, "steps": self.steps, "minutes": self.minutes}


@dataclass
class BackendConfig:
    name: str = "single"
    device: str = "auto"  # auto, cpu, cuda, cuda:1
    threads: int | None = None  # of torch on the CPU; null: as many as are quickest at the start (thread_choice.py)
    processes: int | None = None  # ranks to start on this machine; null: join what a launcher started
    hosts: str | None = None  # machines and their ranks, e.g. a:8,b:8
    rings: str = "1"  # an integer, or auto
    # Of ddp: an engine of torch.distributed that comes as a plug-in, NAME or MODULE:NAME; null: gloo or NCCL
    collective: str | None = None
    sync: str = "window"  # exchange gradients once per window, or after every micro-batch
    # Of gradients on the wire: none, bf16, or fp16, which has more digits and less range: a gradient with an element
    # above 64 becomes infinite, and its step is skipped on all ranks.
    compression: str = "none"
    timeout: float = 300.0  # seconds without an answer from another rank
    # Of fsdp: whether the weights of either model are divided between the ranks; null: they are.
    shard_student: bool | None = None
    shard_teacher: bool | None = None
    offload_teacher: bool = False  # its parts lie in the memory of the host, not of the GPU
    # Fewest and most ranks, e.g. 2:4: ranks and hosts may be lost and come back. null: the first loss ends the run.
    elastic: str | None = None
    elastic_wait: float = 600.0  # seconds with fewer ranks than that, after which the run ends


@dataclass
class PrecisionConfig:
    """Number format of each model's forward: fp32, bf16 or fp16 (autocast), or auto. Weights stay in fp32.

    fp16 is for GPUs that have no bf16; a student in it has its loss scaled (`distill.optim.loss_scale`).
    auto is bf16 where the processor or GPU multiplies faster in it, which is measured when a run begins and kept when
    it is resumed; else fp32. The teacher in training can be int8 too (`distill.models.kernels.int8`); as an evaluated
    model it never is.
    """

    student: str = "fp32"
    teacher: str = "fp32"
    evaluate: str = "fp32"
    compile: bool = False  # encoders and objective through torch.compile: slow to start, then faster
    # auto: what is fastest on this processor; plain: torch's own kernels everywhere (see distill/kernels)
    kernels: str = "auto"


@dataclass
class TrackerConfig:
    """Where metrics go besides metrics.jsonl. `kind`: none, wandb, tensorboard."""

    kind: str = "none"
    project: str = "distill"
    mode: str = "offline"  # of wandb: offline or online


@dataclass
class StageConfig:
    """One job, or one for each of several seeds, of the milestones of an earlier stage, or of both."""

    recipe: str
    settings: list[str] = field(default_factory=list)  # as on the command line; {NAME} is the folder of stage NAME
    seeds: list[int] = field(default_factory=list)  # none: the one of the recipe
    milestones_of: str | None = None  # run it from each milestone of that earlier stage; its {NAME} is the milestone


@dataclass
class ChainConfig:
    """Stages by name, in their order, and which of them score which model of the table."""

    stages: dict[str, StageConfig] = field(default_factory=dict)
    table: dict[str, list[str]] = field(default_factory=dict)  # stages by the name of the model that they score
    anchors: list[str] = field(default_factory=list)  # lines below the table, such as published scores


@dataclass
class Config:
    corpus: CorpusConfig = field(default_factory=CorpusConfig)
    teacher: TeacherConfig = field(default_factory=TeacherConfig)
    student: StudentConfig = field(default_factory=StudentConfig)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: Component = field(default_factory=default_schedule)  # learning rate over the run
    train: TrainConfig = field(default_factory=TrainConfig)
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)
    backend: BackendConfig = field(default_factory=BackendConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    tracker: TrackerConfig = field(default_factory=TrackerConfig)
    profile: ProfileConfig = field(default_factory=ProfileConfig)
    report: ReportConfig = field(default_factory=ReportConfig)
    scale: str = "custom"  # said in the banner and the report
    seed: int = 0
    resume: str = "auto"  # auto, strict, never, or a checkpoint folder
    optimize: Any = None  # the number of its results that a run gives to a sweep, by its name; see comparison/goal.py
    # The same settings, nested by the names of the command line: as they are written down, without what comes from the
    # environment, and as a resumed run compares them, with digests of that.
    given: dict[str, Any] = field(default_factory=dict)
    compared: dict[str, Any] = field(default_factory=dict)
