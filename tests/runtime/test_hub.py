"""Names of the Hugging Face Hub without a network: refused in a moment with the cure, and what is cached loads."""

import json
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import datasets
import pytest
from distributed import free_port
from families import make_family, tokenizer_of
from huggingface_hub import constants

from distill.data.readers import hub_revision, load_hub
from distill.data.remote import file_system
from distill.models.kind import CAUSAL, MASKED
from distill.models.load import load_pretrained, load_tokenizer
from distill.runtime.errors import SettingError
from distill.runtime.hub import is_hub_reached

AT_ONCE = 20.0  # seconds, on a busy machine with imports to make; the retries of the libraries wait for 23
Hub = Callable[[str], None]


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    """Lets the Hub be at an address, with an empty cache; it is not reached by itself."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{free_port()}")
    is_hub_reached.cache_clear()
    yield lambda endpoint: monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    is_hub_reached.cache_clear()


def refusal(call: Callable[[], object]) -> str:
    """The line of a refusal that came at once."""
    began = time.monotonic()
    with pytest.raises(SettingError) as raised:
        call()
    assert time.monotonic() - began < AT_ONCE
    return str(raised.value)


def test_a_hub_that_answers_is_asked_once(hub: Hub) -> None:
    server = HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler)  # which answers that it knows no HEAD
    threading.Thread(target=server.handle_request, daemon=True).start()
    hub(f"http://127.0.0.1:{server.server_port}")
    assert is_hub_reached()
    server.server_close()
    assert is_hub_reached()


def test_a_hub_that_takes_connections_and_does_not_answer(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """As behind a firewall that drops packets."""
    monkeypatch.setenv("HF_HUB_ETAG_TIMEOUT", "0.3")
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        hub(f"http://127.0.0.1:{silent.getsockname()[1]}")
        assert "within 0.3 s (HF_HUB_ETAG_TIMEOUT)" in refusal(lambda: load_pretrained("teacher.path", "a/model"))


def test_a_model_is_refused_with_the_setting_the_name_and_the_cure(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    for load in (load_pretrained, load_tokenizer):
        line = refusal(lambda load=load: load("teacher.path", "somebody/model", MASKED))
        assert line.startswith("teacher.path=somebody/model: ") and f"no folder {Path.cwd() / 'somebody/model'}" in line
        assert f"{constants.ENDPOINT} does not answer" in line and "`hf download somebody/model" in line
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE=1" in refusal(lambda: load_pretrained("student.path", "somebody/model", MASKED))


def test_a_model_in_the_cache_loads(hub: Hub, tmp_path: Path) -> None:
    repository = tmp_path / "hub" / "models--somebody--model"
    for saved in (make_family("gpt2"), tokenizer_of("gpt2")):
        saved.save_pretrained(repository / "snapshots" / ("0" * 40))
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0" * 40)
    assert load_pretrained("teacher.path", "somebody/model", CAUSAL).config.model_type == "gpt2"
    assert len(load_tokenizer("teacher.path", "somebody/model", CAUSAL)) > 5


def test_a_data_set_is_refused_unless_it_is_in_the_cache(hub: Hub, tmp_path: Path) -> None:
    line = refusal(lambda: load_hub("somebody/texts", None, "train", False, "corpus"))
    assert line.startswith("corpus.hub=somebody/texts (subset=None, split=train) cannot be loaded: ")
    assert "`hf download somebody/texts --local-dir FOLDER --repo-type dataset`" in line
    assert hub_revision("somebody/texts") == "somebody/texts"
    assert "check the network, or give" in refusal(lambda: file_system("hf://datasets/a/b/c.txt", "corpus.path"))
    file, cache = tmp_path / "texts.jsonl", tmp_path / "datasets"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in "ab"))
    datasets.load_dataset("json", data_files={"train": str(file)}, cache_dir=str(cache))
    (made,) = (path for path in (cache / "json").glob("*/*/*") if path.is_dir())
    cached = shutil.copytree(made, cache / "somebody___texts" / "default" / "0.0.0" / made.name)
    (cached / "json-train.arrow").rename(cached / "texts-train.arrow")
    assert load_hub("somebody/texts", None, "train", False, "corpus")["text"] == ["a", "b"]
    assert "Available configs" in refusal(lambda: load_hub("somebody/texts", "other", "train", False, "corpus"))
