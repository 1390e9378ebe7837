"""Names that settings had before are refused with the new one."""

import pytest
from job import distill

from distill.config.renamed import new_name

OLD = {
    "corpus.rows=10": "corpus.max_sequences",
    "corpus.share=0.5": "corpus.fraction",
    "corpus.max_bad=0.1": "corpus.max_invalid",
    "corpus.unreadable=stop": "corpus.invalid_files",
    "corpus.unknown=0.3": "corpus.max_unknown",
    "corpus.cache=cache": "data.cache",
    "corpus={tokens: rows}": "data.tokens",
    "corpus.shard_bytes=1": "data.shard_bytes",
    "corpus.compression=zstd": "data.compression",
    "corpus.local=disk": "data.local",
    "corpus.local_bytes=1": "data.local_bytes",
    "corpus.shuffle_bytes=1": "data.shuffle_bytes",
    "+corpus.workers=1": "data.workers",
    "objective.masking.share=0.2": "objective.masking.mlm_probability",
    "objective.masking={most: 3}": "objective.masking.max_predictions",
    "objective.soft.rows=all": "objective.soft.positions",
    "objective.cosine.rows=masked": "objective.cosine.positions",
    "train.rows_per_step=64": "train.sequences_per_step",
    "train.milestones=[1]": "train.snapshots",
    "train={milestone_every: 4}": "train.snapshot_every",
    "evaluate.rows=3": "evaluate.max_sequences",
    "evaluate.by_set.heldout.rows=3": "evaluate.by_set.heldout.max_sequences",
    "evaluate.pseudo_perplexity.share=1": "evaluate.pseudo_perplexity.fraction",
    "evaluate.curve.rows=3": "evaluate.curve.sequences",
    "evaluate.twin=runs/x": "evaluate.baseline",
    "student.kind=config": "student.init (config is random now)",
    "student={kind: layers}": "student.init (",
    "student.start=neighbours": "student.init (random and neighbours are values of it",
}


@pytest.mark.parametrize("override", OLD)
def test_an_old_name_is_refused_with_the_new_one(override: str, capfd: pytest.CaptureFixture) -> None:
    assert distill("+recipe=smoke", override) == 2
    (line,) = [line for line in capfd.readouterr().err.splitlines() if line.startswith("distill: ")]
    assert f"give {OLD[override]}" in line


def test_a_setting_with_one_name_has_no_other() -> None:
    assert new_name("train.steps") is None
