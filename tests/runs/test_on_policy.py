"""Steps on what the student writes itself: what they learn from, the gradient, and that nothing but weights decides."""

import itertools
import math
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from families import make_family, without_dropout
from job import (
    Shelf,
    assert_same,
    command,
    distill,
    finish,
    interrupted,
    metrics,
    results,
    save_model,
)
from tiny import PAD, SEP, VOCAB, loss_of, make_batches, make_objective, named_terms, records
from transformers import GenerationConfig, GenerationMixin

from distill.config.objective import OnPolicyConfig, SamplingConfig
from distill.config.settings import BackendConfig
from distill.data.collate.clm import CausalLM
from distill.data.sequence_format import SequenceFormat
from distill.distributed.single import Single
from distill.models.generation import Completion, complete
from distill.models.language_model import LanguageModel
from distill.runs.on_policy import OnPolicy
from distill.runtime.seed import key

FORMAT = SequenceFormat(None, None, None, SEP, None, PAD, 1)
T, F = [True], [False]
# Sequences [16], the prompt of each where completions have 6 tokens, and the 2 tokens of the text behind it.
SEQUENCES: list[tuple[Any, list[int], list[int]]] = [
    (records(range(10, 26)), [10, 11, 12, 13], [14, 15]),
    (records([5, SEP, *range(10, 22), SEP, 6]), [10, 11, 12, 13], [14, 15]),  # the longest document
    (records([7, 8, SEP, *[PAD] * 13]), [7], [8]),  # what ends the text is left to be written
    (records([SEP] * 16), [SEP], []),  # documents without a token
    (records(range(10, 26), F * 5 + T * 4 + F * 3 + T * 4), [*range(10, 15)], [15, 16]),  # up to the first answer
    (records(range(10, 26), F * 13 + T * 3), [*range(13, 23)], []),  # a prompt that is longer than the room
    (records([9, SEP, *range(20, 34)], F * 4 + T * 12, F + T + F * 14), [9, SEP, 20, 21], [22, 23]),
]


def writer(student: Any, ends: set[int], batch_size: int = 7) -> OnPolicy:
    """Of all these sequences in one step."""
    settings = OnPolicyConfig(fraction=1.0, max_new_tokens=6, prompt_tokens=4, seeded_tokens=2, group_size=4)
    sequences, collator = np.stack([sequence for sequence, *_ in SEQUENCES]), CausalLM(FORMAT, True)
    batches = make_batches(sequences, collator, batch_size, sequences=len(sequences))
    ranks = Single(BackendConfig(device="cpu"))
    return OnPolicy(settings, batches, collator, LanguageModel(student), frozenset(ends), VOCAB, ranks)


def expected(student: Any, ends: set[int], numbers: list[int]) -> Iterator[tuple[list[int], list[int], Completion]]:
    """Prompt, tokens of the text, and completion of each sequence of the step, whose groups have 4."""
    for group in (numbers[:4], numbers[4:]):
        keys, given = key(0, "samples", 0, np.array(group)), [SEQUENCES[number][1:] for number in group]
        settings, prompts = SamplingConfig(max_new_tokens=6), [np.array(prompt + text) for prompt, text in given]
        for (prompt, text), completion in zip(
            given, complete(student, prompts, keys, settings, ends, VOCAB), strict=True
        ):
            yield prompt, text, completion


def jsd(teacher: torch.Tensor, student: torch.Tensor, beta: float) -> torch.Tensor:
    """Of logits [n, V], in each row, as Agarwal et al. define it."""
    p, q = teacher.softmax(-1), student.softmax(-1)
    mixture = beta * p + (1 - beta) * q
    return (beta * p * (p / mixture).log() + (1 - beta) * q * (q / mixture).log()).sum(-1)


def gradient(model: Any, loss: torch.Tensor) -> torch.Tensor:
    return torch.cat([each.reshape(-1) for each in torch.autograd.grad(loss, [*model.parameters()])])


def test_a_step_learns_from_completions_up_to_their_first_end_and_from_nothing_of_the_prompt() -> None:
    """Tokens of the text behind the prompt are learned from; counts, value and gradient are those of a plain loop."""
    student, teacher = without_dropout("llama"), make_family("gpt2")
    with torch.no_grad():
        student.model.embed_tokens.weight[PAD].mul_(4)  # what fills up sequences is written, too, again and again
    ends = {SEP, *range(30, 40)}  # so that some completions end
    objective = make_objective(
        named_terms(jsd={"beta": 0.3, "positions": "targets", "temperature": 1.0}), student, teacher
    )
    numbers = writer(student, ends).batches.numbers_of(0).tolist()
    rows = [*expected(student, ends, numbers)]
    assert {completion.ended for *_, completion in rows} == {True, False}
    assert any(PAD in completion.tokens[:-1] for *_, completion in rows)
    plain = []
    for prompt, text, completion in rows:
        ids = torch.tensor([[*prompt, *text, *completion.tokens]])
        logits = [model(ids).logits[0, len(prompt) - 1 : -1, :VOCAB] for model in (teacher, student)]
        plain.append(jsd(logits[0].detach(), logits[1], 0.3))
    loss = torch.cat(plain).mean()
    reference = gradient(student, loss)
    for batch_size in (7, 3, 1):
        window, samples = writer(student, ends, batch_size).window(0, 0.0)
        given = torch.cat([batch.ids for batch in window]).tolist()
        for (prompt, text, completion), ids in zip(rows, given, strict=True):
            written = [*prompt, *text, *completion.tokens]
            assert ids == written + [0] * (16 - len(written))
        assert objective.count(window)[0] == sum(map(len, plain))
        found, _ = loss_of(objective, student, teacher, window)
        torch.testing.assert_close(found, loss, rtol=1e-5, atol=0)
        torch.testing.assert_close(gradient(student, found), reference, rtol=1e-4, atol=1e-6)
    completions = [completion for *_, completion in rows]
    grams = [[tuple(each.tokens[n : n + 4]) for n in range(len(each.tokens) - 3)] for each in completions]
    assert samples.mean_length == pytest.approx(np.mean([len(each.tokens) for each in completions]))
    assert samples.ended == pytest.approx(np.mean([each.ended for each in completions]))
    assert samples.entropy == pytest.approx(np.mean(np.concatenate([each.entropy for each in completions])))
    assert 0 < samples.repeated == sum(len(each) - len({*each}) for each in grams) / sum(map(len, grams))
    assert samples.text_length == pytest.approx((6 + 6 + 1 + 1 + 2 + 3 + 6) / 7) and not samples.collapsed


def test_the_expected_gradient_is_that_of_the_expected_divergence_without_one_through_the_drawing() -> None:
    """By all 9 completions of 2 of 3 tokens, each as often as the student writes it."""
    student, teacher = without_dropout("gpt2", vocab_size=3), make_family("gpt2", vocab_size=3, n_layer=1)
    objective = make_objective(
        named_terms(jsd={"beta": 0.5, "positions": "targets", "temperature": 1.0}), student, teacher, vocab=3
    )
    collator, prompt = CausalLM(SequenceFormat(None, None, None, 7, None, 8, 1), True), [2, 0]

    def at(*written: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The student's probabilities of the next token, and its divergence from the teacher there."""
        ids = torch.tensor([[*prompt, *written]])
        logits = [model(ids).logits[0, -1:] for model in (teacher, student)]
        return logits[1].softmax(-1)[0].detach(), jsd(logits[0].detach(), logits[1], 0.5)[0]

    first, value = at()
    exact, estimated, probabilities = value / 2, torch.zeros(()), dict[tuple[int, ...], float]()
    for one in range(3):
        second, value = at(one)
        exact = exact + first[one] * value / 2
        for other in range(3):
            probability = probabilities[one, other] = float(first[one] * second[other])
            tokens = records([[*prompt, one, other, 8, 8]], [F * 2 + T * 2 + F * 2], [F * 2 + T * 2 + F * 2])
            batch = collator.collate(tokens, np.zeros(1, np.uint64), np.zeros(1, np.int64))
            estimated = estimated + probability * loss_of(objective, student, teacher, [batch])[0]
    torch.testing.assert_close(estimated, exact, rtol=1e-5, atol=0)
    torch.testing.assert_close(gradient(student, estimated), gradient(student, exact), rtol=1e-4, atol=1e-7)
    count = 4000
    drawn = complete(
        student, [np.array(prompt)] * count, key(0, "", np.arange(count)), SamplingConfig(max_new_tokens=2), (), 3
    )
    for pair in itertools.product(range(3), repeat=2):
        probability, found = probabilities[pair], np.mean([one.tokens.tolist() == [*pair] for one in drawn])
        assert abs(found - probability) < 4.5 * math.sqrt(probability * (1 - probability) / count) + 1e-4


# --- whole runs ----------------------------------------------------------------------------------------------------

HOROVOD = pytest.mark.skipif(find_spec("horovod") is None, reason="Horovod is not installed")
SLOW = pytest.mark.slow
STILL = ["optimizer.lr=1e-12", "optimizer.eps=1"]  # no weight moves further than it is rounded
STEP = ["train.sequences_per_step=12", "train.batch_size=12", "train.epochs=null", "train.steps=3", "train.log_every=1"]


def line(shelf: Shelf, folder: Path, *more: str, family: str = "gpt2") -> list[str]:
    """A run that writes 3 groups in each step, the last of which is smaller."""
    model, sampling = shelf.root / f"writes-{family}", {"fraction": 1, "max_new_tokens": 8, "group_size": 5}
    if not model.exists():
        save_model(model, family)
    run = ["+recipe=distilgpt2_gutenberg", *shelf.corpus, f"teacher.path={model}", "student.layers=[0,2]", *STEP]
    run += ["objective=gkd", *(f"objective.on_policy.{name}={value}" for name, value in sampling.items())]
    return [*run, "precision=fp32", "evaluate.samples=0", *more, f"hydra.run.dir={folder}"]


def hashes(folder: Path) -> list[str | None]:
    return [each.get("samples_sha256") for each in metrics(folder)]


@pytest.fixture(scope="module")
def unmoved(shelf: Shelf) -> Path:
    """Of a run in which no step changes a weight."""
    folder = shelf.root / "unmoved"
    assert distill(*line(shelf, folder, *STILL)) == 0
    assert len({*hashes(folder)}) == 3
    return folder


@pytest.mark.parametrize(
    "split",
    [
        ["train.batch_size=3", "backend=ddp", "backend.processes=3"],
        ["train.batch_size=6", "backend=fsdp", "backend.processes=2"],
        pytest.param(["train.batch_size=1", "backend=ddp", "backend.processes=2"], marks=SLOW),
        pytest.param(["train.batch_size=6", "backend=horovod", "backend.processes=2"], marks=[HOROVOD, SLOW]),
    ],
)
def test_the_same_is_written_in_any_micro_batches_and_on_any_ranks(
    shelf: Shelf, unmoved: Path, tmp_path: Path, split: list[str]
) -> None:
    """The third of three ranks has the group that is smaller, the second of two has none at the end."""
    finish(command(*line(shelf, tmp_path, *STILL, *split)))
    assert hashes(tmp_path) == hashes(unmoved)
    losses = [[each["loss/jsd"] for each in metrics(folder)] for folder in (tmp_path, unmoved)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5), "and each rank learns from its own"


def test_without_the_students_own_text_it_is_the_same_divergence(shelf: Shelf, tmp_path: Path) -> None:
    never = ["objective.on_policy.fraction=0", "objective.jsd.beta=0.1"]
    assert distill(*line(shelf, tmp_path / "gkd", *never)) == 0
    plain = [each for each in line(shelf, tmp_path / "jsd") if not each.startswith("objective")]
    plain += ["objective.soft.weight=0", "objective.clm.weight=0", "objective.cosine.weight=0"]
    plain += ["objective.temperature=1", "+objective.jsd={weight: 1, beta: 0.1, positions: targets}"]
    assert distill(*plain) == 0
    assert_same(tmp_path / "gkd", tmp_path / "jsd")
    assert not any("samples_sha256" in each for each in metrics(tmp_path / "gkd"))
    identities = [results(tmp_path / name)["identity"] for name in ("gkd", "jsd")]
    assert not any("on_policy" in name for identity in identities for name in identity)


@pytest.fixture(scope="module")
def learned(shelf: Shelf) -> Path:
    """Of a run that learns from the student's own text in some steps, with less and less of the corpus's."""
    folder = shelf.root / "learned"
    assert distill(*line(shelf, folder, *LEARNING)) == 0
    return folder


LEARNING = [
    "train.steps=8",
    "train.save_every=2",
    "train.keep=9",
    "optimizer.lr=5e-3",
    "objective.on_policy.fraction=0.6",
]
LEARNING += ["objective.on_policy.seeded_tokens={start: 6, end: 0}", "objective.on_policy.max_new_tokens=12"]


def test_a_killed_run_writes_the_same_again(shelf: Shelf, learned: Path) -> None:
    folder = interrupted(learned, shelf.root / "resumed", leave=1)
    assert distill(*line(shelf, folder, *LEARNING)) == 0
    assert_same(folder, learned)
    assert hashes(folder) == hashes(learned)
    lines, found = [each for each in metrics(learned) if "samples_sha256" in each], results(learned)["training"]
    assert 1 < len({each["samples_sha256"] for each in lines}) == len(lines) < 8, "some steps are on the corpus"
    mean = found["written"]["mean_length"]
    assert mean == lines[-1]["samples/mean_length"] <= 12
    assert f"{mean:.3g} tokens a completion in its last such step" in (learned / "report.md").read_text()


def test_a_module_that_writes_nothing_is_refused(
    shelf: Shelf, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(GenerationMixin, "generate")
    assert distill(*line(shelf, tmp_path / "run")) == 2 and not (tmp_path / "run" / "checkpoints").exists()
    said = "on_policy.fraction: the student, a module of yours, has no `generate` of transformers; take"
    assert said in capfd.readouterr().err


def test_a_student_that_stops_writing_is_warned_of_once(
    shelf: Shelf, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """In bf16, with gradient checkpointing, of a model whose heads share keys and that has settings of its own."""
    save_model(tmp_path / "model", "llama")
    eager = GenerationConfig(eos_token_id=[*range(9000)], top_k=50, do_sample=True, repetition_penalty=1.3)
    eager.save_pretrained(tmp_path / "model")
    more = ["precision=bf16", "student.gradient_checkpointing=true", "train.batch_size=5"]
    more += [f"teacher.path={tmp_path / 'model'}", "objective.on_policy.max_new_tokens=999"]
    assert distill(*line(shelf, tmp_path / "run", *more)) == 0
    logged = capfd.readouterr().err
    assert logged.count("completions collapse to 1.0 tokens, where the text has") == 1
    assert all(each["samples/mean_length"] == each["samples/ended"] == 1 for each in metrics(tmp_path / "run"))
    assert all(10 < each["samples/text_length"] <= 16 for each in metrics(tmp_path / "run")), "half of a sequence"
    assert all(math.isfinite(each["loss/jsd"]) and each["tokens"] for each in metrics(tmp_path / "run"))
