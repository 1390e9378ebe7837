"""Loading models and tokenizers; what does not load, or would not be read right, is refused in one line."""

import json
import shutil
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from families import FAMILIES, GROUPED, SIZES, make_family
from job import Shelf, refused_line, results, save_model
from safetensors.torch import load_file, save_file
from tiny import CLS, VOCAB, make_model, make_tokenizer
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForPreTraining,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    BertConfig,
    GPT2Tokenizer,
)
from vocabularies import END, byte_level

from distill.commands.api.pair import load_pair
from distill.config.models import BUNDLED
from distill.config.settings import StudentConfig, TeacherConfig
from distill.models.check import check_model, check_packing, check_tokenizers, check_vocabulary, check_vocabulary_size
from distill.models.kind import (
    CAUSAL,
    CLASSES,
    MASKED,
    SPANS,
    ModelKind,
    are_anonymous,
    output_names,
    refuse_other_kind,
)
from distill.models.load import load_pretrained, load_tokenizer
from distill.models.loaded import LoadedModel, device_of, load_model
from distill.models.precision import in_fp32
from distill.models.student import make_student
from distill.models.teacher import TITLES, bundled_folder, load_teacher, teacher_tokenizer
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


def test_a_teacher_loads_frozen_and_in_fp32_from_a_folder_or_a_run(sound: Path, tmp_path: Path) -> None:
    shutil.copytree(sound, tmp_path / "run" / "student")
    half = Path(shutil.copytree(sound, tmp_path / "half"))
    make_model("bert", 2).bfloat16().save_pretrained(half)
    ids = torch.tensor([[CLS, 7, 8, 9]])
    expected = make_model("bert", 2)(ids).logits.detach()
    for path in (sound, half, tmp_path / "run"):
        model, tokenizer, name = load_teacher(TeacherConfig(path=str(path)))
        assert name == str(path) and tokenizer.get_vocab() == make_tokenizer().get_vocab()
        assert not model.training and not any(weight.requires_grad for weight in model.parameters())
        assert {weight.dtype for weight in model.parameters()} == {torch.float32}
        torch.testing.assert_close(model(ids).logits, expected, atol=0.2 if path == half else 1e-5, rtol=1e-5)


def test_weights_for_ranks_are_in_the_format_of_their_files(folder: Path) -> None:
    """Whatever config.json names: conversions leave the format of another model there."""
    changed("config.json", dtype="float16", torch_dtype="float16")(folder)
    model = load_pretrained("teacher.path", str(folder), mapped=True)
    assert {weight.dtype for weight in model.parameters()} == {torch.float32}


@pytest.mark.parametrize("mapped", [False, True])
def test_what_no_file_has_is_computed_in_fp32(mapped: bool, tmp_path: Path) -> None:
    """The scale of its embeddings is a root, which has too few digits in the format of the weights."""
    make_family("gemma3_text").bfloat16().save_pretrained(tmp_path)
    model = load_pretrained("teacher.path", str(tmp_path), CAUSAL, mapped=mapped)
    expected = {name: each.clone() for name, each in make_family("gemma3_text").named_buffers()}
    found = dict(model.named_buffers())
    assert found.keys() == expected.keys() and all(torch.equal(found[name], each) for name, each in expected.items())
    with torch.no_grad(), in_fp32(model, torch.device("cpu")):
        on_host = load_pretrained("teacher.path", str(tmp_path), CAUSAL)
        ids = torch.tensor([[CLS, 7, 8, 9]])
        assert torch.equal(model(ids).logits, on_host(ids).logits)


def test_size_counts_tied_weights_once() -> None:
    model = make_model("bert", 1)
    number = sum({weight.data_ptr(): weight.numel() for weight in model.parameters()}.values())
    assert size(model) == (number, 4 * number) and size(model.bfloat16()) == (number, 2 * number)


@pytest.mark.parametrize("name", ["mps", "xpu", "meta"])
def test_devices_that_torch_alone_knows_are_refused(name: str) -> None:
    assert device_of("cpu") == torch.device("cpu")
    refusal(lambda: device_of(name), f"device={name}: give auto, cpu, cuda or cuda:NUMBER")


@pytest.mark.parametrize("kind", BUNDLED)
def test_a_bundled_teacher_knows_some_english(kind: str) -> None:
    model, tokenizer, title = load_teacher(TeacherConfig(path=kind))
    assert title == TITLES[kind] and model.config.num_hidden_layers == {"bundled_small": 4, "bundled_deep": 10}[kind]
    ids = tokenizer(f"he looked at her and said nothing, and she {tokenizer.mask_token} at him.", return_tensors="pt")
    with torch.no_grad():
        logits = model(**ids).logits[0, ids["input_ids"][0].tolist().index(tokenizer.mask_token_id)]
    assert "looked" in tokenizer.convert_ids_to_tokens(logits.topk(5).indices)
    folder, other = (Path(bundled_folder(each)) for each in (kind, BUNDLED[0]))
    assert (folder / "model.safetensors").stat().st_size < 12_000_000  # what an installation carries
    assert (folder / "tokenizer.json").read_bytes() == (other / "tokenizer.json").read_bytes()


# --- folders that do not load


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
    file, name = folder / "model.safetensors", "bert.encoder.layer.0.intermediate.dense.weight"
    tensors = load_file(file)
    save_file(tensors | {name: tensors[name][:-1].contiguous()}, file, metadata={"format": "pt"})


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
    "adapters beside weights": (lambda folder: (folder / "adapter_config.json").write_text("{}"), "merge_and_unload"),
}


@pytest.mark.parametrize("case", CASES)
def test_whatever_reads_it_refuses_it_in_one_line(case: str, folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    damage, words = CASES[case]
    path, student = str(folder), StudentConfig(init="pretrained", path=str(folder))
    if case == "quantized":  # without the damage all of these read it
        make_student(student, None, make_tokenizer(), 8)
        load_model(path, "cpu")
        load_pair(path, device="cpu")
    damage(folder)
    capfd.readouterr()
    assert words in refusal(lambda: load_teacher(TeacherConfig(path=path)), f"teacher.path={path}")
    refusal(lambda: make_student(student, None, make_tokenizer(), 8), f"student.path={path}")
    refusal(lambda: load_model(path, "cpu"), f"model={path}")
    refusal(lambda: load_pair(path, device="cpu"), "teacher")
    shown = capfd.readouterr()
    assert shown.out == "" and "[transformers]" not in shown.err and "MISMATCH" not in shown.err


def test_paths_that_no_model_has(folder: Path) -> None:
    refusal(lambda: load_teacher(TeacherConfig()), "teacher.path=null")
    refusal(lambda: load_teacher(TeacherConfig(path="/nowhere/at/all")), "teacher.path=/nowhere/at/all")
    for path in ("x" * 5000, "~nobody-here/model"):
        for read in (lambda path=path: load_model(path, "cpu"), lambda path=path: locate([path])):
            assert "is the path of no folder" in refusal(read, path[:100])
    path = str(folder / "model.safetensors")  # which transformers would read as a pickle
    assert "is a file: give the folder" in refusal(lambda: load_model(path, "cpu"), f"model={path}")


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
    for setting, cure in (
        ("path", "as teacher.tokenizer=FOLDER"),
        ("tokenizer", "save the tokenizer beside the model"),
    ):
        assert refusal(lambda s=setting: load_tokenizer(f"teacher.{s}", str(folder))).endswith(cure)


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
    line = refusal(lambda: load_tokenizer("teacher.tokenizer", str(folder)), f"teacher.tokenizer={folder}: ")
    assert f"has {VOCAB} tokens, but the id of less is {number:,}" in line


def test_a_tokenizer_larger_than_its_model_or_of_another(tmp_path: Path, tokenizer: Any) -> None:
    check_vocabulary(make_model("bert", 1, vocab=VOCAB + 24), "student", tokenizer)  # padded for speed
    small = make_model("bert", 2, vocab=VOCAB - 1)
    for part in (small, tokenizer):
        part.save_pretrained(tmp_path)
    for read in (
        lambda: load_model(tmp_path, "cpu"),
        lambda: load_pair(str(tmp_path), device="cpu"),
        lambda: LoadedModel.of(small, make_tokenizer()),
    ):
        assert f"its vocabulary has {VOCAB - 1} tokens, but the tokenizer" in refusal(read)
    check_tokenizers(tokenizer, make_tokenizer(), "x")
    assert f"({VOCAB + 1} tokens)" in refusal(lambda: check_tokenizers(tokenizer, make_tokenizer(("whale",)), "x"), "x")


def test_text_is_split_as_tokenizer_json_says(tmp_path: Path, lines: list[str]) -> None:
    """Also where transformers rebuilds a tokenizer from the vocabulary alone, which would keep numbers whole."""
    folder = byte_level(tmp_path, digits=True)
    assert AutoTokenizer.from_pretrained(folder).tokenize("12") == ["12"], "transformers takes the vocabulary alone"
    tokenizer = load_tokenizer("teacher.path", str(folder), CAUSAL)
    assert tokenizer.tokenize("12") == ["1", "2"] and tokenizer.eos_token == END
    assert f"teacher.path={folder}: text is split as its tokenizer.json says" in lines[-1]
    same = load_tokenizer("teacher.path", str(byte_level(tmp_path, digits=False)), CAUSAL)
    assert isinstance(same, GPT2Tokenizer) and same.tokenize("12") == ["12"]


def test_special_tokens_beyond_the_vocabulary_that_nothing_writes(
    shelf: Shelf, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As that of images in Gemma 3's tokenizer: no text holds them. Of a pair both heads give as many logits."""
    small, large = (save_model(tmp_path / name, "gpt2", 2) for name in ("small", "large"))
    tokenizer = AutoTokenizer.from_pretrained(small)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    model = AutoModelForCausalLM.from_pretrained(large)
    model.resize_token_embeddings(len(tokenizer))
    model.save_pretrained(large)
    for folder in (small, large):
        tokenizer.save_pretrained(folder)
    load_pair(str(small), layers=[0], device="cpu")
    run = ["+recipe=distilgpt2_gutenberg", *shelf.corpus, "precision=fp32", "corpus.sequence_length=32"]
    pair = [f"teacher.path={small}", "student=pretrained", f"student.path={large}"]
    line = refused_line(capsys, *run, *pair, f"hydra.run.dir={tmp_path / 'run'}")
    assert f"teacher predicts {len(tokenizer) - 1} and student predicts {len(tokenizer)}" in line
    check_vocabulary_size(len(tokenizer) - 1, "teacher", tokenizer)
    refusal(lambda: check_vocabulary_size(len(tokenizer) - 2, "teacher", tokenizer), "teacher: its vocabulary has")
    tokenizer.chat_template = "{% for message in messages %}<image>{{ message['content'] }}{% endfor %}"
    refusal(lambda: check_vocabulary_size(len(tokenizer) - 1, "teacher", tokenizer), "teacher: its vocabulary has")


# --- models of another kind, or that would not be read right


def make(auto: Any, family: str, **fields: Any) -> Any:
    """With weights that make every part of it show."""
    torch.manual_seed(1)
    known = {"vocab_size": VOCAB, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 2}
    model = auto.from_config(AutoConfig.for_model(family, **{**known, "eos_token_id": 3, **fields})).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.15)
    return model


def vision_model() -> Any:
    text = GROUPED | {"vocab_size": VOCAB, "head_dim": 8}
    vision = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    vision |= {"image_size": 16, "patch_size": 4}
    config = AutoConfig.for_model("gemma3", text_config=text, vision_config=vision, mm_tokens_per_image=4)
    return AutoModelForCausalLM.from_config(config).eval()


T5 = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 1, "num_decoder_layers": 1, "num_heads": 4}
MOBILE = SIZES | {"embedding_size": 16, "intra_bottleneck_size": 16, "true_hidden_size": 16}
OPT = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "ffn_dim": 48}
CAUSAL_LM, MASKED_LM = CAUSAL.auto_class, MASKED.auto_class
AHEAD, BACK = "objective=distilbert", "objective=distilgpt2"  # the cures of models that look ahead, and back alone
# What makes the model, the kind that it is taken for, and words of the line.
REFUSED: dict[str, tuple[Callable[[], Any], ModelKind, tuple[str, ...]]] = {
    # What is trained would be another function than these compute, or no hidden states can be read of them.
    "mobilebert": (lambda: make(MASKED_LM, "mobilebert", **MOBILE), MASKED, ("docs/how-to/extend.md",)),
    "esm": (lambda: make(MASKED_LM, "esm", **SIZES, mask_token_id=4), MASKED, ("docs/how-to/extend.md",)),
    "opt": (lambda: make(CAUSAL_LM, "opt", **OPT), CAUSAL, ("docs/how-to/extend.md",)),
    "mamba": (
        lambda: make(CAUSAL_LM, "mamba", hidden_size=32, num_hidden_layers=2, state_size=4),
        CAUSAL,
        ("docs/how-to/extend.md",),
    ),
    "images": (vision_model, CAUSAL, ("Gemma3ForConditionalGeneration", "of text only")),
    "gpt2": (lambda: make_family("gpt2"), MASKED, ("GPT2LMHeadModel", "attends only to earlier tokens", BACK)),
    "bert": (lambda: make_model("bert", 2), CAUSAL, ("BertForMaskedLM", "attends to later tokens", AHEAD)),
    # The class of BERT that transformers loads for causal models looks ahead unless its configuration forbids it.
    "bert, causal": (lambda: make(CAUSAL_LM, "bert", **SIZES), CAUSAL, ("attends to later tokens", AHEAD)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_models_that_would_not_be_read_right(name: str) -> None:
    build, kind, words = REFUSED[name]
    model = build()
    line = refusal(lambda: check_model(model, "teacher.path=x", kind), "teacher.path=x: ")
    assert all(word in line for word in words) and "AssertionError" not in line


def test_a_rank_that_is_lost_is_no_fault_of_the_model() -> None:
    def lost(*_: Any) -> None:
        raise RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer")

    model = make_model("bert", 1)
    model.register_forward_pre_hook(lost)
    with pytest.raises(RuntimeError, match="closed by peer"):
        check_model(model, "teacher", MASKED)


def test_a_bert_that_looks_back_alone_is_a_causal_model() -> None:
    check_model(make(CAUSAL_LM, "bert", is_decoder=True, **SIZES), "student", CAUSAL)


@pytest.mark.parametrize(
    ("build", "kind", "words"),
    [
        (lambda: make_family("gpt2"), MASKED, (MASKED.noun, BACK)),
        (lambda: make_family("llama"), MASKED, (MASKED.noun, BACK)),
        (lambda: make_family("bert"), CAUSAL, (CAUSAL.noun, AHEAD)),
        (lambda: make_family("modernbert"), CAUSAL, (CAUSAL.noun, AHEAD)),
        (lambda: make(AutoModelForSeq2SeqLM, "t5", **T5), MASKED, ("sequence-to-sequence", MASKED.noun)),
        (lambda: make(AutoModelForSeq2SeqLM, "t5", **T5), CAUSAL, ("sequence-to-sequence", CAUSAL.noun)),
        # The discriminator of ELECTRA has no trained head; random weights would teach noise.
        (lambda: make(AutoModelForPreTraining, "electra", **FAMILIES["electra"]), MASKED, ("lacks", "generator_")),
        (lambda: make_model("bert", 1).bert, MASKED, ("lacks weights", "cls.predictions")),
    ],
)
def test_folders_with_models_of_another_kind(
    build: Callable[[], Any], kind: ModelKind, words: tuple[str, ...], tmp_path: Path
) -> None:
    """Also where transformers has a class of each kind: what is made of the weights is looked at."""
    build().save_pretrained(tmp_path)
    line = refusal(lambda: load_pretrained("teacher.path", str(tmp_path), kind), f"teacher.path={tmp_path}")
    assert all(word in line for word in words), line


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("bloom", {"hidden_size": 32, "n_layer": 2, "n_head": 4}),
        ("falcon", SIZES | {"num_kv_heads": 4, "new_decoder_architecture": False}),
        ("mpt", {"d_model": 32, "n_layers": 2, "n_heads": 4}),
    ],
)
def test_models_that_do_not_keep_documents_apart(family: str, fields: dict[str, Any]) -> None:
    model = make(CAUSAL_LM, family, **fields)
    check_model(model, "teacher", CAUSAL)  # one document in a row is read right
    start = f"teacher: {type(model).__name__}"
    assert "corpus.cross_documents=false" in refusal(lambda: check_packing(model, "teacher"), start)
    assert model.training is False


def test_the_classes_of_a_model_go_by_their_numbers_and_are_those_of_the_examples() -> None:
    """A file may list them in any order, such as 10 before 2."""
    two, names = replace(CLASSES, fields={"id2label": {0: "no", 1: "yes"}}), {1: "yes", 0: "no"}

    def saved(**fields: Any) -> BertConfig:
        return BertConfig(architectures=["BertForSequenceClassification"], **fields)

    refuse_other_kind("teacher.path=x", saved(id2label=names), two)
    assert output_names(saved(id2label=names)) == ["no", "yes"] and not are_anonymous(["no", "yes"])
    assert are_anonymous(output_names(saved()))
    several = saved(id2label=names, problem_type="multi_label_classification")
    refuse_other_kind("model=x", several, CLASSES)  # as where it is only asked
    for config, words in (
        (several, "multi_label_classification"),
        (saved(id2label={0: "yes", 1: "no"}), "gives its classes as yes, no, and these examples have no, yes"),
        (saved(num_labels=3), "gives 3 numbers for a text"),
    ):
        assert words in refusal(lambda c=config: refuse_other_kind("teacher.path=x", c, two), "teacher.path=x ")


# --- an encoder alone


def test_an_encoder_without_a_head_teaches_what_reads_none(
    tmp_path: Path, shelf: Shelf, capfd: pytest.CaptureFixture[str]
) -> None:
    """As a sentence encoder does; its scores would be those of a head that is not there."""
    folder = tmp_path / "encoder"
    for auto in (AutoModel, AutoTokenizer):
        auto.from_pretrained(shelf.teacher / "student").save_pretrained(folder)
    pooled = ["objective.soft.weight=0", "objective.cosine.weight=0", "objective.pooled.weight=1", "train.epochs=1"]
    pooled.append(f"teacher.path={folder}")
    small = "{hidden_size: 16, num_hidden_layers: 1, num_attention_heads: 2, intermediate_size: 16}"
    new = [*pooled, "student=bert", "student.layers=null", f"student.config={small}"]
    assert shelf.run(tmp_path / "run", *new) == 0
    content: dict[str, Any] = results(tmp_path / "run")
    assert content["agreement"] is None and "perplexity" not in content["teacher"]
    assert any("without a head" in note for note in content["notes"])
    assert shelf.run(tmp_path / "run", *new) == 0  # the same teacher again
    assert shelf.run(tmp_path / "other", *pooled, "student.layers=auto") == 2
    assert "lacks weights of a masked language model" in capfd.readouterr().err
    saved = ["student=pretrained", f"student.path={folder}", "student.layers=null", "objective.mlm.weight=0"]
    assert shelf.run(tmp_path / "saved", *pooled, *saved) == 0
    assert not results(tmp_path / "saved")["student"].get("perplexity"), "as its head is new"
