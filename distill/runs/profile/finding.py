"""What a rule finds: how much time is lost, to what, what would change it, and by how much."""

from dataclasses import asdict, dataclass, field
from typing import Any

NAMED = 0.1  # share of the time that has to be lost for a bottleneck to be named


@dataclass
class Finding:
    """One bottleneck.

    Attributes:
        rule: its name.
        lost: share of the time that it takes, from 0 to 1.
        sentence: what was seen, with its numbers.
        advice: what to do, where no setting does it, or besides.
        change: the settings to change, with their new values, by the names of the command line.
        gain: how many times as fast the run would be with that change, as the rule predicts it.
    """

    rule: str
    lost: float
    sentence: str
    advice: str = ""
    change: dict[str, Any] = field(default_factory=dict)
    gain: float = 1.0

    @property
    def named(self) -> bool:
        """Whether it is worth a word."""
        return self.lost >= NAMED

    @property
    def overrides(self) -> str:
        """The change as on the command line."""
        return " ".join(f"{name}={'null' if value is None else value}" for name, value in self.change.items())

    def describe(self) -> str:
        """Everything in a few sentences."""
        parts = [f"{self.sentence} (rule: {self.rule})."]
        if self.change:
            parts.append(f"{self.overrides} should make the run {self.gain:.2f} times as fast.")
        if self.advice:
            predicted = "" if self.change else f" Without this the run should be {self.gain:.2f} times as fast."
            parts.append(f"{self.advice}{predicted}")
        return " ".join(parts)

    def as_dict(self) -> dict[str, Any]:
        """As JSON holds it."""
        return asdict(self) | {"named": self.named}


def percent(share: float) -> str:
    """A share in words: `3.4 %`, `57 %`."""
    return f"{100 * share:.{0 if share >= 0.0995 else 1}f} %"
