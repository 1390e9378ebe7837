"""Made-up questions and tables that tests of fine-tuning share."""

import csv
import json
import random
from pathlib import Path

from job import NOUNS


def squad(folder: Path) -> Path:
    """Questions whose answer is the noun after the colour that they name; a fifth of them has no answer in v2.0."""
    folder.mkdir(parents=True)
    for name, seed, count in (("train", 0, 40), ("dev", 1, 12)):
        for version in ("1.1", "2.0"):
            draw, paragraphs = random.Random(seed), []
            for number in range(count):
                first, second = draw.sample(NOUNS, 2)
                context = f"The old {first} stood by the sea. The bright {second} was in the valley."
                answers = [{"text": second, "answer_start": context.index(f"bright {second}") + 7}]
                question = {"id": f"{name}{number}", "question": "What was bright?", "answers": answers}
                if version == "2.0":
                    question["is_impossible"] = number % 5 == 0
                    if number % 5 == 0:
                        question |= {"question": "What was narrow?", "answers": []}
                paragraphs.append({"context": context, "qas": [question]})
            content = {"version": version, "data": [{"title": "made up", "paragraphs": paragraphs}]}
            (folder / f"{name}-v{version}.json").write_text(json.dumps(content))
    return folder


def table(folder: Path, values: bool = False) -> Path:
    """Texts whose class is whether a ship is in them, or whose value is how often."""
    folder.mkdir(parents=True)
    for name, seed, count in (("train", 0, 60), ("validation", 1, 20)):
        draw = random.Random(seed)
        with (folder / f"{name}.csv").open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["review", "stars"])
            for _ in range(count):
                ships = draw.randrange(3)
                words = [*draw.choices(NOUNS[:10], k=6), *["ship"] * ships]
                draw.shuffle(words)
                writer.writerow([" ".join(words), ships if values else "yes" if ships else "no"])
    return folder


def mrpc(folder: Path) -> Path:
    """A folder as GLUE's, with pairs of sentences of which every second is a paraphrase."""
    (folder / "MRPC").mkdir(parents=True)
    for name, count in (("train", 24), ("dev", 8)):
        draw = random.Random(count)
        lines = ["Quality\t#1 ID\t#2 ID\t#1 String\t#2 String"]
        for number in range(count):
            one, other = draw.choice(NOUNS), draw.choice(NOUNS)
            lines.append(f"{number % 2}\t1\t2\tThe old {one}.\tThe old {one if number % 2 else other}.")
        (folder / "MRPC" / f"{name}.tsv").write_text("\n".join(lines))
    return folder
