"""Whether the run of `make demo` is as good as README says: `python tests/demo_scores.py [RUN]` ends with 1 if not."""

import json
import sys
from pathlib import Path
from typing import Any

MOST = 19.2  # perplexity on held-out text; 18.79 is promised
MOST_OF_TEACHER = 1.13  # times that of the teacher; 1.10 is promised


def shortcomings(results: dict[str, Any]) -> list[str]:
    """What is worse than it may be, a line each."""
    student, teacher = (results[model]["perplexity"]["heldout"] for model in ("student", "teacher"))
    found = []
    if not student <= MOST:
        found.append(f"perplexity {student:.2f} is above {MOST}")
    if not student <= MOST_OF_TEACHER * teacher:
        found.append(f"perplexity {student:.2f} is above {MOST_OF_TEACHER} times the teacher's {teacher:.2f}")
    return found


if __name__ == "__main__":
    file = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/distilbert_gutenberg") / "results.json"
    if not file.is_file():
        sys.exit(f"{file}: there is no such file: the run has not ended, or is in another folder")
    sys.exit("\n".join(f"{file}: {line}" for line in shortcomings(json.loads(file.read_text()))) or 0)
