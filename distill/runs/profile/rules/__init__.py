"""The rules that name what holds a run up; each file has one, with the formula of its prediction."""

from distill.runs.profile.figures import Figures
from distill.runs.profile.finding import NAMED, Finding, percent
from distill.runs.profile.phases import DATA
from distill.runs.profile.record import RunProfile
from distill.runs.profile.rules import exchange, imbalance, loader, memory, micro_batch, outliers, storage

RULES = (memory, loader, storage, exchange, imbalance, outliers, micro_batch)
LEAST_STEPS = 5  # that can be compared; fewer say nothing


def diagnose(profile: RunProfile) -> list[Finding]:
    """What the rules find, the most time lost first; also what is too little to be named."""
    if not profile.ranks or min(len(rank.steps) for rank in profile.ranks) < LEAST_STEPS:
        return []
    figures = Figures(profile)
    found = [finding for rule in RULES if (finding := rule.find(figures)) is not None]
    return sorted(found, key=lambda finding: -finding.lost)


def conclusion(profile: RunProfile, findings: list[Finding]) -> str:
    """The bottleneck in words, or that there is none."""
    named = [finding for finding in findings if finding.named]
    if named:
        return f"The bottleneck: {named[0].describe()}"
    if not profile.ranks or min(len(rank.steps) for rank in profile.ranks) < LEAST_STEPS:
        return f"No bottleneck is looked for: there are fewer than {LEAST_STEPS} steps."
    figures = Figures(profile)
    waited = float(figures.phase(DATA).max()) / figures.step
    return (
        f"No bottleneck: no rule finds {percent(NAMED)} of the time lost (waiting for data {percent(waited)}, exchange "
        f"{percent(figures.exchange / figures.step)})."
    )
