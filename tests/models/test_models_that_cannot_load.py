"""A folder that holds no model that loads is refused in one line, at every door, whatever is wrong with it."""

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from job import distill, library
from pydantic import ValidationError
from safetensors.torch import load_file, save_file
from tiny import make_model, make_tokenizer

from distill.commands.api.pair import load_pair
from distill.config.settings import StudentConfig, TeacherConfig
from distill.models.load import load_tokenizer
from distill.models.loaded import load_model
from distill.models.student import make_student
from distill.models.teacher import load_teacher
from distill.runs.located import locate
from distill.runtime.errors import SettingError

NOBODY = "~nobody-here/model"  # of a user that no machine has
LONGEST = 700  # characters of a line, with the name of the folder twice
DEEP = "[" * 100_000
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


def changed(name: str, **values: Any) -> Damage:
    """Keys of a JSON file get other values."""

    def damage(folder: Path) -> None:
        content = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps({**content, **values}))

    return damage


def config(**values: Any) -> Damage:
    return changed("config.json", **values)


def holds(name: str, content: str | bytes) -> Damage:
    """A file holds something else."""
    data = content if isinstance(content, bytes) else content.encode()
    return lambda folder: (folder / name).write_bytes(data)


def vocabulary(change: Callable[[dict[str, int]], dict[str, int]], **model: Any) -> Damage:
    """The tokens of tokenizer.json and their ids are others."""

    def damage(folder: Path) -> None:
        content = json.loads((folder / "tokenizer.json").read_text())
        vocab = change(content["model"]["vocab"])
        content["model"] |= {"vocab": vocab, **model}
        content["added_tokens"] = [token for token in content["added_tokens"] if token["content"] in vocab]
        (folder / "tokenizer.json").write_text(json.dumps(content))

    return damage


def weights(change: Callable[[torch.Tensor], torch.Tensor]) -> Damage:
    """The weights of one layer are others."""

    def damage(folder: Path) -> None:
        file = folder / "model.safetensors"
        tensors = load_file(file)
        name = "bert.encoder.layer.0.intermediate.dense.weight"
        save_file({**tensors, name: change(tensors[name])}, file, {"format": "pt"})

    return damage


def cut(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def pickled(folder: Path) -> None:
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def quantized(method: str, **more: Any) -> Damage:
    return config(quantization_config={"quant_method": method, **more})


CONFIGS: dict[str, Damage] = {
    "gptq": quantized("gptq", bits=4, group_size=128),
    "awq": quantized("awq", bits=4, group_size=128, version="gemm"),
    "bitsandbytes 4 bit": quantized("bitsandbytes", load_in_4bit=True),
    "bitsandbytes 8 bit": quantized("bitsandbytes", load_in_8bit=True),
    "fp8": quantized("fp8", activation_scheme="dynamic"),
    "mxfp4": quantized("mxfp4"),
    "torchao": quantized("torchao", quant_type="int4_weight_only"),
    "unheard of": quantized("unheard_of"),
    "quantization_config 5": config(quantization_config=5),
    "flash_attention_2": config(_attn_implementation="flash_attention_2"),
    "flash_attention_3": config(attn_implementation="flash_attention_3"),
    "a kernel of the hub": config(attn_implementation="kernels-community/flash-attn"),
    "attn_implementation 5": config(attn_implementation=5),
    "hidden_size text": config(hidden_size="64"),
    "hidden_size negative": config(hidden_size=-64),
    "hidden_size list": config(hidden_size=[64]),
    "vocab_size float": config(vocab_size=2000.0),
    "vocab_size negative": config(vocab_size=-1),
    "num_hidden_layers null": config(num_hidden_layers=None),
    "num_hidden_layers negative": config(num_hidden_layers=-2),
    "num_attention_heads 0": config(num_attention_heads=0),
    "num_attention_heads 3": config(num_attention_heads=3),
    "intermediate_size negative": config(intermediate_size=-4),
    "pad_token_id": config(pad_token_id=99999),
    "eos_token_id text": config(eos_token_id="x"),
    "dtype": config(dtype="float4"),
    "torch_dtype": config(torch_dtype="float4", dtype=None),
    "model_type list": config(model_type=[1]),
    "model_type unheard of": config(model_type="unheard_of"),
    "id2label": config(id2label=5),
    "architectures": config(architectures=7),
    "tie_word_embeddings": config(tie_word_embeddings="no"),
    "layer_norm_eps": config(layer_norm_eps="x"),
    "max_position_embeddings 0": config(max_position_embeddings=0),
    "hidden_act": config(hidden_act="unheard_of"),
    "auto_map": config(auto_map=5),
    "a property": config(sub_configs=5),
    "architectures of numbers": config(architectures=[[1]]),
    "code of its own": config(model_type="unheard_of", auto_map={"AutoConfig": "configuration.Own"}),
    "config []": holds("config.json", "[]"),
    "config deep": holds("config.json", DEEP),
    "config empty": holds("config.json", ""),
    "config cut": holds("config.json", '{"model_type": "be'),
    "config not UTF-8": holds("config.json", b'{"model_type": "\xff\xfe"}'),
}
TOKENIZERS: dict[str, Damage] = {
    **{
        f"{name} {what}": holds(name, content)
        for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
        for what, content in {
            "[]": "[]",
            "deep": DEEP,
            "cut": '{"a": [1',
            "empty": "",
            "not UTF-8": b'{"version": "\xff\xfe"}',
        }.items()
    },
    "tokenizer_class": changed("tokenizer_config.json", tokenizer_class=5),
    "special tokens": changed("tokenizer_config.json", mask_token=[5]),
    "model_max_length": changed("tokenizer_config.json", model_max_length="x"),
    "added tokens": changed("tokenizer.json", added_tokens=5),
    "unk_token empty": changed("tokenizer_config.json", unk_token=""),
    "no vocabulary": vocabulary(lambda vocab: {}),
    "no [UNK]": vocabulary(lambda vocab: {token: n for token, n in vocab.items() if token != "[UNK]"}),
    "an id beyond 32 bits": vocabulary(lambda vocab: {**vocab, "the": 2**32}),
}
WEIGHTS: dict[str, Damage] = {
    "cut": cut,
    "empty": holds("model.safetensors", b""),
    "int8": weights(lambda weight: (100 * weight).to(torch.int8)),
    "fp8": weights(lambda weight: weight.to(torch.float8_e4m3fn)),
    "complex": weights(lambda weight: weight.to(torch.complex64)),
    "no weights": holds("model.safetensors", struct.pack("<Q", 2) + b"{}"),
    "header too long": holds("model.safetensors", struct.pack("<Q", 2**60) + b"{}"),
    "header not JSON": holds("model.safetensors", struct.pack("<Q", 2) + b"xy"),
    "another shape": weights(lambda weight: weight[:-1].contiguous()),
    "pickled": pickled,
    "gone": lambda folder: (folder / "model.safetensors").unlink(),
}
CASES = {**CONFIGS, **TOKENIZERS, **WEIGHTS}


def refusal(door: Callable[[], object], start: str) -> str:
    with pytest.raises(SettingError) as raised:
        door()
    line = str(raised.value)
    assert line.startswith(start), line
    assert "\n" not in line and len(line) < LONGEST, line
    return line


@pytest.mark.parametrize("case", CASES)
def test_every_door_refuses_it_in_one_line(case: str, folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    CASES[case](folder)
    path = str(folder)
    capfd.readouterr()
    refusal(lambda: load_teacher(TeacherConfig(path=path)), f"teacher.path={path}")
    refusal(
        lambda: make_student(StudentConfig(init="pretrained", path=path), None, make_tokenizer(), 8),
        f"student.path={path}",
    )
    refusal(lambda: load_model(path, "cpu"), f"model={path}")
    refusal(lambda: load_pair(path, device="cpu"), "teacher")
    if case in TOKENIZERS:
        refusal(lambda: load_tokenizer("teacher.tokenizer", path), f"teacher.tokenizer={path}")
    shown = capfd.readouterr()
    assert shown.out == "" and "[transformers]" not in shown.err


def test_the_sound_folder_passes_every_door(folder: Path) -> None:
    """Without which the cases above would be refused for something else."""
    path = str(folder)
    load_teacher(TeacherConfig(path=path))
    make_student(StudentConfig(init="pretrained", path=path), None, make_tokenizer(), 8)
    load_model(path, "cpu")
    load_pair(path, device="cpu")
    load_tokenizer("teacher.tokenizer", path)


@pytest.mark.parametrize("case", ["gptq", "tokenizer.json deep", "cut"])
def test_every_command_ends_with_status_2(
    case: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    CASES[case](folder)
    books = [f"corpus.path={library(tmp_path / 'books', 2)}", f"data.cache={tmp_path / 'cache'}", "data.workers=1"]
    books += ["corpus.sequence_length=24", "corpus.max_unknown=1"]
    run = ["+recipe=distilbert_gutenberg", *books, f"hydra.run.dir={tmp_path / 'run'}"]
    commands = {
        f"teacher.path={folder}": [*run, "teacher=pretrained", f"teacher.path={folder}"],
        f"student.path={folder}": [
            *run,
            "teacher=none",
            "objective=mlm",
            "student=pretrained",
            f"student.path={folder}",
        ],
        f"model={folder} ": ["predict", f"model={folder}", "text=the [MASK] of"],
        f"model={folder}": ["evaluate", f"model={folder}", *books, "evaluate.sets=[heldout]"],
    }
    for start, arguments in commands.items():
        capsys.readouterr()
        assert distill(*arguments) == 2
        shown = capsys.readouterr()
        assert shown.err.splitlines()[-1].startswith(f"distill: {start}"), shown.err
        assert "Traceback" not in shown.err and "[transformers]" not in shown.err


def test_a_path_that_no_folder_can_have() -> None:
    long = "x" * 5000
    doors: list[tuple[str, Callable[[], object]]] = [
        (long, lambda: load_teacher(TeacherConfig(path=long))),
        (long, lambda: make_student(StudentConfig(init="pretrained", path=long), None, make_tokenizer(), 8)),
    ]
    for path in (long, NOBODY):
        doors += [
            (path, lambda path=path: load_model(path, "cpu")),
            (path, lambda path=path: load_tokenizer("teacher.tokenizer", path)),
            (path, lambda path=path: locate([path])),
        ]
    for path, door in doors:
        assert "is the path of no folder" in refusal(door, path[:100])


@pytest.mark.parametrize("section", [TeacherConfig, StudentConfig])
def test_settings_read_the_home_of_a_user(section: Callable[..., object]) -> None:
    with pytest.raises(ValidationError) as raised:
        section(path=NOBODY)
    (error,) = raised.value.errors()
    assert (error["type"], error["loc"]) == ("refused", ("path",)) and f"give ./{NOBODY}" in error["msg"]


def test_a_file_in_place_of_its_folder(folder: Path) -> None:
    """transformers would read it as a pickle."""
    for name in ("config.json", "model.safetensors"):
        path = str(folder / name)
        line = refusal(lambda path=path: load_teacher(TeacherConfig(path=path)), f"teacher.path={path}")  # type: ignore[misc]
        assert "is a file: give the folder" in line
        refusal(lambda path=path: locate([path]), f"model={path} is a file")  # type: ignore[misc]
