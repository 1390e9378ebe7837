"""Logins in URLs and tokens of the Hub are masked, and what comes from the environment is written nowhere."""

import pytest
import yaml
from job import Shelf, composed, results
from own_models import KEY

from distill.config.base import flatten
from distill.config.settings import Config
from distill.runtime.redaction import redact, redacted


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("hf_" + "a1B2" * 6 + " is refused", "*** is refused"),
        ("redis://:s3cretpw@host/0", "redis://***@host/0"),
        ("git+https://ghp_abcdef123456@github.com/x@v1", "git+https://***@github.com/x@v1"),
        ("from https://me:pa55word@host/x", "from https://***@host/x"),
        ("https://host/x?sig=a1b2&v=2 fails", "https://host/x?sig=***&v=2 fails"),
        ("https://host/x?sig=${oc.env:MY_SIG}", "https://host/x?sig=${oc.env:MY_SIG}"),
        ("https://host/x?apikey=s1&accessToken=t2", "https://host/x?apikey=***&accessToken=***"),
        ("https://host/x?mail=a@b.c", "https://host/x?mail=a@b.c"),
        ("mask_token: [MASK], loss: 3.2, api_key: null", "mask_token: [MASK], loss: 3.2, api_key: null"),
    ],
)
def test_texts_are_redacted(text: str, expected: str) -> None:
    assert redact(text) == expected and redacted({"a": [text]}) == {"a": [expected]}


def settings_of(*overrides: str) -> Config:
    return composed("+recipe=smoke", "+objective.mine._target_=lab.Term", *overrides)


def test_what_is_written_has_the_names_of_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where other settings refer to one of them; numbers too, and whatever is made of them."""
    monkeypatch.setenv("MY_KEY", KEY)
    monkeypatch.setenv("MY_SEED", "17")
    config = settings_of(
        "+objective.mine.thing=${oc.env:MY_KEY}", "+objective.mine.same=${objective.mine.thing}",
        "+objective.mine.url='s3://${oc.env:MY_KEY}@${seed}'", "seed='${oc.decode:${oc.env:MY_SEED}}'",
        "+objective.mine.other=${train.keep}", "+objective.mine.spaced='${ oc.env :MY_KEY }'",
        "+objective.mine.quoted='${oc.env:\"MY_KEY\"}'",
    )  # fmt: skip
    assert config.seed == 17 and config.objective.component("mine").arguments["same"] == KEY
    mine = config.written["objective"]["mine"]
    assert mine["thing"] == mine["same"] == "${oc.env:MY_KEY}" and mine["other"] == config.train.keep
    assert mine["url"] == "s3://***@${seed}" and config.written["seed"] == "${oc.decode:${oc.env:MY_SEED}}"
    assert mine["spaced"] == "${ oc.env :MY_KEY }" and mine["quoted"] == '${oc.env:"MY_KEY"}'
    assert KEY not in str(config.written) and KEY not in str(config.compared)


def test_a_secret_is_masked_in_texts_and_may_change_and_a_setting_may_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """A corpus is called by its address, which the report and the card show."""
    compared = []
    for password, seed in (("a-long-password", "1"), ("another-password", "2")):
        monkeypatch.setenv("MY_PASSWORD", password)
        monkeypatch.setenv("MINE", seed)
        address = "corpus.path='https://host/${oc.env:MY_PASSWORD}/books.txt'"
        config = settings_of("corpus=text", address, "seed=${oc.env:MINE}")
        assert redact(f"{config.corpus.path} cannot be read") == "https://host/***/books.txt cannot be read"
        compared.append(flatten(config.compared))
    assert compared[0]["corpus.path"] == compared[1]["corpus.path"]
    assert compared[0]["seed"] != compared[1]["seed"] and compared[0]["seed"].startswith("sha256 ")


@pytest.mark.parametrize("tracker", ["tensorboard", "wandb"])
def test_settings_of_the_environment_are_written_by_name(
    shelf: Shelf, tracker: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In no file of the run, and in no name of one."""
    pytest.importorskip(tracker)
    monkeypatch.setenv("MY_SECRET", KEY)
    folder = shelf.root / f"secret_{tracker}"
    own = ["student=custom", "student._target_=own_models.service", "student.layers=null", "objective=mlm"]
    shelf.run_alone(folder, *own, "+student.pat=${oc.env:MY_SECRET}", f"tracker={tracker}", "train.snapshots=[2]")
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert files and not [path for path in files if KEY.encode() in path.read_bytes() or KEY in str(path)]
    assert yaml.safe_load((folder / "config.yaml").read_text())["student"]["pat"] == "${oc.env:MY_SECRET}"
    assert "+student.pat=${oc.env:MY_SECRET}" in results(folder)["command"]
