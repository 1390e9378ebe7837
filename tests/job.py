"""Runs the main job in this process or as a command, on a small library of made-up books."""

import os
import random
import subprocess
import sys
from pathlib import Path

from distill.__main__ import main

ROOT = Path(__file__).resolve().parent.parent
NOUNS = [
    "river",
    "house",
    "letter",
    "winter",
    "captain",
    "garden",
    "mother",
    "soldier",
    "morning",
    "road",
    "window",
    "horse",
    "king",
    "ship",
    "story",
]
VERBS = [
    "found",
    "left",
    "carried",
    "watched",
    "remembered",
    "followed",
    "lost",
    "painted",
    "kept",
    "opened",
    "crossed",
    "wrote",
    "heard",
]
ADJECTIVES = ["old", "quiet", "golden", "broken", "distant", "little", "heavy", "strange", "bright", "narrow"]
PLACES = ["by the sea", "in the valley", "at the gate", "over the hill", "near the church", "under the stars"]
TINY = "student.config={hidden_size:32,num_hidden_layers:4,num_attention_heads:2,intermediate_size:64}"


def book(number: int, paragraphs: int = 40) -> str:
    """A Project Gutenberg file as published, with sentences whose words depend on each other."""
    draw = random.Random(number)
    lines = []
    for _ in range(paragraphs):
        for _ in range(6):
            noun = draw.randrange(len(NOUNS))
            # The verb follows from the noun: something that a masked language model can learn.
            verb = VERBS[noun % len(VERBS)]
            adjective = draw.choice(ADJECTIVES)
            lines.append(f"The {adjective} {NOUNS[noun]} {verb} the {draw.choice(NOUNS)} {draw.choice(PLACES)}.")
        lines.append("")
    return (
        f"The Project Gutenberg eBook of Book {number}\n\n"
        f"*** START OF THE PROJECT GUTENBERG EBOOK BOOK {number} ***\n\n"
        + "\n".join(lines)
        + f"\n*** END OF THE PROJECT GUTENBERG EBOOK BOOK {number} ***\nLicence.\n"
    )


def library(folder: Path, books: int = 6) -> Path:
    folder.mkdir(parents=True)
    for number in range(books):
        (folder / f"book{number}.txt").write_text(book(number), encoding="utf-8")
    return folder


def distill(*arguments: str) -> int:
    """`python -m distill ARGUMENTS` in this process; gives the exit status."""
    before = sys.argv
    sys.argv = ["distill", *arguments]
    try:
        return main()
    except SystemExit as end:
        return int(end.code or 0)
    finally:
        sys.argv = before


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "DISTILL_DATA": "", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


def command(*arguments: str) -> subprocess.Popen[str]:
    """The same as a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "distill", *arguments],
        env=environment(),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
