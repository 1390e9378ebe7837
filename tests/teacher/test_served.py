"""A teacher on a server: the cache that its answers make is the local one, whatever goes wrong on the way."""

import random
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from job import command, distill, results, save_model, wait_for
from model_server import FAULTS, ModelServer, serving
from transformers import AutoModelForCausalLM, AutoTokenizer

from distill.config import settings as conf
from distill.data.collate.clm import causal_lm
from distill.distributed.single import Single
from distill.models.language_model import LanguageModel
from distill.runtime import completions
from distill.runtime.completions import Server
from distill.runtime.errors import SettingError, StorageFailed
from distill.teacher.build_cache import Recorder, build
from distill.teacher.cache import HEADER, Cache, CachedTeacher, Positions, find
from distill.teacher.served import ServedRecorder

K, LENGTH = 5, 24
SINGLE, CPU = Single(conf.BackendConfig(device="cpu")), torch.device("cpu")
POSITIONS: dict[str, Positions] = {
    "targets": lambda batch: batch.targets.positions,
    "all": lambda batch: batch.valid_positions,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: Any) -> Path:
    return save_model(tmp_path_factory.mktemp("served") / "teacher")


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder).eval()


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(autouse=True)
def impatient(monkeypatch: Any) -> None:
    monkeypatch.setattr(completions, "FIRST_WAIT", 0.01)


@pytest.fixture
def server(model: Any, tokenizer: Any) -> Any:
    with serving(model, tokenizer) as served:
        yield served


class Desk:
    """Sequences of several documents, padding behind some, and the caches of a local and of a served teacher."""

    def __init__(self, root: Path, tokenizer: Any, positions: str = "targets", packed: bool = True) -> None:
        self.root, self.vocabulary, self.positions = root, len(tokenizer), POSITIONS[positions]
        collator = causal_lm(tokenizer, packed)
        draw = np.random.default_rng(3)
        rows = draw.integers(1, self.vocabulary, (300, LENGTH)).astype(np.uint16)
        rows[draw.random(rows.shape) < 0.1] = collator.format.document_end
        for row in rows[::3]:
            row[draw.integers(4, LENGTH) :] = collator.pad_id
        self.batches = tiny.make_batches(rows, collator, 8, 2)

    def cache(self, name: str) -> Cache:
        origin = {"teacher": "big", "vocabulary": self.vocabulary}
        (self.root / name).mkdir(exist_ok=True)
        settings = conf.TeacherCacheConfig(top_k=K)
        return find(settings, origin, self.batches, self.positions, str(self.root / name))

    def local(self, model: Any) -> np.ndarray:
        cache = self.cache("local")
        build(Recorder(cache, LanguageModel(model), self.batches, self.positions, 1.0, CPU), SINGLE)
        return records_of(cache)

    def recorder(self, served: ModelServer, name: str = "served", **changes: Any) -> ServedRecorder:
        server = Server("teacher", served.url, "big", 4, 120.0, None)
        return ServedRecorder(self.cache(name), replace(server, **changes), self.batches, self.positions)

    def served(self, served: ModelServer, name: str = "served", **changes: Any) -> np.ndarray:
        recorder = self.recorder(served, name, **changes)
        recorder.check()
        build(recorder, SINGLE)
        return records_of(recorder.cache)


def records_of(cache: Cache) -> np.ndarray:
    files = [cache.path_of(part).read_bytes()[HEADER:] for part in range(cache.num_parts)]
    return np.frombuffer(b"".join(files), cache.layout.record)


def assert_equal(found: np.ndarray, expected: np.ndarray) -> None:
    """Byte for byte, but for numbers that half of a float16's last digit rounds to one of two neighbours."""
    assert np.array_equal(found["ids"], expected["ids"])
    one, other = (records["log_probs"].astype(np.float32) for records in (found, expected))
    assert (one != other).mean() < 2e-3
    np.testing.assert_allclose(one, other, rtol=2**-10)


@pytest.mark.parametrize(("positions", "packed"), [("targets", False), ("targets", True), ("all", True)])
def test_its_cache_is_that_of_the_local_model(
    tmp_path: Path, model: Any, tokenizer: Any, server: ModelServer, positions: str, packed: bool
) -> None:
    desk = Desk(tmp_path, tokenizer, positions, packed)
    found = desk.served(server)
    assert_equal(found, desk.local(model))
    assert len(found) == desk.cache("served").num_positions > 2000
    numbers = np.array([5, 299, 0])
    assert len(CachedTeacher(desk.cache("served"), SINGLE).read(numbers)) > 30
    assert all(isinstance(token, int) for body, _ in server.requests for token in body["prompt"])


@pytest.mark.parametrize("sglang", [False, True])
def test_faults_change_nothing(tmp_path: Path, tokenizer: Any, server: ModelServer, sglang: bool) -> None:
    """One answer of five is none: a status 500, too late, cut, no JSON, or of too few tokens."""
    desk, draw, kinds = Desk(tmp_path, tokenizer, packed=False), random.Random(1), set[str]()
    expected = desk.served(server, "whole")
    asked = len(server.requests)
    where = {"url": server.sglang_url} if sglang else {}

    def fault(number: int) -> str:
        kind = draw.choice(FAULTS) if draw.random() < 0.2 else ""
        kinds.add(kind)
        return kind

    server.fault = fault
    assert desk.served(server, timeout=1.0, **where).tobytes() == expected.tobytes()
    assert ("input_ids" in server.requests[-1][0]) == sglang
    assert kinds == {"", *FAULTS} and len(server.requests) - asked > 1.1 * asked


def test_a_server_that_breaks_down_leaves_the_parts_that_are_made(
    tmp_path: Path, tokenizer: Any, server: ModelServer, monkeypatch: Any, caplog: Any
) -> None:
    monkeypatch.setattr(completions, "WORTH_A_LINE", 0.3)
    desk = Desk(tmp_path, tokenizer)
    expected, asked = desk.served(server, "whole"), len(server.requests)
    server.fault = lambda number: "500" if number > 1.6 * asked else ""
    with pytest.raises(StorageFailed, match=r"8 tries \(status 500\).*resumes"):
        desk.served(server)
    said = [record.getMessage() for record in caplog.records if "answer" in record.getMessage()]
    assert said == [f"teacher.url={server.url}: no answer that can be used (status 500); trying 8 times"]
    assert [desk.cache("served").has(part) for part in range(3)] == [True, False, False]
    before, server.fault = len(server.requests), lambda number: ""
    assert desk.served(server).tobytes() == expected.tobytes()
    assert len(server.requests) - before < 0.7 * asked


def test_another_model_behind_the_url_is_refused(
    tmp_path: Path, folder: Path, model: Any, tokenizer: Any, server: ModelServer
) -> None:
    desk = Desk(tmp_path, tokenizer)
    desk.served(server)
    other, like = (AutoModelForCausalLM.from_pretrained(folder).eval() for _ in range(2))
    with torch.no_grad():
        for weight, alike in zip(other.parameters(), like.parameters(), strict=True):
            weight.mul_(1.1)
            alike.copy_(alike.bfloat16())
    with serving(like, tokenizer) as same:
        desk.recorder(same).check()
    for is_whole in (True, False):
        if not is_whole:
            desk.cache("served").path_of(1).unlink()
        with serving(other, tokenizer) as served, pytest.raises(SettingError, match="another model") as refused:
            desk.recorder(served).check()
        assert refused.value.setting == "teacher.model"
    with pytest.raises(SettingError, match="nobody answers"):
        desk.recorder(served).check()  # which has ended
    desk.served(server)
    desk.recorder(served).check()  # a complete cache needs none
    server.fault = lambda number: "500"
    desk.recorder(server).check()
    with serving(model, tokenizer, name="small") as served, pytest.raises(SettingError, match="has small"):
        desk.recorder(served, "new").check()


def test_what_a_server_does_not_give_is_refused_by_name(tmp_path: Path, tokenizer: Any, server: ModelServer) -> None:
    desk = Desk(tmp_path, tokenizer)
    server.max_logprobs = K - 1
    with pytest.raises(SettingError, match="max allowed: 4") as refused:
        desk.served(server)
    server.lies = True
    with pytest.raises(SettingError, match="--max-logprobs 5") as fewer:
        desk.served(server)
    assert (refused.value.setting, fewer.value.setting) == ("teacher.url", "teacher.cache.top_k")
    server.max_logprobs, server.key = 20, "sesame"
    with pytest.raises(SettingError, match=r"status 401: no such key.*teacher.api_key_env"):
        desk.served(server)
    with pytest.raises(SettingError, match="api_key_env=NO_SUCH_KEY"):
        desk.served(server, api_key_env="NO_SUCH_KEY")
    server.key, desk.vocabulary = "", 30
    with pytest.raises(SettingError, match="the tokenizer has 30"):
        desk.served(server, "few")
    assert not [*tmp_path.rglob("*.bin"), *tmp_path.rglob("*.json")]


def test_tokens_that_only_pad_the_head_are_left_out(tmp_path: Path, tokenizer: Any) -> None:
    """One of the largest is such a token, of next to no probability; what takes its place has none."""
    size = len(tokenizer)

    def padded(input_ids: torch.Tensor) -> Any:
        logits = torch.linspace(1, 0, size + 8).repeat(1, input_ids.shape[1], 1)
        logits[..., 7], logits[..., size + 2] = 20.0, 11.0
        return SimpleNamespace(logits=logits)

    with serving(padded, tokenizer) as served:
        found = Desk(tmp_path, tokenizer).served(served)
        assert {*found["ids"][:, 0].tolist()} == {7} and found["ids"].max() < size
        assert (found["log_probs"][:, 0] > -1e-3).all()
        assert all(len({*ids}) == K for ids in found["ids"].tolist())
        least = np.exp(found["log_probs"][:, K - 1].astype(np.float64))
        assert {*found["ids"][least == 0, K - 1].tolist()} == {size - 1}


# --- whole runs


def arguments(root: Path, folder: Path, server: ModelServer) -> list[str]:
    text = root / "text.txt"
    text.write_text("\n".join(f"the {number} of an end and {number * 7}" for number in range(1500)))
    of_teacher = ["teacher=served", f"teacher.url={server.url}", "teacher.model=big", f"teacher.tokenizer={folder}"]
    corpus = ["corpus=text", f"corpus.path={text}", "corpus.sequence_length=32", "data.workers=1"]
    student = ["student=gpt2", "student.config={n_embd: 16, n_layer: 1, n_head: 2}", "precision=fp32"]
    objective = ["objective.cosine.weight=0", "objective.temperature=1", f"teacher.cache.top_k={K}"]
    length = ["train.steps=2", "train.epochs=null", "corpus.max_sequences=300", "evaluate.sets=[]"]
    where = [f"data.cache={root / 'cache'}", f"hydra.run.dir={root / 'run'}"]
    return ["+recipe=distilgpt2_gutenberg", *corpus, *of_teacher, *student, *objective, *length, *where]


def test_a_live_teacher_stands_beside_a_served_one(tmp_path: Path, folder: Path, server: ModelServer) -> None:
    """The report scores the one that is here, and no mean."""
    line = [word for word in arguments(tmp_path, folder, server) if not word.startswith(("teacher", "evaluate.sets"))]
    served = f"{{url: '{server.url}', model: big, tokenizer: {folder}, cache: {{top_k: {K}}}}}"
    members = ["teacher=several", f"teacher.members.a={{path: {folder}}}", f"teacher.members.b={served}"]
    assert distill(*line, *members, "evaluate.sets=[heldout]", "evaluate.max_sequences=4") == 0
    content = results(tmp_path / "run")
    teacher, (here, there) = content["teacher"], content["teacher"]["members"].values()
    assert here["perplexity"] and here["parameters"] > 0 and there["parameters"] is teacher["parameters"] is None
    assert not teacher.keys() & {"perplexity"} and content["agreement"] is None


def test_a_killed_run_asks_for_the_missing_parts_alone(
    tmp_path: Path, folder: Path, server: ModelServer, monkeypatch: Any
) -> None:
    """Of two ranks as well; and a key is sent that stands nowhere."""
    line, numbers = [*arguments(tmp_path, folder, server), "teacher.api_key_env=MY_KEY"], count()
    server.key = "sesame-open-now"
    monkeypatch.setenv("MY_KEY", server.key)
    server.fault = lambda _: "timeout" if next(numbers) > 180 else ""
    process = command(*line)
    wait_for(lambda: [*tmp_path.rglob("part-00000.bin")], process)
    process.kill()
    process.communicate()
    assert not [*tmp_path.rglob("part-00001.bin")] and not (tmp_path / "run" / "results.json").exists()
    before, server.fault = len(server.requests), lambda number: ""
    process = command(*line, "backend=ddp", "backend.processes=2", "backend.device=cpu")
    logged = "".join(process.communicate())
    assert process.returncode == 0, logged
    assert 172 + 8 <= len(server.requests) - before < 190  # and a few probes
    assert "teacher cache: 100%" in logged
    files = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    assert not any(server.key.encode() in content for content in [*files, logged.encode()])
    assert any(b"MY_KEY" in content for content in files)
