"""A file is what its name says, whatever kind of text it is called."""

import gzip
from pathlib import Path

import pandas
import pytest

from distill.config.settings import DataConfig, SourceConfig
from distill.data.sources import Document, _files, find_source
from distill.runtime.errors import SettingError


@pytest.mark.parametrize("kind", ["gutenberg", "text"])
@pytest.mark.parametrize(
    "name", ["reviews.csv", "REVIEWS.CSV", "reviews.tsv", "reviews.jsonl", "DATA.JSONL", "reviews.parquet", "X.PARQUET"]
)
def test_a_file_is_what_its_name_says_whatever_the_kind(kind: str, name: str, tmp_path: Path) -> None:
    """Its raw lines, with numbers and quotation marks, are no text to train on."""
    frame = pandas.DataFrame({"stars": [5, 1], "text": ["The ship was old, and the sea calm.", "A quiet winter."]})
    path = tmp_path / name
    match path.suffix.lower():
        case ".parquet":
            frame.to_parquet(path)
        case ".jsonl":
            frame.to_json(path, orient="records", lines=True)
        case suffix:
            frame.to_csv(path, index=False, sep="\t" if suffix == ".tsv" else ",")
    source = find_source(SourceConfig(kind=kind, path=str(path)), "corpus", DataConfig())
    assert source is not None
    documents = [document for shard in source.shards() for document in source.documents(shard)]
    assert [document.text for document in documents if isinstance(document, Document)] == list(frame["text"])
    source = find_source(SourceConfig(kind=kind, path=str(path), field="review"), "corpus", DataConfig())
    assert source is not None
    with pytest.raises(SettingError, match=r"corpus\.field=review: .*it has stars, text"):
        [document for shard in source.shards() for document in source.documents(shard)]


@pytest.mark.parametrize("kind", ["gutenberg", "text"])
@pytest.mark.parametrize("name", ["page.html", "all.json", "paper.PDF"])
def test_a_file_of_another_format_is_no_plain_text(kind: str, name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("<p>The ship was old.</p>")
    with pytest.raises(SettingError, match=rf"^corpus\.path=.*{name} is by its name no plain text.*write the text"):
        find_source(SourceConfig(kind=kind, path=str(tmp_path / name)), "corpus", DataConfig())


def test_a_packed_file_in_upper_case_is_unpacked_and_not_entered_in_the_middle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_files, "SHARD_BYTES", 1)
    monkeypatch.setattr(_files, "RANGE_BYTES", 1)
    (tmp_path / "BOOK.TXT.GZ").write_bytes(gzip.compress(b"The ship was old."))
    source = find_source(SourceConfig(kind="text", path=str(tmp_path)), "corpus", DataConfig())
    assert source is not None
    (shard,) = source.shards()
    (document,) = source.documents(shard)
    assert isinstance(document, Document) and document.text == "The ship was old."


@pytest.mark.parametrize("pattern", ["corpus", "corpus/**/*.txt"])
def test_links_are_followed_once(pattern: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where they lead in a circle; one that leads nowhere is none. A pattern enters no linked folders."""
    monkeypatch.chdir(tmp_path)
    for folder in ("corpus/a", "elsewhere/inner"):
        Path(folder).mkdir(parents=True)
    for name in ("corpus/a/one.txt", "elsewhere/two.txt", "elsewhere/inner/three.txt", "four"):
        Path(name).write_text(name)
    for link, target in (
        ("corpus/b", "../elsewhere"),
        ("corpus/a/back", ".."),
        ("elsewhere/inner/up", "../../corpus"),
        ("corpus/c", "../elsewhere"),
        ("corpus/four.txt", "../four"),
        ("corpus/gone.txt", "../nowhere"),
        ("corpus/itself", "itself"),
        (".link.txt", "nowhere"),
    ):
        Path(link).symlink_to(target)
    source = find_source(SourceConfig(kind="text", path=pattern), "corpus", DataConfig())
    assert source is not None
    texts = [document.text for shard in source.shards() for document in source.documents(shard)]  # type: ignore[union-attr]
    linked = [] if "*" in pattern else ["elsewhere/inner/three.txt", "elsewhere/two.txt"]  # as of `glob` in a shell
    assert sorted(texts) == ["corpus/a/one.txt", *linked, "four"]
    with pytest.raises(SettingError, match="no such file or folder") as caught:
        find_source(SourceConfig(kind="text", path="corpus/gone.txt"), "corpus", DataConfig())
    assert caught.value.setting == "corpus.path"
