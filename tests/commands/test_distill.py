"""Objects in, run out: the student of the command, what is written down of the objects, and which is another."""

import json
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas
import pytest
import torch
from job import assert_alike, assert_same, book, composed_run, environment, refused_line, results, save_model
from prediction_models import save_fine_tuned
from torch.utils.data import DataLoader, IterableDataset
from torchmetrics import MeanMetric
from transformers import AutoConfig, AutoModelForQuestionAnswering, AutoModelForSequenceClassification

import distill
from distill.commands.api.data import in_memory, splits_of
from distill.commands.api.distill import Call
from distill.commands.api.objects import digest_of, target_of
from distill.models.loaded import model_digest
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
    def __init__(self, file: Any = None) -> None:
        self.folders, self.file = list[str](), file

    def at_checkpoint(self, folder: Path) -> None:
        self.folders.append(folder.name)
        if self.file is not None:
            Path(self.file).write_text(folder.name)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        yield from TEXTS


def total_variation(student: torch.Tensor, teacher: torch.Tensor, targets: Any, scale: float = 1.0) -> torch.Tensor:
    return scale * 0.5 * (student.softmax(-1) - teacher.softmax(-1)).abs().sum(-1)


def is_right(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (logits.argmax(-1) == targets).float()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: Any) -> Path:
    return save_model(tmp_path_factory.mktemp("teacher") / "model", "bert", 4)


@pytest.fixture(scope="module")
def small(tmp_path_factory: Any) -> dict[str, Any]:
    """Settings of a small run."""
    cache = {"data.cache": str(tmp_path_factory.mktemp("cache")), "data.workers": 1, "corpus.sequence_length": 32}
    evaluate = {"max_sequences": 32}
    return {"train": STEPS, "precision": "fp32", "evaluate": evaluate, "settings": cache}


@pytest.fixture
def job(folder: Path, small: dict[str, Any]) -> dict[str, Any]:
    """Arguments of a small run from objects."""
    held = distill.load_model(folder, "cpu")
    objects = {"teacher": (held.model, held.tokenizer), "data": TEXTS, "student": LAYERS, "folder": "runs/mine"}
    return small | objects | {"objective": {"soft": 2.0, "mlm": 1.0}}


def test_objects_give_the_student_of_the_command(job: dict[str, Any], folder: Path, capsys: Any) -> None:
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
    written = first.settings["teacher"]["_target_"]
    assert written.startswith("in memory: BertForMaskedLM, digest ") and "Dataset of 60 rows" in str(first.record.notes)
    line = refused_line(
        capsys, "teacher=custom", f"teacher._target_='{written}'", "teacher.tokenizer=half", "precision=fp32"
    )
    assert "was an object of the program that started the run; call distill.distill() with it again" in line
    # A run is resumed by the same objects alone.
    shutil.copytree(first.folder, "runs/killed")
    _, last = sorted(Path("runs/killed/checkpoints").glob("step-*"))
    for left in (last, Path("runs/killed/student")):
        shutil.rmtree(left)
    Path("runs/killed/results.json").unlink()
    assert_same(distill.distill(**job | {"folder": "runs/killed"}).folder, first.folder)
    assert distill.distill(**job).record == first.record  # finished: nothing is done
    with pytest.raises(SettingError, match=r"the corpus has another text now"):
        distill.distill(**job | {"data": TEXTS[1:]})
    with pytest.raises(SettingError, match=r"the teacher has other weights or another tokenizer"):
        distill.distill(**job | {"teacher": distill.load_model(first.student, "cpu")})
    with pytest.raises(SettingError, match=r"objective\.my_loss"):
        distill.distill(**job | {"objective": {"soft": 2.0, "mlm": 1.0, "my_loss": total_variation}})


def test_a_student_in_memory_is_trained_as_a_copy(job: dict[str, Any], folder: Path) -> None:
    """As its folder is, whether or not it was loaded frozen; its tokenizer is the teacher's where it brings none."""
    student = distill.load_model(folder, "cpu")
    before = model_digest(student.model)
    first = distill.distill(**job | {"student": student.model})
    # The recipe has no dropout, the model its own.
    saved = distill.StudentConfig(init="pretrained", path=str(folder), dropout=None)
    named = distill.distill(**job | {"student": saved, "folder": "runs/named"})
    assert model_digest(student.model) == before != model_digest(distill.load_model(first.student, "cpu").model)
    assert_same(first.folder, named.folder)
    assert "call that function with the same objects and folder" in (first.student / "README.md").read_text()
    Path("mine.txt").write_text(" ".join(TEXTS[:3]))  # such a student is scored on other texts too
    more = ["+evaluate.sources.mine={kind: text, path: mine.txt}", "evaluate.sets=[mine]", "evaluate.max_sequences=4"]
    assert list(distill.evaluate([first.student], more).vocabularies[0].sets) == ["mine"]
    with pytest.raises(SettingError, match=r"the student starts from other weights now\)"):
        distill.distill(**job | {"student": distill.load_model(first.student, "cpu")})


def test_functions_and_classes_are_losses_metrics_and_schedules(job: dict[str, Any], tmp_path: Path) -> None:
    class Confidence(MeanMetric):
        higher_is_better = True

        def update(self, logits: torch.Tensor, targets: torch.Tensor) -> None:
            super().update(logits.softmax(-1).amax(-1))

    measures = {"right": {"_target_": is_right, "higher_is_better": True}, "confidence": Confidence}
    changes = {
        "objective": {"variation": {"_target_": total_variation, "weight": 2.0, "scale": 0.5}, "mlm": 1.0},
        "evaluate": {"max_sequences": np.int64(32), "measures": measures},
        "schedule": {"_target_": Triangle, "peak": np.float64(0.25)},
    }
    steps, counted, made = list[int](), Counted(), {"_target_": Counted, "file": tmp_path / "last"}
    observers = {"steps": lambda seen: steps.append(seen.step), "counted": counted, "made": made}
    run = distill.distill(**job | changes | {"observers": observers})
    assert steps == [1, 2, 3, 4] and counted.folders == ["step-00000002", "step-00000004"]
    assert (
        set(run.record.objective.terms) == {"variation", "mlm"} and (tmp_path / "last").read_text() == "step-00000004"
    )
    assert {"right", "confidence"} <= set(run.scores["student"])
    schedule = run.settings["schedule"]
    assert schedule["_target_"].endswith("test_distill.Triangle") and schedule["peak"] == 0.25
    assert run.settings["objective"]["variation"]["_target_"].startswith("in memory: total_variation, digest ")


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"data": DataLoader(TEXTS)}, r"data: a DataLoader, of which a resumed run .*; give .* loader\.dataset"),
        ({"data": Stream()}, r"data: a Stream, of which a resumed run could not find its place"),
        ({"data": datasets.Dataset.from_dict({"text": TEXTS}).to_iterable_dataset()}, r"data: a IterableDataset"),
        ({"data": datasets.Dataset.from_dict({"body": TEXTS})}, r"corpus: .* has no column text.* it has body"),
        ({"data": datasets.DatasetDict(test=datasets.Dataset.from_dict({"text": TEXTS}))}, r"data has the splits test"),
        ({"data": [1.5]}, r"data: it holds a float"),
        ({"data": []}, r"data: empty"),
        ({"data": {"text": TEXTS}}, r"data: a dict; give a datasets\.Dataset"),
        ({"data": [[3, 4, 100_000]]}, r"corpus\.field=input_ids: .* the tokenizer has \d+ tokens"),
        ({"evaluation": {"my-set": TEXTS}}, r"evaluation: the name my-set of a set"),
        ({"train": {"stps": 3}}, r"train\.stps"),
        ({"train": {"steps": torch.nn.Linear(1, 1)}}, r"train\.steps: a Linear; settings are numbers"),
        ({"eval_dataset": datasets.Dataset.from_dict({"text": TEXTS})}, r"eval_dataset: a Dataset; .* as data="),
        ({"observers": [Counted()]}, r"observers: a Counted; .* as observers=\{'mine'"),
        ({"lr": 1e-3}, r"lr: .*optimizer\.lr"),
        ({"teacher": torch.nn.Linear(1, 1)}, r"teacher is a Linear in memory, without its tokenizer"),
        ({"backend": {"name": "ddp", "processes": 2}}, r"backend\.processes=2: .*`torchrun --nproc-per-node 2 "),
        ({"evaluate": {"measures": {"right": is_right}}}, r"evaluate\.measures\.right\.higher_is_better: missing"),
        ({"objective": {"mine": {"_target_": total_variation, "scales": 2}}}, r"objective\.mine: .*'scales'"),
        ({"objective": lambda student, teacher: student}, r"objective\.loss: a function as a loss takes logits of"),
    ],
)
def test_what_is_refused_in_one_line(job: dict[str, Any], change: dict[str, Any], line: str) -> None:
    with pytest.raises(SettingError, match=f"^{line}") as error:
        distill.distill(**job | change)
    assert "\n" not in str(error.value) and not Path("runs/mine").exists()


def test_labelled_rows_and_their_other_split(folder: Path, small: dict[str, Any], tmp_path: Path) -> None:
    """The label's names are those of the data set; the student is half of the teacher's layers."""
    loaded = distill.load_model(save_fine_tuned(tmp_path / "teacher", AutoModelForSequenceClassification), "cpu")
    kinds = datasets.Features({"body": datasets.Value("string"), "label": datasets.ClassLabel(names=["old", "new"])})
    rows = {"body": [text[300:400] for text in TEXTS], "label": [number % 2 for number in range(60)]}
    data = datasets.Dataset.from_dict(rows, features=kinds)
    job = small | {"teacher": loaded.model, "tokenizer": loaded.tokenizer, "corpus": {"text": "body"}, "evaluate": {}}
    run = distill.distill(data=data.train_test_split(0.2, seed=0), **job)
    assert set(run.record.objective.terms) == {"classes", "soft_classes"}
    assert set(run.scores["student"]["accuracy"]) == {"test"}
    assert distill.load_model(run.student).model.config.id2label == {0: "old", 1: "new"}
    layers = AutoConfig.from_pretrained(run.student).num_hidden_layers
    assert layers == loaded.model.config.num_hidden_layers // 2 and run.folder == Path("runs/table")
    with pytest.raises(SettingError, match=r"^evaluation=None: nothing is held out of labelled data"):
        distill.distill(data=data, **job)
    wrong = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=3)
    with pytest.raises(SettingError, match=r"^student gives 3 numbers for a text, and these examples need 2"):
        distill.distill(data=data, evaluation=data, student=wrong, **job | {"folder": "runs/wrong"})


def test_prompts_and_other_splits_of_a_causal_model(tmp_path: Path, small: dict[str, Any]) -> None:
    """The split is read by the same columns."""
    held = distill.load_model(save_model(tmp_path / "model", "gpt2", 4), "cpu")
    rows = datasets.Dataset.from_list([{"ask": text[:60], "answer": text[60:150]} for text in TEXTS])
    data = datasets.DatasetDict(train=rows.select(range(40)), test=rows.select(range(40, 60)))
    corpus = {"prompt": "ask", "field": "answer"}
    run = distill.distill(teacher=held, student=LAYERS, data=data, corpus=corpus, **small | {"evaluate": {}})
    assert run.record.recipe == "distilgpt2_gutenberg"
    described = run.record.evaluation["test"]
    assert described.documents == 20 and 0 < described.positions < described.tokens


def call_of(recipe: str | None = None, objective: Any = None, **settings: Any) -> Call:
    return Call(recipe, objective, settings, Path("files"))


def test_what_models_and_data_make_of_the_settings(folder: Path) -> None:
    student = distill.load_model(folder, "cpu")
    alone, of_recipe, answers = (call_of() for _ in range(3))
    alone.add_models(None, student)
    config = alone.composed(None).config
    weights = {name: term.weight for name, term in config.objective.terms.items() if term.weight}
    assert config.teacher.path is None and [*weights] == ["mlm"]
    of_recipe.add_models(..., student)
    assert of_recipe.composed(None).config.teacher.path == "bundled_deep"
    answers.add_models((AutoModelForQuestionAnswering.from_pretrained(folder), student.tokenizer), None)
    answers.add_data("questions")
    found = answers.composed(None)
    assert (found.recipe, found.config.student.init, found.config.corpus.path) == ("squad", "layers", "questions")
    assert {"span", "soft_span"} == {*found.config.objective.terms} and "dev" in found.config.evaluate.sources
    with pytest.raises(SettingError, match=r"^corpus: questions with answers are read from files"):
        answers.add_data(TEXTS)
    scored = call_of(corpus={"template": "T", "prompt": "other"})
    scored.add_evaluation({"imdb": TEXTS})
    source = scored.composed(None).config.evaluate.sources["imdb"]
    assert (source.fraction, source.template, source.prompt) == (1.0, "T", None)
    labelled = call_of("table", settings={"evaluate.sets": ["mine"], "evaluate.sources.mine": {"kind": "table"}})
    labelled.add_data(datasets.Dataset.from_dict({"text": TEXTS, "label": [number % 2 for number in range(60)]}))
    assert labelled.composed(None).config.evaluate.sets == ["mine"]


def test_the_command_of_a_run_without_objects_repeats_it(folder: Path, tmp_path: Path) -> None:
    """Values of a program stand in it as a command line has them; what the settings hold is the same."""
    objective = {"soft": {"start": 1.0, "end": 0.0}, "mlm": 1}
    call = call_of(None, objective, train=STEPS, corpus={"sequence_length": 32}, settings={"data.cache": tmp_path})
    call.add_models(folder, LAYERS)
    call.add_data("it's [here]/null")
    of_program = call.composed(tmp_path / "run")
    of_command = composed_run(shlex.split(of_program.command)[3:])
    assert of_command.config == of_program.config and of_command.folder == of_program.folder
    assert of_command.config.corpus.path == "it's [here]/null"


def test_rows_of_other_libraries(tmp_path: Path) -> None:
    """Frames of pandas, columns that the first row lacks, and formats for training, which hide columns."""
    frame = pandas.DataFrame({"text": ["One.", "Two."], "stars": [1, 2]}, index=[7, 8])
    (rows,) = splits_of(frame, "data").values()
    assert rows.column_names == ["text", "stars"] and rows["text"][:] == ["One.", "Two."]
    (rows,) = splits_of([{"input_ids": [1, 2]}, {"input_ids": [3, 4], "labels": [-100, 4]}], "data").values()
    assert rows[1] == {"input_ids": [3, 4], "labels": [-100, 4]} and rows[0]["labels"] is None
    rows = datasets.Dataset.from_dict({"text": TEXTS, "label": [number % 2 for number in range(len(TEXTS))]})
    examples = (
        in_memory(rows.with_format("torch", columns=["label"]), "corpus", True, tmp_path).make().read("corpus", True)
    )
    assert examples.first == TEXTS and examples.classes == ("0", "1")
    with pytest.raises(SettingError, match=r"^corpus: a data set with a transform.* map\(\)"):
        in_memory(rows.with_transform(lambda batch: batch), "corpus", False, tmp_path)


CELL = """
SCALE = {scale}

def helper(value):
    return value {sign} 1

def loss(student, teacher, targets, default={default}):
    return SCALE * helper(student - teacher) + default

class Loss:
    def losses(self, a, b):
        return SCALE * helper(a) if b in {{'p', 'q'}} else {default}
"""


SAME: dict[str, Any] = {"scale": 1.0, "sign": "+", "default": 1}
OTHERS = ({"scale": 2.0}, {"sign": "-"}, {"default": 2})


def digest_in_cell(name: str, more: str = "", **changed: Any) -> str:
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(more + CELL.format(**{**SAME, **changed}), names)
    return digest_of(names[name], "objective.mine")


def test_what_a_function_or_class_of_a_cell_reads_counts_and_in_any_process() -> None:
    code = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
    code += "from test_distill import digest_in_cell\nprint(digest_in_cell('loss'), digest_in_cell('Loss'))"
    env = environment() | {"PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    for name, elsewhere in zip(("loss", "Loss"), done.stdout.split(), strict=True):
        assert elsewhere == digest_in_cell(name) == digest_in_cell(name, more="\n\n# further down\nunused = 3\n")
        assert len({elsewhere, *(digest_in_cell(name, **other) for other in OTHERS)}) == 4


class Held:
    def __init__(self, value: Any) -> None:
        self.value = value


def scaled(weight: Any) -> Any:
    return lambda student, teacher, targets: weight * student


OTHERS_IN_PLACE = [
    (1.0, 2.0),
    (np.arange(3), np.arange(1, 4)),
    (torch.ones(2, dtype=torch.bfloat16), torch.zeros(2, dtype=torch.bfloat16)),
    ({("a", 1): 2}, {("a", 1): 3}),
    ({1, 2}, {1, 3}),
    ([Held([np.ones(2)])], [Held([np.zeros(2)])]),
]


@pytest.mark.parametrize("make", [Held, scaled])
def test_other_values_are_another_object(make: Any) -> None:
    for one, other in OTHERS_IN_PLACE:
        assert digest_of(make(one), "x") == digest_of(make(one), "x") != digest_of(make(other), "x")


def test_what_has_no_content_to_compare() -> None:
    with pytest.raises(SettingError) as error:
        target_of("schedule", Held(number for number in range(3)))
    assert (error.value.setting, error.value.value) == ("schedule", "Held") and error.value.cure.startswith("give its")
    target_of("observers.mine", Held(number for number in range(3)))


def test_another_loss_of_the_same_line_or_other_frozen_parameters_are_refused(
    job: dict[str, Any], folder: Path
) -> None:
    student = distill.load_model(folder, "cpu").model.requires_grad_()
    losses = [lambda s, t, y, sign=sign: (s - sign * t).pow(2).mean(-1) for sign in (1, 2)]

    def run(loss: Any) -> Any:
        return distill.distill(**job | {"student": student, "objective": {"mine": loss}})

    assert run(losses[0]).record == run(losses[0]).record
    with pytest.raises(SettingError, match=r"objective\.mine\._target_ was in memory: <lambda>"):
        run(losses[1])
    student.get_input_embeddings().requires_grad_(False)
    with pytest.raises(SettingError, match=r"other parameters of the student are frozen now"):
        run(losses[0])


RANKS = """
import sys
sys.path.insert(0, {tests!r})
import distill
from job import book
held = distill.load_model({folder!r}, "cpu")
distill.distill(
    (held.model, held.tokenizer),
    distill.StudentConfig(layers=[0, 1]),
    [book(number, 2).strip() for number in range(60)],
    objective={{"soft": 2.0, "mlm": 1.0}}, backend="ddp", train=distill.TrainConfig(steps=4, epochs=None, batch_size=4),
    precision="fp32", evaluate={{"max_sequences": 32}}, folder="runs/ranks",
    settings={{"corpus.sequence_length": 32, "data.cache": {cache!r}}},
)
"""


@pytest.mark.slow
def test_every_rank_of_a_launcher_calls_it(job: dict[str, Any], folder: Path, tmp_path: Path) -> None:
    """The student is that of one rank, but for rounding; a script without `if __name__ == "__main__"` is run once."""
    names = {"tests": str(Path(__file__).parents[1]), "folder": str(folder), "cache": str(tmp_path / "cache")}
    Path("program.py").write_text(RANKS.format(**names))
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "program.py"]
    ended = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=500)
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert_alike(Path("runs/ranks"), distill.distill(**job).folder)
