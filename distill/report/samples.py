"""The samples of text in a report: what each model writes behind the same beginnings."""

from distill.report.page import Block, Table
from distill.report.words import count_of
from distill.runs.record import Record


def samples_blocks(record: Record) -> list[Block]:
    """A table with each beginning as a heading and a row for each model below; nothing where there are no samples."""
    samples = record.samples
    if samples is None or not samples.texts:
        return []
    teacher = record.teacher
    titles = {
        "teacher": "Teachers together" if teacher and teacher.members else "Teacher",
        "student": "Student" if teacher else "Model",
        "baseline": "Baseline (no teacher)",
    }
    rows = []
    for sample in samples.texts:
        rows.append([sample.prompt.strip() or "(the beginning of a text)"])
        for name, text in sample.continuations.items():
            rows.append([titles.get(name, name), text.strip() or "(ends the text here)"])
    length = f", up to {tokens}" if (tokens := count_of(samples.max_tokens, "token")) else ""
    note = (
        f"In bold are beginnings of evenly spaced sequences of {record.label_of(samples.data)}, which may start inside "
        f"a word; below is how each model continues them{length}. Tokens are drawn at temperature "
        f"{samples.temperature}, with the same random numbers for all models and in every run. Samples show how a "
        "model writes; the scores show how well it predicts."
    )
    return [Table(["", ""], rows, note, text=True)]
