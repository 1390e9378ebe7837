"""Names that settings had before: an old one is refused with the new one."""

import re

# By pattern, with the new name.
SETTINGS = {
    r"corpus\.rows": "corpus.max_sequences",
    r"corpus\.share": "corpus.fraction",
    r"((?:corpus|evaluate)\.sources\.\w+)\.share": r"\1.fraction",
    r"corpus\.max_bad": "corpus.max_invalid",
    r"corpus\.unreadable": "corpus.invalid_files",
    r"corpus\.unknown": "corpus.max_unknown",
    r"corpus\.(cache|tokens|shard_bytes|compression|local|local_bytes|shuffle_bytes|workers)": r"data.\1",
    r"objective\.masking\.share": "objective.masking.mlm_probability",
    r"objective\.masking\.most": "objective.masking.max_predictions",
    r"objective\.(\w+)\.rows": r"objective.\1.positions",
    r"train\.rows_per_step": "train.sequences_per_step",
    r"train\.milestones": "train.snapshots",
    r"train\.milestone_every": "train.snapshot_every",
    r"evaluate\.rows": "evaluate.max_sequences",
    r"evaluate\.by_set\.(\w+)\.rows": r"evaluate.by_set.\1.max_sequences",
    r"evaluate\.pseudo_perplexity\.share": "evaluate.pseudo_perplexity.fraction",
    r"evaluate\.by_set\.(\w+)\.pseudo_perplexity\.share": r"evaluate.by_set.\1.pseudo_perplexity.fraction",
    r"evaluate\.curve\.rows": "evaluate.curve.sequences",
    r"evaluate\.twin": "evaluate.baseline",
    r"student\.kind": "student.init",
    r"student\.start": "student.init",
    r"chain\.stages\.(\w+)\.milestones_of": r"chain.stages.\1.snapshots_of",
}
# What else has changed of a setting that has another name.
VALUES = {
    "student.kind": "config is random now",
    "student.start": "random and neighbours are values of it, in place of student.kind=config",
}


def new_name(setting: str) -> str | None:
    """What a setting is called now; None for one that had no other name."""
    for pattern, name in SETTINGS.items():
        if (match := re.fullmatch(pattern, setting)) is not None:
            return match.expand(name)
    return None


def other_name(setting: str) -> str | None:
    """The line that refuses a setting by its old name; None for one that had no other."""
    if (name := new_name(setting)) is None:
        return None
    values = f" ({VALUES[setting]})" if setting in VALUES else ""
    return f"{setting} has another name now: give {name}{values}"
