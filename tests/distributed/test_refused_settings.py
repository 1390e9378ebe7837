"""Settings that a divided model cannot have: each is refused with one line that names setting, value and cure."""

from typing import Any

import pytest
from job import composed

from distill.config.settings import BackendConfig, Config
from distill.distributed import join_ranks
from distill.runs.check import check
from distill.runtime.errors import SettingError

BAD: dict[str, tuple[list[str], list[str]]] = {
    "a student of ddp": (["backend=ddp", "backend.shard_student=true"], ["backend.shard_student=true", "backend=fsdp"]),
    "a teacher of ddp": (["backend=ddp", "backend.shard_teacher=true"], ["backend.shard_teacher=true", "backend=fsdp"]),
    "switched off with ddp": (
        ["backend=ddp", "backend.shard_teacher=false"],
        ["backend.shard_teacher=false", "backend=fsdp"],
    ),
    "offload of ddp": (["backend=ddp", "backend.offload_teacher=true"], ["backend.offload_teacher=true"]),
    "offload of a whole teacher": (
        ["backend=fsdp", "backend.offload_teacher=true", "backend.shard_teacher=false"],
        ["backend.offload_teacher=true", "backend.shard_teacher=false"],
    ),
    "clipping before the exchange": (
        ["backend=fsdp", "optimizer.clip_each_rank=true"],
        ["optimizer.clip_each_rank=true", "backend=ddp"],
    ),
    "compression": (["backend=fsdp", "backend.compression=bf16"], ["backend.compression=bf16", "backend=ddp"]),
    "rings": (["backend=fsdp", "backend.rings=2"], ["backend.rings=2", "backend.shard_student=false"]),
}


def config_of(*more: str) -> Config:
    return composed("+recipe=distilbert_gutenberg", "teacher=pretrained", "teacher.path=x", *more)


@pytest.mark.parametrize("case", BAD)
def test_bad_settings(case: str) -> None:
    arguments, words = BAD[case]
    with pytest.raises(SettingError) as error:
        check(config_of(*arguments))
    text = str(error.value)
    assert error.value.status == 2 and "\n" not in text
    assert all(word in text for word in words), text


@pytest.mark.parametrize(
    "arguments",
    [
        ["backend=fsdp"],
        ["backend=fsdp", "backend.offload_teacher=true", "backend.device=cuda"],
        # What only one of the two models does not have.
        ["backend=fsdp", "backend.shard_student=false", "backend.compression=bf16", "backend.rings=2"],
    ],
)
def test_good_settings(arguments: list[str]) -> None:
    check(config_of(*arguments))


def test_offload_on_a_processor(monkeypatch: Any) -> None:
    monkeypatch.delenv("RANK", raising=False)
    settings = BackendConfig(name="fsdp", device="cpu", offload_teacher=True)
    with pytest.raises(SettingError, match=r"backend.offload_teacher=true with backend.device=cpu") as error:
        join_ranks(settings)
    assert "\n" not in str(error.value)
