"""Scores against the steps of a stage: its own at its milestones, and those of the stages that were run from there."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from distill.report.lookup import measures_of, usable
from distill.report.plots import Curves, draw_by_step
from distill.report.stage_scores import Runs, cell, data_label, lines_of_table, scores_of


@dataclass
class MilestoneRuns:
    """A stage that keeps milestones, and what was run from them.

    Attributes:
        results: results.json of the stage.
        stages: by name of the stages that were run from its milestones: their runs, by the step of the milestone.
    """

    results: dict[str, Any]
    stages: dict[str, dict[int, Runs]] = field(default_factory=dict)


def curves_of(stage: str, runs: MilestoneRuns) -> Curves:
    """Every score at the milestones of a stage, by the name of what has it and its measure with the set.

    The stage itself has one value where it was evaluated after that step, the stages run from there one for each seed.
    """
    results, found = runs.results, Curves()
    for line in results["history"]:
        if line["step"] in results["milestones"]:
            for measure, described in measures_of(results).items():
                for data, value in (line.get(measure) or {}).items():
                    if usable(value):
                        curve = stage, f"{described['title']}, {data_label(results, data)}"
                        found.setdefault(curve, {})[line["step"]] = [value]
    for name, by_step in runs.stages.items():
        for step, of_step in by_step.items():
            for column, values in scores_of(of_step).items():
                if values:
                    found.setdefault((name, ", ".join(column)), {})[step] = values
    return found


def section(path: Path, stage: str, runs: MilestoneRuns, curves: Curves) -> str:
    """The part of chain.md on the milestones of a stage: a table, and the figure, which is drawn into `path`/plots."""
    steps = runs.results["milestones"]
    table = lines_of_table(
        ["step", *(": ".join(curve) for curve in curves)],
        [[f"{step:,}", *(cell(values.get(step, [])) for values in curves.values())] for step in steps],
    )
    note = f"Milestones of {stage}, by step. Of several seeds the median with the lowest and the highest."
    scored = {step for (name, _), values in curves.items() if name == stage for step in values}
    if missing := [f"{step:,}" for step in steps if step not in scored]:
        note += f" {stage} was not evaluated after step {', '.join(missing)}: evaluate.every_steps says when it is."
    picture = [f"![Scores by step of {stage}]({draw_by_step(path, f'milestones_{stage}', curves)})"] if curves else []
    return "\n\n".join([table, note, *picture])
