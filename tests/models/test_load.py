"""Loading models and tokenizers; a folder that holds none that loads is one line at every place that reads models."""

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from job import distill, library, save_model
from safetensors.torch import load_file, save_file
from tiny import CLS, VOCAB, make_model, make_tokenizer
from transformers import AutoTokenizer, GPT2Tokenizer
from vocabularies import END, byte_level

from distill.commands.api.pair import load_pair
from distill.config.settings import StudentConfig, TeacherConfig
from distill.models.check import check_tokenizers, check_vocabulary
from distill.models.kind import CAUSAL, CLASSES, MASKED, SPANS, ModelKind
from distill.models.load import load_pretrained, load_tokenizer
from distill.models.loaded import LoadedModel, device_of, load_model
from distill.models.student import make_student
from distill.models.teacher import load_teacher, teacher_tokenizer
from distill.models.weights import size
from distill.runs.located import locate
from distill.runtime.errors import SettingError

Damage = Callable[[Path], object]


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "bert"
    make_model("bert", 2).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def folder(sound: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sound, tmp_path / "bert"))


def refusal(read: Callable[[], object], start: str = "") -> str:
    with pytest.raises(SettingError) as raised:
        read()
    line = str(raised.value)
    assert line.startswith(start) and "\n" not in line and len(line) < 700, line
    return line


# --- what loads


def test_adapters_beside_weights_are_refused(folder: Path) -> None:
    """Whether transformers adds them depends on a package that need not be there."""
    (folder / "adapter_config.json").write_text("{}")
    line = refusal(lambda: load_pretrained("teacher.path", str(folder)), f"teacher.path={folder}: holds adapters")
    assert "merge_and_unload" in line


def test_size_counts_tied_weights_once() -> None:
    model = make_model("bert", 1)
    names = {p.data_ptr(): p.numel() for p in model.parameters()}
    assert size(model) == (sum(names.values()), 4 * sum(names.values()))
    assert size(model.bfloat16())[1] == 2 * sum(names.values())


def test_teacher_loads_frozen_and_in_fp32(sound: Path, tmp_path: Path) -> None:
    half = tmp_path / "half"
    shutil.copytree(sound, half)
    make_model("bert", 2).bfloat16().save_pretrained(half)
    for path in (sound, half):
        model, tokenizer, name = load_teacher(TeacherConfig(path=str(path)))
        assert name == str(path) and tokenizer.get_vocab() == make_tokenizer().get_vocab()
        assert not model.training and not any(p.requires_grad for p in model.parameters())
        assert {p.dtype for p in model.parameters()} == {torch.float32}
    ids = torch.tensor([[CLS, 7, 8, 9]])
    own = load_teacher(TeacherConfig(path=str(sound)))[0]
    torch.testing.assert_close(own(ids).logits, make_model("bert", 2)(ids).logits.detach())


def test_a_run_folder_stands_for_its_student(sound: Path, tmp_path: Path) -> None:
    shutil.copytree(sound, tmp_path / "run" / "student")
    assert load_teacher(TeacherConfig(path=str(tmp_path / "run")))[0].config.num_hidden_layers == 2


def test_weights_for_ranks_are_in_the_format_of_their_files(folder: Path) -> None:
    """Whatever config.json names: conversions leave the format of another model there."""
    changed("config.json", dtype="float16", torch_dtype="float16")(folder)
    model = load_pretrained("teacher.path", str(folder), mapped=True)
    assert {weight.dtype for weight in model.parameters()} == {torch.float32}


@pytest.mark.parametrize("name", ["mps", "xpu", "meta"])
def test_devices_that_torch_alone_knows_are_refused(name: str) -> None:
    assert device_of("cpu") == torch.device("cpu")
    refusal(lambda: device_of(name), f"device={name}: give auto, cpu, cuda or cuda:NUMBER")


# --- what does not


def changed(name: str, **values: Any) -> Damage:
    """Keys of a JSON file get other values."""

    def damage(folder: Path) -> None:
        content = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps({**content, **values}))

    return damage


def holds(name: str, content: bytes) -> Damage:
    """A file holds something else."""
    return lambda folder: (folder / name).write_bytes(content)


def cut(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def shorter(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    name = "bert.encoder.layer.0.intermediate.dense.weight"
    save_file(
        {**tensors, name: tensors[name][:-1].contiguous()}, folder / "model.safetensors", metadata={"format": "pt"}
    )


def pickled(folder: Path) -> None:
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


CASES: dict[str, tuple[Damage, str]] = {
    "quantized": (changed("config.json", quantization_config={"quant_method": "gptq", "bits": 4}), "quantized (gptq)"),
    "hidden_size text": (changed("config.json", hidden_size="64"), ""),
    "vocab_size negative": (changed("config.json", vocab_size=-1), ""),
    "num_attention_heads 3": (changed("config.json", num_attention_heads=3), ""),
    "hidden_act": (changed("config.json", hidden_act="unheard_of"), "unheard_of"),
    "model_type unheard of": (changed("config.json", model_type="unheard_of"), "unheard_of"),
    "config cut": (holds("config.json", b'{"model_type": "be'), "correct its config.json"),
    "config not UTF-8": (holds("config.json", b'{"model_type": "\xff\xfe"}'), ""),
    "tokenizer.json cut": (holds("tokenizer.json", b'{"a": [1'), "has no tokenizer that loads"),
    "tokenizer_config.json deep": (holds("tokenizer_config.json", b"[" * 100_000), "has no tokenizer that loads"),
    "weights cut": (cut, ""),
    "weights empty": (holds("model.safetensors", b""), ""),
    "no weights": (holds("model.safetensors", struct.pack("<Q", 2) + b"{}"), "lacks weights"),
    "header too long": (holds("model.safetensors", struct.pack("<Q", 2**60) + b"{}"), ""),
    "another shape": (shorter, "other shapes than its config.json"),
    "pickled": (pickled, "pickles, which can run code"),
    "gone": (lambda folder: (folder / "model.safetensors").unlink(), "give its files as they were saved together"),
}


@pytest.mark.parametrize("case", CASES)
def test_whatever_reads_it_refuses_it_in_one_line(case: str, folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    damage, words = CASES[case]
    damage(folder)
    path = str(folder)
    capfd.readouterr()
    student = StudentConfig(init="pretrained", path=path)
    assert words in refusal(lambda: load_teacher(TeacherConfig(path=path)), f"teacher.path={path}")
    refusal(lambda: make_student(student, None, make_tokenizer(), 8), f"student.path={path}")
    refusal(lambda: load_model(path, "cpu"), f"model={path}")
    refusal(lambda: load_pair(path, device="cpu"), "teacher")
    shown = capfd.readouterr()
    assert shown.out == "" and "[transformers]" not in shown.err and "MISMATCH" not in shown.err


def test_the_sound_folder_is_read(folder: Path) -> None:
    """Without which the cases above would be refused for something else."""
    path = str(folder)
    make_student(StudentConfig(init="pretrained", path=path), None, make_tokenizer(), 8)
    load_model(path, "cpu")
    load_pair(path, device="cpu")


@pytest.mark.parametrize("case", ["quantized", "weights cut"])
def test_every_command_ends_with_status_2(
    case: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    CASES[case][0](folder)
    books = [f"corpus.path={library(tmp_path / 'books', 2)}", f"data.cache={tmp_path / 'cache'}", "data.workers=1"]
    books += ["corpus.sequence_length=24", "corpus.max_unknown=1"]
    run = ["+recipe=distilbert_gutenberg", *books, f"hydra.run.dir={tmp_path / 'run'}"]
    saved = ["teacher=none", "objective=mlm", "student=pretrained", f"student.path={folder}"]
    commands = {
        f"teacher.path={folder}": [*run, "teacher=pretrained", f"teacher.path={folder}"],
        f"student.path={folder}": [*run, *saved],
        f"model={folder} ": ["predict", f"model={folder}", "text=the [MASK] of"],
        f"model={folder}": ["evaluate", f"model={folder}", *books, "evaluate.sets=[heldout]"],
    }
    for start, arguments in commands.items():
        capsys.readouterr()
        assert distill(*arguments) == 2
        shown = capsys.readouterr()
        assert shown.err.splitlines()[-1].startswith(f"distill: {start}"), shown.err
        assert "Traceback" not in shown.err and "[transformers]" not in shown.err


def test_paths_that_no_model_has(folder: Path) -> None:
    refusal(lambda: load_teacher(TeacherConfig()), "teacher.path=null")
    refusal(lambda: load_teacher(TeacherConfig(path="/nowhere/at/all")), "teacher.path=/nowhere/at/all")
    for path in ("x" * 5000, "~nobody-here/model"):
        assert "is the path of no folder" in refusal(lambda path=path: load_model(path, "cpu"), path[:100])
        assert "is the path of no folder" in refusal(lambda path=path: locate([path]), path[:100])
    path = str(folder / "model.safetensors")  # which transformers would read as a pickle
    assert "is a file: give the folder" in refusal(
        lambda: load_teacher(TeacherConfig(path=path)), f"teacher.path={path}"
    )


def test_a_model_without_a_trained_head_is_refused(tmp_path: Path) -> None:
    """transformers would fill the gap with random weights: a teacher that teaches noise."""
    make_model("bert", 1).bert.save_pretrained(tmp_path / "headless")
    assert "cls.predictions" in refusal(lambda: load_pretrained("teacher.path", str(tmp_path / "headless")))


# --- tokenizers


@pytest.mark.parametrize(("kind", "words"), [(MASKED, "mask token"), (SPANS, "causal language model")])
def test_the_tokenizer_of_a_decoder_is_refused_for_what_it_lacks(kind: ModelKind, words: str, tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model", "gpt2", 2)
    with pytest.raises(SettingError, match=words) as raised:
        load_tokenizer("student.path", str(folder), kind)
    assert raised.value.setting == "student.path" and raised.value.cure
    assert load_tokenizer("student.path", str(folder), CLASSES).pad_token_id is not None


def test_a_folder_without_a_tokenizer_is_named_with_a_setting_that_exists(folder: Path) -> None:
    for file in folder.glob("*token*"):
        file.unlink()
    with pytest.raises(SettingError, match=r"or name where it lies as teacher\.tokenizer=FOLDER$"):
        load_tokenizer("teacher.path", str(folder))
    with pytest.raises(SettingError, match=r"save the tokenizer beside the model$"):
        load_tokenizer("teacher.tokenizer", str(folder))


def test_the_revision_of_a_teacher_is_not_that_of_another_tokenizer(
    sound: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    revisions = []
    monkeypatch.setattr("distill.models.teacher.load_tokenizer", lambda *_: revisions.append(_[-1].revision))
    settings = TeacherConfig(path=str(sound), revision="a1b2")
    for other in (settings, settings.changed(tokenizer=str(sound))):
        teacher_tokenizer(other)
    assert revisions == ["a1b2", None]


@pytest.mark.parametrize("number", [VOCAB, 2**31])
def test_an_id_beyond_the_number_of_tokens(number: int, folder: Path) -> None:
    """Counts by id would take gigabytes for the second, and ids of 16 bits do not hold it."""
    content = json.loads((folder / "tokenizer.json").read_text())
    content["model"]["vocab"] |= {"less": number}
    del content["model"]["vocab"]["##less"]
    (folder / "tokenizer.json").write_text(json.dumps(content))
    line = refusal(
        lambda: load_tokenizer("teacher.tokenizer", str(folder)), f"teacher.tokenizer={folder}: its tokenizer"
    )
    assert f"has {VOCAB} tokens, but the id of less is {number:,}" in line


def test_a_tokenizer_larger_than_its_model(
    sound: Path, tmp_path: Path, tokenizer: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    check_vocabulary(make_model("bert", 1, vocab=VOCAB + 24), "student", tokenizer)  # padded for speed
    small = tmp_path / "small"
    make_model("bert", 2, vocab=VOCAB - 1).save_pretrained(small)
    tokenizer.save_pretrained(small)
    words = f"its vocabulary has {VOCAB - 1} tokens, but the tokenizer"
    for read in (
        lambda: load_model(small, "cpu"),
        lambda: load_pair(str(small), device="cpu"),
        lambda: LoadedModel.of(make_model("bert", 2, vocab=VOCAB - 1), make_tokenizer()),
    ):
        assert words in refusal(read)
    assert distill("predict", f"model={small}", "text=the [MASK] of") == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith(f"distill: model={small}: {words}")


def test_other_vocabularies_are_refused_by_name(tokenizer: Any) -> None:
    check_tokenizers(tokenizer, make_tokenizer(), "x")
    line = refusal(lambda: check_tokenizers(tokenizer, make_tokenizer(("whale",)), "student.path=folder"))
    assert "student.path=folder" in line and f"({VOCAB + 1} tokens)" in line


def test_text_is_split_as_tokenizer_json_says(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Also where transformers rebuilds a tokenizer from the vocabulary alone, which would keep numbers whole."""
    folder = byte_level(tmp_path, digits=True)
    assert AutoTokenizer.from_pretrained(folder).tokenize("12") == ["12"], "transformers takes the vocabulary alone"
    with caplog.at_level("INFO"):
        tokenizer = load_tokenizer("teacher.path", str(folder), CAUSAL)
    assert tokenizer.tokenize("12") == ["1", "2"] and tokenizer.eos_token == END
    assert f"teacher.path={folder}: text is split as its tokenizer.json says" in caplog.text
    same = load_tokenizer("teacher.path", str(byte_level(tmp_path, digits=False)), CAUSAL)
    assert isinstance(same, GPT2Tokenizer) and same.tokenize("12") == ["12"]
