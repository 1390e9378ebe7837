"""Which settings are said to differ between runs: those that were chosen, and not what follows from them."""

from types import SimpleNamespace
from typing import Any

from distill.report.comparison.groups import differing


def test_a_setting_that_follows_another_of_its_name_is_left_out() -> None:
    def run(general: float, own: float, weight: float = 1.0) -> Any:
        settings = {"objective.temperature": general, "objective.soft.temperature": own, "objective.mlm.weight": weight}
        return SimpleNamespace(settings=settings, record=None)

    assert differing([run(1, 1), run(2, 2)]) == ["objective.temperature"]
    assert differing([run(1, 1), run(2, 1)]) == ["objective.temperature"]
    assert differing([run(1, 1), run(2, 3)]) == ["objective.temperature", "objective.soft.temperature"]
    assert differing([run(1, 1), run(1, 2)]) == ["objective.soft.temperature"]
    assert differing([run(1, 1, 2), run(2, 2, 3)]) == ["objective.temperature", "objective.mlm.weight"]
