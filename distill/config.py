"""Typed settings, and the one door through which Hydra's configuration becomes them.

Every group of `conf/` has its dataclass here. Behind `build` there is no OmegaConf: the rest of the package gets plain
dataclasses. Hydra is imported inside the functions that need it, so that worker processes start quickly.
"""

from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from distill.errors import SettingError

HERE = Path(__file__).resolve().parent
# In a wheel conf/ and recipes/ lie inside the package, in a checkout beside it.
CONF = HERE / "conf" if (HERE / "conf").is_dir() else HERE.parent / "conf"
RECIPES = HERE / "recipes" if (HERE / "recipes").is_dir() else HERE.parent / "recipes"

MISSING: Any = "???"  # OmegaConf's mark of a value that has to be given


class Kind(Enum):
    """Forms of text that `distill.corpus` reads."""

    gutenberg = "gutenberg"
    text = "text"
    jsonl = "jsonl"
    parquet = "parquet"
    wikitext = "wikitext"
    imdb = "imdb"
    hub = "hub"
    prose = "prose"
    heldout = "heldout"  # evaluation only: the part of the corpus that training never sees


class Missing(Enum):
    """What to do when a corpus or an evaluation set is not to be had."""

    stop = "stop"
    skip = "skip"


class Rows(Enum):
    """Which positions carry soft targets."""

    all = "all"
    masked = "masked"


@dataclass
class Source:
    """Where documents come from."""

    kind: Kind = MISSING
    path: str | None = None  # file, folder or glob; null: the usual place under $DISTILL_DATA, then `hub`
    field: str = "text"  # column of JSONL, Parquet and Hub data sets
    hub: str | None = None  # name of a data set on the Hugging Face Hub
    subset: str | None = None  # its configuration
    split: str = "train"  # of a Hub data set, and of the usual place under $DISTILL_DATA
    streaming: bool = False  # read a Hub data set without downloading it whole
    share: float = 1.0  # seeded share of the documents that is used


@dataclass
class Corpus(Source):
    """What the student is trained on, and how it becomes rows of token ids."""

    sequence_length: int = 128
    add_prose: bool = False  # the docstrings of installed packages join the corpus
    fallback: bool = False  # without a path, $DISTILL_DATA or `hub`: train on those docstrings alone
    unreadable: Missing = Missing.skip  # a file that cannot be read: skip it with a count, or stop
    cross_documents: bool = False  # rows may run over a document's end
    heldout: float = 0.02  # share of the documents kept for the evaluation set `heldout`
    rows: int | None = None  # train on at most this many rows, a seeded choice
    vocab_size: int = 6144  # of the tokenizer, when there is none to take over
    cache: str = "~/.cache/distill"
    local: str | None = None  # folder on storage of each node itself; token caches are copied there once per node
    workers: int | None = None  # processes that prepare tokens; null: one per core


@dataclass
class TeacherCache:
    """The teacher's answers on disk, for runs that see the same masked rows several times."""

    top_k: int | None = None  # keep this many of its probabilities per position; null: ask the teacher live
    gigabytes: float = 8.0  # largest size on disk; more is refused before the teacher is asked


@dataclass
class Teacher:
    """The frozen model to learn from. `kind`: embedded, pretrained, none."""

    kind: str = MISSING
    path: str | None = None  # folder, run folder, or name on the Hub
    revision: str | None = None
    trust_remote_code: bool = False
    micro_batches: int = 1  # that one forward of the teacher takes: it keeps nothing for a backward
    cache: TeacherCache = field(default_factory=TeacherCache)


@dataclass
class Student:
    """The model to train. `kind`: layers, config, pretrained, custom."""

    kind: str = MISSING
    architecture: str = "same"  # same (as the teacher) or a transformers model type such as distilbert
    layers: list[int] | None = None  # teacher layers to start from; null: every second one
    config: dict[str, Any] = field(default_factory=dict)  # fields of the transformers configuration
    dropout: float = 0.1  # of kind=layers and kind=config; the others bring their own
    start: str = "random"  # of kind=config: random weights, or neighbours (heads that look at the words beside)
    path: str | None = None
    target: str | None = None  # `package.module.function`, called as function(teacher=..., tokenizer=..., **arguments)
    arguments: dict[str, Any] = field(default_factory=dict)
    trust_remote_code: bool = False


@dataclass
class Soft:
    weight: float = 5.0
    rows: Rows = Rows.all
    cutoff: float = 0.0  # teacher probabilities below it share one tail bucket


@dataclass
class Term:
    weight: float = 1.0


@dataclass
class Masking:
    """How positions are chosen to be predicted and what replaces them."""

    share: float = 0.15
    mask: float = 0.8  # of the chosen: replaced by the mask token
    keep: float = 0.1  # of the chosen: left as they are; the rest get a random token
    smoothing: float = 0.7  # chosen with p ~ max(count, 1)^-smoothing; 0: all alike
    whole_words: bool = False
    static: bool = False  # the same masks in every epoch


@dataclass
class Objective:
    """total = soft.weight * soft + mlm.weight * mlm + cosine.weight * cosine."""

    # plain: readable; fused: one visit, no [rows, vocabulary] tensor kept; auto: fused, compiled where the run is long
    kernel: str = "auto"
    temperature: float = 2.0
    soft: Soft = field(default_factory=Soft)
    mlm: Term = field(default_factory=lambda: Term(2.0))
    cosine: Term = field(default_factory=Term)
    masking: Masking = field(default_factory=Masking)


@dataclass
class Optimizer:
    """AdamW."""

    lr: float = 5e-4
    betas: tuple[float, float] = (0.9, 0.98)
    eps: float = 1e-6
    weight_decay: float = 0.01
    clip: float | None = 5.0  # largest norm of the whole gradient


@dataclass
class Schedule:
    """Learning rate over the run. `kind`: linear, cosine, constant."""

    kind: str = "linear"
    warmup: float = 0.05  # share of the run
    floor: float = 0.0  # share of `optimizer.lr` left at the end


@dataclass
class Train:
    batch_size: int = 16  # rows per rank and micro-batch
    accumulate: int = 50  # micro-batches per step
    epochs: int | None = 3
    steps: int | None = None
    minutes: float | None = None
    log_every: int = 1  # steps
    save_every: int = 100  # steps
    keep: int = 2  # checkpoints
    max_nonfinite: int = 10  # skipped steps in a row before the run stops
    workers: int | None = None  # threads that prepare batches ahead; 0: none, in the loop; null: by this rank's cores


@dataclass
class PseudoPerplexity:
    share: float = 0.1  # seeded share of the positions that are scored; 1: all, 0: none
    batch_size: int = 32  # masked copies in one forward; of rows longer than 128 as many as have that many positions


@dataclass
class Evaluate:
    sets: list[str] = field(default_factory=lambda: ["heldout"])
    # Of Source; `build` types them, because OmegaConf takes no new entry of a typed dict from the command line.
    sources: dict[str, Any] = field(default_factory=dict)
    missing: Missing = Missing.stop  # a set that is not to be had: stop, or leave it out and say so
    rows: int | None = None  # at most this many rows of a set, a seeded choice
    batch_size: int = 32
    every_epoch: bool = True  # false: at the end of the run only
    pseudo_perplexity: PseudoPerplexity = field(default_factory=PseudoPerplexity)
    twin: str | None = None  # run folder of the no-teacher twin, to stand beside the student


@dataclass
class Backend:
    name: str = "single"
    device: str = "auto"  # auto, cpu, cuda, cuda:1
    threads: int | None = None  # of torch on the CPU; null: torch's own choice
    processes: int | None = None  # ranks to start on this machine; null: join what a launcher started
    hosts: str | None = None  # machines and their ranks, e.g. a:8,b:8
    rings: str = "1"  # an integer, or auto
    sync: str = "window"  # exchange gradients once per window, or after every micro-batch
    compression: str = "none"  # of gradients on the wire: none, bf16
    timeout: float = 300.0  # seconds without an answer from another rank


@dataclass
class Precision:
    """Number format of each model's forward: fp32 or bf16 (autocast). Weights stay in fp32.

    The teacher in training can be int8 too (`distill.int8`); as an evaluated model it never is.
    """

    student: str = "fp32"
    teacher: str = "fp32"
    evaluate: str = "fp32"
    compile: bool = False  # encoders and objective through torch.compile: slow to start, then faster


@dataclass
class Tracker:
    """Where metrics go besides metrics.jsonl. `kind`: none, wandb, tensorboard."""

    kind: str = "none"
    project: str = "distill"
    mode: str = "offline"  # of wandb: offline or online


@dataclass
class Config:
    corpus: Corpus = field(default_factory=Corpus)
    teacher: Teacher = field(default_factory=Teacher)
    student: Student = field(default_factory=Student)
    objective: Objective = field(default_factory=Objective)
    optimizer: Optimizer = field(default_factory=Optimizer)
    schedule: Schedule = field(default_factory=Schedule)
    train: Train = field(default_factory=Train)
    evaluate: Evaluate = field(default_factory=Evaluate)
    backend: Backend = field(default_factory=Backend)
    precision: Precision = field(default_factory=Precision)
    tracker: Tracker = field(default_factory=Tracker)
    scale: str = "custom"  # said in the banner and the report
    seed: int = 0
    resume: str = "auto"  # auto, never, or a checkpoint folder


def register() -> None:
    """Make the schema and the recipes known to Hydra.

    Hydra finds a group by the name of its folder, so `recipes/x.yaml` can be `recipe/x` only through the ConfigStore.
    """
    from hydra.core.config_store import ConfigStore
    from omegaconf import OmegaConf

    store = ConfigStore.instance()
    store.store(name="schema", node=Config)
    for file in sorted(RECIPES.glob("*.yaml")):
        store.store(group="recipe", name=file.stem, node=OmegaConf.load(file), package="_global_")


def build(composed: Any) -> Config:
    """Hydra's DictConfig -> plain dataclasses.

    Raises:
        SettingError: a key that no part of Distill reads, a value of the wrong type, or one that was left open.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        # Through a plain container, because keys added with + pass where both sides are typed.
        given = OmegaConf.to_container(composed, resolve=True)
        config = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Config), given))
    except OmegaConfBaseException as error:
        raise SettingError(explain(error)) from error
    assert isinstance(config, Config)
    for name, given in config.evaluate.sources.items():
        try:
            source = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Source), given))
        except OmegaConfBaseException as error:
            raise SettingError(f"evaluate.sources.{name}.{explain(error)}") from error
        config.evaluate.sources[name] = source
    return config


def explain(error: Exception) -> str:
    """One line for an error of Hydra or OmegaConf: the key, what is wrong with it, and where to look."""
    key = getattr(error, "full_key", None)
    chain: list[BaseException] = [error]
    while cause := chain[-1].__cause__:
        chain.append(cause)
    # Hydra wraps OmegaConf's error, which says what is wrong with the value.
    inner = next((e for e in reversed(chain) if getattr(e, "full_key", None)), error)
    key = getattr(inner, "full_key", None) or key
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    what = str(inner).strip().splitlines()[0] if inner is not error else lines[0]
    if inner is error:
        options = [line for line in lines[1:] if "full_key" not in line and "object_type" not in line]
        what = " ".join([what, *options])
    return f"{key}: {what}" if key and key not in what else what
