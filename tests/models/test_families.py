"""Every family: loaded from a folder, its layers taken, its rows and its head read as the model computes them."""

import functools
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from families import CAUSAL, FAMILIES, depth_fields, make_family
from plain_losses import PlainLosses
from tiny import documents_of, loss_of, make_masks, make_objective, make_rows, make_tokenizer, objective_config
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoConfig, AutoModelForMaskedLM
from vocabularies import special_ids, vocabulary_of

from distill.config.settings import StudentConfig, TeacherConfig
from distill.data.batch import Batch
from distill.data.collate.clm import CausalLM
from distill.data.sequence_format import SequenceFormat, causal_format, masked_format
from distill.models import kind
from distill.models.language_model import LAST, LanguageModel, OutputSpec
from distill.models.student import make_student
from distill.models.teacher import load_teacher
from distill.objective import objective as objective_module
from distill.objective.chunked import CPU, ChunkedLosses

DEPTH = 4
BLOCKS = {
    "bert": "bert.encoder.layer",
    "distilbert": "distilbert.transformer.layer",
    "roberta": "roberta.encoder.layer",
    "xlm-roberta": "roberta.encoder.layer",
    "camembert": "roberta.encoder.layer",
    "mpnet": "mpnet.encoder.layer",
    "electra": "electra.encoder.layer",
    "deberta-v2": "deberta.encoder.layer",
    "gpt2": "transformer.h",
    "gpt_neox": "gpt_neox.layers",
}
# What else published models of a family differ in.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "deberta-v2-xlarge": ("deberta-v2", {"conv_kernel_size": 3, "conv_act": "gelu", "share_att_key": True}),
    "deberta-v3": (
        "deberta-v2",
        {"share_att_key": True, "norm_rel_ebd": "layer_norm", "type_vocab_size": 0, "position_biased_input": False},
    ),
    "llama, untied": ("llama", {"tie_word_embeddings": False}),
    "qwen2, full attention": ("qwen2", {"use_sliding_window": False, "layer_types": ["full_attention"] * DEPTH}),
    "mistral, full attention": ("mistral", {"sliding_window": None}),
    "roberta, one block more of positions": ("roberta", {"max_position_embeddings": 130}),
    "granite, untied": ("granite", {"tie_word_embeddings": False}),
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {family: (family, {}) for family in FAMILIES} | VARIANTS
CAUSAL_CASES = [case for case, (family, _) in CASES.items() if family in CAUSAL]


@functools.cache
def _made(case: str) -> Any:
    family, fields = CASES[case]
    return make_family(family, **{**depth_fields(family, DEPTH), **fields}).requires_grad_(False)


def kind_of(case: str) -> kind.ModelKind:
    return kind.CAUSAL if CASES[case][0] in CAUSAL else kind.MASKED


def student_of(case: str, layers: Any, **settings: Any) -> Any:
    wanted = StudentConfig(layers=layers, dropout=0.0, **settings)
    return make_student(wanted, _made(case), None, 12, kind_of(case))  # type: ignore[arg-type]


# --- rows: padded and masked, or packed


CLM = CausalLM(SequenceFormat(None, None, 2, 3, None, 0, 1), packed=True)  # [CLS] begins a document, [SEP] ends it


def packed_rows() -> np.ndarray:
    """[3, 12] documents of 2 to 7 tokens one after the other, cut where a row ends; the last row is padded."""
    random = np.random.default_rng(5)
    stream: list[int] = []
    while len(stream) < 33:
        stream += [2, *random.integers(5, 40, random.integers(0, 6)), 3]
    return np.array([*stream[:33], 0, 0, 0], np.uint16).reshape(3, 12)


def batches_of(case: str) -> list[Batch]:
    """One window of two micro-batches."""
    if kind_of(case) is kind.CAUSAL:
        return tiny.make_batches(packed_rows(), CLM, 2, 2, 0).window(0)
    rows = make_rows(5, shortest=4)
    return tiny.make_batches(rows, make_masks(make_tokenizer(), rows, mlm_probability=0.4), 3, 2, 0).window(0)


def logits_of(model: Any, batch: Batch) -> Tensor:
    """[N, V] of the model itself at the positions that are not padding."""
    # Packed rows tell documents apart by their positions: a mask would undo that.
    mask = None if batch.documents is None or "position_ids" in batch.inputs else (batch.documents >= 0).long()
    cache = {"use_cache": False} if "position_ids" in batch.inputs else {}
    inputs = {name: value for name, value in batch.inputs.items() if name != "document_lengths"}
    logits = model(**inputs, attention_mask=mask, **cache).logits.flatten(0, 1)
    return logits if batch.valid_positions is None else logits[batch.valid_positions]


# --- folders


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_a_folder_with_its_own_kind_of_tokenizer_gives_the_model_back(family: str, tmp_path: Path) -> None:
    own = vocabulary_of(family)
    model = make_family(family, **special_ids(own))
    model.save_pretrained(tmp_path)
    own.save_pretrained(tmp_path)
    wanted = kind_of(family)
    loaded, tokenizer, _ = load_teacher(TeacherConfig(path=str(tmp_path)), wanted)
    assert type(loaded) is type(model) and tokenizer is not None
    text = "the man and the end."
    ids = own(text, add_special_tokens=False).input_ids
    assert tokenizer(text, add_special_tokens=False).input_ids == ids and tokenizer.get_vocab() == own.get_vocab()
    if wanted is kind.MASKED:
        rows = masked_format(tokenizer)
        assert own(text).input_ids == [rows.row_start, *ids, rows.row_end] and tokenizer.mask_token_id is not None
    else:
        rows = causal_format(tokenizer)
        assert rows.document_end == own.eos_token_id and rows.pad not in (own.bos_token_id, own.eos_token_id, *ids)
    row = torch.tensor([own(text).input_ids])
    torch.testing.assert_close(loaded(input_ids=row).logits, model(input_ids=row).logits, rtol=0, atol=0)


@torch.no_grad()
def test_the_head_of_deberta_as_its_authors_saved_it(tmp_path: Path) -> None:
    fields = FAMILIES["deberta-v2"] | {"vocab_size": 40, "max_position_embeddings": 64, "legacy": False}
    model = AutoModelForMaskedLM.from_config(AutoConfig.for_model("deberta-v2", **fields)).eval()
    for parameter in model.parameters():
        parameter.add_(torch.randn_like(parameter) * 0.15)
    assert any(name.startswith("lm_predictions.lm_head.") for name in model.state_dict())
    model.save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    loaded = load_teacher(TeacherConfig(path=str(tmp_path)))[0]
    row = torch.arange(12)[None]
    torch.testing.assert_close(loaded(input_ids=row).logits, model(input_ids=row).logits, rtol=1e-5, atol=1e-5)


# --- layers


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_a_student_of_all_layers_is_its_teacher(case: str) -> None:
    student = student_of(case, list(range(DEPTH))).eval()
    for batch in batches_of(case):
        expected, found = logits_of(_made(case), batch), logits_of(student, batch)
        assert float(expected.std()) > 0.1
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-6 * float(expected.abs().max()))


RULES: list[tuple[Any, dict[str, int], list[int]]] = [
    ([0, 3], {}, [0, 3]),
    ("every_second", {"num_layers": 3}, [0, 2, 3]),
]


def renumbered(name: str, prefix: str, chosen: list[int]) -> str:
    """The name that a student's tensor had in the teacher."""
    if not name.startswith(f"{prefix}."):
        return name
    number, _, rest = name[len(prefix) + 1 :].partition(".")
    return f"{prefix}.{chosen[int(number)]}.{rest}"


@pytest.mark.parametrize("case", CASES)
def test_chosen_layers_are_copies_of_the_teachers(case: str, lines: list[str]) -> None:
    family, teacher = CASES[case][0], _made(case).state_dict()
    prefix = BLOCKS.get(family, "model.layers")
    last = [] if family in ("modernbert", "albert") else [([3, 1], {}, [3, 1])]
    for layers, settings, chosen in [*RULES, *last]:
        student = student_of(case, layers, **settings)
        assert f"the student starts from layers {chosen} of the teacher's 4" in lines
        own = student.state_dict()
        count = sum(name.startswith(f"{prefix}.") for name in own)
        assert count or family == "albert"
        for name, tensor in own.items():
            assert torch.equal(tensor, teacher[renumbered(name, prefix, chosen)]), name
        assert student.config.num_hidden_layers == len(chosen)
        if types := getattr(_made(case).config, "layer_types", None):
            assert student.config.layer_types == [types[layer] for layer in chosen]


# --- head, loss and gradient


def _weights(case: str) -> dict[str, Any]:
    if kind_of(case) is kind.MASKED:
        return {}
    return {"mlm": 0.0, "clm": {"weight": 2.0}, "rows": "targets"}


def _gradients(model: Any) -> dict[str, Tensor]:
    found = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    model.zero_grad()
    return found


def _alike(found: dict[str, Tensor], expected: dict[str, Tensor], relative: float) -> None:
    assert found.keys() == expected.keys() and found
    largest = max(float(each.abs().max()) for each in expected.values())
    assert largest > 1e-4
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=0, atol=relative * largest, msg=lambda m, n=name: n + m)


@pytest.mark.parametrize("case", CASES)
def test_the_chunked_loss_is_the_plain_one_and_that_of_the_models_own_logits(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_three_rows = functools.partial(ChunkedLosses, tiling=CPU._replace(budget=3 * 40 * 8))
    student, batches, found = student_of(case, [0, 2]), batches_of(case), {}
    for kernel, losses in {"plain": PlainLosses, "fused": by_three_rows}.items():
        monkeypatch.setattr(objective_module, "ChunkedLosses", losses)
        objective = make_objective(objective_config(**_weights(case)), student, _made(case))
        loss, sums = loss_of(objective, student, _made(case), batches)
        loss.backward()
        found[kernel] = loss.detach(), sums, _gradients(student)
    torch.testing.assert_close(found["fused"][0], found["plain"][0], rtol=2e-6, atol=0)
    _alike(found["fused"][2], found["plain"][2], 1e-5)
    name = "mlm" if kind_of(case) is kind.MASKED else "clm"
    with torch.no_grad():
        own = sum(
            cross_entropy(_at_targets(student.eval(), batch), batch.targets.targets, reduction="sum")
            for batch in batches
        )
    assert found["plain"][1][name] == pytest.approx(float(own), rel=1e-5)


def _at_targets(model: Any, batch: Batch) -> Tensor:
    everywhere = torch.zeros(batch.ids.numel(), 40)
    everywhere[slice(None) if batch.valid_positions is None else batch.valid_positions] = logits_of(model, batch)
    return everywhere[batch.targets.positions]


@pytest.mark.parametrize("case", CAUSAL_CASES)
def test_packed_rows_are_documents_apart(case: str) -> None:
    """Hidden states, and the gradient of what is read of them, documents cut at the end of a row included."""
    model = student_of(case, list(range(DEPTH))).eval()
    reader, spec, rows = LanguageModel(model), OutputSpec(layers=(2, LAST)), packed_rows().astype(np.int64)
    batch = CLM.collate(rows, np.arange(3).astype(np.uint64), np.arange(3))
    torch.manual_seed(0)
    weigh = torch.randn(2, *rows.shape, 32)
    hidden = reader(batch.inputs, batch.documents, spec).hidden
    packed = torch.stack([hidden[2], hidden[LAST]])
    valid = torch.from_numpy(rows != 0)
    (packed * weigh * valid[..., None]).sum().backward()
    of_rows, loss, count = _gradients(model), torch.zeros(()), 0
    for row, ids in enumerate(rows):
        ends = [0, *(np.flatnonzero(ids == 3) + 1), int((ids != 0).sum())]
        for begin, end in pairwise(ends):
            if begin == end:
                continue
            alone = reader({"input_ids": torch.from_numpy(ids[None, begin:end])}, None, spec).hidden
            states = torch.stack([alone[2], alone[LAST]])[:, 0]
            torch.testing.assert_close(packed[:, row, begin:end], states, rtol=1e-4, atol=1e-5)
            loss, count = loss + (states * weigh[:, row, begin:end]).sum(), count + 1
    assert count > 6
    loss.backward()
    _alike(of_rows, _gradients(model), 1e-5)


@pytest.mark.parametrize("case", [case for case in CASES if case not in CAUSAL_CASES])
@torch.no_grad()
def test_padding_changes_nothing(case: str) -> None:
    rows = torch.from_numpy(make_rows(4, shortest=4).astype(np.int64))
    reader, spec = LanguageModel(_made(case)), OutputSpec(layers=(LAST,))
    padded = reader({"input_ids": rows}, documents_of(rows != 0), spec).hidden[LAST]
    for row, states in zip(rows, padded, strict=True):
        length = int((row != 0).sum())
        alone = reader({"input_ids": row[None, :length]}, None, spec).hidden[LAST][0]
        torch.testing.assert_close(states[:length], alone, rtol=1e-4, atol=1e-5)
