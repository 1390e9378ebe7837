"""Secrets: which names hold them, and that a run with one writes it nowhere."""

from pathlib import Path
from typing import Any

import pytest
from job import Shelf, command
from torch import nn
from transformers import BertConfig, BertForMaskedLM

from distill.redaction import MASK, is_secret, masked, redact

KEY = "sk-4f9Qz81LmNo77"


@pytest.mark.parametrize(
    "name",
    ["api_key", "student.arguments.apiKey", "HF_TOKEN", "token", "access_token", "aws-secret-access-key", "password",
     "dbPassword", "auth", "client_secret", "credentials"],
)  # fmt: skip
def test_names_of_secrets(name: str) -> None:
    assert is_secret(name)


@pytest.mark.parametrize(
    "name",
    ["tokenizer", "tokens", "mask_token", "pad_token", "key", "keys", "author", "row_key", "tokens_per_second",
     "secretary", "vocab_size", "corpus.token.path"],
)  # fmt: skip
def test_names_of_other_things(name: str) -> None:
    assert not is_secret(name)


def test_settings_are_masked_wherever_they_stand() -> None:
    settings = {"a": {"api_key": KEY, "size": 3}, "list": [{"password": 12345}], "token": None, "auth": True}
    assert masked(settings) == {
        "a": {"api_key": MASK, "size": 3}, "list": [{"password": MASK}], "token": None, "auth": True,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("+student.arguments={api_key: abc-def, size: 3}", "+student.arguments={api_key: ***, size: 3}"),
        ("a.password=abcdef b=2", "a.password=*** b=2"),
        ("""{"token": "ab cd", "x": 1}""", """{"token": ***, "x": 1}"""),
        ("from https://me:pa55word@host/x", "from https://***@host/x"),
        ("mask_token: [MASK], loss: 3.2, api_key: null", "mask_token: [MASK], loss: 3.2, api_key: null"),
    ],
)
def test_texts_are_redacted(text: str, expected: str) -> None:
    assert redact(text) == expected


def test_a_known_secret_is_found_without_its_name() -> None:
    masked({"api_key": KEY})
    assert redact(f"could not open {KEY}.") == "could not open ***."


class Service(BertForMaskedLM):
    """A student that takes a key, as one that is fetched from somewhere would."""

    def __init__(self, vocab_size: int, api_key: str) -> None:
        assert api_key == KEY
        sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
        super().__init__(BertConfig(vocab_size=vocab_size, **sizes))


def service(tokenizer: Any, api_key: str) -> nn.Module:
    return Service(len(tokenizer), api_key)


def test_a_run_writes_its_secret_nowhere(shelf: Shelf) -> None:
    folder = shelf.root / "secret"
    own = ["student=custom", "student._target_=test_redaction.service", f"+student.api_key={KEY}", "objective=mlm"]
    process = command(
        *shelf.arguments(folder, *own, "tracker=tensorboard", "train.milestones=[2]"), path=Path(__file__).parent
    )
    output = "".join(process.communicate(timeout=300))
    assert process.returncode == 0, output
    assert KEY not in output
    holding = [path for path in folder.rglob("*") if path.is_file() and KEY.encode() in path.read_bytes()]
    assert not holding
    text = (folder / "config.yaml").read_text()
    assert f"api_key: '{MASK}'" in text and f"+student.api_key={MASK}" in (folder / "report.md").read_text()


def test_an_error_line_holds_no_secret(shelf: Shelf) -> None:
    wrong: list[Any] = ["student=custom", "student._target_=test_redaction.service", f"+student.api_keys={KEY}"]
    process = command(*shelf.arguments(shelf.root / "wrong", *wrong), path=Path(__file__).parent)
    output = "".join(process.communicate(timeout=300))
    assert process.returncode == 2 and KEY not in output, output
