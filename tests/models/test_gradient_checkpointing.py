"""student.gradient_checkpointing: the same gradients, dropout included, from less memory."""

import copy
import shutil
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from distributed import run_ranks
from families import FAMILIES, make_family
from job import Shelf, assert_same
from tiny import Fit, assert_close, make_rows, make_tokenizer, objective_config, plain_sgd
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig

from distill.config.settings import BackendConfig, StudentConfig, TrainConfig
from distill.distributed import join_ranks
from distill.distributed.shard import whole
from distill.models import blocks
from distill.models.kernels.attention import use_batched_products
from distill.models.kernels.dropout import keyed_by_sequence, replace_dropout
from distill.models.language_model import LAST, LanguageModel, OutputSpec
from distill.models.pooling import MEAN
from distill.models.student import dropout_names, make_student
from distill.runs.setup import blocks_of
from distill.runtime.errors import SettingError

KEYS = [3, 2**40, 77, 5]
UNRECORDED = ("mpnet", "deberta-v2")  # families whose queries and keys are not read
# Everything that a term can read, of inner layers too.
EVERYTHING = objective_config(
    hidden_mse={"weight": 0.5}, relations={"weight": 0.1, "relation_heads": 4}, pooled={"weight": 0.3},
    masking={"mlm_probability": 0.3},
)  # fmt: skip


def with_dropout(family: str) -> Any:
    """A student in training mode."""
    return make_family(family, **dict.fromkeys(dropout_names(AutoConfig.for_model(family)), 0.2)).train()


def dropping(family: str) -> Any:
    """Such a student as it runs on the CPU."""
    student = with_dropout(family)
    use_batched_products(student)
    replace_dropout(student)
    return student


def gradients(model: LanguageModel, keyed: bool = True, inside: bool = True, qkv: bool = True) -> dict[str, Tensor]:
    """Of a loss of all that can be read; `inside`: the backward pass comes while the sequences' keys are in force."""
    ids = torch.from_numpy(make_rows(4, shortest=5).astype("int64"))
    documents = tiny.documents_of(ids != tiny.PAD)
    spec = OutputSpec(True, (ids != tiny.PAD).flatten().nonzero()[:, 0], (0, 1, LAST), (1, 2) if qkv else (), (MEAN,))
    torch.manual_seed(11)
    model.zero_grad()
    with keyed_by_sequence(KEYS if keyed else []):
        outputs = model({"input_ids": ids}, documents, spec)
        read = [outputs.head_rows, *outputs.hidden.values(), *outputs.pooled.values()]
        read += [part for record in outputs.qkv.values() for part in (record.query, record.key)]
        loss = sum(part.float().square().mean() * (number + 1) for number, part in enumerate(read))
        if inside:
            loss.backward()
    if not inside:
        loss.backward()
    torch.rand(1)  # the next number of torch's stream
    found = {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}
    return {**found, "loss": loss.detach(), "next number": torch.rand(1)}


@pytest.mark.parametrize(("family", "precision"), [*((family, "fp32") for family in FAMILIES), ("bert", "bf16")])
def test_gradients_have_the_same_bits(family: str, precision: str) -> None:
    student, qkv = dropping(family), family not in UNRECORDED
    plain, again = (LanguageModel(student, precision, checkpoints=checkpoints) for checkpoints in (False, True))
    with plain.weight_cast_cache():
        expected = gradients(plain, qkv=qkv)
    for inside in (True, False):
        with again.weight_cast_cache():
            assert_close(gradients(again, inside=inside, qkv=qkv), expected, rtol=0, atol=0)
    assert not any("forward" in vars(block) for block in blocks_of(student)[0]), "nothing stays behind"


def test_blocks_compute_again_in_training_alone() -> None:
    student, calls = dropping("bert"), list[bool]()
    student.base_model.encoder.layer[0].attention.register_forward_hook(lambda *_: calls.append(True))
    model = LanguageModel(student, checkpoints=True)
    gradients(model)
    assert len(calls) == 2
    with torch.no_grad():
        model.eval()({"input_ids": torch.arange(8)[None]}, None, OutputSpec(layers=(LAST,)))
    assert len(calls) == 3


def test_all_inputs_of_a_block_go_by_position(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a GPU's tensors among the others torch keeps no generator, and dropout would draw other numbers."""
    calls = list[int]()
    monkeypatch.setattr(
        blocks,
        "checkpoint",
        lambda call, *values, **more: calls.append(len(values)) or checkpoint(call, *values, **more),
    )
    block = torch.nn.Bilinear(3, 4, 2)
    one, other = torch.ones(5, 3, requires_grad=True), torch.ones(5, 4)
    expected = block(one, other)
    with blocks.checkpointed([block]):
        assert torch.equal(block(one, input2=other), expected)
    assert calls == [2] and "forward" not in vars(block)


def test_a_run_gives_the_same_student_and_may_resume_with_the_other_setting(shelf: Shelf, done: Path) -> None:
    folder = shelf.root / "gradient_checkpointing"
    assert shelf.run(folder, "student.gradient_checkpointing=true", "train.keep=9") == 0
    assert_same(folder, done)
    (folder / "results.json").unlink()
    for late in ("step-00000006", "step-00000008"):
        shutil.rmtree(folder / "checkpoints" / late)
    assert shelf.run(folder) == 0
    assert_same(folder, done)


def test_a_model_without_a_list_of_blocks_is_refused() -> None:
    settings = StudentConfig(**{"_target_": "own_models.flat"}, gradient_checkpointing=True)
    with pytest.raises(SettingError, match=r"gradient_checkpointing=true: _Encoder has no list of blocks.*ModuleList"):
        make_student(settings, None, make_tokenizer(), 8)


# --- several ranks


def weights(folder: Path, family: str, ranks: Any, checkpoints: bool) -> dict[str, Tensor]:
    """Of a student that was trained."""
    student, teacher = with_dropout(family), make_family(family).requires_grad_(False)
    size = 1 if ranks is None else ranks.size
    for model in (student, teacher) if ranks is not None and ranks.shards else ():
        ranks.shard(model, *blocks_of(model), trained=model is student)
    length = TrainConfig(batch_size=8 // size, accumulate=1, epochs=1, save_every=9)
    fit = Fit(
        folder / family, make_tokenizer(), make_rows(16, shortest=5), teacher, student, copy.deepcopy(EVERYTHING),
        length, ranks=ranks, keyed_dropout=True, checkpoints=checkpoints, **plain_sgd(0.02),
    )  # fmt: skip
    fit.run()
    return {name: whole(weight.detach()).clone() for name, weight in fit.model.named_parameters()}


def on_a_rank(folder: Path, backend: str) -> dict[str, Any]:
    torch.set_num_threads(1)
    ranks = join_ranks(BackendConfig(name=backend, device="cpu", timeout=60.0))
    found = {family: weights(folder, family, ranks, True) for family in ("bert", "albert")}
    ranks.close()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["ddp", "fsdp"])
def test_two_ranks_train_the_student_of_one_process_that_keeps_everything(backend: str, tmp_path: Path) -> None:
    expected = {family: weights(tmp_path, family, None, False) for family in ("bert", "albert")}
    for rank in run_ranks(2, tmp_path / "out", on_a_rank, tmp_path / "ranks", backend):
        for family, student in expected.items():
            assert_close(rank[family], student, rtol=1e-6, atol=1e-6)
