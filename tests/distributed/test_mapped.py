"""Models are divided as they are read: no rank ever has the whole in memory, and what was changed is never lost."""

import ctypes
import gc
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed import run_ranks
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from vocabularies import vocabulary_of

from distill.config.settings import BackendConfig, TeacherConfig
from distill.distributed import join_ranks
from distill.distributed.mapped import parameters_on_meta, release
from distill.distributed.shard import whole
from distill.models.kind import CAUSAL
from distill.models.load import load_pretrained
from distill.models.loaded import model_digest
from distill.models.teacher import load_teacher
from distill.runs.setup import blocks_of

MB = 1 << 20
LAYERS = 12


def resident(kind: str) -> float:
    """MB of this process: RssAnon is its own memory, RssFile holds pages of files, VmHWM is the most of both."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{kind}:")) * 1024 / MB


def save(folder: Path, name: str, **fields: Any) -> Path:
    """A causal model of about 200 MB in bf16, in one file or several, its output embedding tied or not."""
    torch.manual_seed(0)
    tied, size = fields.pop("tied", True), fields.pop("max_shard_size", "50GB")
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "num_attention_heads": 8, "vocab_size": 30_000}
    sizes |= {"num_hidden_layers": LAYERS, "max_position_embeddings": 32, **fields}
    model = LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=tied)).bfloat16()
    model.save_pretrained(folder / name, max_shard_size=size)
    return folder / name


def as_on_the_hub(folder: Path, saved: Path) -> Path:
    """The same as huggingface_hub keeps it: links to files whose names say nothing."""
    snapshot, blobs = folder / "models--x--y" / "snapshots" / "0f", folder / "models--x--y" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, path in enumerate(sorted(saved.iterdir())):
        shutil.copy(path, blobs / f"{number:064x}")
        (snapshot / path.name).symlink_to(blobs / f"{number:064x}")
    return snapshot


def memory_of(path: Path, ranks: Any, trained: bool) -> dict[str, float]:
    """MB that reading, hashing and dividing a model have taken, each counted from before it was read."""
    # What the model before it held goes back to the system first: given back later, it would be taken from this count.
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM counts from here
    before = {kind: resident(kind) for kind in ("RssAnon", "RssFile", "VmHWM")}
    found = {"bytes": sum(file.stat().st_size for file in path.glob("*.safetensors")) / MB}

    def note(after: str) -> None:
        kinds = {"own": "RssAnon", "of files": "RssFile", "most": "VmHWM"}
        found.update({f"{after}, {name}": resident(kind) - before[kind] for name, kind in kinds.items()})

    model = load_pretrained("teacher.path", str(path), CAUSAL, mapped=True)
    note("read")
    if not trained:
        model_digest(model)
        note("hashed")
    ranks.shard(model, *blocks_of(model), trained=trained)
    note("divided")
    return found


def memory_of_whole(path: Path) -> dict[str, float]:
    """MB of this process's own, and of the files, once a teacher for a GPU is read and checked."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    before = {kind: resident(kind) for kind in ("RssAnon", "RssFile")}
    model, _, _ = load_teacher(TeacherConfig(path=str(path)), CAUSAL, gpu=torch.device("cpu"))
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    found = {kind: resident(kind) - before[kind] for kind in before}
    assert {weight.dtype for weight in model.parameters()} == {torch.bfloat16}
    return found | {"bytes": sum(weight.nbytes for weight in model.parameters()) / MB}


def divided_tensors(path: Path, ranks: Any) -> bool:
    """Whether the parts of all ranks are, put together, what the files hold."""
    model = load_pretrained("teacher.path", str(path), CAUSAL, mapped=True)
    ranks.shard(model, *blocks_of(model), trained=False)
    values = {name: whole(parameter.detach()) for name, parameter in model.named_parameters()}
    saved = {name: each for file in path.glob("*.safetensors") for name, each in load_file(file).items()}
    assert values.keys() == saved.keys()
    return all(torch.equal(saved[name], value) and value.dtype == saved[name].dtype for name, value in values.items())


def on_a_rank(large: dict[str, Path], small: dict[str, Path]) -> dict[str, Any]:
    torch.set_num_threads(1)
    ranks = join_ranks(BackendConfig(name="fsdp", device="cpu", timeout=60.0))
    # What is loaded and cached once, by the first model, is not counted.
    found: dict[str, Any] = {name: divided_tensors(path, ranks) for name, path in small.items()}
    for name, path in large.items():
        found[f"memory {name}"] = memory_of(path, ranks, trained=False)
    found["memory whole"] = memory_of_whole(large["one file"])
    found["memory trained"] = memory_of(large["one file"], ranks, trained=True)
    ranks.close()
    return found


SMALL = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 101, "num_hidden_layers": 3}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("models")
    large = {"one file": save(folder, "large")}
    vocabulary_of("llama").save_pretrained(large["one file"])
    large["as on the Hub"] = as_on_the_hub(folder, large["one file"])
    small = {
        "tied": save(folder, "tied", **SMALL),
        "untied": save(folder, "untied", tied=False, **SMALL),
        "several files": save(folder, "files", tied=False, max_shard_size="60KB", **SMALL),
    }
    assert len(list(small["several files"].glob("*.safetensors"))) > 3
    small["as on the Hub"] = as_on_the_hub(folder / "small", small["several files"])
    return run_ranks(2, folder / "out", on_a_rank, large, small)


@pytest.mark.parametrize("name", ["tied", "untied", "several files", "as on the Hub"])
def test_parts_are_those_of_the_files(name: str, ranks: list[dict[str, Any]]) -> None:
    assert all(rank[name] for rank in ranks)


@pytest.mark.parametrize("name", ["one file", "as on the Hub"])
def test_a_rank_holds_its_part_alone(name: str, ranks: list[dict[str, Any]]) -> None:
    """A model of 120 MB in bf16: 60 MB for each of two ranks, and beside them no more than one block or embedding."""
    for rank in ranks:
        found = rank[f"memory {name}"]
        size = found["bytes"]
        assert size > 100
        assert found["read, own"] < 0.1 * size and found["read, of files"] < 0.2 * size, found
        assert found["hashed, of files"] < 0.2 * size, found
        assert found["divided, own"] < 0.65 * size and found["divided, of files"] < 0.2 * size, found


def test_ranks_with_a_gpu_each_read_a_teacher_once_for_all(ranks: list[dict[str, Any]]) -> None:
    """What a rank holds until its GPU does are pages of the file, which all of a host have in common."""
    for found in (rank["memory whole"] for rank in ranks):
        assert found["RssAnon"] < 0.1 * found["bytes"] and found["RssFile"] > 0.8 * found["bytes"], found


def test_a_student_is_divided_in_fp32(ranks: list[dict[str, Any]]) -> None:
    """From bf16 files: its part takes as much as the whole of the files, and no more at any time but for a block."""
    for rank in ranks:
        found = rank["memory trained"]
        assert 0.8 * found["bytes"] < found["divided, own"] < 1.2 * found["bytes"], found
        assert found["divided, most"] < 2 * found["bytes"], found


def test_what_was_changed_is_never_lost(tmp_path: Path) -> None:
    """As by a callable of the user's that reads a model and works on its weights; a single number of them, too."""
    model = AutoModelForCausalLM.from_pretrained(save(tmp_path, "saved", **SMALL), dtype="auto")
    weight = model.get_output_embeddings().weight
    with torch.no_grad():
        weight[57, 3] = 9.0
    release(weight)
    assert weight[57, 3] == 9
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    digest = model_digest(model)
    for parameter in model.parameters():
        release(parameter)
        assert not parameter.any()
    assert model_digest(model) == digest


def test_memory_that_is_no_file_is_left(tmp_path: Path) -> None:
    save_file({"a": torch.full((1 << 16,), 3.0)}, tmp_path / "a.safetensors")
    tensors = [torch.full((1 << 16,), 3.0), torch.empty(0), torch.tensor(3.0)]
    for tensor in (*tensors, load_file(tmp_path / "a.safetensors")["a"]):
        release(tensor)
        assert (tensor == 3).all()


def test_modules_without_memory_have_their_buffers() -> None:
    with parameters_on_meta():
        made = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    assert all(parameter.is_meta for parameter in made.parameters())
    assert not any(buffer.is_meta for buffer in made.buffers())
    assert not nn.Linear(3, 4).weight.is_meta
