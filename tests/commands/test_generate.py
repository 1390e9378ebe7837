"""`distill generate`: the same completions however often it is killed and for any number of ranks, and filters."""

import json
from collections import Counter
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from job import command, composed, distill, finish, refused_line, save_model, wait_for
from model_server import serving
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM, AutoTokenizer
from vocabularies import vocabulary_of

from distill.commands.generation import GenerateOptions, Writer, prompts_of
from distill.commands.prediction import text_of
from distill.distributed import join_ranks
from distill.models.generation import Completion
from distill.runtime import completions

NOUNS = ["the end", "an arm", "the sea", "and so", "a then", "that"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: Any) -> Path:
    return save_model(tmp_path_factory.mktemp("writer") / "model")


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    lines = [{"id": f"p{number}", "prompt": NOUNS[number % 6] + " of" * (number % 4)} for number in range(60)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def words(model: Path, prompts: Path, output: Path, *more: str) -> list[str]:
    return ["generate", f"model={model}", f"input={prompts}", f"output={output}", "max_new_tokens=12", *more]


def test_a_kill_and_the_number_of_ranks_change_nothing(model: Path, prompts: Path, tmp_path: Path) -> None:
    one, two, killed = (tmp_path / f"{name}.jsonl" for name in ("one", "two", "killed"))
    line = words(model, prompts, one, "group_size=4", "duplicates=true")
    assert distill(*line) == 0
    ranks = ["backend=ddp", "backend.processes=2", "backend.device=cpu"]
    finish(command(*words(model, prompts, two, *line[-2:], *ranks)))
    parts = tmp_path / "killed.jsonl.parts" / "rank-0.jsonl"
    process = command(*words(model, prompts, killed, *line[-2:]))
    wait_for(lambda: parts.exists() and parts.read_bytes().count(b"\n") > 5, process)
    process.kill()
    process.communicate()
    assert not killed.exists()
    whole = parts.read_bytes()
    parts.write_bytes(whole[:-30])  # and a line was torn
    assert distill(*words(model, prompts, killed, *line[-2:], "temperature=2")) == 2
    finish(command(*words(model, prompts, killed, *line[-2:], *ranks)))  # by two ranks
    assert one.read_bytes() == two.read_bytes() == killed.read_bytes()
    assert {path.name for path in tmp_path.iterdir()} == {"prompts.jsonl", "one.jsonl", "two.jsonl", "killed.jsonl"}


def test_a_line_says_what_the_model_gives_to_its_tokens(model: Path, prompts: Path, tmp_path: Path) -> None:
    for size in (4, 60):
        path = tmp_path / f"{size}.jsonl"
        assert distill(*words(model, prompts, path, f"group_size={size}", "temperature=0", "duplicates=true")) == 0
    found, other = lines_of(tmp_path / "4.jsonl"), lines_of(tmp_path / "60.jsonl")
    assert [line["completion"] for line in found] == [line["completion"] for line in other]
    assert {line["finish_reason"] for line in found} <= {"stop", "length"} and found[3]["id"] == "p3"
    loaded, tokenizer = AutoModelForCausalLM.from_pretrained(model).eval(), AutoTokenizer.from_pretrained(model)
    for line in found[:4]:
        ids, expected = tokenizer(line["prompt"])["input_ids"], 0.0
        with torch.no_grad():
            for _ in range(line["tokens"]):
                log_probs = loaded(input_ids=torch.tensor([ids])).logits[0, -1].log_softmax(-1)
                ids.append(int(log_probs.argmax()))
                expected += float(log_probs.max())
        assert line["logprob"] == pytest.approx(expected, abs=1e-4)
        text = tokenizer.decode(ids[-line["tokens"] :], skip_special_tokens=True)
        assert line["completion"] == (text if line["finish_reason"] == "stop" else text.rstrip("\ufffd"))


def test_a_server_writes_the_same(model: Path, prompts: Path, tmp_path: Path, monkeypatch: Any) -> None:
    """The likeliest tokens; one answer in five is none."""
    monkeypatch.setattr(completions, "FIRST_WAIT", 0.01)
    loaded, tokenizer = AutoModelForCausalLM.from_pretrained(model).eval(), AutoTokenizer.from_pretrained(model)
    here, there, faults = tmp_path / "here.jsonl", tmp_path / "there.jsonl", count()
    assert distill(*words(model, prompts, here, "temperature=0", "duplicates=true")) == 0
    with serving(loaded, tokenizer) as server:
        server.fault = lambda _: ("500", "cut", "malformed")[next(faults) % 3] if next(faults) % 10 == 1 else ""
        of_server = ["teacher=served", f"teacher.url={server.url}", "teacher.model=big", f"teacher.tokenizer={model}"]
        line = [
            word for word in words(model, prompts, there, "temperature=0", "duplicates=true") if word[:5] != "model"
        ]
        assert distill(*line, *of_server) == 0
        assert len(server.requests) > 66
    for one, other in zip(lines_of(here), lines_of(there), strict=True):
        assert one.pop("logprob") == pytest.approx(other.pop("logprob"), abs=1e-4)
        assert one == other


def test_filters_are_counted_and_a_student_learns_from_the_rest(
    model: Path, prompts: Path, tmp_path: Path, capsys: Any
) -> None:
    every, few = tmp_path / "every.jsonl", tmp_path / "few.jsonl"
    assert distill(*words(model, prompts, every, "duplicates=true", "temperature=0.1")) == 0
    found = lines_of(every)
    perplexity = {line["id"]: np.exp(-line["logprob"] / line["tokens"]) for line in found}
    limit = float(np.quantile([*perplexity.values()], 0.7))
    assert distill(*words(model, prompts, few, "temperature=0.1", f"max_perplexity={limit}", "min_tokens=3")) == 0
    expected, seen = Counter[str](), set[tuple[str, str]]()
    for line in found:
        short = line["tokens"] - (line["finish_reason"] == "stop") < 3 or not line["completion"].strip()
        high, text = perplexity[line["id"]] > limit, (line["prompt"], line["completion"])
        expected["length" if short else "perplexity" if high else "duplicates" if text in seen else ""] += 1
        seen |= set() if short or high else {text}
    assert len(lines_of(few)) == expected[""] > 5 and expected["perplexity"] > 5 and expected["duplicates"]
    logged = capsys.readouterr().err
    assert all(f"{number} by {name}" in logged for name, number in expected.items() if name)
    assert (
        distill(*words(model, prompts, tmp_path / "x.jsonl", "max_repeated=0", "temperature=0", "finished=true")) == 0
    )
    logged = capsys.readouterr().err
    assert "by cut off" in logged
    corpus = ["corpus=jsonl", f"corpus.path={few}", "corpus.prompt=prompt", "corpus.field=completion"]
    student = ["student=pretrained", f"student.path={model}", "student.dropout=0", "train.epochs=null", "train.steps=3"]
    run = ["evaluate.sets=[]", f"hydra.run.dir={tmp_path / 'run'}", "corpus.sequence_length=32", "precision=fp32"]
    assert distill("+recipe=gpt2_pretrain", *corpus, *student, *run, f"data.cache={tmp_path / 'cache'}") == 0


def test_prompts_are_the_beginnings_of_a_corpus(model: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("\n".join(f"the sea and the end of it, {number} then" for number in range(200)))
    corpus = ["corpus=text", f"corpus.path={text}", "corpus.document=line", "corpus.sequence_length=32"]
    corpus += ["corpus.max_sequences=20", f"data.cache={tmp_path / 'cache'}", "data.workers=1"]
    output = tmp_path / "out.jsonl"
    assert (
        distill("generate", f"model={model}", f"output={output}", "max_new_tokens=4", "prompt_tokens=5", *corpus) == 0
    )
    found = lines_of(output)
    assert 10 < len(found) <= 20 and all(text.read_text().count(line["prompt"]) for line in found)


def test_a_beginning_in_the_middle_of_a_text_gets_the_token_that_the_model_expects_before_text(tmp_path: Path) -> None:
    tokenizer, text = AutoTokenizer.from_pretrained(save_model(tmp_path / "model", "llama")), tmp_path / "text.txt"
    bos = (tokenizer.bos_token, tokenizer.bos_token_id)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=f"{bos[0]} $A", special_tokens=[bos])
    tokenizer.save_pretrained(tmp_path / "model")
    text.write_text("the sea and the end of it, and then an arm " * 40)
    corpus = ["corpus=text", f"corpus.path={text}", "corpus.sequence_length=32", f"data.cache={tmp_path / 'cache'}"]
    config, options = composed(*corpus, "data.workers=1"), GenerateOptions(prompt_tokens=5, max_new_tokens=4)
    with join_ranks(config.backend) as ranks:
        writer = Writer.of(str(tmp_path / "model"), options, config, ranks)
        found = prompts_of(None, writer, config)
    assert len(found) > 20 and {len(prompt.tokens) for prompt in found[:-1]} == {4, 5}
    assert all(tokenizer(prompt.written)["input_ids"][0] == prompt.tokens[0] == bos[1] for prompt in found)
    assert all(tokenizer.decode(prompt.tokens[1:]) == prompt.written in text.read_text() for prompt in found)


def test_prompt_and_completion_are_one_text(tmp_path: Path) -> None:
    """With the blank between them; and neither ends inside of a character, whose bytes are tokens of their own."""
    tokenizer, text = vocabulary_of("mistral"), "the end of the sea"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    for length in range(1, len(ids)):
        new = Completion(np.array([*ids[length:], tokenizer.eos_token_id]), True, np.zeros(1), np.zeros(1))
        assert tokenizer.decode(ids[:length]) + text_of(new, ids[:length], tokenizer) == text
    path, model = tmp_path / "text.txt", save_model(tmp_path / "model")
    path.write_text("é" * 1999)
    corpus = ["corpus=text", f"corpus.path={path}", "corpus.sequence_length=31", f"data.cache={tmp_path / 'cache'}"]
    line = ["generate", f"model={model}", f"output={tmp_path / 'out.jsonl'}", "max_new_tokens=9", "prompt_tokens=6"]
    assert distill(*line, *corpus, "data.workers=1") == 0
    found = lines_of(tmp_path / "out.jsonl")
    assert len(found) > 50 and all({*line["prompt"]} == {"é"} for line in found)
    assert not any(line["completion"].endswith("\ufffd") for line in found if line["finish_reason"] == "length")


def test_bad_input_is_one_line(model: Path, prompts: Path, tmp_path: Path, capsys: Any) -> None:
    twice = tmp_path / "twice.jsonl"
    twice.write_text('{"id": 1, "text": "a"}\n{"id": 1, "text": "b"}\n')
    (tmp_path / "none.txt").write_text("\n")
    output = tmp_path / "out.jsonl"
    own = ["corpus=jsonl", f"corpus.path={prompts}", "corpus.prompt=prompt", "corpus.field=id"]
    for line, piece in (
        (words(model, twice, output), "the id 1 is there twice"),
        (words(model, tmp_path / "none.txt", output), "not one prompt"),
        (words(model, prompts, tmp_path / "out.txt"), "output="),
        (words(model, prompts, prompts), "exists"),
        ([*words(model, prompts, output)[:-1], "max_new_tokens=600"], "max_new_tokens=600"),
        (["generate", f"input={prompts}", f"output={output}"], "give model=MODEL"),
        (["generate", f"model={model}", f"output={output}", "corpus=chat", f"corpus.path={twice}"], "input=FILE"),
        (["generate", f"model={model}", f"output={output}", *own], "corpus: it has prompts of its own"),
    ):
        assert piece in refused_line(capsys, *line)
    assert not output.exists() and not [*tmp_path.glob("*.parts")]
