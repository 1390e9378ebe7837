"""Writes the report of a run as report.html and report.md."""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from distill.data.duplicates import describe_duplicates
from distill.report import page
from distill.report.figures import draw
from distill.report.history import history_blocks
from distill.report.model_card import title_of_run
from distill.report.page import Block, Code, Picture, Section, Table, Tiles, facts_table
from distill.report.summary import comparison, explained, findings, reproduced_by, sequences_of_step, setting, tiles
from distill.report.words import NONE, count_of, is_number, number, percent, time_of, with_unit
from distill.runs.facts import Fed, Profile, Training
from distill.runs.profile.phases import TITLES
from distill.runs.record import Record, term_titles
from distill.runtime.files import atomic
from distill.runtime.jsonl import LogLine
from distill.runtime.progress import counted

FEW_POSITIONS = 1000  # of pseudo-perplexity
PROFILE_FILES = (
    "The folder profile/ has the steps and samples of each rank, and traces of a few steps, operation by operation, "
    "which chrome://tracing and ui.perfetto.dev show."
)


def write(folder: Path, record: Record, metrics: Sequence[LogLine], config_yaml: str) -> None:
    """Write plots/*.png, report.html and report.md into `folder`.

    A number that is missing or None is shown as a dash, or its line, table or figure is left out.

    Args:
        metrics: the lines of metrics.jsonl.
    """
    samples = record.profile.samples if record.profile else {}
    parts = [part for part in sections(record, draw(record, metrics, folder, samples), config_yaml) if part.blocks]
    title = f"{title_of_run(record)}: report"
    for name, text in (("report.html", page.html(title, parts)), ("report.md", page.markdown(title, parts))):
        with atomic(folder / name) as new:
            new.write_text(text, encoding="utf-8")


def sections(record: Record, pictures: dict[str, Picture], config_yaml: str = "") -> list[Section]:
    """The report, with what is not known yet left out; some sections may be empty.

    Args:
        pictures: by the names that `figures.draw` gives them.
    """
    return [
        Section("", _headline(record)),
        Section("Size, speed and quality", _models(record, pictures)),
        Section("Samples of text", _samples(record)),
        Section(f"Learning curve by {record.history_by}", history_blocks(record, pictures)),
        Section("Layer selection", _layers(record)),
        Section("Training", _training(record, pictures)),
        Section("Where the time goes", _profile(record.profile, pictures)),
        Section("Data", _data(record)),
        Section("Reproduce", _reproduce(record, config_yaml)),
    ]


def _headline(record: Record) -> list[Block]:
    unfinished = "" if record.finished else "This run has not finished: the numbers are those so far."
    first = tiles(record)
    blocks: list[Block] = [findings(record), unfinished, Tiles(first) if first else "", setting(record), record.notes]
    return [block for block in blocks if block]


def _models(record: Record, pictures: dict[str, Picture]) -> list[Block]:
    table = comparison(record)
    if not table.rows:
        return []
    note = explained(record.measures)
    if record.agreement:
        note += " Top-1 agreement and KL divergence compare student and teacher at all positions with a target."
    table = replace(table, note=" ".join(filter(None, [note, table.note, _few_positions(record)])))
    titles = {"Teacher": record.teacher, "Student" if record.teacher else "Model": record.student}
    names = [f"{title}: {model.name}." for title, model in titles.items() if model and model.name]
    if (baseline := record.baseline) is not None:
        alike = "" if baseline.remarks else ", with the same beginning and the same data,"
        origin = f" (run folder {baseline.folder})." if baseline.folder else "."
        names += [f"The baseline is the same student{alike} trained without a teacher{origin}", *baseline.remarks]
    picture = [pictures["comparison"]] if "comparison" in pictures else []
    return [*([" ".join(names)] if names else []), table, *picture]


def _few_positions(record: Record) -> str:
    """A sentence where a set has so few positions for pseudo-perplexity that its value is rough."""
    counts = {name: data.pseudo_positions for name, data in record.evaluation.items()}
    few = [f"{count:,} on {name}" for name, count in counts.items() if is_number(count) and 0 < count < FEW_POSITIONS]
    if not few:
        return ""
    return (
        f"Pseudo-perplexity scored few positions here ({', '.join(few)}), so that its values are rough; a larger "
        "evaluate.pseudo_perplexity.fraction scores more."
    )


def _samples(record: Record) -> list[Block]:
    """A table with each beginning as a heading and a row for each model below; nothing where there are no samples."""
    samples = record.samples
    if samples is None or not samples.texts:
        return []
    teacher = record.teacher
    titles = {
        "teacher": "Teachers together" if teacher and teacher.members else "Teacher",
        "student": "Student" if teacher else "Model",
        "baseline": "Baseline (no teacher)",
    }
    rows = []
    for sample in samples.texts:
        rows.append([sample.prompt.strip() or "(the beginning of a text)"])
        for name, text in sample.continuations.items():
            rows.append([titles.get(name, name), text.strip() or "(ends the text here)"])
    length = f", up to {tokens}" if (tokens := count_of(samples.max_tokens, "token")) else ""
    note = (
        f"In bold are beginnings of evenly spaced sequences of {record.label_of(samples.data)}, which may start inside "
        f"a word; below is how each model continues them{length}. Tokens are drawn at temperature "
        f"{samples.temperature}, with the same random numbers for all models and in every run. Samples show how a "
        "model writes; the scores show how well it predicts."
    )
    return [Table(["", ""], rows, note, text=True)]


def _layers(record: Record) -> list[Block]:
    """The table of student.layers=auto: the loss of the untrained student by choice of layers, the best first."""
    search = record.student.start.search
    if search is None or not is_number(search.teacher):
        return []

    def shown(loss: float | None) -> str:
        return number(math.exp(min(loss, 700.0)) if search.perplexity and is_number(loss) else loss)

    rows = [["all", "the whole teacher", shown(search.teacher)]]
    choices = {str(choice.layers): choice for choice in [*search.best, *search.by_rule]}
    for choice in sorted(choices.values(), key=lambda choice: math.inf if choice.loss is None else choice.loss):
        rules = ["chosen"] * (choice.layers == search.layers) + [rule.replace("_", " ") for rule in choice.rules]
        layers = ["+".join(map(str, layer)) if isinstance(layer, list) else str(layer) for layer in choice.layers]
        rows.append([", ".join(layers), ", ".join(rules), shown(choice.loss)])
    how = "All subsets were scored." if search.all_subsets else "Layers were taken away one after another."
    how += " student.search_seconds ended the search." * search.stopped
    note = (
        f"Scores of the untrained student on {number(search.sequences)} training sequences; {number(search.tried)} "
        f"choices. {how} A plus sign joins layers whose weights are averaged."
    )
    head = ["Layers", "Rule", "Perplexity" if search.perplexity else "Loss"]
    return [Table(head, rows, note, text=True)]


def _training(record: Record, pictures: dict[str, Picture]) -> list[Block]:
    training, backend, rings = record.training, record.backend, record.backend.rings
    final, snapshots = training.final_loss, record.snapshots
    titles = {**dict.fromkeys(term_titles(record)), **dict.fromkeys(final)}
    titles = {name: term_titles(record).get(name, name) for name in titles}
    losses = [f"{title} {number(final[term])}" for term, title in titles.items() if is_number(final.get(term))]
    facts = [
        ("Steps", number(training.steps)),
        ("Epochs", f"{training.epochs:.4g}" if is_number(training.epochs) else None),
        ("Ended by", training.ended_by),
        ("Tokens", number(training.tokens)),
        ("Time", time_of(training.seconds)),
        ("Throughput", with_unit(training.tokens_per_second, "tokens/s")),
        (
            "Waiting for data",
            f"{percent(training.data_wait, 1)} of the time" if is_number(training.data_wait) else None,
        ),
        ("Evaluation", _evaluation(training)),
        ("Final loss", ", ".join(losses)),
        ("Snapshots", f"snapshots/step-N for N = {', '.join(map(str, snapshots))}" if snapshots else None),
        ("Skipped steps", _skipped(training.skipped_steps)),
        ("Skipped for the loss scale", _left_out(training.overflow_steps)),
        ("Backend", ", ".join(filter(None, [backend.name, count_of(backend.ranks, "rank")]))),
        ("Collective", backend.collective),
        ("Sequences per step", sequences_of_step(backend)),
        ("Rings", f"{rings.asked} requested, {number(rings.in_force)} in use" if rings.asked else None),
    ]
    drawn: list[Block] = [pictures[name] for name in ("loss", "optimizer", "throughput") if name in pictures]
    return drawn + facts_table("", facts)


def _evaluation(training: Training) -> str | None:
    """The time that scoring took; of a resumed run only that of its last process."""
    seconds = training.evaluation_seconds
    return f"{time_of(seconds)} in the last process of the run" if is_number(seconds) else None


def _skipped(count: int | None) -> str | None:
    if count is None:
        return None
    return f"{number(count)}: loss or gradient not finite, no update" if count else "none"


def _left_out(count: int | None) -> str | None:
    return f"{count_of(count, 'step')}, whose gradient overflowed in fp16" if count else None


def _profile(profile: Profile | None, pictures: dict[str, Picture]) -> list[Block]:
    drawn: list[Block] = [pictures["utilisation"]] if "utilisation" in pictures else []
    if profile is None:
        return drawn
    blocks: list[Block] = [profile.conclusion, _rules(profile), _phases(profile), *drawn, PROFILE_FILES]
    return [block for block in blocks if block]


def _rules(profile: Profile) -> Block:
    rows = [
        [finding.rule, percent(finding.lost, 1), finding.sentence if finding.named else NONE]
        for finding in profile.findings
    ]
    head = ["Rule", "Time lost", "What would help"]
    return Table(head, rows, title="What the rules found", text=True) if rows else ""


def _phases(profile: Profile) -> Block:
    total, steps = sum(profile.phases.values()), profile.steps
    if not total or not steps:
        return ""
    rows = [
        [TITLES.get(phase, phase), number(seconds), percent(seconds / total, 1), number(1000 * seconds / steps)]
        for phase, seconds in profile.phases.items()
    ]
    note = f"Mean of {counted(profile.ranks or 1, 'rank')}, all {counted(steps, 'step')}."
    if (times := profile.step_seconds) is not None:
        median, p95, longest = (f"{1000 * (value or 0):,.1f} ms" for value in (times.median, times.p95, times.longest))
        note += (
            f" Single steps ({number(times.steps)}, without the first ones and those that were traced): median "
            f"{median}, 95 % below {p95}, longest {longest}."
        )
    return Table(["Phase", "Seconds", "Fraction", "ms a step"], rows, note, "Phases of a step")


def _data(record: Record) -> list[Block]:
    corpus = record.corpus
    prepared = [time_of(corpus.preparation.seconds), with_unit(corpus.preparation.tokens_per_second, "tokens/s")]
    facts = [
        ("Name", corpus.name),
        ("Documents", number(corpus.documents)),
        ("Tokens", number(corpus.tokens)),
        ("Sequences", with_unit(corpus.sequences, f"of {number(corpus.sequence_length)} tokens")),
        ("Held out", with_unit(corpus.held_out, "sequences, on which nothing trains")),
        ("Of the rest", f"about {100 * taken:.2g} % is trained on" if (taken := corpus.fraction_used) else None),
        ("Preparation", ", ".join(filter(None, prepared))),
        ("Left out", "; ".join(f"{number(count)}: {reason}" for reason, count in corpus.left_out.items()) or None),
        ("Duplicates", describe_duplicates(corpus.duplicates) if corpus.duplicates else None),
    ]
    return [*facts_table("Corpus", facts), *_sources(record), *_sets(record)]


def _sets(record: Record) -> list[Block]:
    """The evaluation sets, and the positions of each that were scored."""
    head = ["", "Documents", "Sequences", "Tokens", "Scored"]
    note = "The last column counts what is scored: next tokens of a causal model, labelled examples."
    pseudo = "pseudo_perplexity" in record.measures
    if pseudo:
        head = [*head[:-1], "Masked", "Masked one at a time"]
        note = "The last two columns count the scored positions."
    rows = []
    for name, data in record.evaluation.items():
        counts = [data.documents, data.sequences, data.tokens, data.positions, *[data.pseudo_positions] * pseudo]
        rows.append([record.label_of(name), *map(number, counts)])
    return [Table(head, rows, note, "Evaluation sets")] if rows else []


def _sources(record: Record) -> list[Block]:
    """The sources of a mixture: the size of each, and the part that the run was fed."""
    rows = []
    for name, source in record.corpus.sources.items():
        fed = record.training.sources.get(name) or Fed()
        passes = f"{fed.passes:.2f}" if fed.passes is not None else NONE
        counts = map(number, (source.documents, source.sequences, fed.sequences, fed.tokens))
        rows.append([name, source.name or NONE, percent(source.weight, 1), *counts, passes])
    head = ["", "Text", "Fraction of sequences", "Documents", "Sequences", "Sequences used", "Tokens used", "Passes"]
    note = "Tokens used are the sequences used times the mean length of the source, which is exact after whole passes."
    return [Table(head, rows, note, "Sources")] if rows else []


def _reproduce(record: Record, config_yaml: str) -> list[Block]:
    environment = [(name.replace("_", " "), value) for name, value in record.environment]
    config: list[Block] = [Code(config_yaml, "Resolved configuration", "yaml")] if config_yaml.strip() else []
    command = reproduced_by(record.command_from_anywhere)
    return [*command, *facts_table("Environment", environment), *config]
