"""Golden runs: losses, scores and weights of small runs of every kind, written down in golden.json.

A change that moves one of them has to say so. Runs are written down anew, each done twice and the same both times, by

    python tests/test_golden.py --record            # all of them
    python tests/test_golden.py --record smoke ddp  # these two; the others stay as they are

Losses and scores are compared everywhere. Processors round differently, hence the tolerance: a factor in a loss,
another mask, order or schedule moves them a hundred times further. Where a machine is of the kind that recorded a run,
its student is the same bit for bit. The weights of teachers follow from their names, and their tokenizers are not
trained, so that a run shows what its own kind does.
"""

import argparse
import hashlib
import importlib.util
import json
import random
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from chat_templates import FAMILIES
from demo_scores import shortcomings
from families import depth_fields, make_family
from job import ADJECTIVES, NOUNS, VERBS, command, finish, library, metrics, results, save_model, save_ordered, weights
from labelled import squad, table
from safetensors.torch import load_file, save_file
from transformers import AutoModelForQuestionAnswering, AutoModelForSequenceClassification, AutoTokenizer
from vocabularies import special_ids

FILE = Path(__file__).with_name("golden.json")
TOLERANCE = 1e-3
OF_DRAWS = 5e-3  # on another processor, whose rounding moves a draw of the cache to the next token
STEPS = 6  # of the small runs
PLAIN = ["precision=fp32", "backend.threads=1"]
SMALL = [*PLAIN, "corpus.sequence_length=32", f"train.steps={STEPS}", "train.log_every=1", "data.workers=1"]
SMALL += ["train.batch_size=4", "train.sequences_per_step=8", "evaluate.max_sequences=16"]
TEXT = [*SMALL, "corpus.heldout=0.1", "corpus.max_sequences=64", "train.epochs=null", "evaluate.sets=[heldout]"]
MASKED = [*TEXT, "evaluate.pseudo_perplexity.fraction=0.05"]
LABELLED = [*SMALL, "train.epochs=null", "optimizer.lr=2e-3"]
DISTILBERT = ["+recipe=distilbert_gutenberg", *MASKED, "objective=distilbert", "optimizer.lr=2e-3"]
DISTILBERT += ["student.layers=[0,2]", "student.dropout=0.1"]


def redraw(model: Path) -> Path:
    """Other weights for a saved model, drawn for the name of each: bit for bit the same on every machine.

    Those of torch.randn are rounded as the processor does it, and what a sampled cache draws follows from the digest of
    its teacher.
    """
    file = model / "model.safetensors"
    tensors = load_file(file)
    for name, tensor in tensors.items():
        draw = np.random.default_rng(int(hashlib.sha256(name.encode()).hexdigest()[:8], 16))
        centre = 1.0 if re.search(r"(norm|ln_.)\.weight$", name.lower()) else 0.0
        tensor.copy_(torch.from_numpy(centre + 0.5 * (draw.random(tensor.shape) - 0.5)))
    save_file(tensors, file, {"format": "pt"})
    return model


def masked_teacher(root: Path, name: str = "teacher", **fields: Any) -> Path:
    """A BERT of four layers."""
    return redraw(save_model(root / name, "bert", max_position_embeddings=512, **fields))


def books(root: Path) -> list[str]:
    return [f"corpus.path={library(root / 'books')}"]


def pair(root: Path) -> list[str]:
    """Books, and a teacher for the recipe of DistilBERT."""
    return [*books(root), "teacher=pretrained", f"teacher.path={masked_teacher(root)}"]


def sentence(draw: random.Random) -> str:
    return f"The {draw.choice(ADJECTIVES)} {draw.choice(NOUNS)} {draw.choice(VERBS)} the {draw.choice(NOUNS)}."


def write_lines(file: Path, records: list[dict[str, Any]]) -> Path:
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return file


def main_job(_: Path) -> list[str]:
    """As `make demo`, whose teacher and books ship with the package, for 60 steps."""
    settings = [*PLAIN, "train.epochs=null", "train.steps=60", "train.log_every=10", "evaluate.max_sequences=64"]
    return ["+recipe=distilbert_gutenberg", *settings]


def smoke(_: Path) -> list[str]:
    return ["+recipe=smoke", *PLAIN, "train.log_every=4"]


def distilbert(root: Path) -> list[str]:
    """Soft targets everywhere, masked words and hidden states, with dropout, two micro-batches a step."""
    return [*DISTILBERT, *pair(root)]


def intermediate(root: Path) -> list[str]:
    """Hidden states and attention scores of several layers."""
    return [*DISTILBERT, *pair(root), "student=layers", "objective=tinybert", "objective.soft.weight=1"]


def pretrain(root: Path) -> list[str]:
    """A BERT from scratch, and its vocabulary."""
    size = "{hidden_size:32,num_hidden_layers:2,num_attention_heads:2,intermediate_size:64}"
    return ["+recipe=bert_pretrain", *MASKED, *books(root), "corpus.vocab_size=400", f"student.config={size}"]


def causal(root: Path) -> list[str]:
    """GPT-2 on short documents, several to a sequence, that do not see each other."""
    draw = random.Random(1)
    texts = [{"text": " ".join(sentence(draw) for _ in range(draw.randint(1, 3)))} for _ in range(120)]
    corpus = ["corpus=jsonl", f"corpus.path={write_lines(root / 'texts.jsonl', texts)}", "corpus.sequence_length=128"]
    model = redraw(save_model(root / "teacher", "gpt2", max_position_embeddings=128))
    layers = [f"teacher.path={model}", "student.layers=[0,2]", "corpus.cross_documents=true"]
    return ["+recipe=distilgpt2_gutenberg", *TEXT, *corpus, *layers]


def chat(root: Path) -> list[str]:
    """Qwen2 on conversations, whose template marks what counts."""
    draw, talks = random.Random(2), []
    for _ in range(120):
        roles = ["user", "assistant"] * draw.randint(1, 2)
        talks.append({"messages": [{"role": role, "content": sentence(draw)} for role in roles]})
    paths, tokenizer = [], FAMILIES["marked"]
    for name, layers in (("teacher", 4), ("student", 2)):
        fields = {**special_ids(tokenizer), "max_position_embeddings": 256}
        make_family("qwen2", **{**depth_fields("qwen2", layers), **fields}).save_pretrained(root / name)
        tokenizer.save_pretrained(root / name)
        paths.append(f"{name}.path={redraw(root / name)}")
    corpus = [f"corpus.path={write_lines(root / 'talks.jsonl', talks)}", "corpus.sequence_length=256"]
    return ["+recipe=distil_chat", *TEXT, *corpus, *paths, "optimizer.lr=2e-3"]


def albert(root: Path) -> list[str]:
    """ALBERT by masked words and the order of sentences, both of them distilled."""
    path = f"teacher.path={redraw(save_ordered(root / 'teacher'))}"
    return ["+recipe=distilalbert_gutenberg", *MASKED, *books(root), path]


def albert_lamb(root: Path) -> list[str]:
    """ALBERT from scratch as its paper trained it, and its vocabulary."""
    size = "embedding_size:16,hidden_size:32,num_hidden_layers:2,num_attention_heads:2,intermediate_size:64"
    more = ["corpus.vocab_size=400", "schedule.warmup_steps=2", f"student.config={{{size}}}"]
    return ["+recipe=albert_paper", *MASKED, *books(root), *more]


def fine_tuned(root: Path, kind: Any, student: Path, **fields: Any) -> list[str]:
    """A teacher for labelled examples, with the body that the student starts from and a head of its own."""
    torch.manual_seed(0)
    kind.from_pretrained(student, **fields).save_pretrained(root / "teacher")
    AutoTokenizer.from_pretrained(student).save_pretrained(root / "teacher")
    return ["teacher=pretrained", f"teacher.path={redraw(root / 'teacher')}", f"student.path={student}"]


def classes(root: Path) -> list[str]:
    labels = {"id2label": {0: "no", 1: "yes"}, "label2id": {"no": 0, "yes": 1}}
    models = fine_tuned(root, AutoModelForSequenceClassification, masked_teacher(root, "student"), **labels)
    data = [f"corpus.path={table(root / 'reviews')}", "corpus.text=review", "corpus.label=stars"]
    return ["+recipe=table", *LABELLED, *data, "objective=distil_classes", *models]


def spans(root: Path) -> list[str]:
    models = fine_tuned(root, AutoModelForQuestionAnswering, masked_teacher(root, "student"))
    data = [f"corpus.path={squad(root / 'squad')}", "corpus.stride=24", "corpus.max_query=24"]
    return ["+recipe=squad", *LABELLED, *data, "corpus.sequence_length=96", "objective=distil_spans", *models]


def cache(root: Path) -> list[str]:
    """What the teacher says is drawn once, before training."""
    static = ["objective.masking.static=true", "objective.cosine.weight=0"]
    return [*DISTILBERT, *pair(root), *static, "teacher.cache.top_k=4", "teacher.cache.sampled=12"]


def several(root: Path) -> list[str]:
    """The mean of two teachers, of which one has other matrices and counts twice."""
    second = masked_teacher(root, "second", num_hidden_layers=2)
    members = [f"+teacher.members.a.path={masked_teacher(root)}", f"+teacher.members.b={{path:{second},weight:2.0}}"]
    return [*DISTILBERT, *books(root), "teacher=several", *members]


def ranks(backend: str, *more: str) -> Callable[[Path], list[str]]:
    return lambda root: [*DISTILBERT, *pair(root), f"backend={backend}", "backend.processes=2", *more]


MADE = (main_job, smoke, distilbert, intermediate, pretrain, causal, chat, albert, albert_lamb, classes, spans, cache)
RUNS: dict[str, Callable[[Path], list[str]]] = {make.__name__.removesuffix("_job"): make for make in (*MADE, several)}
RUNS |= {"ddp": ranks("ddp"), "fsdp": ranks("fsdp"), "horovod": ranks("horovod", "backend.rings=2")}
MARKS = {
    "main": pytest.mark.slow,
    "horovod": pytest.mark.skipif(importlib.util.find_spec("horovod") is None, reason="Horovod is not installed"),
}


def machine() -> str:
    """What decides how sums are rounded."""
    wanted = {"cpu family": "", "model": "", "model name": "unknown"}
    info = Path("/proc/cpuinfo")
    for line in info.read_text().splitlines() if info.exists() else ():
        name, _, value = line.partition(":")
        if name.strip() in wanted:
            wanted[name.strip()] = value.strip()
    processor = f"{wanted['model name']}, family {wanted['cpu family']}, model {wanted['model']}"
    return f"{processor}, {torch.backends.cpu.get_cpu_capability()}, torch {torch.__version__}"


def digest(tensors: dict[str, torch.Tensor]) -> str:
    """The same for the same weights, in whatever file they stand."""
    found = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        found.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        found.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def measure(name: str, root: Path) -> dict[str, Any]:
    """Do a run in an empty folder; give what is written down of it."""
    folder = root / "run"
    finish(command(*RUNS[name](root), f"data.cache={root / 'cache'}", f"hydra.run.dir={folder}"))
    lines, content = metrics(folder), results(folder)
    names = [key for key in sorted(lines[0]) if key.startswith("loss/") or key == "grad_norm"]
    scores = {
        f"{model} {measure} {dataset}": value
        for model in ("teacher", "student")
        for measure in content["measures"]
        for dataset, value in ((content[model] or {}).get(measure) or {}).items()
    }
    for dataset, values in (content["agreement"] or {}).items():
        scores |= {f"agreement {measure} {dataset}": value for measure, value in values.items()}
    return {
        "losses": {key: [_rounded(line[key]) for line in lines] for key in ("step", *names)},
        "scores": {key: _rounded(value) for key, value in sorted(scores.items())},
        "sha256": digest(weights(folder)),
    }


def _rounded(value: float) -> float:
    return value if isinstance(value, int) else float(f"{value:.8g}")


@pytest.mark.parametrize("name", [pytest.param(name, marks=MARKS.get(name, ())) for name in RUNS])
def test_a_run_is_the_one_written_down(name: str, tmp_path: Path) -> None:
    written, found = json.loads(FILE.read_text())[name], measure(name, tmp_path)
    assert found["losses"].keys() == written["losses"].keys(), found
    tolerance = OF_DRAWS if name == "cache" else TOLERANCE
    for key, values in written["losses"].items():
        assert found["losses"][key] == pytest.approx(values, rel=tolerance), (key, found)
    assert found["scores"] == pytest.approx(written["scores"], rel=tolerance), found
    if written["machine"] == machine():
        assert found["sha256"] == written["sha256"], f"other weights; losses and scores are within {tolerance}: {found}"


@pytest.mark.parametrize(
    ("student", "teacher", "failed"),
    [(18.79, 17.01, 0), (19.3, 17.2, 1), (19.1, 16.8, 1), (30.0, 17.0, 2), (float("nan"), 17.0, 2)],
)
def test_a_demo_that_is_worse_than_promised_fails(student: float, teacher: float, failed: int) -> None:
    scores = {name: {"perplexity": {"heldout": value}} for name, value in (("student", student), ("teacher", teacher))}
    assert len(shortcomings(scores)) == failed


def record(names: list[str]) -> None:
    """Do each run twice and write it down. Raises AssertionError where the two differ; what was written stays."""
    for name in names:
        found = []
        for _ in range(2):
            with tempfile.TemporaryDirectory() as root:
                found.append(measure(name, Path(root)))
        assert found[0] == found[1], f"{name} is not the same twice: {found}"
        before = json.loads(FILE.read_text()) if FILE.exists() else {}
        entries = before | {name: {"machine": machine(), **found[0]}}
        text = json.dumps({each: entries[each] for each in RUNS if each in entries}, indent=1)
        text = re.sub(r"\[[^]]*\]", lambda found: "[" + " ".join(found[0][1:-1].split()) + "]", text)  # a list a line
        FILE.write_text(text + "\n")
        same = before.get(name, {}).get("sha256") == found[0]["sha256"]
        print(f"{name}: {'the same weights as before' if same else 'written down'}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Write golden runs down anew.")
    parser.add_argument("--record", nargs="*", choices=RUNS, required=True, metavar="NAME", help="none: all of them")
    record(parser.parse_args().record or list(RUNS))
