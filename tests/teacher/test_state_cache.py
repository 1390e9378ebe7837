"""A cache of last hidden states: a step from it is that of the live teacher, of which the head alone runs."""

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from families import FAMILIES, make_family, without_dropout
from job import Shelf, assert_same, metrics, results
from tiny import PAD, SEP, VOCAB, make_batches, make_masks, make_objective, make_rows, make_tokenizer, only, step_of
from torch import Tensor

from distill.config.settings import BackendConfig, PrecisionConfig, TeacherCacheConfig
from distill.data.batch import as_dummy
from distill.data.batches import Batches
from distill.data.collate.clm import CausalLM
from distill.data.sequence_format import SequenceFormat
from distill.distributed.single import Single
from distill.models.language_model import LAST, Head, KnownStates, OutputSpec, head_alone, hidden_widths
from distill.models.loaded import model_digest
from distill.objective.objective import Objective
from distill.runs.setup import setup_teacher
from distill.runtime.errors import SettingError
from distill.teacher.build_cache import Recorder, build
from distill.teacher.cache import CachedTeacher, find
from distill.teacher.live import LiveTeacher
from distill.teacher.output import MeanTeacher, Teacher

SINGLE, CPU = Single(BackendConfig(device="cpu")), torch.device("cpu")


class Case(NamedTuple):
    """A teacher, and what a student learns from it."""

    teacher: Any
    student: str
    batches: Batches
    objective: Objective
    precision: PrecisionConfig

    @classmethod
    def of(cls, kind: str, precision: str, terms: dict[str, Any], family: str = "") -> "Case":
        """`kind`: masked, causal (without padding), or packed: causal with several documents a sequence."""
        rows = make_rows(24, shortest=None if kind == "causal" else 5)
        collator: Any = make_masks(make_tokenizer(), rows, mlm_probability=0.3, static=True)
        if kind != "masked":
            rows[:, 2] = SEP
            collator = CausalLM(SequenceFormat(None, None, None, SEP, None, PAD, 2), kind == "packed")
        family = family or ("bert" if kind == "masked" else "llama")
        teacher = make_family(family).requires_grad_(False)
        student = "distilbert" if kind == "masked" else "gpt2"
        objective = make_objective(only(**terms), without_dropout(student), teacher)
        batches = make_batches(rows, collator, 4, 2, static=True)
        return cls(teacher, student, batches, objective, PrecisionConfig(teacher=precision))

    def live(self) -> LiveTeacher:
        return LiveTeacher(setup_teacher(self.teacher, self.precision, SINGLE))

    def cached(self, folder: Path, **more: Any) -> CachedTeacher:
        (width,), positions = hidden_widths(self.teacher, (LAST,)), self.objective.state_positions
        identity = {"vocabulary": VOCAB, "hidden_states": width, "teacher": model_digest(self.teacher)}
        cache = find(TeacherCacheConfig(hidden_states=True, **more), identity, self.batches, positions, str(folder))
        build(Recorder(cache, self.live().model, self.batches, positions, None, CPU), SINGLE)
        return CachedTeacher(cache, SINGLE, setup_teacher(head_alone(self.teacher), self.precision, SINGLE))

    def gradient(self, teacher: Teacher) -> tuple[float, Tensor]:
        """Loss and whole gradient of the step in the middle of the run."""
        self.objective.begin_step(0.5)
        return step_of(without_dropout(self.student).train(), self.objective, teacher, self.batches.window(1))


TERMS: dict[str, dict[str, Any]] = {
    "soft": {"soft": 1.0, "temperature": 1.0},
    "soft where a token is predicted, hot": {"soft": 1.0, "rows": "masked", "temperature": 4.0},
    "cut off": {"soft": 1.0, "cutoff": 0.01},
    "a scheduled temperature": {"soft": {"start": 0.0, "end": 2.0}, "temperature": {"start": 4.0, "end": 1.0}},
    "reverse": {"reverse_kl": {"weight": 1.0, "temperature": 0.5}},
    "two temperatures": {"soft": 2.0, "jsd": {"weight": 1.0, "temperature": 3.0}, "logit_mse": {"weight": 0.1}},
    "cosine": {"cosine": 1.0},
    "cosine at some positions": {"cosine": 1.0, "cosine_rows": "masked"},
    "both, and cosine at more positions": {"soft": 1.0, "rows": "masked", "cosine": 1.0},
}


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("kind", ["masked", "causal", "packed"])
@pytest.mark.parametrize("terms", TERMS)
def test_a_step_is_that_of_the_live_teacher(terms: str, kind: str, precision: str, tmp_path: Path) -> None:
    """Bit for bit where the head reads the states in bf16 anyway; else but for their rounding to bf16."""
    case = Case.of(kind, precision, TERMS[terms])
    (want, wanted), (loss, found) = case.gradient(case.live()), case.gradient(case.cached(tmp_path))
    if precision == "bf16" and "cosine" not in terms:
        assert loss == want and torch.equal(found, wanted)
    else:
        assert loss == pytest.approx(want, rel=2e-3) and not torch.equal(found, wanted)
        assert float((found - wanted).norm()) < 2**-7 * float(wanted.norm())


@pytest.mark.parametrize("family", FAMILIES)
def test_what_follows_the_encoder_is_kept_of_every_family(family: str) -> None:
    """Bit for bit in bf16; but where Cohere's factor of 3 is between states and head, to which rounding comes first."""
    model, precision = make_family(family).requires_grad_(False), PrecisionConfig(teacher="bf16")
    live = setup_teacher(model, precision, SINGLE)
    head = setup_teacher(head_alone(model), precision, SINGLE)
    outputs = live({"input_ids": torch.arange(24).view(2, 12)}, None, OutputSpec(head=True, last_rows=True))
    assert outputs.head_rows is not None and outputs.last_rows is not None
    logits, found = live.head(outputs.head_rows), head.head_of(outputs.last_rows.bfloat16())
    same = [each._replace(rows=each.rows.bfloat16()).logits() for each in (logits, found)]
    assert isinstance(head.model.base_model, KnownStates) and len(list(head.model.base_model.parameters())) == 0
    if family.startswith("cohere"):
        torch.testing.assert_close(*same, rtol=2**-7, atol=2**-5)
    else:
        assert torch.equal(*same)


@pytest.mark.parametrize("family", ["bert", "llama"])
def test_where_nothing_is_read_there_is_a_head_without_rows(family: str, tmp_path: Path) -> None:
    """As a rank without a sequence has it."""
    case = Case.of("masked" if family == "bert" else "packed", "bf16", TERMS["both, and cosine at more positions"])
    dummy, reader = as_dummy(case.batches.window(0)[0]), case.cached(tmp_path)
    (output,) = reader.outputs([reader.read_ahead(dummy)], case.objective.teacher_spec)
    assert isinstance(output.distribution, Head) and output.distribution.rows.shape == (0, 32)
    assert output.outputs.hidden[LAST].shape == (*dummy.ids.shape, 32) and not output.outputs.hidden[LAST].any()


def test_each_of_several_teachers_has_its_own(tmp_path: Path) -> None:
    terms = TERMS["two temperatures"] | {"jsd": {"weight": 1.0}, "logit_mse": {"weight": 0.1, "center": True}}
    one, other = (Case.of("masked", "bf16", terms, family) for family in ("bert", "distilbert"))
    want, wanted = one.gradient(MeanTeacher([one.live(), other.live()], (1.0, 3.0)))
    members = [each.cached(tmp_path) for each in (one, other)]
    loss, found = one.gradient(MeanTeacher(members, (1.0, 3.0)))
    assert loss == want and torch.equal(found, wanted)


def test_what_is_too_large_or_not_finite_is_refused(tmp_path: Path) -> None:
    case = Case.of("causal", "bf16", TERMS["soft"])
    size = case.cached(tmp_path).cache.num_bytes
    assert size == 24 * 12 * 2 * 32 + 8 * 25
    with pytest.raises(SettingError, match=r"hidden_states=true at 288 pos.* keep teacher\.cache\.sampled in place of"):
        case.cached(tmp_path / "large", gigabytes=(size - 1) / 1e9)
    case.teacher.model.norm.weight.data[3] = 3.4e38
    with pytest.raises(SettingError, match=r"^teacher: its last hidden states are not finite in one of .*fp32"):
        case.cached(tmp_path / "infinite")


def never(*_: Any, **__: Any) -> None:
    raise AssertionError("the teacher was asked")


def test_runs_from_the_cache(
    shelf: Shelf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The student is the live teacher's, bit for bit; later runs ask nothing of it, for other losses either."""
    given = ["objective.masking.static=true", "precision.teacher=bf16", f"data.cache={tmp_path}/cache", "train.keep=9"]
    live, first, again, other = (tmp_path / name for name in ("live", "first", "again", "other"))
    assert shelf.run(live, *given, "objective.cosine.weight=0") == 0
    states = [*given, "teacher.cache.hidden_states=true"]
    assert shelf.run(first, *states, "objective.cosine.weight=0") == 0
    assert_same(first, live)
    assert "training read all positions 2 times" in capfd.readouterr().err
    note = next(note for note in results(first)["notes"] if "last hidden states in bf16" in note)
    assert results(first)["teacher"]["cache"]["hidden_states"] == 32 and "(64." in note
    monkeypatch.setattr(Recorder, "records", never)
    monkeypatch.setattr(LiveTeacher, "outputs", never)
    middle = f"resume={live / 'checkpoints' / 'step-00000004'}"
    assert shelf.run(again, *states, "objective.cosine.weight=0", middle) == 0
    assert_same(again, live)
    losses = ["objective.cosine.positions=masked", "+objective.jsd={weight: 1, positions: masked}"]
    assert shelf.run(other, *states, *losses, "objective.temperature={start: 4.0, end: 1.0}") == 0
    assert all(line[f"loss/{name}"] > 0 for line in metrics(other) for name in ("soft", "jsd", "cosine"))
