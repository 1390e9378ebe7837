"""Made-up results of a run with teacher, student and baseline, as results.json and metrics.jsonl would hold them."""

import math
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

from distill.evaluation.perplexity import PERPLEXITY
from distill.evaluation.pseudo_perplexity import PSEUDO_PERPLEXITY
from distill.objective.terms.cosine import Cosine
from distill.objective.terms.mlm import Mlm
from distill.objective.terms.soft import Soft
from distill.runs.describe import measure_facts

SETS = ("heldout", "wikitext2")
TERMS = {"soft": Soft, "mlm": Mlm, "cosine": Cosine}
CONFIG = "train:\n  epochs: 3\n  note: '<b>&'\n"


def model(name: str, scale: float) -> dict[str, Any]:
    return {
        "name": name,
        "parameters": int(3_212_543 / scale),
        "bytes": int(12_850_172 / scale),
        "tokens_per_second": 41_250.3 * scale,
        "perplexity": {"heldout": 31.237 * scale, "wikitext2": 112.43 * scale},
        "pseudo_perplexity": {"heldout": 28.411 * scale, "wikitext2": 101.83 * scale},
    }


def history(scale: float, terms: tuple[str, ...]) -> list[dict[str, Any]]:
    return [
        {
            "epoch": float(epoch),
            "step": 41 * epoch,
            "tokens": 123_456 * epoch,
            "seconds": 71.3 * epoch,
            "loss": {term: 9.137 * scale / epoch + number for number, term in enumerate(terms)},
            "perplexity": {"heldout": 71.19 * scale / epoch, "wikitext2": 271.7 * scale / epoch},
            "pseudo_perplexity": {"heldout": 61.19 * scale / epoch, "wikitext2": 241.3 * scale / epoch},
        }
        for epoch in (1, 2, 3)
    ]


def objective(*terms: str) -> dict[str, Any]:
    return {"kernel": "fused", "terms": {name: {"title": TERMS[name].title, "weight": 1.0} for name in terms}}


def sample_results() -> dict[str, Any]:
    return {
        "objective": objective("soft", "mlm", "cosine"),
        "measures": {name: each.model_dump() for name, each in measure_facts([PERPLEXITY, PSEUDO_PERPLEXITY]).items()},
        "recipe": "distilbert_gutenberg",
        "command": "python -m distill +recipe=distilbert_gutenberg",
        "notes": ["The teacher ships with the package; +recipe=distilbert_paper has the paper's."],
        "finished": True,
        "corpus": {
            "name": "Project Gutenberg", "documents": 30, "tokens": 3_944_120, "max_sequences": 30_813,
            "sequence_length": 128, "preparation": {"seconds": 14.2, "tokens_per_second": 277_755.0},
        },
        "teacher": model("little-bert", 1.0),
        "student": model("half-bert", 1.25),
        "baseline": {
            **model("baseline", 1.7),
            "folder": "runs/baseline",
            "steps": 123,
            "history": history(1.3, ("total", "mlm")),
            "objective": objective("mlm"),
        },
        "agreement": {"heldout": {"top1": 0.6312, "kl": 0.4123}, "wikitext2": {"top1": 0.5517, "kl": 0.6329}},
        "training": {
            "steps": 123, "epochs": 3.0, "tokens": 370_368, "seconds": 213.9, "tokens_per_second": 1731.5,
            "data_wait": 0.0301, "final_loss": {"total": 9.421, "soft": 1.253, "mlm": 3.714, "cosine": 0.1423},
            "skipped_steps": 2, "ended_by": "epochs",
        },
        "backend": {
            "name": "single", "ranks": 1, "rings": {"asked": 1, "in_force": 1}, "accumulate": 5, "batch_size": 16,
        },
        "environment": {"python": "3.11.7", "torch": "2.13.0", "device": "cpu", "git_revision": "3f2c1d9"},
        "evaluation": {
            name: {"name": f"{name} test", "documents": 6, "sequences": 912, "tokens": 116_701, "positions": 17_233}
            for name in SETS
        },
        "history": history(1.0, ("total", "soft", "mlm", "cosine")),
    }  # fmt: skip


def sample_metrics() -> list[dict[str, Any]]:
    return [
        {
            "step": step,
            "epoch": step / 41,
            "tokens": 3011 * step,
            "seconds": 1.74 * step,
            **{f"loss/{term}": 9 / step**0.3 for term in ("total", "soft", "mlm", "cosine")},
            "lr": 5e-4 * (1 - step / 124),
            "grad_norm": 2 + math.sin(step),
            "tokens_per_second": 1730.0 + step % 7,
            "data_wait": 0.03,
            "skipped": int(step > 60),
        }
        for step in range(1, 124)
    ]


def parsed(folder: Path) -> ElementTree.Element:
    """The page as a tree; raises where a tag is not closed or something is not escaped."""
    return ElementTree.fromstring((folder / "report.html").read_text(encoding="utf-8"))
