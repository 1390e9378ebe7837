"""Every kind of job: it learns, resumes bitwise after a kill, and two ranks give the same student as one process."""

import csv
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from job import (
    NOUNS,
    TINY,
    Shelf,
    assert_alike,
    assert_same,
    command,
    distill,
    finish,
    interrupted,
    lines_of,
    metrics,
    results,
    weights,
)
from labelled import mrpc, squad, table
from safetensors.torch import load_file
from text import some_text

import distill as package
from distill.data.order import quotas

GPT2 = "student.config={n_embd:32,n_layer:4,n_head:2}"
ALBERT = TINY.replace("{", "{embedding_size:16,")
NARROW = "student.config={hidden_size:24,num_hidden_layers:2,num_attention_heads:2,intermediate_size:48}"
TRAIN = ["train.batch_size=8", "train.accumulate=2", "train.epochs=2", "train.save_every=2", "train.keep=9"]
TRAIN += ["train.log_every=1", "precision=fp32"]
LABELLED = ["corpus.sequence_length=32", *TRAIN, "optimizer.lr=2e-3"]
REVIEWS = ["corpus.text=review", "corpus.label=stars"]
SNAPSHOT = "train.snapshots=[3]"


# --- the jobs: their settings, without the folder ------------------------------------------------------------------


def to(folder: Path) -> str:
    return f"hydra.run.dir={folder}"


def masked(shelf: Shelf) -> list[str]:
    return shelf.settings("train.keep=9", SNAPSHOT)


def projected(shelf: Shelf) -> list[str]:
    """A narrow student, whose hidden states are projected to the teacher's width."""
    student = ["student=bert", "student.layers=null", NARROW]
    return shelf.settings(*student, "objective.cosine.weight=0", "+objective.hidden_mse.weight=1", "train.keep=9")


def gpt2(shelf: Shelf) -> Path:
    return shelf.once("gpt2", lambda folder: shelf.pretrain(folder, "gpt2_pretrain", GPT2))


def causal(shelf: Shelf) -> list[str]:
    corpus = [*shelf.corpus, "corpus.max_sequences=60"]
    return ["+recipe=distilgpt2_gutenberg", *corpus, f"teacher.path={gpt2(shelf)}", *TRAIN]


def cached(shelf: Shelf) -> list[str]:
    return [*causal(shelf), "teacher.cache.top_k=16", "objective.cosine.weight=0"]  # no masks that need be static


def of_albert(shelf: Shelf) -> Path:
    return shelf.once("albert", lambda folder: shelf.pretrain(folder, "albert_pretrain", ALBERT))


def albert(shelf: Shelf) -> list[str]:
    corpus = [*shelf.corpus, "corpus.max_sequences=60"]
    teacher = f"teacher.path={of_albert(shelf)}"
    return ["+recipe=distilalbert_gutenberg", *corpus, teacher, *TRAIN, "train.epochs=4", "optimizer.lr=5e-3"]


def mixture(shelf: Shelf) -> list[str]:
    """A distillation on made-up notes, of which there are few, and books."""
    notes = shelf.root / "notes"
    notes.mkdir(exist_ok=True)
    for number in range(20):
        (notes / f"{number}.txt").write_text(some_text(number, 12))
    sources = f"{{notes: {{kind: text, document: file, path: {notes}, weight: 3}}, "
    sources += f"books: {{kind: gutenberg, path: {shelf.books}, weight: 1}}}}"
    corpus = [each for each in shelf.corpus if not each.startswith("corpus.path")]
    corpus += [f"corpus.sources={sources}", "corpus.max_sequences=60", "evaluate.pseudo_perplexity.fraction=0"]
    teacher = ["teacher=pretrained", f"teacher.path={shelf.teacher}", "student.layers=[0,1]", "optimizer.lr=5e-3"]
    return ["corpus=mixture", "evaluate=heldout", *corpus, *teacher, *TRAIN]


def made(folder: Path, make: Callable[[Path], Path]) -> Path:
    return folder if folder.exists() else make(folder)


def questions(shelf: Shelf) -> list[str]:
    data = made(shelf.root / "squad", squad)
    windows = [f"corpus.path={data}", "corpus.stride=12", "corpus.max_query=8"]
    return ["+recipe=squad", f"student.path={shelf.teacher}", *windows, *LABELLED, "train.epochs=3"]


def answerer(shelf: Shelf) -> Path:
    return shelf.once("answerer", lambda folder: distill(*questions(shelf), to(folder)))


def spans(shelf: Shelf) -> list[str]:
    """A smaller student of that, also on questions without answers."""
    draw, bare = random.Random(0), shelf.root / "bare.jsonl"
    contexts = [f"The bright {draw.choice(NOUNS)} was in the valley." for _ in range(50)]
    bare.write_text("".join(json.dumps({"context": each, "question": "What was bright?"}) + "\n" for each in contexts))
    teacher = ["objective=distil_spans", "teacher=pretrained", f"teacher.path={answerer(shelf)}"]
    student = ["student=layers", "student.path=null", "student.layers=first", "student.dropout=0"]
    more = ["+objective.hidden_mse.weight=1", f"corpus.unlabelled={bare}", "train.epochs=1"]
    return [*questions(shelf), *teacher, *student, *more]


def reviews(shelf: Shelf) -> list[str]:
    data = made(shelf.root / "reviews", table)
    return ["+recipe=table", f"corpus.path={data}", *REVIEWS, f"student.path={shelf.teacher}", *LABELLED]


def classifier(shelf: Shelf) -> Path:
    return shelf.once("classifier", lambda folder: distill(*reviews(shelf), "train.epochs=4", to(folder)))


def classes(shelf: Shelf) -> list[str]:
    """Few of the examples, and many texts without labels."""
    texts = random.Random(2)
    (shelf.root / "more.txt").write_text(
        "".join(" ".join(texts.choices([*NOUNS[:10], "ship"], k=7)) + "\n" for _ in range(90))
    )
    pair = ["objective=distil_classes", "teacher=pretrained", f"teacher.path={classifier(shelf)}", "student.dropout=0"]
    few = ["corpus.max_sequences=6", f"corpus.unlabelled={shelf.root / 'more.txt'}", "+objective.hidden_mse.weight=0.1"]
    return [*reviews(shelf), *pair, *few]


# --- what else is to be seen of each -------------------------------------------------------------------------------


def check_masked(folder: Path, found: dict[str, Any], shelf: Shelf) -> None:
    assert transformers.AutoModelForMaskedLM.from_pretrained(folder / "student").config.n_layers == 2
    assert {"perplexity", "pseudo_perplexity"} <= found["student"].keys()


def check_projected(folder: Path, found: dict[str, Any], shelf: Shelf) -> None:
    """Projections are trained and kept in checkpoints, and no part of the student."""
    steps = [load_file(folder / "checkpoints" / f"step-0000000{step}" / "model.safetensors") for step in (2, 4)]
    names = [name for name in steps[0] if name.startswith("terms.")]
    assert [(name, tuple(steps[0][name].shape)) for name in names] == [
        (f"terms.hidden_mse.{number}.weight", (32, 24)) for number in range(3)
    ]
    assert not any(torch.equal(*(step[name] for step in steps)) for name in names)
    assert not any("terms" in name for name in weights(folder))
    assert found["objective"]["terms"]["hidden_mse"] == {"title": "Hidden layers (MSE)", "weight": 1.0}
    assert "Hidden layers (MSE)" in (folder / "report.html").read_text()


def check_causal(folder: Path, found: dict[str, Any], shelf: Shelf) -> None:
    assert found["teacher"]["perplexity"] == results(gpt2(shelf))["student"]["perplexity"]
    assert all(0 < found[model]["bits_per_byte"]["heldout"] < 8 for model in ("teacher", "student"))
    assert transformers.AutoModelForCausalLM.from_pretrained(folder / "student").config.n_layer == 2
    text = transformers.pipeline("text-generation", str(folder / "student"))("The old river", max_new_tokens=5)
    assert text[0]["generated_text"].startswith("The old river")
    assert "text-generation" in (folder / "student" / "README.md").read_text()
    samples, report = found["samples"]["texts"], (folder / "report.md").read_text()
    assert len({sample["prompt"] for sample in samples}) == 3
    assert all(sample["continuations"].keys() == {"teacher", "student"} for sample in samples)
    assert all(each in report for each in ("Samples of text", "Bits per byte", "Next token"))
    assert "seudo-perplexity" not in report


def check_cached(folder: Path, found: dict[str, Any], shelf: Shelf) -> None:
    assert (cache := found["teacher"]["cache"]).get("hidden_states") == 32 or 0.1 < cache["kept_mass"] < 1


def check_albert(folder: Path, found: dict[str, Any], shelf: Shelf) -> None:
    teacher, before = of_albert(shelf), metrics(of_albert(shelf))
    assert before[-1]["loss/mlm"] < before[0]["loss/mlm"] and "Order of segments" in (teacher / "report.md").read_text()
    assert results(teacher)["training"]["final_loss"].keys() == {"total", "mlm", "sop"}
    assert found["teacher"]["order_accuracy"] == results(teacher)["student"]["order_accuracy"]
    model = transformers.AlbertForPreTraining.from_pretrained(folder / "student")
    assert model.config.num_hidden_layers == 2 and model.sop_classifier.classifier.weight.abs().sum() > 0


def check_mixture(folder: Path, found: dict[str, Any], shelf: Shelf) -> None:
    """Sources are counted and scored one by one."""
    sources, fed, count = found["corpus"]["sources"], found["training"]["sources"], found["corpus"]["sequences"]
    parts = quotas([3, 1], count).tolist()
    assert list(sources) == list(fed) == ["notes", "books"]
    assert [each["sequences"] for each in fed.values()] == [2 * part for part in parts]
    assert parts[0] > sources["notes"]["sequences"], "in an epoch it begins a second pass"
    for name, each in fed.items():
        assert each["passes"] == each["sequences"] / sources[name]["sequences"]
        assert metrics(folder)[-1][f"sequences/{name}"] == each["sequences"]
    assert sum(each["tokens"] for each in fed.values()) == pytest.approx(found["training"]["tokens"], rel=0.05)
    for scores in (found["student"]["perplexity"], found["history"][0]["perplexity"]):
        assert set(scores) == {"heldout_notes", "heldout_books"} and all(score > 1 for score in scores.values())
    assert "Fraction of sequences" in (folder / "report.html").read_text()


def check_spans(folder: Path, found: dict[str, Any], shelf: Shelf) -> None:
    teacher, before = results(answerer(shelf)), metrics(answerer(shelf))
    assert before[-1]["loss/span"] < before[0]["loss/span"] and found["teacher"]["f1"] == teacher["student"]["f1"]
    assert 0 <= found["student"]["exact"]["dev"] <= found["student"]["f1"]["dev"] <= 100
    assert found["agreement"] is None and found["measures"]["f1"]["lower_is_better"] is False
    assert found["corpus"]["name"].startswith("40 labelled and 50 unlabelled examples: ")
    assert transformers.AutoModelForQuestionAnswering.from_pretrained(folder / "student").config.num_hidden_layers == 2
    assert "AutoModelForQuestionAnswering" in (folder / "student" / "README.md").read_text()
    assert "Exact match" in (folder / "report.md").read_text()


def check_classes(folder: Path, found: dict[str, Any], shelf: Shelf) -> None:
    teacher = results(classifier(shelf))["student"]
    assert teacher["accuracy"]["dev"] >= 60 and "macro_f1" in teacher
    config = transformers.AutoModelForSequenceClassification.from_pretrained(folder / "student").config
    assert config.id2label == {0: "no", 1: "yes"} and config.problem_type == "single_label_classification"
    label = transformers.pipeline("text-classification", str(folder / "student"))("the old ship")[0]["label"]
    assert label in ("no", "yes")


class Kind(NamedTuple):
    """A kind of job: its settings, what it learns from, what else is looked at, and a score with its tolerance."""

    settings: Callable[[Shelf], list[str]]
    losses: str
    check: Callable[[Path, dict[str, Any], Shelf], None]
    score: str = "perplexity"
    atol: float = 0.0  # of that score


KINDS = {
    "masked": Kind(masked, "soft mlm cosine", check_masked),
    "projected": Kind(projected, "soft mlm hidden_mse", check_projected),
    "causal": Kind(causal, "soft clm cosine", check_causal),
    "cached": Kind(cached, "soft clm", check_cached),
    "states": Kind(lambda shelf: [*causal(shelf), "teacher.cache.hidden_states=true"], "soft clm cosine", check_cached),
    "albert": Kind(albert, "soft mlm cosine sop soft_sop", check_albert),
    "mixture": Kind(mixture, "soft mlm cosine", check_mixture),
    "spans": Kind(spans, "span soft_span hidden_mse", check_spans, "f1", 9.0),  # a question of the twelve
    "classes": Kind(classes, "classes soft_classes hidden_mse", check_classes, "accuracy", 5.1),
}


class Job(NamedTuple):
    """A job that has run undisturbed."""

    name: str
    shelf: Shelf
    folder: Path

    def line(self, folder: Path, *more: str) -> list[str]:
        return [*KINDS[self.name].settings(self.shelf), to(folder), *more]

    def run(self, name: str, *more: str, folder: Path | None = None) -> Path:
        """The folder of another run of the same job."""
        folder = folder or self.shelf.root / f"{self.name}-{name}"
        assert distill(*self.line(folder, *more)) == 0
        return folder


@pytest.fixture(scope="module")
def job(request: Any, shelf: Shelf) -> Job:
    made = Job(request.param, shelf, shelf.root / f"job-{request.param}")
    if not made.folder.exists():
        made.run("", folder=made.folder)
    return made


def of(*names: str) -> Any:
    return pytest.mark.parametrize("job", names, indirect=True)


@of(*KINDS)
def test_it_learns(job: Job) -> None:
    kind, found, lines = KINDS[job.name], results(job.folder), metrics(job.folder)
    assert found["training"]["final_loss"].keys() == {"total", *kind.losses.split()}
    assert all(value > 0 for value in found["training"]["final_loss"].values())
    losses = [line["loss/total"] for line in lines]
    assert sum(losses[len(losses) // 2 :]) < sum(losses[: len(losses) // 2])
    kind.check(job.folder, found, job.shelf)


@of(*KINDS)
def test_it_resumes_bitwise(job: Job) -> None:
    folder = job.run("", folder=interrupted(job.folder, job.shelf.root / f"{job.name}-resumed"))
    assert_same(folder, job.folder)
    newest = [sorted((each / "checkpoints").glob("step-*"))[-1] for each in (folder, job.folder)]
    for name in ("model", "optimizer"):
        one, other = (load_file(each / f"{name}.safetensors") for each in newest)
        assert one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)
    for key in ("loss/total", "grad_norm", "lr"):
        assert [line[key] for line in metrics(folder)] == [line[key] for line in metrics(job.folder)]
    one, other = ([line["loss"] for line in results(each)["history"]] for each in (folder, job.folder))
    assert one == other


SLOW = pytest.mark.slow


def on_ranks(job: Job, folder: Path, backend: str) -> Path:
    """The folder of the same job on two ranks."""
    if not (folder / "results.json").exists():
        finish(command(*job.line(folder, f"backend={backend}", "backend.processes=2", "train.accumulate=1")))
    return folder


@pytest.mark.parametrize(
    ("job", "backend"),
    [("masked", "fsdp"), *(pytest.param(name, "ddp", marks=SLOW) for name in KINDS)],
    indirect=["job"],
)
def test_two_ranks_give_the_same(job: Job, backend: str) -> None:
    """A mixture goes on with two ranks from a checkpoint of one process, as from one integer."""
    kind, folder = KINDS[job.name], job.shelf.root / f"{job.name}-{backend}"
    if job.name == "mixture":
        interrupted(job.folder, folder, leave=1)
    on_ranks(job, folder, backend)
    assert_alike(folder, job.folder)
    one, two = (results(each) for each in (job.folder, folder))
    assert two["backend"]["name"] == backend and two["backend"]["ranks"] == 2
    for name, value in one["student"][kind.score].items():
        assert two["student"][kind.score][name] == pytest.approx(value, rel=1e-3, abs=kind.atol)
    assert two["student"]["parameters"] == one["student"]["parameters"] and two["evaluation"] == one["evaluation"]
    assert two["training"]["steps"] == one["training"]["steps"]
    assert two["training"]["sources"] == one["training"]["sources"] if job.name == "mixture" else True
    if one["agreement"]:
        for name, agreement in one["agreement"].items():
            assert two["agreement"][name]["kl"] == pytest.approx(agreement["kl"], rel=1e-2)


# --- sharded models ------------------------------------------------------------------------------------------------

FSDP = ["backend=fsdp", "backend.processes=2", "train.accumulate=1"]


@pytest.fixture
def sharded(job: Job) -> Path:
    return on_ranks(job, job.shelf.root / f"{job.name}-fsdp", "fsdp")


@of("masked")
def test_the_export_of_a_sharded_student_is_the_same_plain_folder(job: Job, sharded: Path) -> None:
    for name in ("student", "snapshots/step-3"):
        one, two = job.folder / name, sharded / name
        assert sorted(path.name for path in two.iterdir()) == sorted(path.name for path in one.iterdir())
        for file in ("config.json", "tokenizer.json"):
            assert (two / file).read_bytes() == (one / file).read_bytes()
        found, expected = (load_file(each / "model.safetensors") for each in (two, one))
        assert found.keys() == expected.keys()
        for key, tensor in expected.items():
            torch.testing.assert_close(found[key], tensor, rtol=0, atol=2e-4)


@of("masked")
def test_one_process_goes_on_from_a_checkpoint_of_shards(job: Job, sharded: Path) -> None:
    folder = interrupted(sharded, job.shelf.root / "taken-over", leave=1)
    (first,) = (folder / "checkpoints").glob("step-*")
    assert len(list(first.glob("model-*-of-00002.safetensors"))) == 2
    assert_alike(job.run("", folder=folder), job.folder)


@SLOW
@of("masked")
def test_a_damaged_shard_is_named_and_the_checkpoint_before_is_taken(job: Job, sharded: Path) -> None:
    folder = Path(shutil.copytree(sharded, job.shelf.root / "damaged"))
    (folder / "results.json").unlink()
    part = folder / "checkpoints" / "step-00000008" / "optimizer-00002-of-00002.safetensors"
    part.write_bytes(part.read_bytes()[:-1])
    errors = finish(command(*job.line(folder, *FSDP)))
    assert "step-00000008 is damaged" in errors and "taking step-00000006" in errors
    assert_alike(folder, job.folder)


@SLOW
@of("masked")
def test_a_sharded_teacher_beside_a_whole_student(job: Job) -> None:
    """The common case; the student's checkpoints are those of any backend."""
    folder = job.shelf.root / "whole-student"
    finish(command(*job.line(folder, *FSDP, "backend.shard_student=false")))
    assert_alike(folder, job.folder)
    assert all((path / "model.safetensors").is_file() for path in (folder / "checkpoints").glob("step-*"))


@SLOW
def test_losses_that_are_scores_are_those_of_one_process(shelf: Shelf, tmp_path: Path) -> None:
    """Of a run that trains no head: ranks with fewer batches of a set join in the forwards of the sharded teacher."""
    only = [f"objective.{name}.weight=0" for name in ("soft", "mlm", "cosine")] + ["objective.pooled.weight=1"]
    only += ["evaluate.batch_size=1", "evaluate.max_sequences=7", "train.epochs=null", "train.steps=3"]
    assert shelf.run(tmp_path / "alone", *only) == 0
    shelf.run_alone(tmp_path / "ranks", *FSDP, *only)
    one, two = (results(tmp_path / name)["student"]["pooled_loss"]["heldout"] for name in ("alone", "ranks"))
    assert one > 0 and two == pytest.approx(one, rel=1e-3)
    assert_alike(tmp_path / "ranks", tmp_path / "alone")


# --- variants of them ----------------------------------------------------------------------------------------------


@of("causal", "albert")
def test_plain_kernels_train_it_alike(job: Job) -> None:
    assert_alike(job.run("plain", "precision.kernels=plain"), job.folder)


@of("causal")
def test_samples_of_text_change_nothing_and_can_be_left_out(job: Job) -> None:
    folder = job.run("without-samples", "evaluate.samples=0")
    assert_same(folder, job.folder)
    assert "samples" not in results(folder) and "Samples of text" not in (folder / "report.html").read_text()
    assert results(folder)["agreement"] == results(job.folder)["agreement"]


@SLOW
@of("causal")
def test_a_causal_baseline_stands_beside_the_student(job: Job) -> None:
    folder = job.shelf.root / "causal-baseline"
    assert distill("+recipe=distilgpt2_gutenberg_baseline", *job.line(folder)[1:]) == 0
    assert results(folder)["training"]["final_loss"].keys() == {"total", "clm"}
    beside = job.run("beside", f"evaluate.baseline={folder}")
    assert_same(beside, job.folder)
    assert results(beside)["baseline"]["perplexity"] == pytest.approx(results(folder)["student"]["perplexity"])
    for sample in results(beside)["samples"]["texts"]:
        assert sample["continuations"].keys() == {"teacher", "student", "baseline"}


@of("albert")
def test_without_the_order_nothing_is_swapped_and_there_is_no_head(job: Job) -> None:
    folder = job.run("words", "objective.sop.weight=0", "objective.soft_sop.weight=0", "train.epochs=1")
    assert not any("sop" in name for name in weights(folder))
    found = results(folder)
    assert "order_accuracy" not in found["student"] and "sop" not in found["training"]["final_loss"]


@of("albert")
def test_an_albert_learns_words_from_a_bert_and_the_order_by_itself(job: Job) -> None:
    pair = [f"teacher.path={job.shelf.teacher}", "student=albert", ALBERT, "objective.soft_sop.weight=0"]
    found = results(job.run("from-bert", *pair, "train.epochs=1"))
    assert "order_accuracy" in found["student"] and "order_accuracy" not in found["teacher"]


def test_the_objective_of_minilm_runs(shelf: Shelf, tmp_path: Path) -> None:
    more = ["objective=minilm", "objective.relations.relation_heads=16", "teacher.micro_batches=2", "train.steps=2"]
    assert shelf.run(tmp_path / "run", *more) == 0
    assert list(results(tmp_path / "run")["objective"]["terms"]) == ["relations"]
    assert all(line["loss/relations"] > 0 for line in metrics(tmp_path / "run"))


@of("classes")
def test_labels_of_texts_that_are_unlabelled_are_ignored_and_other_texts_are_another_run(
    job: Job, tmp_path: Path, capfd: pytest.CaptureFixture
) -> None:
    texts = (job.shelf.root / "more.txt").read_text().splitlines()
    with (tmp_path / "labelled.csv").open("w", newline="") as file:
        rows = [(text, ("yes", "", "nonsense")[number % 3]) for number, text in enumerate(texts)]
        csv.writer(file).writerows([("review", "stars"), *rows])
    more = f"corpus.unlabelled={tmp_path / 'labelled.csv'}"
    assert_same(job.run("ignored", more), job.folder)
    (tmp_path / "other.txt").write_text("\n".join(texts).replace("ship", "boat", 1))
    assert distill(*job.line(job.folder, f"corpus.unlabelled={tmp_path / 'other.txt'}")) == 2
    assert "the corpus has another text now" in capfd.readouterr().err


@of("classes")
def test_accuracy_against_a_baseline_has_an_interval_in_points(job: Job, tmp_path: Path) -> None:
    """The baseline learns from the same labels, without a teacher; each of the 20 examples is drawn by itself."""
    own = ["corpus.max_sequences=48", "corpus.unlabelled=null", "objective.hidden_mse.weight=0", "train.epochs=8"]
    alone = [*reviews(job.shelf), "objective=classes", "student.dropout=0", own[0], own[-1]]
    assert distill(*alone, "optimizer.lr=1e-5", to(tmp_path / "baseline")) == 0
    run = job.run("", *own, f"evaluate.baseline={tmp_path / 'baseline'}", "optimizer.lr=5e-3", folder=tmp_path / "run")
    found = results(run)
    drawn = found["baseline"]["conclusions"]["accuracy"]["dev"]
    points = found["student"]["accuracy"]["dev"] - found["baseline"]["accuracy"]["dev"]
    assert points and drawn["difference"] == pytest.approx(points) and drawn["unit"] == "points"
    assert drawn["low"] <= drawn["difference"] <= drawn["high"] and drawn["n"] == 20
    for compared in package.evaluate([run, tmp_path / "baseline"]).comparisons:  # accuracy and F1
        one, other = (found[model][compared.measure]["dev"] for model in ("baseline", "student"))
        assert compared.conclusion.difference == pytest.approx(one - other)


def test_values_of_a_table(shelf: Shelf, tmp_path: Path) -> None:
    data = [f"corpus.path={table(tmp_path / 'values', values=True)}", "corpus.regression=true", "train.epochs=4"]
    assert distill(*reviews(shelf), *data, to(tmp_path / "run")) == 0
    assert results(tmp_path / "run")["student"]["pearson"]["dev"] > 0
    config = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "run" / "student").config
    assert config.num_labels == 1 and config.problem_type == "regression"


SCRATCH = ["student=bert", "student.path=null", TINY, "student.init=random"]


@pytest.mark.parametrize(
    ("settings", "more", "scores"),
    [
        (questions, ["corpus.version='2.0'"], "exact best_exact has_answer_f1 no_answer_exact"),
        (reviews, ["+recipe=glue", "corpus.path={mrpc}", "corpus.task=mrpc"], "f1 accuracy"),
        (reviews, [*SCRATCH, "student.tokenizer={teacher}"], "accuracy"),
        (reviews, ["evaluate.sets=[]"], ""),
    ],
    ids=["without answers", "a task of GLUE", "random weights with another's tokenizer", "nothing scored"],
)
def test_other_examples_with_labels(
    settings: Callable[[Shelf], list[str]], more: list[str], scores: str, shelf: Shelf, tmp_path: Path
) -> None:
    line = settings(shelf)
    if "corpus.task=mrpc" in more:
        line = [each for each in line[1:] if not each.startswith("corpus.path") and each not in REVIEWS]
        more = [more[0], f"corpus.path={mrpc(tmp_path / 'glue')}", more[2]]
    more = [each.replace("{teacher}", str(shelf.teacher)) for each in more]
    assert distill(*line, *more, "train.epochs=null", "train.steps=2", to(tmp_path / "run")) == 0
    found = results(tmp_path / "run")
    assert set(scores.split()) <= found["student"].keys() and bool(found["evaluation"]) == bool(scores)


# --- refusals ------------------------------------------------------------------------------------------------------

FROM_BERT = ["teacher.path={teacher}", "student=albert", ALBERT]
MEMBERS = ["teacher=several", "+teacher.members.a.path=A", "+teacher.members.b.path=B", "teacher.path=null"]
COSINE = ["+objective.cosine.weight=1", "+objective.cosine.positions=masked"]
TOP_K = ["teacher.cache.top_k=4", "objective.masking.static=true", "objective.cosine.weight=0"]


@pytest.mark.parametrize(
    ("settings", "more", "words"),
    [
        (reviews, ["corpus.text=nothing"], ["corpus.text=nothing", "review"]),
        (reviews, ["objective=spans"], ["corpus.kind=", "squad"]),
        (reviews, ["objective=mlm"], ["corpus"]),
        (reviews, ["student.path=null"], ["student.path"]),
        (reviews, ["evaluate.sets=[other]"], ["evaluate.sets: other"]),
        (reviews, ["objective.masking.mlm_probability=0.2"], ["objective.masking", "leave it out"]),
        (reviews, ["corpus.heldout=0.1"], ["corpus.heldout=0.1"]),
        (reviews, ["objective=distil_classes"], ["teacher.path=null", "objective.soft_classes"]),
        (reviews, ["teacher=bundled_small", *COSINE], ["objective.cosine.positions", "set it to all"]),
        (reviews, ["teacher=bundled_small", "objective=distil_classes"], ["teacher.path=bundled_small"]),
        (reviews, ["corpus.path={reviews}/train.csv"], ["evaluate.sources.dev", "that the student is trained on"]),
        (reviews, ["corpus.path={reviews}/train.csv", "evaluate.max_sequences=3"], ["evaluate.sources.dev"]),
        (classes, ["objective=classes", "~objective.hidden_mse"], ["corpus.unlabelled=", "distil_classes"]),
        (classes, ["corpus.max_sequences=0"], ["corpus.max_sequences=0", "objective.classes.weight=0"]),
        (classes, ["corpus.max_sequences=0", "corpus.unlabelled=null"], ["corpus.max_sequences=0"]),
        (classes, ["corpus.unlabelled=/no/such/file"], ["corpus.unlabelled=/no/such/file"]),
        (classes, ["corpus.unlabelled={reviews}/validation.csv"], ["evaluate.sources.dev", "corpus.unlabelled"]),
        (classes, ["corpus.unlabelled={reviews}"], ["split unlabelled", "give a file"]),
        (albert, ["corpus.cross_documents=true"], ["corpus.cross_documents=true"]),
        (albert, ["precision.student=fp16", "backend.compression=fp16"], ["twice"]),
        (albert, MEMBERS, ["objective.soft_sop"]),
        (albert, FROM_BERT, ["teacher.path", "head for the order", "soft_sop"]),
        (masked, ["objective=minilm"], ["objective.relations.relation_heads=48", "32"]),
        (masked, ["+objective.relations={weight: 1, relation_heads: 4}", "precision.compile=true"], ["compile=false"]),
        (masked, ["+objective.pooled.weight=1", *TOP_K], ["teacher.cache.top_k=4", "objective.pooled.weight=0"]),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(
    settings: Callable[[Shelf], list[str]], more: list[str], words: list[str], shelf: Shelf, tmp_path: Path,
    capfd: pytest.CaptureFixture,
) -> None:  # fmt: skip
    places = {"{teacher}": shelf.teacher, "{reviews}": shelf.root / "reviews"}
    line = settings(shelf)
    for name, place in places.items():
        more = [each.replace(name, str(place)) for each in more]
    capfd.readouterr()
    assert distill(*line, *more, to(tmp_path / "run")) == 2
    said = lines_of(capfd)
    assert len(said) == 1 and all(word in said[0] for word in words), said
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_a_teacher_of_other_classes_is_refused(shelf: Shelf, tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    """In another order, or of another number; one that names none is taken for those of the examples."""
    pair, base = ["objective=distil_classes", "teacher=pretrained"], classifier(shelf) / "student"

    def line(name: str, labels: list[str]) -> list[str]:
        ids = {"id2label": dict(enumerate(labels)), "label2id": {label: number for number, label in enumerate(labels)}}
        model = transformers.AutoModelForSequenceClassification.from_pretrained(
            base, num_labels=len(labels), ignore_mismatched_sizes=True, **ids
        )
        model.save_pretrained(tmp_path / name)
        transformers.AutoTokenizer.from_pretrained(base).save_pretrained(tmp_path / name)
        return [*reviews(shelf), *pair, f"teacher.path={tmp_path / name}", to(tmp_path / f"run-{name}")]

    for name, labels, words in (
        ("other", ["yes", "no"], "its classes as yes, no"),
        ("three", ["a", "b", "c"], "gives 3 numbers"),
    ):
        assert distill(*line(name, labels)) == 2
        assert words in capfd.readouterr().err
    assert distill(*line("unnamed", ["LABEL_0", "LABEL_1"]), "train.steps=1") == 0
    assert "names no classes: its outputs are taken for 0=no, 1=yes" in capfd.readouterr().err


@of("mixture")
def test_another_weight_is_another_run(job: Job, capfd: pytest.CaptureFixture) -> None:
    assert distill(*job.line(job.folder, "corpus.sources.notes.weight=2")) == 2
    assert "sequences of books and is now" in capfd.readouterr().err
