"""A student that is sharded over ranks is that of one process: families, exchanges, resumes, models of one's own."""

import copy
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed import run_ranks
from families import without_dropout
from own_models import Convolutions
from safetensors.torch import save_model
from tiny import Fit, assert_close, make_rows, make_tokenizer, objective_config, plain_sgd, weights_of
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from distill.config.settings import BackendConfig, OptimizerConfig, TrainConfig
from distill.distributed import gradient_sync, join_ranks
from distill.distributed.shard import empty_copy, put_together, sharded_modules, skeleton_of, whole
from distill.models.loaded import load_weights
from distill.optim.optimizers.lamb import Lamb
from distill.runs.setup import blocks_of

FAMILIES = ("bert", "distilbert", "roberta", "albert", "modernbert", "gpt2", "llama")
# Everything that a term can read: logits, inner hidden states, queries and keys, vectors of whole rows.
EVERYTHING = objective_config(
    hidden_mse={"weight": 0.5}, relations={"weight": 0.1, "relation_heads": 4}, pooled={"weight": 0.3},
    masking={"mlm_probability": 0.3},
)  # fmt: skip
# The student is narrower than the teacher: there are projections, which are trained and not divided.
NARROW = {"hidden_size": 16, "intermediate_size": 24}
WITHOUT_COSINE = objective_config(cosine=0.0, hidden_mse={"weight": 0.5}, pooled={"weight": 0.3})
# One term that reads nothing but the inside of the last block: no gradient comes to what the block gives.
INSIDE = objective_config(soft=0.0, mlm=0.0, cosine=0.0, relations={"weight": 1.0, "relation_heads": 4})
NUM_ROWS = 18  # windows of 8, 8 and 2 rows: with 4 ranks two of them have no row in the last window
NEAR = {"rtol": 1e-6, "atol": 1e-6}

# By name: family of both models, objective, fields of the student, optimizer.
CASES: dict[str, tuple[str, Any, dict[str, Any], str]] = {
    **{family: (family, EVERYTHING, {}, "sgd") for family in FAMILIES},
    "inside": ("bert", INSIDE, {}, "sgd"),
    "projections": ("bert", WITHOUT_COSINE, NARROW, "sgd"),
    "adamw": ("llama", EVERYTHING, {}, "adamw"),
    "lamb": ("llama", EVERYTHING, {}, "lamb"),
}


def fit_of(folder: Path, case: str, ranks: Any = None, **settings: Any) -> Fit:
    """A training of windows of 8 rows, in micro-batches of one row where there are several ranks."""
    family, objective, fields, optimizer = CASES[case]
    student, teacher = without_dropout(family, **fields).train(), without_dropout(family).requires_grad_(False)
    with torch.no_grad():
        for parameter in teacher.parameters():
            parameter.mul_(1.1)
    size = 1 if ranks is None else ranks.size
    for model in (student, teacher) if ranks is not None else ():
        ranks.shard(model, *blocks_of(model), trained=model is student)
    chosen: dict[str, Any] = plain_sgd(0.02)
    if optimizer == "adamw":
        chosen = {"optimizer_settings": OptimizerConfig(lr=1e-3, clip=0.5)}
    elif optimizer == "lamb":
        chosen["optimizer"] = lambda model: Lamb(model.parameters(), lr=1e-3)
    length = TrainConfig(
        batch_size=1 if size > 1 else 8, accumulate=8 // size if size > 1 else 1, epochs=1, save_every=1, keep=9
    )
    return Fit(
        folder, make_tokenizer(), make_rows(NUM_ROWS, shortest=5), teacher, student, copy.deepcopy(objective),
        length.changed(**settings), ranks=ranks, **chosen,
    )  # fmt: skip


def weights(fit: Fit) -> dict[str, torch.Tensor]:
    """All that is trained, whole."""
    return {name: whole(parameter.detach()).clone() for name, parameter in fit.model.named_parameters()}


def on_a_rank(folder: Path) -> dict[str, Any]:
    """Every case; a run that is cut in two; the calls of one step."""
    torch.set_num_threads(1)
    ranks = join_ranks(BackendConfig(name="fsdp", device="cpu", timeout=60.0))
    found: dict[str, Any] = {}
    for case in CASES if ranks.size == 2 else ("bert", "albert"):
        fit = fit_of(folder / case, case, ranks)
        fit.run()
        found[case] = weights(fit)
    if ranks.size == 2:
        goes_on = fit_of(folder / "adamw", "adamw", ranks).resume(folder / "adamw" / "step-00000001")
        goes_on.folder = goes_on.checkpoints.folder = folder / "resumed"
        goes_on.run()
        found["resumed"] = weights(goes_on)
        calls_of_a_step(folder, ranks)
    ranks.close()
    return found


def calls_of_a_step(folder: Path, ranks: Any) -> None:
    """Gradients are reduced once a window and sharded module; stats and norm of a step take a small sum each."""
    name = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"
    summed = []
    for sync, times in (("window", 1), ("every", 4)):
        fit, calls = fit_of(folder / sync, "bert", ranks, epochs=None, steps=1), Counter[str]()
        num_syncs = ranks.traffic.num_syncs
        fit.checkpoints.save = lambda *_: True  # type: ignore[method-assign, assignment]
        ranks.settings = ranks.settings.changed(sync=sync)
        with pytest.MonkeyPatch.context() as patch:
            for each in (name, "all_reduce"):
                patch.setattr(dist, each, counted(each, getattr(dist, each), calls))
            fit.run()
        assert fit.settings.accumulate == 4 and len(list(sharded_modules(fit.student))) == 3
        assert calls[name] == 3 * times and ranks.traffic.num_syncs - num_syncs == times
        summed.append(calls["all_reduce"])
    ranks.settings = ranks.settings.changed(sync="window")
    assert summed[0] == summed[1]


def counted(name: str, function: Any, calls: Counter[str]) -> Any:
    def call(*arguments: Any, **named: Any) -> Any:
        calls[name] += 1
        return function(*arguments, **named)

    return call


def near(case: str) -> dict[str, float]:
    """How near weights have to be; Adam makes steps of one length from gradients of any, and so of rounding too."""
    return {"rtol": 1e-5, "atol": 1e-5} if case in ("adamw", "lamb") else NEAR


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("two")
    return run_ranks(2, folder / "out", on_a_rank, folder)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, torch.Tensor]]:
    folder, found = tmp_path_factory.mktemp("alone"), {}
    for case in CASES:
        fit = fit_of(folder / case, case)
        before = weights_of(fit.model)
        fit.run()
        found[case] = weights_of(fit.model)
        moved = max(float((found[case][name] - value).abs().max()) for name, value in before.items())
        assert moved > 1e-3, f"{case}: the comparison needs weights that move"
    return found


@pytest.mark.parametrize("case", CASES)
def test_the_student_is_that_of_one_process(case: str, two_ranks: list[Any], alone: dict[str, Any]) -> None:
    for rank in two_ranks:
        assert_close(rank[case], alone[case], **near(case))


@pytest.mark.slow
def test_four_ranks_of_which_two_have_nothing_in_the_last_window(tmp_path: Path, alone: dict[str, Any]) -> None:
    for rank in run_ranks(4, tmp_path / "out", on_a_rank, tmp_path):
        for case in ("bert", "albert"):
            assert_close(rank[case], alone[case], **NEAR)


def in_two_groups(folder: Path) -> dict[str, Any]:
    """Weights are sharded over two of four ranks, and the other two have the same parts."""
    torch.set_num_threads(1)
    ranks = join_ranks(BackendConfig(name="fsdp", device="cpu", timeout=60.0, shard_size=2))
    found = {}
    for case in ("bert", "adamw", "lamb"):
        fit = fit_of(folder / case, case, ranks)
        fit.run()
        found[case] = weights(fit)
    goes_on = fit_of(folder / "adamw", "adamw", ranks).resume(folder / "adamw" / "step-00000001")
    goes_on.folder = goes_on.checkpoints.folder = folder / "resumed"
    goes_on.run()
    files = {path.name: path.stat().st_size for path in (folder / "adamw" / "step-00000001").glob("*.safetensors")}
    found |= {"resumed": weights(goes_on), "files": files}
    ranks.close()
    return found


def test_groups_of_ranks_have_all_weights_each(tmp_path: Path, alone: dict[str, Any]) -> None:
    for rank in run_ranks(4, tmp_path / "out", in_two_groups, tmp_path):
        for case in ("bert", "adamw", "lamb"):
            assert_close(rank[case], alone[case], **near(case))
        assert_close(rank["resumed"], rank["adamw"], rtol=0, atol=0)
        assert sum(size > 1000 for size in rank["files"].values()) == len(rank["files"]) / 2, "a part is written once"


def test_a_resumed_run_ends_with_the_same_bits(two_ranks: list[Any]) -> None:
    for rank in two_ranks:
        assert_close(rank["resumed"], rank["adamw"], rtol=0, atol=0)


# --- a model of one's own, on one rank


class Scaled(Convolutions):
    """With a learned factor, its output embedding's weight tied to that of the words, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(1.5))
        self.head.weight = self.base_model.words.weight
        self.register_buffer("shift", torch.full((24,), 0.25), persistent=False)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        hidden = self.base_model(input_ids, attention_mask)
        logits: Tensor = self.head(hidden * self.factor + self.shift)
        return logits


def scaled(seed: int = 0) -> Scaled:
    torch.manual_seed(seed)
    return Scaled()


def assert_tied_weights(made: Any, expected: Scaled) -> None:
    assert type(made) is Scaled and made.head.weight is made.base_model.words.weight
    assert_close(weights_of(made), weights_of(expected), rtol=0, atol=0)
    assert torch.equal(made.shift, expected.shift)


def test_a_model_of_ones_own(tmp_path: Path) -> None:
    """A single number stays whole and is trained; ties are kept; a baseline of its class has weights of its own."""
    plain, model, other, ids = scaled(), scaled(), scaled(seed=1), torch.tensor([[5, 6, 7]])
    skeleton = skeleton_of(model)
    with join_ranks(BackendConfig(name="fsdp", device="cpu")) as ranks:
        ranks.shard(model, *blocks_of(model), trained=True)
        for each in (plain, model):
            each.shift.fill_(0.5)
        assert_tied_weights(put_together(model, skeleton, keep=True), plain)
        assert put_together(model, skeleton, keep=False) is None
        half = scaled().bfloat16()
        skeleton_of_half = skeleton_of(half)
        ranks.shard(half, *blocks_of(half), trained=True)
        made = put_together(half, skeleton_of_half, keep=True)
        assert {each.dtype for each in made.parameters()} == {torch.float32}, "as they are trained"
        save_model(other, str(tmp_path / "model.safetensors"))
        baseline = empty_copy(skeleton)
        load_weights(baseline, "evaluate.baseline", str(tmp_path))
        assert_tied_weights(baseline, other)
        assert all(each.is_meta for each in skeleton.parameters()), "the skeleton stays one"

        sync = gradient_sync(ranks, model)
        assert not isinstance(model.factor, DTensor) and isinstance(model.head.weight, DTensor)
        sync.zero()
        for each in (plain, model):
            each(ids).square().mean().backward()
        sync.all_reduce_gradients()
        for name, each in plain.named_parameters():
            torch.testing.assert_close(whole(model.get_parameter(name).grad), each.grad)
        assert plain.factor.grad is not None and plain.factor.grad != 0
        sync.scale(0.5)
        torch.testing.assert_close(model.factor.grad, plain.factor.grad * 0.5)
        torch.testing.assert_close(whole(model.head.weight.grad), plain.head.weight.grad * 0.5)
        sync.zero()
        sync.all_reduce_gradients()
        assert not whole(model.head.weight.grad).any(), "what no micro-batch touched has a gradient of zeros"
