"""A causal pair on conversations, from the command line: what is trained, what is scored, and what is refused."""

import json
import os
import random
import re
import shutil
from pathlib import Path

import pytest
from job import distill, metrics, results
from transformers import AutoTokenizer

from distill.commands import predict as predict_command
from distill.commands.prediction import predict
from distill.models.loaded import load_model
from distill.runtime.errors import SettingError

SMALL = ["data.cache=cache", "data.workers=1", "corpus.sequence_length=64", "corpus.heldout=0.2", "precision=fp32"]
SMALL += ["train.steps=4", "evaluate=heldout", "evaluate.max_sequences=16"]
SHORT = (  # as the model reads 64 tokens
    "{% for message in messages %}{{ message['role'][0] + ': ' + message['content'] + eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'a: ' }}{% endif %}"
)
NAMED = ("_name_or_path", "name_or_path", "special_tokens_map_file", "tokenizer_file", "vocab_file")
SHARED = [{"from": "human", "value": "Repeat red"}]
MESSAGES = [{"role": "user", "content": "Repeat red"}]
COLOURS = ["red", "blue", "green", "white", "brown"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Conversations, the same as prompts and completions, and a teacher trained on them."""
    where = tmp_path_factory.mktemp("conversations")
    draw = random.Random(3)
    chats, pairs = [], []
    for _ in range(120):
        said = " ".join(draw.choices(COLOURS, k=draw.randint(2, 8)))
        turns = [{"role": "user", "content": f"Repeat {said}"}, {"role": "assistant", "content": f"{said}."}]
        chats.append(json.dumps({"messages": turns * draw.randint(1, 2)}))
        pairs.append(json.dumps({"prompt": f"Repeat {said}:", "completion": f" {said}."}))
    (where / "chats.jsonl").write_text("\n".join(chats))
    (where / "pairs.jsonl").write_text("\n".join(pairs))
    with pytest.MonkeyPatch.context() as here:
        here.chdir(where)
        size = ["student.config={n_embd:32,n_layer:2,n_head:2}", "corpus.vocab_size=300"]
        chosen = ["corpus=chat", "corpus.path=chats.jsonl", "hydra.run.dir=runs/gpt2_pretrain"]
        assert distill("+recipe=gpt2_pretrain", *chosen, *SMALL, *size) == 0
    return where


@pytest.fixture(autouse=True)
def here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)


def instructed(teacher: Path) -> Path:
    """The teacher with a chat template."""
    shutil.copytree("runs/gpt2_pretrain/student", teacher)
    (teacher / "chat_template.jinja").write_text(SHORT)
    return teacher


def scored(run: Path) -> tuple[int, int]:
    """Positions that perplexity scores, and tokens of the set."""
    described = results(run)["evaluation"]["heldout"]
    return described["positions"], described["tokens"]


def test_distillation_on_conversations(
    folder: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["+recipe=distilgpt2_gutenberg", "corpus=chat", "corpus.path=chats.jsonl", *SMALL]
    command += ["student.layers=[0]", "train.snapshots=[2]", "hydra.run.dir=runs/chat"]
    assert distill(*command) == 0
    run = Path("runs/chat")
    content = results(run)
    assert "of which the assistant's messages count" in content["corpus"]["name"]
    assert "prompts are read and not scored" in content["measures"]["perplexity"]["explanation"]
    asked = [sample["prompt"] for sample in content["samples"]["texts"]]
    assert asked and all(prompt.endswith("<|assistant|>\n") for prompt in asked), asked
    positions, tokens = scored(run)
    assert 0 < positions < 0.6 * tokens
    assert all(line["loss/clm"] > 0 and line["loss/soft"] > 0 for line in metrics(run))
    for student in (run / "student", run / "snapshots" / "step-2"):
        tokenizer = AutoTokenizer.from_pretrained(student)
        asked = tokenizer.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
        assert asked == "<|user|>\nRepeat red\n<|assistant|>\n"
        card = (student / "README.md").read_text()
        (code,) = re.findall(r"## Use\n\n```python\n(.*?)```", card, flags=re.DOTALL)
        assert '{"role": "user"' in code and "It was a long time" not in card
        monkeypatch.chdir(student)
        exec(code, {})
        assert "'role': 'assistant'" in capfd.readouterr().out
        monkeypatch.chdir(folder)
    # Another template is another text: the run cannot go on with it. The same again is finished.
    capfd.readouterr()
    assert distill(*command, "corpus.template='{% for m in messages %}{{ m.content }}{% endfor %}'") == 2
    assert "the corpus has another text now" in capfd.readouterr().err
    assert distill(*command) == 0
    assert "finished and nothing was changed" in capfd.readouterr().err


def test_the_template_of_the_teacher(
    folder: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It writes the training, is in the student's folder, and is what predictions and the card's lines apply."""
    teacher = instructed(folder / "instructed")
    for name, fields in (("config.json", NAMED[:1]), ("tokenizer_config.json", NAMED[1:])):  # as programs leave them
        content = json.loads((teacher / name).read_text()) | dict.fromkeys(fields, f"{folder}/mine")
        (teacher / name).write_text(json.dumps(content))
    command = ["+recipe=distilgpt2_gutenberg", "corpus=chat", f"corpus.path={folder}/chats.jsonl", *SMALL]
    command += [f"teacher.path={teacher}", f"student.path={teacher}", "student=pretrained", "train.snapshots=[2]"]
    assert distill(*command, f"hydra.run.dir={folder}/runs/instructed") == 0
    assert "by the chat template of the tokenizer" in results(Path("runs/instructed"))["corpus"]["name"]
    student = folder / "runs/instructed/student"
    assert (student / "chat_template.jinja").read_text() == SHORT
    private = (os.fsencode(folder), os.fsencode(Path.home()) + b"/")
    for published in (student, student.parent / "snapshots" / "step-2"):
        assert "instructed" in (published / "README.md").read_text()  # a folder alone: whose it is nobody reads there
        for file in published.iterdir():
            assert not any(path in file.read_bytes() for path in private), file
    tokenizer = AutoTokenizer.from_pretrained(student)
    prompt = tokenizer.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    assert prompt == "u: Repeat red<|endoftext|>a: "
    card = (student / "README.md").read_text()
    (code,) = re.findall(r"## Use\n\n```python\n(.*?)```", card, flags=re.DOTALL)
    monkeypatch.chdir(student)
    capfd.readouterr()
    exec(code, {})
    assert "'role': 'assistant'" in capfd.readouterr().out

    (student.parent / "asked.jsonl").write_text(
        "\n".join(json.dumps(each) for each in ({"id": 1, "messages": MESSAGES}, {"conversations": SHARED}))
    )
    monkeypatch.chdir(folder)
    predict_command.run(["model=runs/instructed", "input=runs/instructed/asked.jsonl", "max_new_tokens=5"])
    first, second = map(json.loads, capfd.readouterr().out.splitlines())
    model = load_model(student)
    inputs = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)
    written = model.model.generate(**inputs, max_new_tokens=5, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    assert first["continuation"] == second["continuation"] == tokenizer.decode(written, skip_special_tokens=True)
    assert first["id"] == 1 and first["messages"] == MESSAGES
    raw, same = predict(model, ["Repeat red", {"messages": MESSAGES}], max_new_tokens=5)
    assert same["continuation"] == first["continuation"] != raw["continuation"]
    for wrong, words in (
        ({"messages": [*MESSAGES, {"role": "assistant", "content": "red"}]}, "its last message is the assistant's"),
        ({"messages": "Repeat red"}, "in column messages: no JSON"),
        ({"messages": []}, "messages has no message"),
    ):
        with pytest.raises(SettingError, match=words):
            predict(model, wrong)
    with pytest.raises(SettingError, match="has no chat template, so it answers no messages"):
        model.tokenizer.chat_template = None
        predict(model, {"messages": MESSAGES})


def test_a_student_without_a_template_takes_that_of_its_teacher(folder: Path) -> None:
    """And ends its answers where the teacher ends its own; of the same tokens."""
    teacher = instructed(folder / "answering")
    (teacher / "generation_config.json").write_text('{"eos_token_id": [0, 7]}')
    plain = Path(shutil.copytree("runs/gpt2_pretrain/student", "plain"))
    (plain / "chat_template.jinja").unlink()
    command = ["+recipe=distil_chat", "corpus.path=chats.jsonl", *SMALL, "evaluate.samples=0"]
    command += [f"teacher.path={teacher}", f"student.path={plain}"]
    assert distill(*command, "hydra.run.dir=runs/answering") == 0
    student = Path("runs/answering/student")
    assert (student / "chat_template.jinja").read_text() == SHORT
    ends = json.loads((student / "generation_config.json").read_text())["eos_token_id"]
    assert 7 in ends and AutoTokenizer.from_pretrained(student).eos_token_id in ends
