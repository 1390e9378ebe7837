"""What a record is made of: the facts of a corpus, of models and their scores, of training, machine and profile.

The descriptions of the fields are the page reference/record.md of the manual. A value that is not known, or not yet,
is None. A part is also made of an object that has attributes of the names of its fields.
"""

import math
from collections.abc import Container, Mapping
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field

from distill.config.objective import WeightSchedule

Scores = dict[str, dict[str, float | None]]  # by measure and evaluation set
LOGARITHMIC = ("perplexity", "pseudo_perplexity")  # measures whose gap is taken in logarithms


class Part(BaseModel):
    """A part of what JSON holds: every value is of its field's kind, and keys that it does not have are passed over."""

    model_config = ConfigDict(
        frozen=True,
        strict=True,
        from_attributes=True,
        validate_by_name=True,
        serialize_by_alias=True,
        ser_json_inf_nan="constants",
    )

    def changed(self, **values: Any) -> Self:
        """This part with other values for some of its fields, which are checked."""
        return type(self)(**(dict(self) | values))


def field(default: Any, description: str, **more: Any) -> Any:
    """A field: its default, and what reference/record.md says of it."""
    return Field(default, description=description, **more)


def sparse(default: Any, description: str) -> Any:
    """A field that JSON has only where there is something in it."""
    is_empty = lambda value: value in (None, {}, [], Published())  # noqa: E731
    return field(default, f"{description} Left out where empty.", exclude_if=is_empty)


class Scored(Part, extra="allow"):
    """What has scores: every key besides its fields is the name of a measure."""

    __pydantic_extra__: Scores = Field(init=False)

    @property
    def scores(self) -> Scores:
        """By measure, then by evaluation set."""
        return self.__pydantic_extra__

    def score(self, measure: str, data: str) -> float | None:
        """By a measure on an evaluation set; None where there is none."""
        return self.scores.get(measure, {}).get(data)


class Preparation(Part):
    seconds: float | None = field(None, "How long it took.")
    tokens_per_second: float | None = field(None, "Speed of the tokenizer.")


class Sized(Part):
    name: str | None = field(None, "What the report calls it.")
    documents: int | None = field(None, "How many documents.")
    tokens: int | None = field(None, "How many tokens, without padding.")
    sequences: int | None = field(None, "How many sequences.")


class Source(Sized):
    """One source of a mixture."""

    weight: float | None = field(None, "Fraction of the sequences that are fed.")


class Corpus(Sized):
    """The text: how much there is of it, and what of it is of no use or there twice."""

    sequence_length: int | None = field(None, "Tokens of a sequence.")
    held_out: int | None = sparse(None, "Sequences of it that no step reads.")
    fraction_used: float | None = sparse(None, "About what of the rest `corpus.max_sequences` takes, if not all.")
    left_out: dict[str, int] = sparse({}, "Sound records, or parts of them, by why they are not used.")
    duplicates: dict[str, int] = sparse({}, "How many documents are there several times, by what was done.")
    sources: dict[str, Source] = sparse({}, "The sources of a mixture.")
    hub: list[str] = sparse([], "Names of data sets on the Hub.")
    chat_template: str | None = sparse(None, "Of conversations, in Jinja.")
    preparation: Preparation = field(Preparation(), "How long tokenizing took.")


class TeacherCache(Part):
    """What a cache of a teacher holds."""

    key: str = field("", "Its folder below `data.cache/teacher/`.")
    hidden_states: int | None = sparse(None, "Width of the last hidden state that is kept of each position.")
    top_k: int = field(0, "Entries that are kept exactly at each position.")
    sampled: int | None = sparse(None, "Entries that are drawn from all others.")
    sample_seed: int | None = sparse(None, "Seed of the draws.")
    positions: int = field(0, "Positions that are kept.")
    bytes: int = field(0, "Size on disk, in bytes.")
    bytes_per_token: float = field(0.0, "Bytes of a position.")
    kept_mass: float | None = field(None, "Mean probability of the entries that are kept exactly.")
    seconds: float | None = field(None, "How long the teacher ran for it.")
    precision: str | None = field(None, "The number format that the teacher ran in.")


class Model(Scored):
    """A model and its scores."""

    name: str | None = field(None, "What the report calls it.")
    parameters: int | None = field(None, "How many; tied ones count once, adapters (they are merged) not at all.")
    bytes: int | None = field(None, "Size of the weights, in bytes.")
    tokens_per_second: float | None = field(None, "Speed.")


class Published(Part):
    """How a model is published; a folder that states no licence has neither."""

    hub: str | None = sparse(None, "Its name on the Hub, NAME or OWNER/NAME.")
    license: str | None = sparse(None, "As the Hub calls it, such as apache-2.0.")


class Teacher(Model):
    """The teacher, or what several are together; these are the members."""

    published: Published = sparse(Published(), "How the model is published.")
    members: "dict[str, Teacher]" = sparse({}, "The teachers, where there are several.")
    cache: TeacherCache | None = sparse(None, "What was kept of its answers on disk.")


class Origin(Part):
    """Where a student's class comes from."""

    model_class: str = field("", "As package.module.Name.")
    made_by: str | None = field(None, "The import path of the callable that made it; null: transformers made it.")
    causal: bool = field(False, "Whether it is a causal model.")
    has_config: bool = field(True, "Whether it was saved with a configuration, as transformers models are.")
    call: str | None = field(None, "The arguments of that callable, as they are written; null: not known.")
    tokenizer: str | None = sparse(None, "The class that gives its tokenizer back, where AutoTokenizer does not.")
    encodes: str | None = sparse(None, "What was trained where no head was: `states`, or vectors by a pooling.")
    normalizes: bool | None = sparse(None, "Whether its vectors get the length 1, as the teacher's do.")


class ChosenLayers(Part):
    """A choice of layers, the loss of the untrained student with it, and the rules that make that choice."""

    layers: list[Any] = field([], "Their numbers.")
    loss: float | None = field(None, "Of the untrained student.")
    rules: list[str] = field([], "Rules that make this choice.")


class LayerSearch(Part):
    """What `student.layers=auto` has found."""

    layers: list[Any] = field([], "The choice.")
    teacher: float | None = field(None, "The loss of the whole teacher, a mean over predicted positions or sequences.")
    best: list[ChosenLayers] = field([], "The best choices, best first.")
    by_rule: list[ChosenLayers] = field([], "The choices of the rules.")
    tried: int | None = field(None, "How many choices were scored, those of the rules included.")
    all_subsets: bool = field(False, "Whether these were all that there are.")
    sequences: int | None = field(None, "Of the corpus, on which they were scored.")
    perplexity: bool = field(False, "Whether losses are logarithms of a perplexity.")
    seconds: float | None = field(None, "How long it took.")
    stopped: bool = field(False, "Whether `student.search_seconds` ended the search.")


class RefittedBlock(Part):
    """Relative errors are roots of the mean square of (what it gives - the teacher's state) / the state's size."""

    block: int | None = field(None, "Of the student.")
    layer: int | None = field(None, "The teacher's layer whose input it is to give; its depth: the last state.")
    before: float | None = field(None, "Relative error of the copy.")
    after: float | None = field(None, "Relative error on the same positions after the refit.")


class Refit(Part):
    """What `student.refit` did before the first step."""

    blocks: list[RefittedBlock] = field([], "What was refitted, in order.")
    tokens: int | None = field(None, "Of the sequences that it was fitted on.")
    seconds: float | None = field(None, "How long it took; not part of the training's.")


class Neurons(Part):
    """What `student.intermediate_size` has kept of each MLP. Errors are relative to what the MLPs add, and means."""

    kept: int | None = field(None, "How many.")
    of: int | None = field(None, "Of how many.")
    before: float | None = field(None, "Error of the neurons as copied.")
    after: float | None = field(None, "Error once they were refitted.")


class Start(Part):
    """What the student was before its first step."""

    init: str | None = field(None, "As `student.init`.")
    source: str | None = field(None, "Where the weights come from.", alias="from")
    published: Published = sparse(Published(), "How the model is published.")
    layers: list[Any] = sparse([], "Layers of the teacher.")
    new_head: bool | None = sparse(None, "True where the teacher had not been fine-tuned for the task.")
    search: LayerSearch | None = sparse(None, "How `student.layers=auto` has found them.")
    neurons: Neurons | None = sparse(None, "What was kept of their MLPs.")
    refit: Refit | None = sparse(None, "What `student.refit` has changed in them.")


class Student(Model):
    origin: Origin | None = field(None, "Its class.")
    start: Start = field(Start(), "Its weights before the first step.")


class Term(Part):
    title: str = field("", "What the report calls it.")
    weight: WeightSchedule | float | None = field(None, "In the total.")
    temperature: WeightSchedule | float | None = sparse(None, "Of the term, where it has one.")


class Objective(Part):
    kernel: str | None = field(None, "How losses on logits were computed.")
    terms: dict[str, Term] = field({}, "The loss terms.")


class Optimizer(Part):
    """The optimizer, and the learning rate of which the schedule takes a fraction."""

    name: str | None = field(None, "What the report calls it.")
    peak_lr: float | None = field(None, "The learning rate at its highest.")
    lr: float | None = field(None, "`optimizer.lr` as it was given.")
    scale_lr: str | None = field(None, "How the rate grows with the sequences of a step.")
    base_batch: int | None = field(None, "The sequences of a step that `lr` is meant for.")
    sequences_per_step: int | None = field(None, "Of all ranks together.")


class Measure(Part):
    title: str = field("", "Its name in tables.")
    explanation: str = field("", "What it is, in a sentence.")
    lower_is_better: bool = field(True, "Whether the lowest value is the best.")


class EvaluationSet(Sized):
    description: str | None = field(None, "Where its text comes from.")
    positions: int | None = field(None, "Scored positions.")
    pseudo_positions: int | None = field(None, "Positions that are masked one by one.")
    digest: str | None = sparse(None, "Of the sequences that are scored; runs in which it is the same can be compared.")


class Agreement(Part):
    """How often the student's first choice is the teacher's, and the mean KL divergence from the teacher."""

    top1: float | None = field(None, "Fraction of positions at which both have the same first choice.")
    kl: float | None = field(None, "Mean KL(teacher || student), in nats.")


class Sample(Part):
    """The beginning of a text, and what each model writes behind it."""

    prompt: str = field("", "As text, without special tokens.")
    continuations: dict[str, str] = field({}, "By model: `teacher`, `student`, `baseline`.")


class Samples(Part):
    """How the models of a run continue the same beginnings, which shows how they write and measures nothing."""

    data: str = field("", "The evaluation set that the beginnings are from.", alias="set")
    temperature: float | None = field(None, "At which each token is drawn.")
    max_tokens: int | None = field(None, "Of a continuation.")
    texts: list[Sample] = field([], "In the order of the report.")


class HistoryPoint(Scored):
    """The mean losses since the point before, and the student's scores."""

    epoch: float | None = field(None, "Passes over the corpus by then.")
    step: int | None = field(None, "The number of the step.")
    tokens: int | None = field(None, "Seen by then.")
    seconds: float | None = field(None, "Of training by then.")
    loss: dict[str, float | None] = field({}, "Of each term since the point before, without weight, and `total`.")


class Best(Part):
    """The evaluation whose student is published (`train.keep_best`), and the last one."""

    measure: str = field("", "By which evaluations are compared.")
    data: str = field("", "The evaluation set of that score.", alias="set")
    lower_is_better: bool = field(True, "The direction of the measure.")
    patience: int | None = field(None, "Evaluations without a better one after which the run ends.")
    step: int | None = field(None, "After which the best one came, the first of equal ones; null: none has a score.")
    score: float | None = field(None, "Of that one.")
    last_score: float | None = field(None, "Of the last evaluation.")
    later: int = field(0, "Evaluations after the best one.")

    def among(self, points: list[HistoryPoint], steps: Container[int] | None = None) -> "Best":
        """The best of these points; `steps`: those whose student can be published, None: all."""
        scored = {
            point.step or 0: point.score(self.measure, self.data)
            for point in points
            if self.data in point.scores.get(self.measure, {})
        }
        choices = [(score, at) for at, score in scored.items() if score is not None and (steps is None or at in steps)]
        best = min if self.lower_is_better else max
        score, step = best(choices, key=lambda choice: choice[0], default=(None, None))
        last = next(reversed(scored.values()), None)
        return self.changed(step=step, score=score, last_score=last, later=sum(at > (step or 0) for at in scored))


class Conclusion(Part):
    """Whether learning from the teacher has helped (`distill.evaluation.significance`)."""

    word: str = field("unclear", "`helped`, `did not` or `unclear`.")
    reason: str = field("", "Why, in half a sentence.")
    difference: float | None = field(None, "Of the student from the baseline, on the whole set.")
    low: float | None = field(None, "Lower end of its 95 % interval.")
    high: float | None = field(None, "Its upper end.")
    unit: str = field("", "`ratio` of perplexities, below 1 if the student is better; or `points`, above 0 if it is.")
    n: int | None = field(None, "How many units were scored.")
    units: str = field("", "What they are, such as documents.")


class GapClosed(Part):
    """The fraction of the gap from the baseline to the teacher that the student closes, on the draws of `Conclusion`.

    The interval is left out where some draws have no gap, and where nothing is resampled.
    """

    fraction: float | None = field(None, "(baseline - student) / (baseline - teacher), perplexities as logarithms.")
    low: float | None = sparse(None, "Lower end of the interval that holds 95 % of the fractions.")
    high: float | None = sparse(None, "Its upper end.")
    without_gap: int | None = sparse(None, "Draws with a baseline no worse than the teacher; any: no interval.")


def fraction_closed(scores: Mapping[str, float], measure: str, lower_is_better: bool = True) -> float | None:
    """(baseline - student) / (baseline - teacher); None where the baseline is no worse than the teacher.

    Below 0 the student is worse than the baseline, above 1 better than the teacher. Of a perplexity it is taken in
    nats a token: there equal steps are equal factors, while in perplexity itself the first steps of a bad model would
    count for most.

    Args:
        scores: of `teacher`, `student` and `baseline`, finite numbers.
        measure: by its name in the record.
    """
    as_losses = {
        name: math.log(score) if measure in LOGARITHMIC else score if lower_is_better else -score
        for name, score in scores.items()
    }
    gap = as_losses["baseline"] - as_losses["teacher"]
    return (as_losses["baseline"] - as_losses["student"]) / gap if gap > 0 else None


class Baseline(Model):
    """The same student, trained without a teacher in a run of its own."""

    folder: str | None = field(None, "The folder of its run.")
    steps: int | None = field(None, "Steps that it was trained for.")
    history: list[HistoryPoint] = field([], "The evaluations in the course of its training.")
    objective: Objective = field(Objective(), "Its loss.")
    remarks: list[str] = field([], "What else differs from the run of the student.")
    same_limits: bool = field(False, "Whether both ran up to the same limits: as many minutes may be other steps.")
    learning_rate: float | None = sparse(None, "The baseline's learning rate, where it is not the student's.")
    sequences_per_step: int | None = sparse(None, "Of the baseline's steps, where it is not the student's.")
    started_from: str | None = sparse(
        None, "The model whose layers it started from, where the student had the teacher's."
    )
    conclusions: dict[str, dict[str, Conclusion]] = field({}, "On the student, by measure and evaluation set.")
    gap_closed: dict[str, dict[str, GapClosed]] = sparse({}, "What of its gap the student closes, by measure and set.")


class Fed(Part):
    """What a source of a mixture has given to the run."""

    sequences: int | None = field(None, "How many sequences.")
    tokens: int | None = field(None, "In these sequences, rounded.")
    passes: float | None = field(None, "Over the source.")


class Training(Part):
    steps: int | None = field(None, "Steps that were made.")
    epochs: float | None = field(None, "Passes over the corpus.")
    tokens: int | None = field(None, "How many tokens, without padding.")
    seconds: float | None = field(None, "Of training alone, without evaluation and saving.")
    tokens_per_second: float | None = field(None, "Of all ranks together.")
    data_wait: float | None = field(None, "Fraction of the time that the loop waited for data.")
    threads: int | None = field(None, "That prepare batches, on a rank.")
    final_loss: dict[str, float | None] = field({}, "The mean of each term at the end.")
    skipped_steps: int | None = field(None, "Steps left out because loss or gradient was not finite.")
    overflow_steps: int | None = field(None, "Steps left out because fp16 overflowed.")
    sources: dict[str, Fed] = sparse({}, "What each source of a mixture has given.")
    written: dict[str, float] = sparse({}, "What the student wrote last, for a step, as metrics.jsonl calls it.")
    ended_by: str | None = field(None, "The limit that ended it, or a signal.")
    length: dict[str, int | float | None] | None = field(None, "The limits in epochs, steps and minutes.")
    evaluation_seconds: float | None = field(None, "Of evaluation.")
    scored_sequences: int | None = sparse(None, "How many sequences of each set `history` is about, if not all.")


class Rings(Part):
    asked: int | str | None = field(None, "As `backend.rings` asks for; 0.1.0 wrote a text.")
    in_force: int | None = field(None, "Connections that were used.")
    engine: str | None = field(None, "The library that made them.")


class Backend(Part):
    """The ranks that the run ended with, and what each of them does in a step."""

    name: str | None = field(None, "What the report calls it.")
    ranks: int | None = field(None, "How many.")
    collective: str | None = field(None, "The engine of torch.distributed.")
    rings: Rings = field(Rings(), "Connections of a rank.")
    accumulate: int | None = field(None, "Micro-batches of a rank in a step.")
    batch_size: int | None = field(None, "Sequences of a micro-batch, at most.")
    sequences_per_step: int | None = field(None, "Of all ranks together.")


class Environment(Part):
    python: str | None = field(None, "Version.")
    torch: str | None = field(None, "Version.")
    transformers: str | None = field(None, "Version.")
    distill: str | None = field(None, "Version.")
    device: str | None = field(None, "Of rank 0.")
    cpu_count: int | None = field(None, "Cores of the machine.")
    platform: str | None = field(None, "System and processor.")
    git_revision: str | None = field(None, "Of the working tree that it ran from.")


class Finding(Part):
    """What a rule has found."""

    rule: str = field("", "Its name.")
    lost: float = field(0.0, "Fraction of the time.")
    sentence: str = field("", "What was found, with the setting that helps.")
    named: bool = field(False, "Whether it is worth a word.")


class StepTimes(Part):
    """Times of the steps that are known one by one."""

    mean: float | None = field(None, "Seconds of a step.")
    median: float | None = field(None, "Seconds of a step.")
    p95: float | None = field(None, "95 % of the steps are shorter, in seconds.")
    longest: float | None = field(None, "Seconds of a step.")
    steps: int | None = field(None, "How many steps are known one by one.")


class Profile(Part):
    """Where the time went."""

    conclusion: str = field("", "The bottleneck and the setting that helps, in a sentence.")
    findings: list[Finding] = field([], "What each rule has found.")
    bottleneck: str | None = field(None, "The rule that names it.")
    steps: int = field(0, "Steps that were recorded.")
    phases: dict[str, float] = field({}, "Seconds of each phase of a step.")
    step_seconds: StepTimes | None = field(None, "Times of single steps.")
    ranks: int | None = field(None, "How many ranks were recorded.")
    samples: dict[str, list[float]] = field({}, "Use of the processor and memory in the course of the run, by name.")
