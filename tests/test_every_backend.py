"""Every recipe that ships for two steps on two ranks of every backend, and teachers of every stored format."""

import importlib.util
import json
import shutil
from pathlib import Path

import pytest
import torch
from job import (
    Shelf,
    assert_alike,
    command,
    composed,
    distill,
    finish,
    interrupted,
    metrics,
    results,
    save_model,
    save_ordered,
)
from labelled import mrpc, squad, table
from safetensors.torch import load_file, save_file
from test_recipes import ALBERT, NAMES, OF_A_CAUSAL_STUDENT, OF_CHATS, OF_SCRATCH

HOROVOD = pytest.mark.skipif(importlib.util.find_spec("horovod") is None, reason="Horovod is not installed")
BACKENDS = ["ddp", "fsdp", pytest.param("horovod", marks=HOROVOD)]
STEPS = ["train.epochs=null", "train.steps=2", "train.batch_size=4", "train.log_every=1", "precision=fp32"]
FORMATS = [torch.float32, torch.float16, torch.bfloat16]


def stored(model: Path, folder: Path, number_format: torch.dtype) -> Path:
    """A saved model in another number format."""
    shutil.copytree(model / "student" if (model / "student").exists() else model, folder)
    weights, file = load_file(folder / "model.safetensors"), folder / "config.json"
    cast = {name: tensor.to(number_format) for name, tensor in weights.items()}
    save_file(cast, folder / "model.safetensors", {"format": "pt"})
    file.write_text(json.dumps(json.loads(file.read_text()) | {"dtype": str(number_format).removeprefix("torch.")}))
    return folder


def text(name: str, shelf: Shelf, folder: Path) -> list[str]:
    """The books of the shelf and a small pair for a recipe, its teacher in half precision as the one that ships."""
    corpus = [*shelf.corpus, "corpus.max_sequences=60"]
    if name == "mixture":
        corpus = [setting for setting in corpus if not setting.startswith("corpus.path")]
        corpus += [f"corpus.sources.{source}.path={shelf.books}" for source in ("wiki", "books")]
        corpus += ["corpus.sources.wiki.kind=gutenberg", "corpus.sources.wiki.hub=null"]
    if name in ("albert_paper", "albert_aws"):
        return [*corpus, ALBERT, "corpus.vocab_size=400", "schedule.warmup_steps=1"]
    if name in OF_SCRATCH:
        return [*corpus, *OF_SCRATCH[name]]
    if name in OF_A_CAUSAL_STUDENT:
        return [*corpus, f"student.path={save_model(folder / 'model')}"]
    saved = {"clm": save_model, "mlm_sop": save_ordered}.get(composed(f"+recipe={name}").objective.task)
    whole = shelf.teacher if saved is None else saved(folder / "whole")
    teacher = stored(whole, folder / "teacher", torch.bfloat16)
    narrow = ["student.intermediate_size=24"] * (name in ("distil_smollm2", "distil_scarce"))
    layers = ["student.layers=[0,1]"] * (name == "distilbert_paper" or bool(narrow))
    return [*corpus, "teacher=pretrained", f"teacher.path={teacher}", *layers, *narrow]


def labelled(name: str, shelf: Shelf, folder: Path) -> list[str]:
    """Labelled examples for a recipe of fine-tuning, and a student in half precision."""
    made = {"squad": squad, "table": table, "glue": mrpc}[name](folder / name)
    more = {"squad": ["corpus.stride=12", "corpus.max_query=8"], "glue": ["corpus.task=mrpc"]}
    more["table"] = ["corpus.text=review", "corpus.label=stars"]
    student = stored(shelf.teacher, folder / "model", torch.bfloat16)
    cache = f"data.cache={folder / 'cache'}"
    return [f"corpus.path={made}", "corpus.sequence_length=32", cache, f"student.path={student}", *more[name]]


def run(folder: Path, backend: str, *arguments: str) -> None:
    finish(command(*arguments, f"backend={backend}", "backend.processes=2", f"hydra.run.dir={folder}"))
    assert metrics(folder)[-1]["step"] == 2
    assert results(folder)["student"]["parameters"] > 0 and (folder / "student" / "model.safetensors").is_file()


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", [name for name in NAMES if name not in OF_CHATS])
def test_a_recipe_on_two_ranks(name: str, backend: str, shelf: Shelf, tmp_path: Path) -> None:
    make = labelled if name in ("squad", "table", "glue") else text
    settings = [f"+recipe={name}", *STEPS, *make(name, shelf, tmp_path)]
    if name == "albert_aws" and backend == "fsdp":  # of which a sharded student has neither
        settings += ["backend.compression=none", "optimizer.clip_each_rank=false"]
    if name == "distil_scarce":
        settings += ["evaluate.every_steps=1", *["backend.shard_teacher=false"] * (backend == "fsdp")]
    run(tmp_path / "run", backend, *settings)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["single", "fsdp"])
def test_compiled_blocks_go_on_after_a_kill(backend: str, shelf: Shelf, tmp_path: Path) -> None:
    settings = ["+recipe=distilbert_gutenberg", *text("distilbert_gutenberg", shelf, tmp_path), "precision=bf16"]
    settings += ["precision.compile=true", "train.epochs=null", "train.steps=4", "train.save_every=1"]
    settings += [f"backend={backend}", *["backend.processes=2"] * (backend == "fsdp")]
    said = finish(command(*settings, f"hydra.run.dir={tmp_path / 'run'}"))
    assert "recompile_limit" not in said
    finish(command(*settings, f"hydra.run.dir={interrupted(tmp_path / 'run', tmp_path / 'again')}"))
    assert_alike(tmp_path / "run", tmp_path / "again", atol=0)


@pytest.mark.parametrize(
    "teacher",
    [pytest.param(format, marks=[] if format == torch.bfloat16 else pytest.mark.slow) for format in FORMATS],
    ids=str,
)
def test_a_teacher_of_any_format_on_one_rank_of_fsdp(teacher: torch.dtype, shelf: Shelf, tmp_path: Path) -> None:
    """DistilBERT from layers that are still to be found: the default pair, and the student of a single process."""
    settings = pair(teacher, shelf, tmp_path)
    for backend in ("single", "fsdp"):
        assert distill(*settings, f"backend={backend}", f"hydra.run.dir={tmp_path / backend}") == 0
    assert_alike(tmp_path / "single", tmp_path / "fsdp")


def pair(teacher: torch.dtype, shelf: Shelf, folder: Path) -> list[str]:
    """A pair with the terms of the paper, of which the cosine asks both models for their sizes."""
    path = stored(shelf.teacher, folder / "teacher", teacher)
    models = ["objective=distilbert", "teacher=pretrained", f"teacher.path={path}", "student.layers=auto"]
    return ["+recipe=distilbert_gutenberg", *STEPS, *shelf.corpus, "corpus.max_sequences=60", *models]
