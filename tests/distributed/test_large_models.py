"""A 70B teacher and a 7B student on eight ranks, as one of them holds them: real modules of tensors without memory."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed import run_ranks
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from distill.config.settings import OptimizerConfig
from distill.distributed import shard
from distill.distributed.fsdp import Fsdp
from distill.models.language_model import LanguageModel, OutputSpec
from distill.objective.chunked import GPU
from distill.optim import updates
from distill.runs.setup import blocks_of

SIZE, GB = 8, 1e9
SIZES = {"vocab_size": 128_256, "tie_word_embeddings": False, "num_key_value_heads": 8}
LARGE = {"hidden_size": 8192, "intermediate_size": 28_672, "num_hidden_layers": 80, "num_attention_heads": 64}
SMALL = {"hidden_size": 4096, "intermediate_size": 11_008, "num_hidden_layers": 32, "num_attention_heads": 32}


def bytes_of(tensors: Any) -> float:
    """GB of this rank's parts."""
    return sum(shard.local(tensor).nbytes for tensor in tensors) / GB


def held() -> dict[str, float]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=SIZE)
    ranks: Any = SimpleNamespace(mesh=init_device_mesh("cpu", (SIZE,)), _offloads=False)
    with pytest.MonkeyPatch.context() as patch, FakeTensorMode(allow_non_fake_inputs=True):
        patch.setattr(PreTrainedModel, "init_weights", lambda _: None)
        patch.setattr(shard, "release", lambda _: None)  # no tensor has an address
        teacher = LlamaForCausalLM._from_config(LlamaConfig(**LARGE, **SIZES), dtype=torch.bfloat16)
        student = LlamaForCausalLM(LlamaConfig(**SMALL, **SIZES)).train()
        found = {"published": bytes_of(teacher.parameters()), "student": bytes_of(student.parameters())}
        for model in (teacher.eval().requires_grad_(False), student):
            Fsdp.shard(ranks, model, *blocks_of(model), trained=model is student)
        reader, ids = LanguageModel(student, "bf16"), {"input_ids": torch.zeros(1, 64, dtype=torch.long)}
        reader.logits(reader(ids, None, OutputSpec(head=True)).head_rows).sum().backward()
        optimizer = updates.build(student, OptimizerConfig())
        optimizer.step()
        parts = {"teacher": teacher.parameters(), "weights": student.parameters()}
        parts["gradients"] = [weight.grad for weight in student.parameters()]
        parts["optimizer"] = [each for states in optimizer.state.values() for each in states.values()]
        return found | {name: bytes_of(each) for name, each in parts.items()}


def test_a_rank_holds_an_eighth_of_both_models(tmp_path: Path) -> None:
    (found,) = run_ranks(1, tmp_path, held)
    teacher, student = found.pop("published"), found.pop("student")
    assert teacher > 140 and student > 26, "70 B in bf16, 7 B in fp32"
    whole = {"teacher": teacher, "weights": student, "gradients": student, "optimizer": 2 * student}
    for name, size in whole.items():
        assert found[name] == pytest.approx(size / SIZE, rel=0.01), name
    assert sum(found.values()) + GPU.budget / GB < 40, "with a chunk of logits"
