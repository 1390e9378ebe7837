"""The report's table of student.layers=auto: what the untrained student lost with each choice of layers."""

import math
from typing import Any

from distill.report.lookup import usable, value_at
from distill.report.page import Block, Table, number


def layer_blocks(results: dict[str, Any]) -> list[Block]:
    """A table, the best choices first; nothing where the layers were not searched for."""
    search = value_at(results, "student", "start", "search") or {}
    if not usable(search.get("teacher")):
        return []
    words = search.get("perplexity")
    listed = {str(each["layers"]): each for each in [*(search.get("best") or []), *(search.get("by_rule") or [])]}
    table = Table(["Layers", "Rule", "Perplexity" if words else "Loss"], text=True)
    table.rows.append(["all", "the whole teacher", _shown(search["teacher"], words)])
    for each in sorted(listed.values(), key=lambda each: each["loss"]):
        chosen = ["chosen"] * (each["layers"] == search.get("layers"))
        names = [str(rule).replace("_", " ") for rule in each.get("rules") or []]
        layers = ", ".join(
            "+".join(map(str, layer)) if isinstance(layer, list) else str(layer) for layer in each["layers"]
        )
        table.rows.append([layers, ", ".join([*chosen, *names]), _shown(each["loss"], words)])
    how = "All subsets were scored." if search.get("all_subsets") else "One layer after another was taken away."
    table.note = (
        f"Of the untrained student on {number(search.get('rows'))} training rows; {number(search.get('tried'))} "
        f"choices. {how} A plus sign joins layers whose weights are averaged."
    )
    return [table]


def _shown(loss: Any, words: Any) -> str:
    return number(math.exp(min(loss, 700.0)) if words and usable(loss) else loss)
