"""The pairs and caches that the teacher-cache benchmarks compare, and one run of them."""

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.common import digest_of, execute
from distill.config.models import TeacherCacheConfig
from distill.teacher.layout import Layout, layout_of

LIVE = "live"


@dataclass(frozen=True)
class Kept:
    """What a cache keeps; nothing: the teacher runs live."""

    top_k: int | None = None
    sampled: int | None = None

    @property
    def wanted(self) -> bool:
        return self.top_k is not None or self.sampled is not None

    def layout(self, vocabulary: int) -> Layout:
        return layout_of(TeacherCacheConfig(top_k=self.top_k, sampled=self.sampled), vocabulary)

    def settings(self, seed: int) -> list[str]:
        found = [] if self.top_k is None else [f"teacher.cache.top_k={self.top_k}"]
        if self.sampled is not None:
            found += [f"teacher.cache.sampled={self.sampled}", f"teacher.cache.seed={seed}"]
        return found


# With ids of 16 bits top 64 takes 258 bytes a token. Of the draws all but the last two take 128 at most.
CACHES = {
    LIVE: Kept(),
    "top 16": Kept(16),
    "top 32": Kept(32),
    "top 64": Kept(64),
    "63 draws": Kept(None, 63),
    "8 exact, 46 draws": Kept(8, 46),
    "16 exact, 30 draws": Kept(16, 30),
    "12 draws": Kept(None, 12),
    "16 exact, 94 draws": Kept(16, 94),  # 256 bytes, as top 64
}


def pair_settings(pair: str, teacher: str | None) -> list[str]:
    """The recipe of a pair without the terms that no cache can serve; `teacher`: run folder of the causal one."""
    if pair == "masked":
        # The weights, temperature and layers of the published table, whatever the recipe has by now.
        fixed = ["teacher=bundled_small", "objective=masked", "student.layers=[0,1]"]
        return ["+recipe=distilbert_gutenberg", *fixed, "objective.masking.static=true", "objective.cosine.weight=0"]
    return [
        "+recipe=distilgpt2_gutenberg",
        f"teacher.path={teacher}",
        "student.layers=even",
        "objective.cosine.weight=0",
    ]


def evaluation(rows: int) -> list[str]:
    """Scores once, at the end: on unseen books and WikiText-2 where there are any, else on what is held out."""
    sets = "[books,wikitext2]" if os.environ.get("DISTILL_DATA") else "[heldout]"
    return [
        f"evaluate.sets={sets}",
        f"evaluate.max_sequences={rows}",
        "evaluate.every_epoch=false",
        "evaluate.pseudo_perplexity.fraction=0",
    ]


@dataclass
class Line:
    """One run; what belongs to a cache is None for the live teacher."""

    pair: str
    teacher: str
    seed: int
    bytes_per_token: float | None
    kept_mass: float | None
    build_seconds: float | None
    training_seconds: float
    tokens_per_second: float
    perplexity: dict[str, float]
    agreement: dict[str, dict[str, float]]
    teacher_perplexity: dict[str, float]


def folder_name(name: str, seed: int, arguments: list[str]) -> str:
    """What the folder of a run is called: with other settings it has another, so that each is run."""
    return f"{name.replace(' ', '-').replace(',', '').replace('^', '')}-seed{seed}-{digest_of(arguments)}"


def run(pair: str, name: str, seed: int, settings: list[str], work: Path) -> Line:
    """Train a student of the pair from this cache, and give what the run says of itself."""
    arguments = [*settings, *CACHES[name].settings(seed), f"seed={seed}"]
    folder = work / pair / folder_name(name, seed, arguments)
    fresh = not (folder / "results.json").is_file()
    content = execute(folder, arguments)
    cache = content["teacher"].get("cache", {})
    line = Line(
        pair,
        name,
        seed,
        cache.get("bytes_per_token"),
        cache.get("kept_mass"),
        cache.get("seconds"),
        content["training"]["seconds"],
        content["training"]["tokens_per_second"],
        content["student"]["perplexity"],
        content["agreement"],
        content["teacher"]["perplexity"],
    )
    if fresh:
        with (work / "lines.jsonl").open("a") as file:
            file.write(json.dumps(asdict(line)) + "\n")
    return line
