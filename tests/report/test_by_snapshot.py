"""Scores by snapshot: every step has its own values, a step without evaluation is said, and the figure shows them."""

from pathlib import Path

import pytest

from distill.report.chain_report import SnapshotRuns, curves_of, panels_by_step, section
from distill.report.figures import Line, Panel, Sheet, draw
from distill.report.words import NONE
from distill.runs.record import Record

TITLES = {"perplexity": {"title": "Perplexity"}, "order_accuracy": {"title": "Order accuracy"}}
F1 = {3: [10.0, 14.0, 11.0], 6: [20.0, 21.0, 40.0], 9: [30.0, 31.0, 29.0]}


def fine_tuned(f1: float) -> Record:
    evaluation = {"dev": {"description": "the questions of dev-v1.1; 9 of them"}}
    measures, student = {"f1": {"title": "F1"}}, {"f1": {"dev": f1}}
    return Record.from_json({"measures": measures, "student": student, "evaluation": evaluation})


@pytest.fixture
def runs() -> SnapshotRuns:
    """Evaluated after steps 3, 5 and 9, and without a head for the order until then."""
    history = [
        {"step": 3, "perplexity": {"heldout": 90.0}, "order_accuracy": {"heldout": None}},
        {"step": 5, "perplexity": {"heldout": 70.0}, "order_accuracy": {"heldout": 0.6}},
        {"step": 9, "perplexity": {"heldout": 50.0}, "order_accuracy": {"heldout": 0.7}},
    ]
    results = {"snapshots": [3, 6, 9], "history": history, "measures": TITLES, "evaluation": {}}
    record = Record.from_json(results)
    return SnapshotRuns(record, {"squad": {step: [fine_tuned(value) for value in of] for step, of in F1.items()}})


def test_values_stand_at_their_step(runs: SnapshotRuns) -> None:
    assert curves_of("pretrain", runs) == {
        ("pretrain", "Perplexity, heldout"): {3: [90.0], 9: [50.0]},
        ("pretrain", "Order accuracy, heldout"): {9: [0.7]},
        ("squad", "F1, dev-v1.1"): F1,
    }


def test_the_table_has_medians_and_spreads(runs: SnapshotRuns, tmp_path: Path) -> None:
    text = section(tmp_path, "pretrain", runs, curves_of("pretrain", runs))
    rows = [line.strip("| ").split(" | ") for line in text.splitlines()[:5]]
    assert rows[0] == [
        "step",
        "pretrain: Perplexity, heldout",
        "pretrain: Order accuracy, heldout",
        "squad: F1, dev-v1.1",
    ]
    assert rows[2:] == [
        ["3", "90.00", NONE, "11.00 (10.00 to 14.00)"],
        ["6", NONE, NONE, "21.00 (20.00 to 40.00)"],
        ["9", "50.00", "0.700", "30.00 (29.00 to 31.00)"],
    ]
    assert "not evaluated after step 6: " in text
    assert (tmp_path / "plots" / "snapshots_pretrain.png").stat().st_size > 1000
    assert "(plots/snapshots_pretrain.png)" in text


def test_the_figure_has_a_panel_for_each_with_medians_and_ranges(runs: SnapshotRuns) -> None:
    figure = draw(Sheet(panels_by_step(curves_of("pretrain", runs)), "", 3))
    panels = [axes for axes in figure.axes if axes.get_visible()]
    titles = [axes.get_title(loc="left") or axes.get_title() for axes in panels]
    assert titles == ["pretrain\nPerplexity, heldout", "pretrain\nOrder accuracy, heldout", "squad\nF1, dev-v1.1"]
    drawn = [axes.lines[0].get_xydata().tolist() for axes in panels]
    assert drawn == [[[3, 90], [9, 50]], [[9, 0.7]], [[3, 11], [6, 21], [9, 30]]]
    band = panels[2].collections[0]
    corners = {tuple(corner) for corner in band.get_paths()[0].vertices.tolist()}
    assert {(step, end(of)) for step, of in F1.items() for end in (min, max)} <= corners
    assert len({axes.get_xlim() for axes in panels}) == 1
    colours = [axes.lines[0].get_color() for axes in panels]
    assert colours[0] == colours[1] != colours[2]


def test_the_legend_names_what_is_drawn_in_any_panel() -> None:
    """A baseline without a score on the first set is drawn beside the others."""
    student, baseline = (Line([1.0, 2.0], [3.0, 2.0], "red", name) for name in ("student", "baseline"))
    sheet = Sheet([Panel("a", "step", [student]), Panel("b", "step", [student, baseline])], "", legend="below")
    (legend,) = draw(sheet).legends
    assert [text.get_text() for text in legend.get_texts()] == ["student", "baseline"]
