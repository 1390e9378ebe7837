"""What a model card says of a run: that pair and that text, no path of a machine, and what the Hub reads of it."""

import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from huggingface_hub import ModelCard, ModelCardData

from distill.config.settings import CorpusConfig
from distill.report import summary
from distill.report.model_card import model_card, model_name, shareable, without_paths
from distill.runs import describe
from distill.runs.describe import hub_datasets, published
from distill.runs.facts import Published
from distill.runs.record import Record

ME = "/home/me/my files"
QWEN = {"hub": "Qwen/Qwen3-0.6B", "license": "apache-2.0"}


def own_run(**changes: Any) -> dict[str, Any]:
    """A pair and a text of the user's own, all under absolute paths, in the recipe that no recipe stands for."""
    command = f"python -m distill '+recipe=distilbert_gutenberg' 'corpus.path={ME}/a.csv' teacher.path=/srv/big"
    origin = {"model_class": "mine.Small", "made_by": "mine.small", "call": f"vocab='{ME}/vocab.txt'"}
    content: dict[str, Any] = {
        "recipe": "distilbert_gutenberg",
        "command": f"{command} 'student.extra=[/srv/one,/srv/two]' corpus.cache=s3://bucket/tokens",
        "notes": [f"Skipped 1 file that could not be read: {ME}/b.csv."],
        "corpus": {"name": f"30.0% mine (csv file {ME}/a.csv) + 70.0% web (2 text files in ~/texts, after prompts)"},
        "teacher": {"name": "/srv/models/big/student"},
        "student": {
            "name": "Small",
            "origin": {**origin, "has_config": False},
            "start": {"init": "pretrained", "from": "/srv/models/small"},
        },
    }
    return content | changes


def metadata_of(content: dict[str, Any]) -> dict[str, Any]:
    """The front matter of a card, as the Hub's own parser reads it and gives it back."""
    card = ModelCard(model_card(Record.from_json(content)))
    assert isinstance(card.data, ModelCardData)
    written = yaml.safe_load(model_card(Record.from_json(content)).split("---\n")[1])
    assert card.data.to_dict() == written
    return written


def test_a_card_has_no_absolute_path() -> None:
    card = model_card(Record.from_json(own_run()))
    for private in ("/home", "my files/", "/srv", "~/", "models/big"):
        assert private not in card
    for shown in ("csv file a.csv", "text files in texts, after prompts", "distilled from big", "read: b.csv."):
        assert shown in card, shown
    assert "'student.extra=[one,two]'" in card and "s3://bucket/tokens" in card and "vocab='vocab.txt'" in card


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("in /a/b/c, and /d/e.", "in c, and e."),
        ("and/or 5 / 3, s3://a/b, https://a.org/b", "and/or 5 / 3, s3://a/b, https://a.org/b"),
        ("file:///a/b c/d.csv", "d.csv"),
        ("runs/mine/student", "runs/mine/student"),
        ("/a/b/", "b"),
        ("see /a/b. Then tokens/s follow.", "see b. Then tokens/s follow."),
        ("see /a/b: then tokens/second follow", "see b: then tokens/second follow"),
        ("/a/b/ made 900 tokens/s (in /c/d e/f.txt): fine", "b made 900 tokens/s (in f.txt): fine"),
        ("/a/b c/de f", "de f"),
        ("from /a/b to ~/c d/ef, and ~/g", "from b to ef, and g"),
        ("{path:/a/b/c.csv,kind:text}, https://a.org:80/b", "{path:c.csv,kind:text}, https://a.org:80/b"),
    ],
)
def test_of_a_path_the_last_part_is_left(text: str, shown: str) -> None:
    assert without_paths(text) == shown


def test_what_a_run_changed_of_its_recipe_is_named() -> None:
    record = Record.from_json(own_run())
    words = summary.setting(record)
    assert words.startswith("Recipe: distilbert_gutenberg, with other settings of corpus, teacher and student.")
    assert "YOUR_NAME/MODEL" in model_card(record) and "YOUR_NAME/distilbert" not in model_card(record)
    assert "YOUR_NAME/distilbert_gutenberg" in model_card(Record.from_json(own_run(command="python -m distill")))


def test_the_hub_reads_what_the_models_are(results: dict[str, Any]) -> None:
    results["teacher"] |= {"name": "Qwen/Qwen3-0.6B", "published": QWEN}
    results["student"]["start"] = {"init": "layers", "from": "Qwen/Qwen3-0.6B", "published": QWEN}
    results["corpus"]["hub"] = ["Salesforce/wikitext"]
    written = metadata_of(results)
    assert written["base_model"] == ["Qwen/Qwen3-0.6B"] and written["license"] == "apache-2.0"
    assert written["datasets"] == ["Salesforce/wikitext"] and written["metrics"] == ["perplexity"]
    assert written["library_name"] == "transformers" and written["pipeline_tag"] == "fill-mask"
    scores = ModelCard(model_card(Record.from_json(results))).data.eval_results
    values = {(score.dataset_type, score.metric_type): score.metric_value for score in scores or []}
    student = results["student"]
    assert values[("heldout", "perplexity")] == student["perplexity"]["heldout"]
    assert values[("heldout", "pseudo_perplexity")] == student["pseudo_perplexity"]["heldout"]
    assert {score.task_type for score in scores or []} == {"fill-mask"}
    card = model_card(Record.from_json(results))
    assert "add its languages to the front matter" in card and "licence and languages" not in card


def test_what_nobody_states_is_left_out_and_asked_for() -> None:
    assert not {"base_model", "license", "datasets", "metrics"} & metadata_of(own_run()).keys()
    assert "set its licence and languages in the front matter" in model_card(Record.from_json(own_run()))


@pytest.mark.parametrize(
    ("start", "license", "says"),
    [
        ({"published": {"license": "mit"}}, None, "some of its source models state mit and apache-2.0"),
        ({"published": {}}, None, "some of its source models state apache-2.0"),
        ({"from": None}, "apache-2.0", "add its languages to the front matter"),
    ],
)
def test_licences_that_differ_are_named_and_none_is_chosen(start: Any, license: str | None, says: str) -> None:
    content = own_run()
    content["teacher"]["published"] = QWEN
    content["student"]["start"] = {"init": "pretrained", "from": "/srv/models/small", **start}
    assert metadata_of(content).get("license") == license and says in model_card(Record.from_json(content))


@pytest.mark.parametrize(
    ("text", "stated"),
    [("license: MIT\n---\n# A model\n", "mit"), ("license: other\n---\n", None), ("license: [\n---\n", None)],
)
def test_the_licence_of_a_folder(text: str, stated: str | None, tmp_path: Path) -> None:
    assert published(str(tmp_path)) == Published()
    (tmp_path / "README.md").write_text(f"---\n{text}")
    assert published(str(tmp_path)) == Published(license=stated)


def test_the_licence_of_a_name_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That of a card in the cache; without one and without a network none, and no error."""
    monkeypatch.setattr(describe, "is_hub_reached", lambda: False)
    assert published("someone/that-is-not-there") == Published(hub="someone/that-is-not-there")
    card = tmp_path / "README.md"
    card.write_text("---\nlicense: apache-2.0\n---\n")
    monkeypatch.setattr("huggingface_hub.hf_hub_download", lambda *_, **__: str(card))
    assert published("Qwen/Qwen3-0.6B") == Published(hub="Qwen/Qwen3-0.6B", license="apache-2.0")
    assert published(None) == Published()


def test_the_data_sets_of_a_corpus() -> None:
    of_hub, of_folder = {"kind": "hub", "hub": "a/b"}, {"kind": "gutenberg", "hub": "c/d", "path": "books"}
    assert hub_datasets(CorpusConfig(**of_hub)) == ["a/b"]
    assert hub_datasets(CorpusConfig(**of_folder)) == []
    mixed = {name: {**one, "weight": 1.0} for name, one in (("a", of_hub), ("b", of_folder), ("c", of_hub))}
    assert hub_datasets(CorpusConfig(kind="mixture", sources=mixed)) == ["a/b"]
    tables: list[dict[str, str]] = [
        {"kind": "glue", "task": "sst2"}, {"kind": "squad", "version": "2.0"}, {"kind": "glue", "path": "a"},
        {"kind": "table"}, {"kind": "glue", "task": "rte", "hub": "x/y"},
    ]  # fmt: skip
    found = [hub_datasets(CorpusConfig(**table)) for table in tables]
    assert found == [["nyu-mll/glue"], ["rajpurkar/squad_v2"], [], [], ["x/y"]]


def shared(*words: str) -> list[str]:
    """The words of a command as a card has them."""
    record = shareable(Record.from_json(own_run(command=shlex.join(words))))
    return shlex.split(str(record.command))


def test_a_path_in_a_command_loses_all_of_its_folders() -> None:
    """Also in quotation marks, as Hydra needs them around parentheses."""
    source, url = "+evaluate.sources.mine={kind:text,path:/srv/x/y.txt}", "data.cache=https://a.org/b"
    quoted = "corpus.path='/home/me/a (b)/c.csv'"
    given = shared("corpus.path=/home/me/a (b)/it's.csv", source, "teacher.path=~/big", url, quoted)
    source = "+evaluate.sources.mine={kind:text,path:y.txt}"
    assert given == ["corpus.path=it's.csv", source, "teacher.path=big", url, "corpus.path='c.csv'"]


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/srv/models/2024", "2024"),
        ("a/mine/snapshots/step-0100", "mine after step 100"),
        ("runs/mine/student", "mine"),
    ],
)
def test_the_name_of_a_model_is_that_of_its_folder(path: str, name: str) -> None:
    assert model_name(path) == name
