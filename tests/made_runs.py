"""Folders of runs that were never trained: settings and results by hand, for comparisons."""

import json
from pathlib import Path
from typing import Any

import yaml

from distill.runs.record import Record
from distill.runs.results_file import write_results

MEASURES = {"perplexity": {"title": "Perplexity", "lower_is_better": True}}


def settings_of(seed: int, temperature: float = 2.0, **others: Any) -> dict[str, Any]:
    return {"seed": seed, "objective": {"temperature": temperature, "soft": {"weight": 5.0}}, **others}


def results_of(scores: dict[str, float | None], **others: Any) -> dict[str, Any]:
    """Results with a perplexity on each of some sets, and what else stands there."""
    sets = {name: {"name": name, "description": name, "documents": 3, "sequences": 8, "tokens": 90} for name in scores}
    return {
        "finished": True,
        "measures": MEASURES,
        "evaluation": {name: {**of, "positions": 40, "pseudo_positions": 0} for name, of in sets.items()},
        "student": {"perplexity": scores, "parameters": 1000, "tokens_per_second": 50.0},
        "teacher": {"perplexity": dict.fromkeys(scores, 9.0)},
        "training": {"seconds": 10.0, "tokens_per_second": 40.0, "final_loss": {"total": 1.5}},
        "corpus": {"name": "books", "documents": 20, "tokens": 5000},
        "identity": {"corpus.digest": "c0ffee", "teacher.digest": "7eac4e7"},
        **others,
    }


def make_run(
    folder: Path, settings: dict[str, Any], results: dict[str, Any] | None = None, words: str = "ab", steps: int = 4
) -> Path:
    """A run folder; without results one that stopped after its last step.

    Args:
        words: of its student's vocabulary.
    """
    (folder / "student").mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(settings, sort_keys=False))
    lines = [{"step": step, "seconds": 1.0 * step, "data_wait": 0.0} for step in range(1, steps + 1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    parts = {"model": {"vocab": list(words)}, "normalizer": None, "pre_tokenizer": None}
    (folder / "student" / "tokenizer.json").write_text(json.dumps(parts))
    if results is not None:
        write_results(folder / "results.json", Record.from_json(results))
    return folder
