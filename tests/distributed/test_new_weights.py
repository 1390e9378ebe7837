"""New weights of a student that is to be divided: the same numbers as in memory, and never all of them in it."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed import run_ranks
from tiny import make_tokenizer

from distill.config.settings import BackendConfig, StudentConfig
from distill.distributed import join_ranks
from distill.distributed.weights_file import parameters_in_file
from distill.models.kind import CAUSAL, MASKED
from distill.models.student import make_student
from distill.runs.setup import weights_on_disk
from distill.runtime.errors import SettingError

MB = 1 << 20
LARGE = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 4}
SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
FAMILIES: dict[str, dict[str, Any]] = {
    "bert": SMALL,
    "albert": SMALL | {"embedding_size": 8},
    "modernbert": SMALL,
    "gpt2": {"n_embd": 16, "n_layer": 2, "n_head": 2},
    "llama": SMALL | {"tie_word_embeddings": True},
}


def student(family: str, fields: dict[str, Any], init: str = "random") -> Any:
    torch.manual_seed(5)
    kind = CAUSAL if family in ("gpt2", "llama") else MASKED
    settings = StudentConfig(init=init, architecture=family, config=fields)
    return make_student(settings, None, make_tokenizer(), 16, kind, mapped=True)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_numbers_are_those_of_a_student_in_memory(family: str) -> None:
    plain = student(family, FAMILIES[family])
    random = torch.rand(1)
    with parameters_in_file():
        made = student(family, FAMILIES[family])
    assert torch.equal(torch.rand(1), random)
    weights = dict(plain.named_parameters())
    assert dict(made.named_parameters()).keys() == weights.keys()  # ties are kept: they are named once
    for name, parameter in made.named_parameters():
        assert parameter.requires_grad and torch.equal(parameter, weights[name]), name


def test_a_start_that_changes_weights_in_place() -> None:
    plain = student("bert", SMALL, init="neighbours")
    with parameters_in_file():
        made = student("bert", SMALL, init="neighbours")
    for one, other in zip(plain.parameters(), made.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_disk_without_room(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(SettingError, match=r"^TMPDIR=.* no room .*; set TMPDIR"), parameters_in_file():
        student("bert", SMALL)


def resident(kind: str) -> float:
    """MB of this process: RssAnon is its own memory, VmHWM the most that it had, pages of files included."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{kind}:")) * 1024 / MB


def on_a_rank() -> dict[str, Any]:
    """The memory of a student that is drawn in a file, and a sum over its weights."""
    ranks = join_ranks(BackendConfig(name="fsdp"))
    student("bert", SMALL)  # imports
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM counts from here
    before = {kind: resident(kind) for kind in ("RssAnon", "VmHWM")}
    with weights_on_disk(ranks, StudentConfig(init="random")):
        made = student("bert", LARGE)
    found: dict[str, Any] = {kind: resident(kind) - value for kind, value in before.items()}
    found["size"] = sum(parameter.nbytes for parameter in made.parameters()) / MB
    found["sum"] = sum(parameter.double().sum().item() for parameter in made.parameters())
    ranks.close()
    return found


def test_a_rank_holds_one_weight_at_a_time(tmp_path: Path) -> None:
    ranks = run_ranks(2, tmp_path, on_a_rank)
    plain = sum(parameter.double().sum().item() for parameter in student("bert", LARGE).parameters())
    for found in ranks:
        assert found["size"] > 70 and found["sum"] == plain
        assert found["RssAnon"] < 0.15 * found["size"] and found["VmHWM"] < 0.3 * found["size"], found
