"""Runs side by side: the settings that differ, the numbers of each run, which can be compared, as tables and pages."""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, zip_longest
from pathlib import Path
from textwrap import shorten
from typing import Any

import pandas as pd

from distill.evaluation.conclusion import UNCLEAR, word_of
from distill.report import figures, page
from distill.report.comparison.columns import GAP_CLOSED, Number, number_named
from distill.report.comparison.runs import FINISHED, Run, find_runs, natural
from distill.report.page import Section, Table, Tiles, prose, render, table_text
from distill.report.summary import AGREEMENT, closed_of, conclusions
from distill.report.words import NONE, count_of, is_number
from distill.runs.facts import Baseline, EvaluationSet, Model
from distill.runs.record import Record
from distill.runtime.errors import printable, raising_at_the_call
from distill.runtime.files import make_folder, refuse_overwriting, write_text

HTML, MARKDOWN, TABLE = "compare.html", "compare.md", "compare.csv"
# Settings, or groups of them, that do not change the student.
IGNORED = ["seed", "resume", "optimize", "tracker", "profile", "report", "observers", "evaluate.baseline"]
IGNORED += [f"train.{name}" for name in ("workers", "log_every", "keep", "save_every", "async_checkpoints", "on_usr1")]
IGNORED += ["train.snapshots", "train.snapshot_every", "evaluate.samples"]
IGNORED += [f"data.{name}" for name in ("cache", "workers", "local", "local_bytes", "tokens")]
DIGESTS = ("corpus.digest", "teacher.digest")  # of the identity: two runs may name the same path and read other content
UNEVEN = 1.25  # times by which speeds of one model differ where a machine had other work
OF_VOCABULARY = ("perplexity", "pseudo_perplexity")  # measures of tokens: another vocabulary has others to predict
OF_TEXT = ("bits_per_byte", "order_accuracy", GAP_CLOSED)  # measures of a text that no vocabulary changes
OF_CONTEXT = ("perplexity", "bits_per_byte")  # measures of a text, whose tokens have more before them at a small stride
MAX_SETTINGS = 5  # that are columns of the tables; more have a table of their own
MAX_BEST = 8  # sentences on the best groups
# The 97.5 % quantiles of Student's distribution, for 1 to 10 degrees of freedom.
STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
MAX_TILES, MAX_LABEL = 4, 60  # numbers to see first, and letters of the settings beside each
MAX_PANELS, MAX_ROWS = 3, 24  # of the figure
APART = "†"
TEACHER = "Learning from the teacher"  # whether it has helped, in a word
REFERENCES: dict[str, Callable[[Record], Model | None]] = {
    "teacher": lambda record: record.teacher,
    "baseline without a teacher": lambda record: record.baseline,
}


@dataclass
class Group:
    """Runs with the same settings but for their seed.

    Attributes:
        values: of the settings that differ between groups.
        rows: its runs, of `Comparison.frame`.
    """

    values: dict[str, Any]
    rows: pd.DataFrame

    @property
    def finished(self) -> pd.DataFrame:
        return self.rows[self.rows.status == FINISHED]

    @property
    def name(self) -> str:
        """Of its first run."""
        return str(self.rows.run.iloc[0])

    @property
    def label(self) -> str:
        """The settings that distinguish it from the other groups."""
        return ", ".join(f"{name}={shown(value)}" for name, value in self.values.items()) or self.name


class ComparedRuns:
    """Runs side by side, as a table of text (`print`), as records, or as the files of `distill compare`.

    Attributes:
        names: of the settings that differ.
        frame: a row for each run: folder, status, seed, the settings that differ, every number; None for what it lacks.
        groups: in the order of these settings' values, or by a number, best first.
        columns: the scores, with the value of the first run that has each; those of a measure together.
        costs: size, speed and time.
        apart: by name of a column the rows of the runs whose number cannot be compared with the others.
        reasons: why there are such.
        uneven: rows of runs whose model was faster or slower in another run.
    """

    def __init__(self, runs: Sequence[Run], first: str | None = None, setting: str = "by") -> None:
        """
        Args:
            first: name of the number to begin with, and to order the groups by, best first.
            setting: what an error line calls it.

        Raises:
            SettingError: no number has that name.
        """
        self.runs = [*runs]
        self.names = differing([run for run in runs if run.settings])
        numbers = dict[str, Number]()
        for run in runs:
            numbers |= {name: each for name, each in run.numbers.items() if name not in numbers}
        rows = [
            {"run": run.name, "status": run.status, "seed": run.settings.get("seed")}
            | ({name: value_of(run, name) for name in self.names} if run.settings else {})
            | {name: each.value for name, each in run.numbers.items()}
            for run in runs
        ]
        frame = pd.DataFrame(rows, columns=["run", "status", "seed", *self.names, *numbers], dtype=object)
        self.frame = frame.where(frame.notna(), None)
        self.groups = self._grouped()
        scores = [each for each in numbers.values() if each.measure]
        order = list(dict.fromkeys(each.group for each in scores))
        self.columns = sorted(scores, key=lambda each: order.index(each.group))
        self.costs = [each for each in numbers.values() if not (each.measure or each.name.startswith("loss."))]
        self.costs = [each for each in self.costs if self.frame[each.name].notna().any()]
        self.apart, self.reasons = dict[str, set[Any]](), list[str]()
        for column in self.columns:
            self._separate(column)
        self.uneven = self._uneven()
        if first is not None and numbers:
            chosen = number_named(first, [*numbers.values()], setting)
            self.columns.sort(key=lambda other: other.name != chosen.name)
            ranked = [id(group) for group, _ in self.best(chosen)]
            self.groups.sort(key=lambda group: ranked.index(id(group)) if id(group) in ranked else len(ranked))

    @property
    def records(self) -> list[dict[str, Any]]:
        """One dict for each run: `run`, `status`, `seed`, the settings that differ, and every number by its name."""
        return self.frame.to_dict("records")

    def write(self, folder: str | Path, title: str = "Comparison of runs", *, overwrite: bool = False) -> Path:
        """Write compare.html, compare.md, compare.csv and plots/ into `folder`; gives the first.

        Args:
            overwrite: whether they may replace files of these names that another program wrote.

        Raises:
            SettingError: such a file is in the way.
        """
        written_here = page.is_written_here(Path(folder) / HTML)
        for name in (HTML, MARKDOWN, TABLE, "plots/compare.png"):
            refuse_overwriting(Path(folder) / name, f"output={folder}", overwrite=overwrite or written_here)
        self.write_pages(Path(folder), title)
        return Path(folder) / HTML

    def write_pages(self, folder: Path, title: str, renew: int | None = None) -> None:
        """Write these files, whatever is there.

        Args:
            renew: seconds after which a browser loads the page again, while runs are under way.
        """
        make_folder(folder, f"output={folder}")
        sections = sections_of(self, folder)
        # The page changes only when a run ends, so it shows no notice of missing news.
        html = page.html(title, sections, renew, watched=False)
        texts = {HTML: html, MARKDOWN: page.markdown(title, sections), TABLE: self.frame.to_csv(index=False)}
        for name, text in texts.items():
            write_text(folder / name, text)

    def __str__(self) -> str:
        """The table of scores, and the runs that are not finished, for a terminal, to which names send no commands."""
        parts = [summary(self)]
        if self.columns:
            table = scores_table(self)
            parts += [table_text(table), table.note]
        parts += [f"{run.name}: {run.status}" for run in self.runs if run.record is None]
        return "\n".join(printable(line) for part in parts if part for line in part.split("\n"))

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        return render("text.html", text=str(self))

    def values(self, group: Group, column: Number, apart: bool = False) -> pd.Series:
        """The numbers of a group's runs by their rows, of those that can be compared, or of those `apart`."""
        numbers = group.rows[column.name].dropna().astype(float)
        return numbers[numbers.index.isin(self.apart.get(column.name, ())) == apart]

    def best(self, column: Number) -> list[tuple[Group, pd.Series]]:
        """The groups with numbers that can be compared, best mean first."""
        ranked = [(group, values) for group in self.groups if len(values := self.values(group, column))]
        return sorted(ranked, key=lambda pair: pair[1].mean(), reverse=not column.lower_is_better)

    def _grouped(self) -> list[Group]:
        """The runs by the values of the settings that differ, ordered by them; those of a group by their seed."""
        rows = [row for row, run in enumerate(self.runs) if run.settings]
        rows.sort(key=lambda row: (natural(self.frame.seed[row]), natural(self.frame.run[row])))
        frame = self.frame.loc[rows]
        keys = frame[self.names].map(repr).agg(tuple, axis=1) if self.names else frame.run.map(lambda _: ())
        groups = [Group(of[self.names].iloc[0].to_dict(), of) for _, of in frame.groupby(keys, sort=False)]
        return sorted(groups, key=lambda group: [_order(value) for value in group.values.values()])

    def _separate(self, column: Number) -> None:
        """Set the runs apart whose number of this column was measured on something else than in most runs."""
        scored = self.frame[column.name].dropna().index
        bases = {row: basis(run, run.record, column) for row in scored if (run := self.runs[row]).record}
        counts = Counter(map(repr, bases.values()))
        if len(counts) > 1:
            most = counts.most_common(1)[0][0]
            self.apart[column.name] = {row for row, of in bases.items() if repr(of) != most}
            usual = next(of for of in bases.values() if repr(of) == most)
            others = [reason for of in bases.values() for reason in of if of[reason] != usual[reason]]
            self.reasons += [reason for reason in usual if reason in others and reason not in self.reasons]

    def _uneven(self) -> set[Any]:
        """The runs of one model on one kind of machine whose speeds differ by more than `UNEVEN`."""
        by_model: dict[tuple[Any, ...], dict[int, float]] = {}
        for row, run in enumerate(self.runs):
            if run.record is not None and (speed := run.numbers["tokens_per_second"].value) is not None:
                student, machine = run.record.student, run.record.environment
                where = (machine.device, machine.cpu_count, run.record.precision.get("evaluate"))
                by_model.setdefault((student.name, student.parameters, student.bytes, *where), {})[row] = speed
        unlike = (speeds for speeds in by_model.values() if max(speeds.values()) > UNEVEN * min(speeds.values()))
        return {row for speeds in unlike for row in speeds}


def summary(compared: ComparedRuns) -> str:
    """How many runs there are, and how many groups they make."""
    finished = sum(run.record is not None for run in compared.runs)
    several = sum(group.rows.seed.map(repr).nunique() > 1 for group in compared.groups)
    numbers = (len(compared.runs), finished, len(compared.groups), several)
    return prose("comparison", *numbers, compared.names, MAX_SETTINGS)


def best_lines(compared: ComparedRuns) -> list[str]:
    """For each score the best group, and whether what differs from the next one has helped."""
    lines = []
    for column in compared.columns[:MAX_BEST]:
        ranked = compared.best(column)
        if len(ranked) < 2:
            continue
        (group, values), (second, others) = ranked[:2]
        line = f"{column.title}: best is {column.form(values.mean())} with {group.label}"
        repeats = "seeds" if group.finished.seed.map(repr).is_unique else "runs"
        line += f" (mean of {len(values)} {repeats})" if len(values) > 1 else ""
        line += f"; next {column.form(others.mean())} with {second.label}"
        seeds = compared.frame.seed.map(str)
        pair = (of.groupby(seeds[of.index]).last() for of in (values, others))
        lines.append(f"{line}{_difference(column, *pair)}.")
    return lines


def _difference(column: Number, one: pd.Series, two: pd.Series) -> str:
    """Whether the first of two groups is better, over the seeds that both have, with its 95 % interval (paired t-test).

    Args:
        one, two: their numbers by seed.
    """
    differences = (two - one if column.lower_is_better else one - two).dropna()
    if len(differences) < 2:
        return ""
    degrees, mean = len(differences) - 1, differences.mean()
    quantile = STUDENT[degrees - 1] if degrees <= len(STUDENT) else 1.96 + 2.6 / degrees
    half = quantile * differences.std() / math.sqrt(len(differences))
    low, high = mean - half, mean + half
    word = UNCLEAR if math.isclose(low, high) else word_of(low, high)  # without any spread other seeds are unknown
    shown = f"{column.form(mean)}, 95 % from {column.form(low)} to {column.form(high)}, on {len(differences)} seeds"
    return f"; what differs {word if word != UNCLEAR else 'is unclear'} ({shown})"


def best_tiles(compared: ComparedRuns) -> Tiles:
    """The best number of each measure on its first set."""
    tiles = []
    for column in {column.group: column for column in reversed(compared.columns)}.values():
        for group, values in compared.best(column)[:1]:
            label = shorten(group.label, MAX_LABEL, placeholder=" …")
            tiles.append((column.form(values.mean()), f"{column.title}: the best, with {label}"))
    return Tiles(tiles[::-1][:MAX_TILES])


def scores_table(compared: ComparedRuns) -> Table:
    """A line for each group, then the teacher's and the baseline's scores where they are the same for all."""
    columns = compared.columns
    several = any(len(group.finished) > 1 for group in compared.groups)
    has_gap = any(column.measure == GAP_CLOSED for column in columns)
    titles = [
        list(dict.fromkeys(column.group for column in columns if column.lower_is_better is lower))
        for lower in (True, False)
    ]
    table = _table(compared, columns, prose("scores", several, has_gap, compared.reasons, *titles))
    between = [""] * (len(table.head) - len(columns) - 1)
    for title, model_of in REFERENCES.items():
        cells = [_reference(compared, column, model_of) for column in columns]
        table.rows += [[title, *between, *cells]] if {*cells} - {NONE} else []
    words = [_concluded(compared, group) for group in compared.groups]
    if not any(words):
        return table
    rows = [[*row, word] for row, word in zip_longest(table.rows, words, fillvalue="")]
    groups = [*table.groups, ("", 1)] if table.groups else []
    return replace(table, head=[*table.head, TEACHER], rows=rows, groups=groups)


def _concluded(compared: ComparedRuns, group: Group) -> str:
    """Whether learning from the teacher helped, as the reports of a group's runs say; unclear where they differ."""
    records = [record for row in group.finished.index if (record := compared.runs[row].record)]
    words = [next(iter(conclusions(record).values())).word for record in records if conclusions(record)]
    return words[0] if len({*words}) == 1 else UNCLEAR if words else ""


def _reference(compared: ComparedRuns, column: Number, model_of: Callable[[Record], Model | None]) -> str:
    """The score of a model that is not the student, where it is the same in every run whose numbers can be compared."""
    apart = compared.apart.get(column.name, set())
    models = [model_of(run.record) for row, run in enumerate(compared.runs) if run.record and row not in apart]
    values = {None if model is None else model.score(column.measure, column.data) for model in models}
    texts = {column.form(value) for value in values if value is not None}
    return texts.pop() if len(texts) == 1 and None not in values else NONE


def costs_table(compared: ComparedRuns) -> Table:
    """Size, speed and time of each group."""
    machines = [run.record.environment for run in compared.runs if run.record]
    devices = {", ".join(filter(None, (str(of.device), count_of(of.cpu_count, "core")))) for of in machines}
    notes = []
    if len(devices) > 1:
        notes.append(f"Speeds and times come from different devices ({'; '.join(sorted(devices))}).")
    notes += [prose("uneven", UNEVEN - 1)] if compared.uneven else []
    return _table(compared, compared.costs, " ".join(notes))


def settings_table(compared: ComparedRuns) -> Table:
    """The settings that differ, one a line, where they are too many for columns; else a table without rows."""
    names = compared.names if len(compared.names) > MAX_SETTINGS else []
    rows = [[name, *(shown(group.values[name]) for group in compared.groups)] for name in names]
    return Table(["", *(group.name for group in compared.groups)], rows, text=True)


def runs_table(compared: ComparedRuns) -> Table:
    """Every run with its seed and its status."""
    rows = [[run.name, shown(run.settings.get("seed")) if run.settings else NONE, run.status] for run in compared.runs]
    return Table(["Run", "Seed", "Status"], rows, text=True)


def _table(compared: ComparedRuns, columns: Sequence[Number], note: str) -> Table:
    names = compared.names if len(compared.names) <= MAX_SETTINGS else []
    head = [*(names or ["Run"]), "Runs", *(column.label or column.group for column in columns)]
    groups: list[tuple[str, int]] = []
    if any(column.label for column in columns):
        groups = [("", len(head) - len(columns))]
        groups += [(name, len(list(members))) for name, members in groupby(columns, key=lambda column: column.group)]
    rows = []
    for group in compared.groups:
        first = [shown(group.values[name]) for name in names] or [group.name]
        rows.append([*first, _seeds(group), *(_cell(compared, group, column) for column in columns)])
    return Table(head, rows, note, groups=groups)


def _seeds(group: Group) -> str:
    """The seeds of the finished runs by name, as a bare 0 reads as a number of runs, and how many more there are."""
    finished, missing = len(group.finished), len(group.rows) - len(group.finished)
    seeds = f"seed{'s' * (finished > 1)} {', '.join(map(shown, group.finished.seed))}" if finished else ""
    return ", ".join(filter(None, [seeds, f"{missing} not finished" if missing else ""]))


def _cell(compared: ComparedRuns, group: Group, column: Number) -> str:
    """The mean with the range; the numbers that cannot be compared by themselves, with their mark."""
    mark = " *" if column.name == "tokens_per_second" and compared.uneven & {*group.rows.index} else ""
    both = {mark: compared.values(group, column), f" {APART}": compared.values(group, column, apart=True)}
    texts = []
    for mark, values in both.items():
        if len(values):
            mean, low, high = (column.form(value) for value in (values.mean(), values.min(), values.max()))
            texts.append((mean if low == high else f"{mean} ({low} to {high})") + mark)
    text = "; ".join(texts) or NONE
    if column.measure == GAP_CLOSED and len(group.finished) == 1:
        # Of one run there is no range, but the bootstrap of its student and its baseline.
        record = compared.runs[group.finished.index[0]].record or Record()
        closed = closed_of(record, record.first_measure[0], column.data)
        if closed and is_number(closed.low) and is_number(closed.high):
            return f"{text} ({column.form(closed.low)} to {column.form(closed.high)})"
    return text


def figure(compared: ComparedRuns) -> figures.Drawn:
    """A panel for each score with a row for each group, of many the best by the first score, in the tables' order.

    None where fewer than two groups have numbers that can be compared.
    """
    columns = [column for column in compared.columns if len(compared.best(column)) > 1][:MAX_PANELS]
    if not columns:
        return None, ""
    best = [id(group) for group, _ in compared.best(columns[0])][:MAX_ROWS]
    groups = [group for group in compared.groups if id(group) in best]
    panels = {}
    for column in columns:
        of_rows = {row: [*compared.values(group, column)] for row, group in enumerate(groups)}
        if of_rows := {row: values for row, values in of_rows.items() if values}:
            group, label = (shorten(text, 80, placeholder=" …") for text in (column.group, column.label))
            better = "lower" if column.lower_is_better else "higher"
            panels[f"{group}\n{label} ({better} is better)".strip()] = {"": (figures.MODELS["student"], "o", of_rows)}
    rows = [shorten(group.label, MAX_LABEL, placeholder=" …") for group in groups]
    drawn = figures.dots(panels, rows, 0.9 + 0.22 * len(rows), (figures.MODELS["student"], 1.5))
    several = any(len(group.finished) > 1 for group in groups)
    caption = "Scores" + ": the mean of the seeds, and lines from the lowest to the highest" * several
    return drawn, caption + (", without the numbers that cannot be compared." if compared.reasons else ".")


def sections_of(compared: ComparedRuns, folder: Path) -> list[Section]:
    """The page; its figure is drawn into `folder`/plots."""
    drawn = figures.picture("compare", lambda: figure(compared), folder)
    return [
        Section("", [summary(compared), best_tiles(compared)]),
        Section("Scores", [scores_table(compared) if compared.columns else None, drawn, best_lines(compared)]),
        Section("Size, speed and time", [costs_table(compared) if compared.costs else None]),
        Section("Settings that differ", [settings_table(compared)]),
        Section("Runs", [runs_table(compared)]),
    ]


@raising_at_the_call
def compare(*runs: str | Path, by: str | None = None) -> ComparedRuns:
    """Lay runs side by side: the settings in which they differ against their results.

    Args:
        runs: run folders, folders of runs, sweeps or chains, or globs.
        by: name of the number to begin with and to order by, such as `perplexity` or `heldout.perplexity`.

    Raises:
        SettingError: there are no such runs, or no number has that name.
    """
    return ComparedRuns(find_runs([str(run) for run in runs]), by)


def basis(run: Run, record: Record, column: Number) -> dict[str, Any]:
    """What a number rests on besides the model; two numbers of which it is the same can be compared."""
    of_teacher = column.measure in (*AGREEMENT, GAP_CLOSED) or column.measure.endswith("_loss")
    ends = ("digest", "members", "weight")  # and not the cache: the report scores the teacher itself
    names = [name for name in record.identity if name.startswith("teacher.") and name.endswith(ends)]
    return {
        "the evaluation set, or how it is cut into tokens": _scored(run, record, column),
        "the teacher": [(name, record.identity[name]) for name in sorted(names)] if of_teacher else None,
        "the baseline": _baseline(run, record) if column.measure == GAP_CLOSED else None,
        "evaluate.stride": run.settings.get("evaluate.stride") if column.measure in OF_CONTEXT else None,
    }


def _scored(run: Run, record: Record, column: Number) -> list[Any]:
    """What was scored: of measures of tokens these by their digest, of measures of a text or of examples its source."""
    data, measure = record.evaluation.get(column.data) or EvaluationSet(), column.measure
    is_text = any(name in record.measures for name in OF_VOCABULARY)
    if measure in (*OF_VOCABULARY, *AGREEMENT) or (is_text and measure not in OF_TEXT):
        return [data.digest, data.pseudo_positions if measure == "pseudo_perplexity" else None]
    scored: list[Any] = [data.description, data.documents]
    everywhere = run.settings.get("evaluate.max_sequences")
    limit = run.settings.get(f"evaluate.by_set.{column.data}.max_sequences", everywhere)
    if limit is not None and (data.sequences or 0) >= limit:
        # Another vocabulary cuts a text into other sequences, so that as many of them are other passages.
        scored += [data.sequences, data.digest if is_text else None]
    kind = run.settings.get(f"evaluate.sources.{column.data}.kind", column.data.partition("_")[0])
    return [*scored, record.corpus.name, record.corpus.documents] if kind == "heldout" else scored


def _baseline(run: Run, record: Record) -> list[Any]:
    """What a baseline learned by; its seed is the student's."""
    baseline = record.baseline or Baseline()
    rate = baseline.learning_rate if baseline.learning_rate is not None else run.settings.get("optimizer.lr")
    ends = [run.settings.get(name) for name in ("train.minutes", "train.patience")]  # whatever steps that gives
    step = baseline.sequences_per_step or run.settings.get("train.sequences_per_step")
    return [baseline.steps if ends == [None, None] else ends, rate, step, baseline.remarks]


def differing(runs: Sequence[Run]) -> list[str]:
    """The names of the settings that are not the same in all these runs, besides the seed.

    A setting that takes its value from another of the same name, as objective.soft.temperature does, is left out,
    and a digest counts only where it distinguishes runs that no setting does.
    """

    def values(name: str) -> list[str]:
        return [repr(value_of(run, name)) for run in runs]

    present = dict.fromkeys(name for run in runs for name in run.settings)
    names = [name for name in present if not any(f"{name}.".startswith(f"{ignored}.") for ignored in IGNORED)]
    names = [name for name in names if len({*values(name)}) > 1]
    names = [name for name in names if not any(_is_below(name, of) and values(name) == values(of) for of in names)]
    finished = [run for run in runs if run.record is not None]
    for digest in DIGESTS:
        settings = [tuple(repr(value_of(run, name)) for name in names) for run in finished]
        if len({*settings}) < len({*zip(settings, (value_of(run, digest) for run in finished), strict=True)}):
            names.append(digest)
    return names


def _is_below(name: str, other: str) -> bool:
    """Whether a setting is called as another one further up."""
    (*within, last), (*above, same) = name.split("."), other.split(".")
    return last == same and len(above) < len(within)


def value_of(run: Run, name: str) -> Any:
    """A setting of a run, or one of `DIGESTS` in short; a dash where it has none."""
    if name in DIGESTS:
        digest = run.record.identity.get(name) if run.record else None
        return NONE if digest is None else str(digest)[:8]
    return run.settings.get(name, NONE)


def _order(value: Any) -> tuple[int, float, list[Any]]:
    """To sort by: no value, numbers, then everything else as text."""
    if value is None or value == NONE:
        return 0, 0.0, []
    return (1, float(value), []) if isinstance(value, int | float) else (2, 0.0, natural(value))


def shown(value: Any) -> str:
    """A value as it is in a table, and nearly as it is written on the command line."""
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:.6g}" if isinstance(value, float) else "null" if value is None else str(value)
