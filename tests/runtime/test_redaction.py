"""Secrets: which names hold them, and that a run with one writes it nowhere."""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra import compose, initialize_config_dir
from job import Shelf, command
from omegaconf import OmegaConf
from torch import nn
from transformers import BertConfig, BertForMaskedLM

from distill.config.command_line import check_overrides, check_secrets
from distill.config.compose import build, register
from distill.config.flat_settings import flatten
from distill.config.settings import CONF, RECIPES
from distill.runtime import redaction
from distill.runtime.errors import SettingError
from distill.runtime.redaction import MASK, is_credential, is_secret, masked, redact, redact_override, redacted

KEY = "sk-4f9Qz81LmNo77"


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What one test makes known stays out of the others."""
    monkeypatch.setattr(redaction, "_known", {})
    yield


def digest_of(value: str) -> str:
    return f"{MASK} {hashlib.sha256(value.encode()).hexdigest()[:12]}"


@pytest.mark.parametrize(
    "name",
    ["api_key", "student.arguments.apiKey", "HF_TOKEN", "token", "access_token", "aws-secret-access-key", "password",
     "dbPassword", "auth", "client_secret", "credentials", "api_token", "hf_tokens", "openai_key", "WANDB_KEY",
     "acme_key", "openaiKeys", "api_key_2", "auth_header", "credentials.user", "student.password.value"],
)  # fmt: skip
def test_names_of_secrets(name: str) -> None:
    assert is_secret(name)


@pytest.mark.parametrize(
    "name", ["password", "api_key", "hf_token", "x.credentials.user", "OPENAI_API_KEY", "accessKey"]
)
def test_names_of_credentials(name: str) -> None:
    assert is_credential(name)


@pytest.mark.parametrize("name", ["acme_key", "feature_key", "token", "my_token", "auth_mode", "secret_weight"])
def test_names_that_may_be_something_else(name: str) -> None:
    assert is_secret(name) and not is_credential(name)


@pytest.mark.parametrize(
    "name",
    ["tokenizer", "tokens", "mask_token", "pad_token", "key", "keys", "author", "row_key", "tokens_per_second",
     "secretary", "vocab_size", "corpus.token.path", "token_weight", "corpus.token_column", "sort_key", "primary_key",
     "foreign_key", "key_field", "label_key", "stop_tokens", "monkey", "num_keys"],
)  # fmt: skip
def test_names_of_other_things(name: str) -> None:
    assert not is_secret(name)


def test_settings_are_masked_wherever_they_stand() -> None:
    settings = {"a": {"api_key": KEY, "size": 3}, "list": [{"password": 12345}], "token": None, "auth": True}
    assert masked(settings) == {
        "a": {"api_key": MASK, "size": 3}, "list": [{"password": MASK}], "token": None, "auth": True,
    }  # fmt: skip


def test_all_below_a_credential_is_masked() -> None:
    settings = {"credentials": {"user": "bob", "ports": [5432], "tls": True, "more": {"value": "hunter22"}}}
    assert masked({"student": settings}) == {
        "student": {"credentials": {"user": MASK, "ports": [MASK], "tls": True, "more": {"value": MASK}}}
    }


def test_numbers_are_masked_only_as_credentials() -> None:
    numbers = {"token": 0.25, "hf_tokens": 500, "secret_weight": 0.5, "feature_key": 3, "max_token": 7}
    assert masked(numbers) == numbers
    assert masked({"password": 12345, "api_key": 678901}) == {"password": MASK, "api_key": MASK}


def test_what_may_be_no_secret_is_masked_by_its_digest() -> None:
    settings = {"feature_key": "pooled", "auth_mode": "basic", "password": "pa55word"}
    once = masked(settings)
    assert once == {"feature_key": digest_of("pooled"), "auth_mode": digest_of("basic"), "password": MASK}
    assert masked(once) == once and redacted(once) == once
    assert masked({"path": "rows/pooled"}) == {"path": f"rows/{digest_of('pooled')}"}
    assert redact("+x={feature_key: other}") == f"+x={{feature_key: {digest_of('other')}}}"


def test_no_setting_of_the_package_is_masked() -> None:
    register()
    names = [f"+recipe={file.stem}" for file in RECIPES.glob("*.yaml")]
    names += [f"{file.parent.name}={file.stem}" for file in CONF.glob("*/*.yaml")]
    with initialize_config_dir(str(CONF), version_base="1.3"):
        for name in names:
            composed = compose("config", [name])
            found = flatten({"composed": OmegaConf.to_container(composed)})
            assert not [each for each in found if is_secret(each)], name


def test_settings_that_change_the_student_change_its_identity() -> None:
    register()

    def given(*overrides: str) -> dict[str, Any]:
        with initialize_config_dir(str(CONF), version_base="1.3"):
            own = ["+recipe=smoke", "+objective.mine._target_=lab.Term", *overrides]
            return flatten(build(compose("config", own), own).given)

    for name, one, another in [("token_weight", "0.25", "0.75"), ("token", "a", "b"), ("feature_key", "x", "yy"),
                               ("auth_mode", "soft", "hard"), ("secret_weight", "1", "2")]:  # fmt: skip
        assert given(f"+objective.mine.{name}={one}") != given(f"+objective.mine.{name}={another}")
    # A run goes on with a new key, where the old one has run out.
    assert given("+objective.mine.api_key=abcdef") == given("+objective.mine.api_key=ghijkl")


def test_nothing_is_learned_from_texts() -> None:
    for number in range(50):
        redact(f"password=distill{number} unexpected token: distill")
        redacted({"note": f"api_key: {number}abcdef"})
    assert redact("distill: hello distill7") == "distill: hello distill7" and not redaction._known


def test_the_command_line_is_learned_from() -> None:
    check_overrides(
        ["+student.password='a, b}c'", f"+student.arguments={{api_key: {KEY}}}", "+x.secret=wrong{", "seed=1"]
    )
    assert redact(f"no such thing: a, b}}c, {KEY}, wrong{{") == "no such thing: ***, ***, ***"


@pytest.mark.parametrize(
    ("override", "expected"),
    [("+a.password=correct horse battery", "+a.password=***"), ("a.password='it\\'s, b'", "a.password=***"),
     ("+a.credentials={user: b}", "+a.credentials=***"), ("a.api_key=${oc.env:KEY}", "a.api_key=${oc.env:KEY}"),
     ("+a={api_key: x1y2, n: 3}", "+a={api_key: ***, n: 3}"), ("seed=3", "seed=3"), ("--config-dir", "--config-dir")],
)  # fmt: skip
def test_overrides_are_redacted(override: str, expected: str) -> None:
    assert redact_override(override) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("+student.arguments={api_key: abc-def, size: 3}", "+student.arguments={api_key: ***, size: 3}"),
        ("a.password=abcdef b=2", "a.password=*** b=2"),
        ("""{"api_token": "ab cd", "x": 1}""", """{"api_token": ***, "x": 1}"""),
        ("Authorization: Bearer sk-123456 failed", "Authorization: *** failed"),
        ("sent Bearer sk-123456, failed", "sent Bearer ***, failed"),
        ("redis://:s3cretpw@host/0", "redis://***@host/0"),
        ("git+https://ghp_abcdef123456@github.com/x@v1", "git+https://***@github.com/x@v1"),
        ("https://host/x?api_key=abcdef&rows=5", "https://host/x?api_key=***&rows=5"),
        ("https://host/x?mail=a@b.c", "https://host/x?mail=a@b.c"),
        ("token: 0.25, token_weight: 3, api_token=true", "token: 0.25, token_weight: 3, api_token=true"),
        ("from https://me:pa55word@host/x", "from https://***@host/x"),
        ("mask_token: [MASK], loss: 3.2, api_key: null", "mask_token: [MASK], loss: 3.2, api_key: null"),
    ],
)
def test_texts_are_redacted(text: str, expected: str) -> None:
    assert redact(text) == expected


def test_a_known_secret_is_found_without_its_name() -> None:
    masked({"api_key": KEY})
    assert redact(f"could not open {KEY}.") == "could not open ***."
    masked({"a": {"password": "correct horse battery"}})
    assert redact("a.password=correct horse battery seed=1") == "a.password=*** seed=1"


class Service(BertForMaskedLM):
    """A student that takes a key, as one that is fetched from somewhere would."""

    def __init__(self, vocab_size: int, api_key: str) -> None:
        assert api_key == KEY
        sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
        super().__init__(BertConfig(vocab_size=vocab_size, **sizes))


def service(tokenizer: Any, api_key: str) -> nn.Module:
    return Service(len(tokenizer), api_key)


@pytest.mark.parametrize("tracker", ["tensorboard", "wandb"])
def test_a_run_writes_its_secret_nowhere(shelf: Shelf, tracker: str) -> None:
    pytest.importorskip(tracker)
    folder = shelf.root / f"secret_{tracker}"
    own = ["student=custom", "student._target_=test_redaction.service", f"+student.api_key={KEY}", "objective=mlm"]
    process = command(
        *shelf.arguments(folder, *own, f"tracker={tracker}", "train.milestones=[2]"), path=Path(__file__).parent.parent
    )
    output = "".join(process.communicate(timeout=300))
    assert process.returncode == 0, output
    assert KEY not in output
    holding = [path for path in folder.rglob("*") if path.is_file() and KEY.encode() in path.read_bytes()]
    assert not holding
    text = (folder / "config.yaml").read_text()
    assert f"api_key: '{MASK}'" in text and f"+student.api_key={MASK}" in (folder / "report.md").read_text()


def test_an_error_line_holds_no_secret(shelf: Shelf) -> None:
    wrong: list[Any] = ["student=custom", "student._target_=test_redaction.service", f"+student.api_keys={KEY}"]
    process = command(*shelf.arguments(shelf.root / "wrong", *wrong), path=Path(__file__).parent.parent)
    output = "".join(process.communicate(timeout=300))
    assert process.returncode == 2 and KEY not in output, output


@pytest.mark.parametrize(
    "arguments",
    [[f"+student.api_key={KEY}", "seed=0,1", "--multirun"], [f"+student.api_key={KEY},b", "-m"],
     [f"+student.arguments={{hf_token: {KEY}}}", "-m"], [f"+student.arguments={{a: 1}},{{hf_token: {KEY}}}", "-m"],
     [f"+student.api_key={KEY}", "student=glob(*)", "optimizer.lr=interval(0,1)", "-m"],
     ["+student.api_key=${oc.env:KEY}", "-m"], [f"+student.api_key={KEY}", "hydra.mode=MULTIRUN"],
     [f"+student.api_key={KEY}", "hydra.output_subdir=.hydra"],
     [f"+student.api_key={KEY}", "hydra.run.dir=${hydra.job.override_dirname}"],
     ["--config-dir", "FOLDER", "+recipe=mine", "-m"]],
)  # fmt: skip
def test_secrets_that_hydra_would_write_are_refused(arguments: list[str], tmp_path: Path) -> None:
    register()
    write_recipe(tmp_path, KEY)
    given = [str(tmp_path) if each == "FOLDER" else each for each in arguments]
    with pytest.raises(SettingError, match=r"(api_key|hf_token).* is named like a secret, .* into a recipe") as raised:
        check_secrets(given)
    assert KEY not in str(raised.value)
    check_secrets([f"+student.api_key={KEY}", "seed=0"])  # a single run, of which Hydra writes nothing


@pytest.mark.parametrize(
    "defaults", ["[base, _self_]", "[sub/base, _self_]", "\n  - my-sweep\n  - _self_", "\n  - /recipe/base@_global_"]
)
@pytest.mark.parametrize("way", ["--config-dir", "hydra.searchpath"])
def test_recipes_that_sweep_are_found_however_they_are_named(defaults: str, way: str, tmp_path: Path) -> None:
    register()
    (tmp_path / "recipe" / "sub").mkdir(parents=True)
    base = f"# @package _global_\nhydra: {{mode: MULTIRUN}}\nstudent: {{config: {{api_key: '{KEY}'}}}}\n"
    for name in ("base", "sub/base", "my-sweep"):
        (tmp_path / "recipe" / f"{name}.yaml").write_text(base)
    (tmp_path / "recipe" / "mine.yaml").write_text(f"# @package _global_\ndefaults: {defaults}\n")
    path = ["--config-dir", str(tmp_path)] if way == "--config-dir" else [f"hydra.searchpath=[file://{tmp_path}]"]
    with pytest.raises(SettingError, match=r"api_key is named like a secret"):
        check_secrets([*path, "+recipe=mine"])


def test_packaged_recipes_that_sweep_say_so_themselves() -> None:
    """Those that do not are not composed to find out."""
    named = {file.stem: yaml.safe_load(file.read_text()).get("defaults") or [] for file in RECIPES.glob("*.yaml")}
    sweeps = {file.stem for file in RECIPES.glob("*.yaml") if "MULTIRUN" in file.read_text()}
    assert "search" in sweeps
    assert {name for name, others in named.items() if any(each in str(others) for each in sweeps)} <= sweeps


def write_recipe(folder: Path, key: str) -> None:
    (folder / "recipe").mkdir()
    recipe = f"# @package _global_\ndefaults: [/recipe/smoke, _self_]\nstudent: {{api_key: '{key}'}}\n"
    (folder / "recipe" / "mine.yaml").write_text(recipe)


def test_a_sweep_takes_its_secret_from_the_environment(
    shelf: Shelf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_recipe(tmp_path, "${oc.env:MY_KEY}")
    monkeypatch.setenv("MY_KEY", KEY)
    own = ["student=custom", "student._target_=test_redaction.service", "objective=mlm"]
    arguments = [each for each in shelf.arguments(tmp_path / "run", *own) if not each.startswith("+recipe")]
    process = command(
        "--config-dir", str(tmp_path), "+recipe=mine", *arguments, f"hydra.sweep.dir={tmp_path / 'sweep'}",
        "hydra.sweep.subdir=${hydra:job.num}", "seed=0,1", "-m", path=Path(__file__).parent.parent,
    )  # fmt: skip
    output = "".join(process.communicate(timeout=300))
    assert process.returncode == 0 and KEY not in output, output
    written = [path for path in (tmp_path / "sweep").rglob("*") if path.is_file()]
    assert {"multirun.yaml", "report.html"} <= {path.name for path in written}
    assert not [path for path in written if KEY.encode() in path.read_bytes() or KEY in str(path)]
