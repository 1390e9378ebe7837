"""Writes the report of a run as report.html and report.md."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path

from distill.data.duplicates import describe_duplicates
from distill.report import page
from distill.report.figures import draw
from distill.report.model_card import title_of_run
from distill.report.page import Block, Code, Picture, Section, Table, Tiles, facts, facts_table, prose
from distill.report.summary import comparison, explained, findings, reproduced_by, sequences_of_step, setting, tiles
from distill.report.words import NONE, is_number, number, percent, short, time_of
from distill.runs.facts import Fed, HistoryPoint, Profile
from distill.runs.profile.phases import TITLES
from distill.runs.record import Record, term_titles
from distill.runtime.files import write_text
from distill.runtime.jsonl import LogLine

FEW_POSITIONS = 1000  # of pseudo-perplexity
MAX_LINES = 40  # of a history in a table; the figures show all

Points = dict[str, HistoryPoint]  # by step or epoch, as it is shown


def write(folder: Path, record: Record, metrics: Sequence[LogLine], config_yaml: str) -> None:
    """Write plots/*.png, report.html and report.md into `folder`.

    A number that is missing or None is shown as a dash, or its line, table or figure is left out.

    Args:
        metrics: the lines of metrics.jsonl.
    """
    samples = record.profile.samples if record.profile else {}
    parts = sections(record, draw(record, metrics, folder, samples), config_yaml)
    title = f"{title_of_run(record)}: report"
    for name, text in (("report.html", page.html(title, parts)), ("report.md", page.markdown(title, parts))):
        write_text(folder / name, text)


def sections(record: Record, pictures: dict[str, Picture], config_yaml: str = "") -> list[Section]:
    """The report, with what is not known yet left out; some sections may be empty.

    Args:
        pictures: by the names that `figures.draw` gives them.
    """
    unfinished = "" if record.finished else "This run has not finished: the numbers are those so far."
    terms = term_titles(record)
    terms |= {name: name for name in record.training.final_loss if name not in terms}
    training = facts_table("", facts("training", record, terms, sequences_of_step(record.backend)))
    duplicates = describe_duplicates(record.corpus.duplicates) if record.corpus.duplicates else ""
    corpus = facts_table("Corpus", facts("corpus", record.corpus, duplicates))
    environment = facts_table("Environment", [(name.replace("_", " "), value) for name, value in record.environment])
    config = Code(config_yaml, "Resolved configuration", "yaml")
    of = record.profile or Profile()
    conclusion, rules, phases = of.conclusion, _rules(of), _phases(of)
    files = prose("profile_files") if record.profile else ""
    drawn = pictures.get
    return [
        Section("", [findings(record), unfinished, Tiles(tiles(record)), setting(record), record.notes]),
        Section("Size, speed and quality", [*_models(record), drawn("comparison")]),
        Section("Samples of text", [_samples(record)]),
        Section(f"Learning curve by {record.history_by}", [*history(record), drawn("history"), drawn("minutes")]),
        Section("Layer selection", [_layers(record)]),
        Section("Training", [drawn("loss"), drawn("optimizer"), drawn("throughput"), training]),
        Section("Where the time goes", [conclusion, rules, phases, drawn("utilisation"), files]),
        Section("Data", [corpus, _sources(record), _sets(record)]),
        Section("Reproduce", [*reproduced_by(record.command_from_anywhere), environment, config]),
    ]


def _models(record: Record) -> list[Block]:
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
        names += [prose("baseline", baseline, record.student.start.refit is not None), *baseline.remarks]
    return [" ".join(names), table]


def _few_positions(record: Record) -> str:
    """A sentence where a set has so few positions for pseudo-perplexity that its value is rough."""
    counts = {name: data.pseudo_positions for name, data in record.evaluation.items()}
    few = [f"{count:,} on {name}" for name, count in counts.items() if is_number(count) and 0 < count < FEW_POSITIONS]
    return prose("few_positions", few) if few else ""


def _samples(record: Record) -> Table | None:
    """A table with each beginning as a heading and a row for each model below; nothing where there are no samples."""
    samples = record.samples
    if samples is None:
        return None
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
    note = prose("samples", samples, record.label_of(samples.data))
    return Table(["", ""], rows, note, text=True)


def history(record: Record) -> list[Block]:
    """The tables of a history; of a run under way that so far."""
    of_baseline = record.baseline.history if record.baseline else []
    key = _key([*record.history, *of_baseline], record.history_by)
    both = {"Student": record.history, "Baseline": of_baseline}
    points = {name: _some({key(point): point for point in points}) for name, points in both.items()}
    num_points, num_shown = len({*map(key, record.history)}), len(points["Student"])
    some = f"The tables list {num_shown} of {num_points} points; history.jsonl has all."
    tables = [_losses(record, points), *(_measure(record, measure, points) for measure in record.measures)]
    return [some if num_shown < num_points else "", *tables]


def _key(history: Sequence[HistoryPoint], axis: str) -> Callable[[HistoryPoint], str]:
    """What names a point: its step, or its epoch in as few digits as keep those of this history apart."""
    if axis == "step":
        return lambda point: number(point.step or 0)
    epochs = {point.epoch or 0.0 for point in history}
    digits = next((count for count in range(2, 9) if len({round(epoch, count) for epoch in epochs}) == len(epochs)), 9)
    return lambda point: f"{point.epoch or 0.0:.{digits}f}".rstrip("0").rstrip(".")


def _some(points: Points) -> Points:
    """The points themselves, or every n-th from the last one back where a table of all would be too long."""
    keys = [*points][:: -(-(-len(points) // MAX_LINES) or 1)]
    return {key: points[key] for key in reversed(keys)}


def _losses(record: Record, both: dict[str, Points]) -> Table:
    """Training losses up to each point, with what the baseline's terms were beside them."""
    titles = term_titles(record, record.baseline) if record.baseline else term_titles(record)
    columns = []
    for name, points in both.items():
        terms = [term for term in titles if any(point.loss.get(term) is not None for point in points.values())]
        # With one term alone the weighted total is that term again.
        terms = terms[1:] if len(terms) == 2 and terms[0] == "total" else terms
        columns += [(name, titles[of], {key: number(at.loss.get(of)) for key, at in points.items()}) for of in terms]
    by_step = record.history_by == "step"
    first = [*(["Step", "Epochs"] if by_step else ["Epoch", "Steps"]), "Tokens", "Time"]
    rows = [
        [
            key,
            f"{point.epoch or 0.0:.3g}" if by_step else number(point.step),
            short(point.tokens),
            time_of(point.seconds) or NONE,
            *(cells.get(key, NONE) for _, _, cells in columns),
        ]
        for key, point in both["Student"].items()
    ]
    heads = [(name, title) for name, title, _ in columns]
    groups = [("", 4), *_spans(heads)] if "Baseline" in dict(heads) else []
    return Table(
        [*first, *(title for _, title in heads)], rows if columns else [], title="Training loss", groups=groups
    )


def _spans(heads: Sequence[tuple[str, str]]) -> Iterator[tuple[str, int]]:
    """The groups of columns with the number of columns in each."""
    return ((group, len(list(of))) for group, of in groupby(heads, key=lambda head: head[0]))


def _measure(record: Record, measure: str, both: dict[str, Points]) -> Table:
    """One measure at each point for each evaluation set, student and baseline side by side; the teacher's last."""
    columns = [
        (key, name, {at: number(point.score(measure, key)) for at, point in points.items()})
        for key in record.sets_of(measure)
        for name, points in both.items()
        if any(point.score(measure, key) is not None for point in points.values())
    ]
    axis, points = record.history_by, both["Baseline"] | both["Student"]
    rows = []
    for at in sorted(points, key=lambda at: float((points[at].step if axis == "step" else points[at].epoch) or 0)):
        cells = [by_point.get(at, NONE) for _, _, by_point in columns]
        is_kept = record.best is not None and at in both["Student"] and points[at].step == record.best.step
        rows += [[f"{at}, kept" if is_kept else at, *cells]] if {*cells} - {NONE} else []
    is_whole = record.training.scored_sequences is None  # the teacher's score is that of all sequences
    if rows and is_whole and record.teacher and record.teacher.scores.get(measure):
        keys = [key for key, _, _ in columns]
        firsts = [keys.index(key) == column for column, key in enumerate(keys)]  # once for each set
        scores = [number(record.teacher.score(measure, key)) for key in keys]
        rows.append(["Teacher", *(score if first else "" for score, first in zip(scores, firsts, strict=True))])
    heads = [(record.label_of(key), name) for key, name, _ in columns]
    title, first = record.measures[measure].title, axis.capitalize()
    if not both["Baseline"]:
        return Table([first, *(label for label, _ in heads)], rows, title=title)
    return Table([first, *(name for _, name in heads)], rows, title=title, groups=[("", 1), *_spans(heads)])


def _layers(record: Record) -> Table | None:
    """The table of student.layers=auto: the loss of the untrained student by choice of layers, the best first."""
    search = record.student.start.search
    if search is None or not is_number(search.teacher):
        return None

    def shown(loss: float | None) -> str:
        return number(math.exp(min(loss, 700.0)) if search.perplexity and is_number(loss) else loss)

    rows = [["all", "the whole teacher", shown(search.teacher)]]
    choices = {str(choice.layers): choice for choice in [*search.best, *search.by_rule]}
    for choice in sorted(choices.values(), key=lambda choice: math.inf if choice.loss is None else choice.loss):
        rules = ["chosen"] * (choice.layers == search.layers) + [rule.replace("_", " ") for rule in choice.rules]
        rows.append([", ".join(map(str, choice.layers)), ", ".join(rules), shown(choice.loss)])
    head = ["Layers", "Rule", "Perplexity" if search.perplexity else "Loss"]
    return Table(head, rows, prose("layers", search), text=True)


def _rules(profile: Profile) -> Table:
    rows = [
        [finding.rule, percent(finding.lost, 1), finding.sentence if finding.named else NONE]
        for finding in profile.findings
    ]
    head = ["Rule", "Time lost", "What would help"]
    return Table(head, rows, title="What the rules found", text=True)


def _phases(profile: Profile) -> Table | None:
    total, steps = sum(profile.phases.values()), profile.steps
    if not total or not steps:
        return None
    rows = [
        [TITLES.get(phase, phase), number(seconds), percent(seconds / total, 1), number(1000 * seconds / steps)]
        for phase, seconds in profile.phases.items()
    ]
    note = prose("phases", profile.ranks or 1, steps, profile.step_seconds)
    return Table(["Phase", "Seconds", "Fraction", "ms a step"], rows, note, "Phases of a step")


def _sets(record: Record) -> Table:
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
    return Table(head, rows, note, "Evaluation sets")


def _sources(record: Record) -> Table:
    """The sources of a mixture: the size of each, and the part that the run was fed."""
    rows = []
    for name, source in record.corpus.sources.items():
        fed = record.training.sources.get(name) or Fed()
        passes = f"{fed.passes:.2f}" if fed.passes is not None else NONE
        counts = map(number, (source.documents, source.sequences, fed.sequences, fed.tokens))
        rows.append([name, source.name or NONE, percent(source.weight, 1), *counts, passes])
    head = ["", "Text", "Fraction of sequences", "Documents", "Sequences", "Sequences used", "Tokens used", "Passes"]
    note = "Tokens used are the sequences used times the mean length of the source, which is exact after whole passes."
    return Table(head, rows, note, "Sources")
