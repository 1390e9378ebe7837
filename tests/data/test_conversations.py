"""A causal pair on conversations, from the command line: what is trained, what is scored, and what is refused."""

import json
import os
import random
import re
import shutil
from pathlib import Path

import pytest
from job import distill, metrics, results
from reading import write_lines
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
MESSAGES = [{"role": "user", "content": "Repeat red"}]
COLOURS = ["red", "blue", "green", "white", "brown"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Conversations, and a teacher trained on them."""
    where = tmp_path_factory.mktemp("conversations")
    draw = random.Random(3)
    chats = []
    for _ in range(120):
        said = " ".join(draw.choices(COLOURS, k=draw.randint(2, 8)))
        turns = [{"role": "user", "content": f"Repeat {said}"}, {"role": "assistant", "content": f"{said}."}]
        chats.append({"messages": turns * draw.randint(1, 2)})
    write_lines(where / "chats.jsonl", chats)
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


def said_by_the_card(student: Path, capfd: pytest.CaptureFixture[str]) -> str:
    """What the lines of code of a model card print."""
    (code,) = re.findall(r"## Use\n\n```python\n(.*?)```", (student / "README.md").read_text(), flags=re.DOTALL)
    assert '{"role": "user"' in code
    with pytest.MonkeyPatch.context() as there:
        there.chdir(student)
        capfd.readouterr()
        exec(code, {})
    return capfd.readouterr().out


def test_distillation_on_conversations(capfd: pytest.CaptureFixture[str]) -> None:
    command = ["+recipe=distilgpt2_gutenberg", "corpus=chat", "corpus.path=chats.jsonl", *SMALL]
    command += ["student.layers=[0]", "train.snapshots=[2]", "hydra.run.dir=runs/chat"]
    assert distill(*command) == 0
    run = Path("runs/chat")
    content = results(run)
    assert "of which the assistant's messages count" in content["corpus"]["name"]
    asked = [sample["prompt"] for sample in content["samples"]["texts"]]
    assert asked and all(prompt.endswith("<|assistant|>\n") for prompt in asked), asked
    scored = content["evaluation"]["heldout"]
    assert 0 < scored["positions"] < 0.6 * scored["tokens"], "prompts are read and not scored"
    assert all(line["loss/clm"] > 0 and line["loss/soft"] > 0 for line in metrics(run))
    for student in (run / "student", run / "snapshots" / "step-2"):
        tokenizer = AutoTokenizer.from_pretrained(student)
        prompt = tokenizer.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
        assert prompt == "<|user|>\nRepeat red\n<|assistant|>\n"
        assert "'role': 'assistant'" in said_by_the_card(student, capfd)
    # Another template is another text: the run cannot be resumed with it.
    assert distill(*command, "corpus.template='{% for m in messages %}{{ m.content }}{% endfor %}'") == 2
    assert "the corpus has another text now" in capfd.readouterr().err


def test_the_template_of_the_teacher(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """It writes the training, is in the student's folder, and is what predictions and the card's lines apply."""
    teacher = instructed(folder / "instructed")
    for name, fields in (("config.json", NAMED[:1]), ("tokenizer_config.json", NAMED[1:])):  # as programs leave them
        content = json.loads((teacher / name).read_text()) | dict.fromkeys(fields, f"{folder}/mine")
        (teacher / name).write_text(json.dumps(content))
    command = ["+recipe=distilgpt2_gutenberg", "corpus=chat", f"corpus.path={folder}/chats.jsonl", *SMALL]
    command += [f"teacher.path={teacher}", f"student.path={teacher}", "student=pretrained", "train.snapshots=[2]"]
    run = folder / "runs/instructed"
    assert distill(*command, f"hydra.run.dir={run}") == 0
    assert "by the chat template of the tokenizer" in results(run)["corpus"]["name"]
    private = (os.fsencode(folder), os.fsencode(Path.home()) + b"/")
    for published in (run / "student", run / "snapshots" / "step-2"):
        assert (published / "chat_template.jinja").read_text() == SHORT
        for file in published.iterdir():
            assert not any(path in file.read_bytes() for path in private), file
    assert "'role': 'assistant'" in said_by_the_card(run / "student", capfd)
    shared = [{"from": "human", "value": "Repeat red"}]
    write_lines(run / "asked.jsonl", [{"id": 1, "messages": MESSAGES}, {"conversations": shared}])
    predict_command.run([f"model={run}", f"input={run}/asked.jsonl", "max_new_tokens=5"])
    first, second = map(json.loads, capfd.readouterr().out.splitlines())
    model = load_model(run / "student")
    inputs = model.tokenizer("u: Repeat red<|endoftext|>a: ", return_tensors="pt", add_special_tokens=False)
    answer = model.model.generate(**inputs, max_new_tokens=5, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    assert first["continuation"] == second["continuation"] == model.tokenizer.decode(answer, skip_special_tokens=True)
    assert (first["id"], first["messages"]) == (1, MESSAGES)
    raw, same = predict(model, ["Repeat red", {"messages": MESSAGES}], max_new_tokens=5)
    assert same["continuation"] == first["continuation"] != raw["continuation"]
    with pytest.raises(SettingError, match="its last message is the assistant's"):
        predict(model, {"messages": [*MESSAGES, {"role": "assistant", "content": "red"}]})


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
