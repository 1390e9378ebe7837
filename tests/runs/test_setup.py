"""Formats, kernels and tokenizers of a run: what `auto` is, one switch for kernels, and pairs with a token more."""

import json
import math
import os
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from families import make_family
from job import Shelf, assert_alike, distill, results, save_model
from own_models import Convolutions
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from vocabularies import vocabulary_of

from distill import load_pair
from distill.config.settings import BackendConfig, PrecisionConfig
from distill.data.collate.clm import causal_lm
from distill.distributed.single import Single
from distill.evaluation.sets import EvaluationSet
from distill.models.kernels.attention import DROPOUT_ONLY, NAME
from distill.models.kind import CAUSAL, MASKED
from distill.models.language_model import LAST, LanguageModel, OutputSpec
from distill.models.precision import bf16_speedup, set_products
from distill.runs import setup
from distill.runs.pair import load_baseline
from distill.runs.tokenizers import reads_same_tokens, refuse_tokens_beyond
from distill.runtime.errors import SettingError

AUTO = PrecisionConfig(student="auto", teacher="auto")


class OtherRanks(Single):
    """Rank 0 of several, whose others multiply in bf16 so many times as fast as in fp32."""

    def __init__(self, *others: float) -> None:
        super().__init__(BackendConfig(device="cpu"))
        self.others, self.size = others, 1 + len(others)

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor + torch.tensor([0.0, *self.others])

    def broadcast(self, value: Any) -> Any:
        return value


def choose(speedup: float, *others: float, recorded: dict[str, str] | None = None) -> PrecisionConfig:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(setup, "bf16_speedup", lambda device: speedup)
        return setup.choose_precision(AUTO, recorded or {}, OtherRanks(*others))


@pytest.mark.parametrize(
    ("speedups", "expected", "words"),
    [
        ((1.9,), "bf16", "multiplies 1.9 times as fast"),
        ((0.6,), "fp32", "multiplies 0.6 times as fast"),
        ((0.0,), "fp32", "only emulates bf16"),
        ((1.9, 1.8), "bf16", "1.8"),
        ((1.9, 0.6), "fp32", "0.6"),  # of several ranks the slowest decides for all
    ],
)
def test_auto_takes_bf16_where_it_is_faster_on_all_ranks(
    speedups: tuple[float, ...], expected: str, words: str, lines: list[str]
) -> None:
    chosen = choose(*speedups)
    assert (chosen.student, chosen.teacher, chosen.evaluate) == (expected, expected, "fp32")
    assert len(lines) == 1 and f"precision=auto: {expected}" in lines[0] and words in lines[0]


@pytest.mark.parametrize("settings", [PrecisionConfig(), PrecisionConfig(tf32=False, deterministic=True)])
def test_what_gpus_multiply_in_and_repeat(settings: PrecisionConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    names = "CUBLAS_WORKSPACE_CONFIG", "FLASH_ATTENTION_DETERMINISTIC"
    for name in names:
        monkeypatch.setenv(name, "")  # and as it was, after the test
        monkeypatch.delenv(name)
    before, of_convolutions = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    try:
        set_products(settings, torch.device("cpu"))
        assert torch.get_float32_matmul_precision() == before and not torch.are_deterministic_algorithms_enabled()
        set_products(settings, torch.device("cuda"))
        assert torch.get_float32_matmul_precision() == ("high" if settings.tf32 else "highest")
        assert torch.backends.cudnn.allow_tf32 == torch.backends.cuda.matmul.allow_tf32 == settings.tf32
        assert torch.are_deterministic_algorithms_enabled() == settings.deterministic
        assert all((name in os.environ) == settings.deterministic for name in names)
        assert not torch.is_deterministic_algorithms_warn_only_enabled(), "attention would stay as it is"
    finally:
        torch.set_float32_matmul_precision(before)
        torch.backends.cudnn.allow_tf32 = of_convolutions
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = True


@pytest.mark.parametrize(
    ("family", "name", "device", "words"),
    [
        ("bert", "flash_attention_2", "cpu", "needs a GPU"),
        ("bert", "flash_attention_2", "cuda", "FlashAttention2"),
        ("gpt2", "flex_attention", "cuda", "does not support"),
        ("mpnet", "sdpa", "cpu", "has its own"),
        ("bert", "eager", "cpu", ""),
        ("llama", "flex_attention", "cuda", ""),
    ],
)
def test_attention_as_asked_for(family: str, name: str, device: str, words: str) -> None:
    model = make_family(family)
    if not words:
        setup.use_attention(model, name, torch.device(device))
        assert model.config._attn_implementation == name
        return
    with pytest.raises(SettingError, match=words) as raised:
        setup.use_attention(model, name, torch.device(device))
    assert (raised.value.setting, raised.value.value) == ("precision.attention", name)


@pytest.mark.parametrize(("asked", "found"), [("auto", NAME), ("sdpa", DROPOUT_ONLY), ("eager", "eager")])
def test_what_a_processor_attends_with(asked: str, found: str) -> None:
    """torch's SDPA that is asked for still drops by sequence."""
    ranks, precision = Single(BackendConfig(device="cpu")), PrecisionConfig.model_validate({"attention": asked})
    frozen = setup.setup_teacher(make_family("bert"), precision, ranks)
    assert frozen.model.config._attn_implementation == found


def test_a_gpu_with_bf16_needs_no_measuring(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: not including_emulation)
    assert bf16_speedup(torch.device("cuda")) == math.inf


def test_a_resumed_run_stays_in_its_formats() -> None:
    recorded = {"student": "bf16", "teacher": "bf16", "evaluate": "fp32"}
    assert choose(0.6, recorded=recorded).student == "bf16"
    assert setup.choose_precision(PrecisionConfig(), recorded, OtherRanks()).student == "fp32", "what is given wins"


def test_a_run_says_records_and_keeps_its_formats(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, arguments = shelf.root / "auto", ("precision=auto", "train.steps=4")
    monkeypatch.setattr(setup, "bf16_speedup", lambda device: 1.9)
    assert shelf.run(folder, *arguments) == 0
    newest = sorted((folder / "checkpoints").iterdir())[-1]
    assert json.loads((newest / "state.json").read_text())["precision"]["student"] == "bf16"
    assert results(folder)["precision"]["student"] == "bf16"
    (folder / "results.json").unlink()
    monkeypatch.setattr(setup, "bf16_speedup", lambda device: 0.6)  # as after a move to another machine
    assert shelf.run(folder, *arguments) == 0
    assert results(folder)["precision"]["student"] == "bf16"


def test_a_student_that_drops_blocks_is_not_sharded() -> None:
    ranks: Any = SimpleNamespace(shards=True, shards_teacher=False, shards_student=True, size=2, barrier=lambda: None)
    student = SimpleNamespace(config=SimpleNamespace(layerdrop=0.1))
    with pytest.raises(SettingError, match=r"^student: .*layerdrop=0\.1.*shard_student=false"):
        setup.shard_models(ranks, [], student, (MASKED, MASKED), 16)


def test_a_baseline_computes_with_its_own_weights_where_blocks_are_compiled(tmp_path: Path) -> None:
    student, other = Convolutions(), Convolutions()
    save_file(other.state_dict(), tmp_path / "model.safetensors")
    for layer in student.base_model.layers:  # as torch.compile leaves them

        def compiled(*values: Any, inner: Any = layer.forward) -> Any:
            return inner(*values)

        compiled._torchdynamo_orig_callable = layer.forward  # type: ignore[attr-defined]
        layer.forward = compiled
    config: Any = SimpleNamespace(
        evaluate=SimpleNamespace(baseline=str(tmp_path)), student=SimpleNamespace(custom=object())
    )
    pair: Any = SimpleNamespace(student=student, skeleton=None)
    ids = torch.tensor([[5, 6, 7]])
    torch.testing.assert_close(load_baseline(config, pair)(ids), other(ids))
    assert all("forward" in vars(layer) for layer in student.base_model.layers)


def test_a_compiled_encoder_gives_layers_that_were_not_asked_for_at_first(monkeypatch: pytest.MonkeyPatch) -> None:
    model = LanguageModel(tiny.make_model("bert", 2))
    inputs = {"input_ids": torch.from_numpy(tiny.make_rows(4)).long()}
    specs = [OutputSpec(layers=(LAST,)), OutputSpec(layers=(1, LAST)), OutputSpec(layers=(0,))]
    expected = [model(inputs, None, spec).hidden for spec in specs]
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    setup.compile_blocks(model.model)
    for spec, hidden in zip(specs, expected, strict=True):
        found = model(inputs, None, spec).hidden
        assert found.keys() == hidden.keys()
        assert all(torch.equal(found[layer], hidden[layer]) for layer in hidden)
    torch._dynamo.reset()


@pytest.mark.parametrize(("dropout", "formats", "atol"), [(0.0, "fp32", 2e-4), (0.1, "bf16", 3e-3)])
def test_one_switch_turns_all_kernels_off(
    dropout: float, formats: str, atol: float, shelf: Shelf, tmp_path: Path
) -> None:
    """Torch's own kernels give the same student, but for rounding: these make a run faster and nothing else."""
    common = [f"student.dropout={dropout}", f"precision={formats}", "train.steps=4"]
    common.append("evaluate.pseudo_perplexity.fraction=0")
    for kernels in ("auto", "plain"):
        assert shelf.run(tmp_path / kernels, *common, f"precision.kernels={kernels}") == 0
    assert_alike(tmp_path / "auto", tmp_path / "plain", atol=atol)
    scores = [results(tmp_path / kernels)["student"]["perplexity"]["heldout"] for kernels in ("auto", "plain")]
    assert scores[0] == pytest.approx(scores[1], rel=1e-3 if formats == "fp32" else 2e-2)


# --- the tokenizers of a pair: one may have special tokens more at its end, such as a [PAD] that no text has --------

SMALL = ["train.steps=2", "corpus.max_sequences=60", "corpus.sequence_length=32", "evaluate=heldout", "precision=fp32"]


def added(name: str, **special: Any) -> Any:
    tokenizer = vocabulary_of(name)
    tokenizer.add_special_tokens(special)
    return tokenizer


def test_which_tokenizers_read_the_same_tokens() -> None:
    plain, padded = vocabulary_of("gpt2"), added("gpt2", pad_token="[PAD]")
    assert all(reads_same_tokens(*pair, CAUSAL) for pair in ((plain, plain), (padded, plain), (plain, padded)))
    assert not reads_same_tokens(padded, plain, MASKED), "a masked model reads padding"
    assert not reads_same_tokens(added("gpt2", bos_token="<begin>"), plain, CAUSAL), "sequences have it"
    with_word = vocabulary_of("gpt2")
    with_word.add_tokens(["river"])
    assert not reads_same_tokens(with_word, plain, CAUSAL), "texts have it"


@pytest.mark.parametrize("setting", ["corpus", "evaluate.sets=heldout", ""])
def test_a_text_with_such_a_token_is_refused(setting: str) -> None:
    padded = added("gpt2", pad_token="[PAD]", additional_special_tokens=["<|user|>"])
    shared, user = len(padded) - 2, padded.convert_tokens_to_ids("<|user|>")
    counts = np.bincount([0, 1, padded.pad_token_id], minlength=len(padded))
    counts[user] = setting == "corpus"
    ids = [1, padded.pad_token_id, user if setting.startswith("evaluate") else 1]
    arguments = shared, counts, [EvaluationSet("heldout", "", np.array([ids], np.uint16), 1)], causal_lm(padded, False)
    if not setting:
        return refuse_tokens_beyond(*arguments)
    with pytest.raises(SettingError, match=f"has the token {user}, ") as error:
        refuse_tokens_beyond(*arguments)
    assert error.value.setting == setting


def test_such_a_pair_trains_either_way_round(shelf: Shelf, tmp_path: Path) -> None:
    plain, padded = save_model(tmp_path / "plain", "gpt2", 2), tmp_path / "padded"
    tokenizer, model = AutoTokenizer.from_pretrained(plain), AutoModelForCausalLM.from_pretrained(plain)
    tokenizer.add_special_tokens({"pad_token": "[ADDED]"})
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    model.save_pretrained(padded)
    tokenizer.save_pretrained(padded)
    recipe = ["+recipe=distilgpt2_gutenberg", *shelf.corpus, *SMALL, "student=pretrained", "objective.clm.weight=0"]
    of_way = list[dict[str, float]]()
    for teacher, student in ((plain, padded), (padded, plain)):
        run = tmp_path / f"from-{teacher.name}"
        assert distill(*recipe, f"teacher.path={teacher}", f"student.path={student}", f"hydra.run.dir={run}") == 0
        assert results(run)["agreement"]["heldout"]["top1"] > 0.5, "they were one model"
        assert len(AutoTokenizer.from_pretrained(run / "student")) == len(AutoTokenizer.from_pretrained(student))
        pair = load_pair(teacher, student, sequence_length=24, device="cpu")
        losses = pair.objective({"soft": 1.0, "clm": 1.0})(["the quiet ship", "a stranger and the captain of the ship"])
        of_way.append(losses.terms)
    assert of_way[0] == pytest.approx(of_way[1], rel=1e-6), "over the tokens that both have"
