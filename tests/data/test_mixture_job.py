"""A job on a mixture end to end: scored by source, counted by source, and resumed on another number of ranks."""

import re
from pathlib import Path

import pytest
from job import Shelf, assert_alike, command, distill, metrics, results
from text import some_text

from distill.data.order import quotas

LENGTH = ["schedule=constant", "schedule.warmup=0"]  # with which a run may go on for more steps


@pytest.fixture(scope="module")
def arguments(shelf: Shelf, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A distillation on made-up notes, of which there are few, and books."""
    folder = tmp_path_factory.mktemp("notes")
    for number in range(20):
        (folder / f"{number}.txt").write_text(some_text(number, 12))
    notes, books = f"{{kind: text, document: file, path: {folder}", f"{{kind: gutenberg, path: {shelf.books}"
    sources = f"{{notes: {notes}, weight: 3}}, books: {books}, weight: 1}}}}"
    corpus = [each for each in shelf.corpus if not each.startswith("corpus.path")]
    train = [
        "train.batch_size=4",
        "train.sequences_per_step=8",
        "train.epochs=2",
        "train.save_every=2",
        "corpus.max_sequences=60",
    ]
    model = [
        "teacher=pretrained",
        f"teacher.path={shelf.teacher}",
        "precision=fp32",
        "evaluate.pseudo_perplexity.fraction=0",
    ]
    return ["corpus=mixture", "evaluate=heldout", f"corpus.sources={sources}", *corpus, *train, *model]


@pytest.fixture(scope="module")
def alone(arguments: list[str], shelf: Shelf) -> Path:
    folder = shelf.root / "mixture"
    assert distill(*arguments, f"hydra.run.dir={folder}") == 0
    return folder


def test_sources_are_counted_and_scored_one_by_one(alone: Path) -> None:
    found = results(alone)
    sources, fed = found["corpus"]["sources"], found["training"]["sources"]
    steps, rows = found["training"]["steps"], found["corpus"]["sequences"]
    assert list(sources) == list(fed) == ["notes", "books"] and steps == 2 * -(-rows // 8)
    shares = quotas([3, 1], rows).tolist()
    assert [each["weight"] * rows for each in sources.values()] == pytest.approx(shares)
    assert [each["sequences"] for each in fed.values()] == [2 * share for share in shares]
    assert shares[0] > sources["notes"]["sequences"], "in an epoch it begins a second pass"
    assert sum(each["tokens"] for each in fed.values()) == pytest.approx(found["training"]["tokens"], rel=0.05)
    assert [each["passes"] for each in fed.values()] == [
        each["sequences"] / sources[name]["sequences"] for name, each in fed.items()
    ]
    for scores in (found["student"]["perplexity"], found["history"][0]["perplexity"]):
        assert set(scores) == {"heldout_notes", "heldout_books"} and all(score > 1 for score in scores.values())
    last = metrics(alone)[-1]
    assert (last["sequences/notes"], last["sequences/books"]) == tuple(2 * share for share in shares)
    page = (alone / "report.html").read_text()
    assert "Fraction of sequences" in page and "heldout_notes" in page


@pytest.mark.slow
def test_it_goes_on_with_two_ranks_from_the_one_integer_of_a_checkpoint(
    arguments: list[str], alone: Path, shelf: Shelf
) -> None:
    folder = shelf.root / "mixture-ranks"
    begun = [*arguments, f"hydra.run.dir={folder}", *LENGTH]
    assert distill(*begun, "train.epochs=null", "train.steps=7") == 0
    more = ["backend=ddp", "backend.processes=2", "train.epochs=null", "train.steps=14"]
    ranks = command(*begun, *more)
    _, error = ranks.communicate(timeout=500)
    assert ranks.returncode == 0, error
    whole = shelf.root / "mixture-whole"
    assert distill(*arguments, f"hydra.run.dir={whole}", *LENGTH, "train.epochs=null", "train.steps=14") == 0
    assert_alike(folder, whole)
    assert results(folder)["training"]["sources"] == results(whole)["training"]["sources"]


def test_another_weight_is_another_run(arguments: list[str], alone: Path, capfd: pytest.CaptureFixture) -> None:
    assert distill(*arguments, f"hydra.run.dir={alone}", "corpus.sources.notes.weight=2") == 2
    assert re.search(
        r"corpus.order was \d+ sequences of notes; \d+ sequences of books and is now", capfd.readouterr().err
    )
