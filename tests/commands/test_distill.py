"""Objects in, run out: the student of the command, what is written down of the objects, and what is refused."""

import json
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from job import assert_alike, assert_same, book, composed_run, environment, refused_line, results, save_model
from torch.utils.data import DataLoader, IterableDataset
from torchmetrics import MeanMetric
from transformers import AutoModelForQuestionAnswering, AutoModelForSequenceClassification

import distill
from distill.commands.api.data import in_memory
from distill.commands.api.distill import _Job as Job
from distill.commands.api.objects import CallSettings, target_of
from distill.config.component import InMemory
from distill.models.identity import model_digest
from distill.runtime.errors import SettingError

TEXTS = [book(number, 2).strip() for number in range(60)]
STEPS = distill.TrainConfig(steps=4, epochs=None, save_every=2, batch_size=8)
LAYERS = distill.StudentConfig(layers=[0, 1])


class Triangle:
    def __init__(self, peak: float = 0.5) -> None:
        self.peak = peak

    def __call__(self, progress: float) -> float:
        return min(progress / self.peak, (1 - progress) / (1 - self.peak))


class Counted(distill.Observer):
    def __init__(self) -> None:
        self.folders = list[str]()

    def at_checkpoint(self, checkpoint: distill.ObservedCheckpoint) -> None:
        self.folders.append(checkpoint.folder.name)


def total_variation(student: torch.Tensor, teacher: torch.Tensor, targets: Any, scale: float = 1.0) -> torch.Tensor:
    return scale * 0.5 * (student.softmax(-1) - teacher.softmax(-1)).abs().sum(-1)


def is_right(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (logits.argmax(-1) == targets).float()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("teacher") / "model", "bert", 4)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def job(folder: Path, cache: Path) -> dict[str, Any]:
    """Arguments of a small run from objects."""
    held = distill.load_model(folder, "cpu")
    return {
        "teacher": (held.model, held.tokenizer),
        "data": TEXTS,
        "student": LAYERS,
        "objective": {"soft": 2.0, "mlm": 1.0},
        "folder": "runs/mine",
        "train": STEPS,
        "precision": "fp32",
        "evaluate": {"max_sequences": 32, "curve": {"points": 0}},
        "data.cache": str(cache),
        "data.workers": 1,
        "corpus.sequence_length": 32,
    }


def test_objects_give_the_student_of_the_command(
    job: dict[str, Any], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With names in place of the objects; and the objects stay as they are, without a trace but in the folder."""
    model = job["teacher"][0].half().train()
    before = model_digest(model)
    first = distill.distill(**job)
    assert model_digest(model) == before and model.dtype == torch.float16 and model.training
    Path("texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    distill.load_model(folder, "cpu").model.half().save_pretrained("half")
    job["teacher"][1].save_pretrained("half")
    named = distill.distill(**job | {"teacher": "half", "data": "texts.jsonl", "folder": "runs/named"})
    assert_same(first.folder, named.folder)
    assert results(first.folder)["student"]["perplexity"] == results(named.folder)["student"]["perplexity"]
    assert "Dataset of 60 rows" in str(first.record.notes) and not any("program" in note for note in named.record.notes)
    written = first.settings["teacher"]["_target_"]
    assert written.startswith("in memory: BertForMaskedLM, digest ")
    line = refused_line(capsys, "teacher=custom", f"teacher._target_='{written}'", "teacher.tokenizer=half")
    assert "was an object of the program that started the run; call distill.distill() with it again" in line
    assert "python -m distill +recipe=distilbert_gutenberg" in named.record.command


def test_no_teacher_is_no_teacher_and_not_the_recipes(folder: Path) -> None:
    """The losses are then those without one; a teacher that is left out is the recipe's."""
    student = distill.load_model(folder, "cpu")
    for kind, (teacher, expected) in {"none": (None, (None, ["mlm"])), "recipe's": (..., None)}.items():
        job = Job(None, Path("files"), {})
        job.add_models(teacher, student)
        job.add_settings(None)
        config = composed_run(job.arguments(None), job.values).config
        terms = [name for name, term in config.objective.terms.items() if term.weight]
        assert (config.teacher.path, terms) == expected if expected else config.teacher.path == "bundled_deep", kind


def test_a_run_is_resumed_by_the_same_objects_alone(job: dict[str, Any]) -> None:
    whole = distill.distill(**job)
    shutil.copytree(whole.folder, "runs/killed")
    (first, last) = sorted(Path("runs/killed/checkpoints").glob("step-*"))
    for left in (last, Path("runs/killed/student")):
        shutil.rmtree(left)
    Path("runs/killed/results.json").unlink()
    resumed = distill.distill(**job | {"folder": "runs/killed"})
    assert_same(resumed.folder, whole.folder)
    assert first.name.endswith("2") and resumed.metrics[0]["step"] == 1
    assert distill.distill(**job).record == whole.record  # finished: nothing is done
    other = distill.load_model(whole.student, "cpu")
    with pytest.raises(SettingError, match=r"the corpus has another text now"):
        distill.distill(**job | {"data": TEXTS[1:]})
    with pytest.raises(SettingError, match=r"the teacher has other weights or another tokenizer"):
        distill.distill(**job | {"teacher": other})
    with pytest.raises(SettingError, match=r"objective\.my_loss"):
        distill.distill(**job | {"objective": {"soft": 2.0, "mlm": 1.0, "my_loss": total_variation}})


@pytest.mark.slow
def test_a_student_in_memory_is_trained_as_a_copy(job: dict[str, Any], folder: Path) -> None:
    """As its folder is; its tokenizer is the teacher's where it brings none."""
    student = distill.load_model(folder, "cpu").model.requires_grad_(True)
    before = model_digest(student)
    first = distill.distill(**job | {"student": student})
    # The recipe has no dropout, the model its own.
    saved = distill.SavedStudentConfig(path=str(folder), dropout=None)
    named = distill.distill(**job | {"student": saved, "folder": "runs/named"})
    assert model_digest(student) == before
    assert_same(first.folder, named.folder)
    card = (first.student / "README.md").read_text()
    assert "AutoModelForMaskedLM" in card and card.count("from transformers import") == 1
    assert "call that function with the same objects and folder" in card
    with pytest.raises(SettingError, match=r"the student starts from other weights now\)"):
        distill.distill(**job | {"student": distill.load_model(first.student, "cpu").model.requires_grad_(True)})


def test_functions_and_classes_are_losses_metrics_and_schedules(job: dict[str, Any]) -> None:
    class Confidence(MeanMetric):
        higher_is_better = True

        def update(self, logits: torch.Tensor, targets: torch.Tensor) -> None:
            super().update(logits.softmax(-1).amax(-1))

    measures = {"right": {"_target_": is_right, "higher_is_better": True}, "confidence": Confidence}
    changes = {
        "objective": {"variation": {"_target_": total_variation, "weight": 2.0, "scale": 0.5}, "mlm": 1.0},
        "evaluate": {"max_sequences": 32, "measures": measures},
        "schedule": {"_target_": Triangle, "peak": 0.25},
    }
    steps, counted = list[int](), Counted()
    observers = {"steps": lambda seen: steps.append(seen.step), "counted": counted, "made": {"_target_": Counted}}
    run = distill.distill(**job | changes | {"observers": observers})
    assert steps == [1, 2, 3, 4] and counted.folders == ["step-00000002", "step-00000004"]
    assert set(run.record.objective.terms) == {"variation", "mlm"}
    assert {"right", "confidence"} <= set(run.scores["student"])
    assert run.settings["schedule"]["_target_"].endswith("test_distill.Triangle")
    assert run.settings["objective"]["variation"]["_target_"].startswith("in memory: total_variation, digest ")
    line = r"^evaluate\.measures\.right\.higher_is_better: missing"
    with pytest.raises(SettingError, match=line):
        distill.distill(**job | {"evaluate": {"measures": {"right": is_right}}})
    with pytest.raises(SettingError, match=r"^objective\.variation\.scales: no setting of in memory"):
        distill.distill(**job | {"objective": {"variation": {"_target_": total_variation, "scales": 2}}})
    with pytest.raises(SettingError, match=r"^objective\.loss: a function as a loss takes logits of the student"):
        distill.distill(**job | {"objective": lambda student, teacher: student})


@pytest.mark.slow
def test_token_ids_are_the_documents_that_they_come_from(job: dict[str, Any]) -> None:
    tokenizer = job["teacher"][1]
    more = {"corpus.heldout": 0.0, "evaluation": {"mine": TEXTS[:8]}}
    of_texts = distill.distill(**job | more)
    ids = tokenizer(TEXTS, padding=True)
    rows = datasets.Dataset.from_dict({name: ids[name] for name in ("input_ids", "attention_mask")})
    assert_same(distill.distill(**job | more | {"data": rows, "folder": "runs/ids"}).folder, of_texts.folder)
    plain = [torch.tensor(one) for one in tokenizer(TEXTS)["input_ids"]]
    assert_same(distill.distill(**job | more | {"data": plain, "folder": "runs/plain"}).folder, of_texts.folder)
    with pytest.raises(SettingError, match=r"^corpus\.field=input_ids: .* the tokenizer has \d+ tokens: give ids"):
        distill.distill(**job | more | {"data": [[3, 4, 100_000]], "folder": "runs/beyond"})


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        yield from TEXTS


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"data": DataLoader(TEXTS)}, r"data: a DataLoader, of which a resumed run .*; give .* loader\.dataset"),  # type: ignore[arg-type]
        ({"data": Stream()}, r"data: a Stream, of which a resumed run could not find its place"),
        ({"data": datasets.Dataset.from_dict({"text": TEXTS}).to_iterable_dataset()}, r"data: a IterableDataset"),
        (
            {"data": datasets.Dataset.from_dict({"body": TEXTS})},
            r"corpus: .* has no column text.* it has body: name .* prompts as corpus\.prompt",
        ),
        ({"data": datasets.DatasetDict(test=datasets.Dataset.from_dict({"text": TEXTS}))}, r"data has the splits test"),
        ({"data": [1.5]}, r"data: it holds a float"),
        ({"data": []}, r"data: empty"),
        ({"data": {"text": TEXTS}}, r"data: a dict; give a datasets\.Dataset"),
        ({"evaluation": {"my-set": TEXTS}}, r"evaluation: the name my-set of a set"),
        ({"train": {"stps": 3}}, r"train\.stps"),
        ({"train": {"steps": torch.nn.Linear(1, 1)}}, r"train\.steps: a Linear; settings are numbers"),
        ({"train": {"steps": 1}, "eval_dataset": TEXTS}, r"eval_dataset is no argument .*: give evaluation="),
        ({"observers": [Counted()]}, r"observers: a list; give each a name, as observers=\{'mine'"),
        ({"observers": Counted()}, r"observers: a Counted; give each a name"),
        ({"lr": 1e-3}, r"^lr: .*optimizer\.lr"),
        ({"teacher": torch.nn.Linear(1, 1)}, r"teacher is a Linear in memory, without its tokenizer"),
        ({"backend": {"name": "ddp", "processes": 2}}, r"backend\.processes=2: .*`torchrun --nproc-per-node 2 "),
        ({"backend": {"name": "horovod", "processes": 2}}, r"backend\.processes=2: .*`horovodrun -np 2 "),
    ],
)
def test_what_is_refused_in_one_line(job: dict[str, Any], change: dict[str, Any], line: str) -> None:
    with pytest.raises(SettingError, match=f"^{line}") as error:
        distill.distill(**job | change)
    assert "\n" not in str(error.value) and not Path("runs/mine").exists()


def test_labelled_rows_and_their_other_split(folder: Path, cache: Path) -> None:
    """The label's names are those of the data set; nothing is held out of labelled rows."""
    tokenizer = distill.load_model(folder, "cpu").tokenizer
    teacher, student = (AutoModelForSequenceClassification.from_pretrained(folder, num_labels=2) for _ in range(2))
    kinds = datasets.Features({"body": datasets.Value("string"), "label": datasets.ClassLabel(names=["old", "new"])})
    rows = {"body": [text[300:400] for text in TEXTS], "label": [number % 2 for number in range(60)]}
    data = datasets.Dataset.from_dict(rows, features=kinds)
    job: dict[str, Any] = {
        "teacher": teacher,
        "student": student,
        "tokenizer": tokenizer,
        "corpus": {"text": "body", "sequence_length": 32},
        "train": STEPS,
        "precision": "fp32",
        "folder": "runs/labelled",
        "data.cache": str(cache),
    }
    run = distill.distill(data=data.train_test_split(0.2, seed=0), **job)
    assert set(run.record.objective.terms) == {"classes", "soft_classes"}
    assert set(run.scores["student"]["accuracy"]) == {"test"}
    assert distill.load_model(run.student).model.config.id2label == {0: "old", 1: "new"}
    with pytest.raises(SettingError, match=r"^evaluation=None, and nothing is held out of labelled data"):
        distill.distill(data=data, **job)
    wrong = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=3)
    with pytest.raises(SettingError, match=r"^student gives 3 numbers for a text, and these examples need 2"):
        distill.distill(data=data, evaluation=data, **job | {"student": wrong, "folder": "runs/wrong"})


def test_other_splits_are_read_as_the_data_is(tmp_path: Path, cache: Path) -> None:
    """By the same columns, prompts and template; and a set that has the name of a shipped one is scored whole."""
    held = distill.load_model(save_model(tmp_path / "model", "gpt2", 4), "cpu")
    rows = datasets.Dataset.from_list([{"ask": text[:60], "answer": text[60:150]} for text in TEXTS])
    run = distill.distill(
        teacher=held,
        student=LAYERS,
        data=datasets.DatasetDict(train=rows.select(range(40)), test=rows.select(range(40, 60))),
        train=STEPS,
        precision="fp32",
        folder="runs/answers",
        corpus={"prompt": "ask", "field": "answer", "sequence_length": 48},
        settings={"data": {"cache": str(cache)}},
    )
    assert "prompts are read and not scored" in str(run.record.measures["perplexity"].explanation)
    described = run.record.evaluation["test"]
    assert described.documents == 20 and 0 < described.positions < described.tokens
    job = Job(None, tmp_path, {"corpus": {"template": "T", "prompt": "other"}})
    job.add_evaluation({"imdb": TEXTS})
    beside = {name.rpartition(".imdb.")[2]: value for name, value in job.given.values.items()}
    assert (beside["fraction"], beside["template"]) == (1.0, "T") and "prompt" not in beside


def test_answers_are_read_from_files_and_learned_from_the_teacher(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model", "bert", 4)
    model = AutoModelForQuestionAnswering.from_pretrained(folder)
    pair = (model, distill.load_model(folder, "cpu").tokenizer)
    with pytest.raises(SettingError, match=r"^data: questions with answers are read from files"):
        distill.distill(teacher=pair, data=datasets.Dataset.from_dict({"text": TEXTS}))
    job = Job(None, tmp_path, {})
    job.add_models(pair, None)
    job.add_data("questions")
    arguments = job.arguments(None)
    assert arguments[0] == "+recipe=squad" and {"objective=distil_spans", "student=layers"} <= {*arguments}
    assert job.given.values["corpus.path"] == "questions" and not any("heldout" in word for word in arguments)


def test_conversations_and_a_causal_pair(tmp_path: Path, cache: Path) -> None:
    held = distill.load_model(save_model(tmp_path / "model", "gpt2", 4), "cpu")
    cuts = {"user": 300, "assistant": 400}
    rows = [
        {"messages": [{"role": role, "content": text[cut : cut + 90]} for role, cut in cuts.items()]} for text in TEXTS
    ]
    run = distill.distill(
        teacher=held,
        student=LAYERS,
        data=datasets.Dataset.from_list(rows),
        train=STEPS,
        precision="fp32",
        folder="runs/chat",
        evaluate={"max_sequences": 8},
        settings={"corpus.sequence_length": 32, "data": {"cache": str(cache)}},
    )
    assert run.record.recipe == "distilgpt2_gutenberg" and run.record.corpus.chat_template is not None
    assert "the messages of assistant count" in str(run.record.corpus.name)
    data = datasets.Dataset.from_list([{"messages": row["messages"][:1]} for row in rows])
    with pytest.raises(SettingError, match=r"^corpus\.path=.*: no document has a token that counts as a target"):
        distill.distill(
            teacher=held,
            student=LAYERS,
            data=data,
            corpus={"sequence_length": 32},
            settings={"data": {"cache": str(cache)}},
        )


def test_how_settings_become_options_and_values() -> None:
    given = CallSettings()
    given.add("train", distill.TrainConfig(steps=np.int64(3), epochs=None))
    given.add("student", distill.StudentConfig(init="random", architecture="bert", config={"hidden_size": 32}))
    given.add("optimizer", "lamb")
    given.add("optimizer", {"lr": np.float64(1e-4)})
    given.add("objective", {"soft": {"start": 1.0, "end": 0.0}, "mlm": 2, "temperature": 3.0, "cosine": {"weight": 1}})
    given.add("corpus.path", Path("a folder/it's"))
    given.add("evaluate.sets", ("a", "null"))
    assert given.options == {"optimizer": "lamb"} and given.values == {
        "corpus.path": "a folder/it's",
        "evaluate.sets": ["a", "null"],
        "objective.cosine.weight": 1,
        "objective.mlm.weight": 2,
        "objective.soft.weight": {"start": 1.0, "end": 0.0},
        "objective.temperature": 3.0,
        "optimizer.lr": 1e-4,
        "student.architecture": "bert",
        "student.config.hidden_size": 32,
        "student.init": "random",
        "student.layers": None,
        "student.num_layers": None,
        "student.path": None,
        "student.search_seconds": None,
        "student.trust_remote_code": False,
        "train.epochs": None,
        "train.steps": 3,
    }
    assert target_of("optimizer", torch.optim.RAdam) == "torch.optim.radam.RAdam"
    one, other = target_of("objective.x", lambda a, b, c: a), target_of("objective.x", lambda a, b, c: b)
    assert isinstance(one, InMemory) and isinstance(other, InMemory) and one.digest != other.digest  # of one line


RANKS = """
import sys
sys.path.insert(0, {tests!r})
import distill
from job import book
held = distill.load_model({folder!r}, "cpu")
run = distill.distill(
    (held.model, held.tokenizer),
    distill.StudentConfig(layers=[0, 1]),
    [book(number, 2).strip() for number in range(60)],
    objective={{"soft": 2.0, "mlm": 1.0}}, backend="ddp", train=distill.TrainConfig(steps=4, epochs=None, batch_size=4),
    precision="fp32", evaluate={{"max_sequences": 32}}, folder={run!r},
    settings={{"corpus.sequence_length": 32, "data.cache": {cache!r}}},
)
print(run)
"""


@pytest.mark.slow
def test_every_rank_of_a_launcher_calls_it(job: dict[str, Any], folder: Path, cache: Path, tmp_path: Path) -> None:
    """The student is that of one rank, but for rounding; a script without `if __name__ == "__main__"` is run once."""
    names = {"tests": str(Path(__file__).parents[1]), "folder": str(folder), "cache": str(tmp_path / "cache")}
    Path("program.py").write_text(RANKS.format(run="runs/ranks", **names))
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "program.py"]
    ended = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert_alike(Path("runs/ranks"), distill.distill(**job).folder)


def test_a_format_for_training_is_set_aside(tmp_path: Path) -> None:
    rows = datasets.Dataset.from_dict({"text": TEXTS, "label": [number % 2 for number in range(len(TEXTS))]})
    made = in_memory(rows.with_format("torch", columns=["label"]), "corpus", True, tmp_path).make()
    examples = made.read("corpus", training=True)
    assert examples.first == TEXTS and examples.classes == ("0", "1")
    with pytest.raises(SettingError, match=r"^corpus: a data set with a transform.* map\(\)"):
        in_memory(rows.with_transform(lambda batch: batch), "corpus", False, tmp_path)


def test_the_command_of_a_run_without_objects_repeats_it(folder: Path, cache: Path, tmp_path: Path) -> None:
    """Values of a program stand in it as a command line has them; what the settings hold is the same."""
    job = Job(None, tmp_path, {"train": STEPS, "corpus": {"sequence_length": 32}, "settings": {"data.cache": cache}})
    job.add_models(folder, LAYERS)
    job.add_data("it's [here]/null")
    job.add_settings({"soft": {"start": 1.0, "end": 0.0}, "mlm": 1})
    of_program = composed_run(job.arguments(tmp_path / "run"), job.values)
    of_command = composed_run(shlex.split(of_program.command)[3:])
    assert of_command.config == of_program.config and of_command.folder == of_program.folder
    assert of_command.config.corpus.source.path == "it's [here]/null"  # type: ignore[union-attr]
