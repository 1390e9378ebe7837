"""`train.sequences_per_step` in value: the same steps for any number of ranks, also where that changes within a run."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed import run_ranks
from job import Shelf, assert_alike, command, composed, distill, metrics
from test_recipes import NAMES
from tiny import Fit, make_model, make_rows, make_tokenizer, plain_sgd
from torch.testing import assert_close

from distill.config.settings import BackendConfig, TrainConfig
from distill.distributed import join_ranks
from distill.runtime.errors import SettingError

ROWS = 7  # of a step: neither two ranks nor three divide them
STEPS = 5  # of 20 rows: two epochs of three steps, whose last has six rows, but one step


def fit(folder: Path, steps: int, **more: Any) -> Fit:
    settings = TrainConfig(batch_size=2, sequences_per_step=ROWS, epochs=None, steps=steps, save_every=1, keep=9)
    student = make_model("distilbert", 1, seed=5, dropout=0.2).train()
    teacher = make_model("bert", 4).requires_grad_(False)
    rows = make_rows(20, shortest=5)
    made = Fit(
        folder, make_tokenizer(), rows, teacher, student, settings=settings, keyed_dropout=True, **plain_sgd(), **more
    )
    return made.resume() if made.checkpoints.newest() else made


def rank_trains(folder: Path, steps: int) -> dict[str, Any]:
    """One rank, from the newest checkpoint to so many steps: its weights, its losses, and its share of a step."""
    torch.set_num_threads(1)
    ranks = join_ranks(BackendConfig(name="ddp", device="cpu"))
    made = fit(folder, steps, ranks=ranks)
    made.run()
    ranks.close()
    window = [len(batch.row_ids) for batch in made.batches.window(0)]
    weights = {name: tensor.detach().clone() for name, tensor in made.student.state_dict().items()}
    return {"weights": weights, "losses": [line["loss/total"] for line in made.logs], "window": window}


def test_ranks_come_and_go_and_the_steps_stay_the_same(tmp_path: Path) -> None:
    """Two steps on three ranks, two on two, and the last on one, against one process that takes whole steps."""
    parts = [
        run_ranks(size, tmp_path / f"out{size}", rank_trains, tmp_path / "run", steps)
        for size, steps in ((3, 2), (2, 4))
    ]
    assert [[rank["window"] for rank in part] for part in parts] == [[[2, 1], [2], [2]], [[2, 2], [2, 1]]]
    last = fit(tmp_path / "run", STEPS)
    last.run()
    losses = [loss for part in parts for loss in part[0]["losses"]] + [line["loss/total"] for line in last.logs]

    whole = fit(tmp_path / "whole", STEPS)
    whole.batches = replace(whole.batches, step_shape=replace(whole.batches.step_shape, batch_size=ROWS))
    whole.run()
    assert losses == pytest.approx([line["loss/total"] for line in whole.logs], rel=1e-5)
    assert_close(dict(last.student.state_dict()), dict(whole.student.state_dict()), rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize("name", NAMES)
def test_every_recipe_says_how_many_sequences_a_step_has(name: str) -> None:
    train = composed(f"+recipe={name}").train
    assert train.accumulate is None and train.sequences_per_step is not None
    assert {train.sequences(ranks) for ranks in (1, 2, 3)} == {train.sequences_per_step}
    assert composed(f"+recipe={name}", "train.accumulate=3").train.sequences(2) == 6 * train.batch_size


def test_a_step_is_a_micro_batch_where_nothing_is_given() -> None:
    assert [TrainConfig(batch_size=6).sequences(ranks) for ranks in (1, 2, 3)] == [6, 6, 6]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["train.accumulate=2", "train.sequences_per_step=16"], "not read with train.accumulate=2"),
        (["train.batch_size=16"], "more than a step has; set train.sequences_per_step=16 too"),
    ],
)
def test_what_is_not_read_is_refused(settings: list[str], message: str) -> None:
    with pytest.raises(SettingError, match=message):
        composed("+recipe=distilbert_gutenberg", *settings)
    composed("+recipe=distilbert_gutenberg", "train.batch_size=16", "train.sequences_per_step=16")


def run_in(shelf: Shelf, folder: Path) -> list[str]:
    """The main job without a word on the size of a step."""
    size = ["train.epochs=null", "train.steps=4", "train.log_every=1", "precision=fp32", "student.layers=[0,1]"]
    teacher = ["teacher=pretrained", f"teacher.path={shelf.teacher}", "evaluate.pseudo_perplexity.fraction=0"]
    recipe = ["+recipe=distilbert_gutenberg", *shelf.corpus, *size, *teacher, "corpus.max_sequences=60"]
    return [*recipe, f"hydra.run.dir={folder}"]


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "micro_batch"), [(2, 4), (3, 3)])
def test_the_student_does_not_depend_on_the_number_of_ranks(
    ranks: int, micro_batch: int, shelf: Shelf, tmp_path: Path
) -> None:
    one, several = tmp_path / "one", tmp_path / "several"
    assert distill(*run_in(shelf, one)) == 0
    process = command(*run_in(shelf, several), "backend=ddp", f"backend.processes={ranks}")
    _, errors = process.communicate(timeout=500)
    assert process.returncode == 0, errors
    assert f"8 sequences (1 micro-batch of at most {micro_batch} on each of {ranks} ranks)" in errors
    assert_alike(one, several)
    assert [line["tokens"] for line in metrics(several)] == [line["tokens"] for line in metrics(one)]
