"""Secrets: which names hold them, that the command line may have none, and that a run writes and shows none."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra import compose
from job import (
    Shelf,
    check_words,
    command,
    composed,
    composed_chain,
    composed_line,
    distill,
    hydra_set_up,
    program,
    results,
)
from omegaconf import OmegaConf
from own_models import KEY

from distill.config.flat_settings import flatten
from distill.config.settings import CONF, RECIPES, Config
from distill.runtime import redaction
from distill.runtime.errors import SettingError
from distill.runtime.redaction import MASK, is_secret, literal_secret, masked, redact, redacted, remember


@pytest.fixture(autouse=True)
def nothing_remembered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What one test makes known stays out of the others."""
    monkeypatch.setattr(redaction, "_secrets", set())
    yield


@pytest.mark.parametrize(
    "name",
    ["api_key", "student.arguments.apiKey", "HF_TOKEN", "token", "access_token", "aws-secret-access-key", "password",
     "dbPassword", "auth", "client_secret", "credentials", "api_token", "openai_key", "WANDB_KEY", "api_keys",
     "api_key_2", "credentials.user", "student.password.value", "pat", "githubPat", "jwt", "dsn", "cookie",
     "session_cookie", "sas", "pin", "otp", "bearer", "passphrase", "webhook", "connection_string", "oauth_token"],
)  # fmt: skip
def test_names_of_secrets(name: str) -> None:
    assert is_secret(name)


@pytest.mark.parametrize(
    "name",
    ["tokenizer", "tokens", "mask_token", "pad_token", "key", "keys", "author", "row_key", "tokens_per_second",
     "secretary", "vocab_size", "token_weight", "corpus.token_column", "sort_key", "primary_key", "foreign_key",
     "key_field", "label_key", "stop_tokens", "monkey", "num_keys", "pin_memory", "spin", "pattern", "path",
     "auth_mode", "feature_key", "data.tokens"],
)  # fmt: skip
def test_names_of_other_things(name: str) -> None:
    assert not is_secret(name)


def test_no_setting_of_the_package_is_one_of_a_secret() -> None:
    with hydra_set_up():
        written = {"schema": OmegaConf.to_container(compose("config"))}
    files = [*RECIPES.glob("*.yaml"), *CONF.glob("**/*.yaml")]
    written |= {str(file): {file.parent.name: yaml.safe_load(file.read_text())} for file in files}
    assert len(written) == 1 + len(files) > 20
    for name, settings in written.items():
        found = flatten(settings)
        assert found and not [each for each in found if is_secret(each)], name


def test_settings_are_masked_wherever_they_stand() -> None:
    settings = {"a": {"api_key": KEY, "size": 3}, "list": [{"password": 12345}], "token": None, "auth": True}
    assert masked(settings) == {
        "a": {"api_key": MASK, "size": 3}, "list": [{"password": MASK}], "token": None, "auth": True,
    }  # fmt: skip
    below = {"credentials": {"user": "bob", "ports": [5432], "tls": True, "more": {"value": "hunter22"}}}
    assert masked({"student": below})["student"] == {
        "credentials": {"user": MASK, "ports": [MASK], "tls": True, "more": {"value": MASK}}
    }
    numbers = {"token": 0.25, "token_weight": 3, "feature_key": 3, "max_token": 7}
    assert masked(numbers) == numbers and masked(masked(settings)) == masked(settings)
    assert masked({"api_key": "${oc.env:KEY}"}) == {"api_key": "${oc.env:KEY}"}
    assert masked({"api_key": "${oc.env:KEY,x1y2}"}) == {"api_key": MASK}


@pytest.mark.parametrize(
    ("override", "name"),
    [("+a.password=correct horse battery", "a.password"), ("a.password='it\\'s, b'", "a.password"),
     ("+a.credentials={user: b}", "a.credentials"), ("+a={api_key: x1y2, n: 3}", "api_key"), ("a.pin=1234", "a.pin"),
     ("+a.api_key=a,b", "a.api_key"), ("+a={n: 1},{hf_token: x}", "hf_token"), ("+a.secret=wrong{", "a.secret"),
     ("corpus.path=https://host/x?api_key=abcdef&rows=5", "api_key"), ("+a.jwt=eyJ", "a.jwt"),
     ("a.api_key=${oc.env:KEY}", None), ("+a={api_key: '${oc.env:KEY}'}", None), ("a.password=null", None),
     ("a.password='${oc.env:PW,hunter2}'", "a.password"), ("a.password='${oc.env:PW, null}'", None),
     ("a.password='${oc.env:PW,${oc.env:OTHER}}'", None), ("a.password='${oc.env:PW,}'", None),
     ("a.auth=false", None), ("seed=3", None), ("a.mask_token=[MASK]", None), ("data.tokens=s3://b/t", None),
     ("a.password=", None)],
)  # fmt: skip
def test_secrets_on_the_command_line_are_found(override: str, name: str | None) -> None:
    assert literal_secret(override) == name
    if name is not None:
        with pytest.raises(SettingError, match=rf"^{name} is named like a secret, .* give {name}='\$\{{oc\.env:NAME"):
            check_words(override)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("sent Bearer sk-123456, failed", "sent Bearer ***, failed"),
        ("redis://:s3cretpw@host/0", "redis://***@host/0"),
        ("git+https://ghp_abcdef123456@github.com/x@v1", "git+https://***@github.com/x@v1"),
        ("https://host/x?mail=a@b.c", "https://host/x?mail=a@b.c"),
        ("https://host/x?X-Amz-Signature=abc&rows=5", "https://host/x?X-Amz-Signature=***&rows=5"),
        ("from https://me:pa55word@host/x", "from https://***@host/x"),
        ("https://host/b.txt?token=ghp_abcdef&rows=5", "https://host/b.txt?token=***&rows=5"),
        ("https://host/b.txt?access_token=a1&sig=b2, api_key", "https://host/b.txt?access_token=***&sig=***, api_key"),
        ("https://host/b.txt?token=${oc.env:MINE}", "https://host/b.txt?token=${oc.env:MINE}"),
        ("mask_token: [MASK], loss: 3.2, api_key: null", "mask_token: [MASK], loss: 3.2, api_key: null"),
    ],
)
def test_texts_are_redacted(text: str, expected: str) -> None:
    assert redact(text) == expected and redacted({"a": [text]}) == {"a": [expected]}


@pytest.mark.parametrize(
    "part",
    ["a", "a.", "a_", "token_1", "=a", "a ", " ", '"', "://", "://a", "&sig=", "Bearer ", "1", "a:'"],
)  # fmt: skip
def test_masking_is_linear_in_the_length_of_a_text(part: str) -> None:
    """The square of these signs would be minutes."""
    text = part * (200_000 // len(part))
    begin = time.monotonic()
    for last in ("", "x", "=b"):
        literal_secret(text + last)
        redact(text + last)
        is_secret(text + last)
    assert time.monotonic() - begin < 20


def test_what_is_remembered_is_found_without_its_name() -> None:
    for secret in (KEY, "correct horse battery", "abc"):
        remember(secret)
    assert redact(f"could not open {KEY} with correct horse battery: abc") == "could not open *** with ***: abc"


def settings_of(*overrides: str) -> Config:
    return composed("+recipe=smoke", "+objective.mine._target_=lab.Term", *overrides)


def test_what_is_written_has_the_names_of_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where other settings refer to one of them; numbers too, and whatever is made of them."""
    monkeypatch.setenv("MY_KEY", KEY)
    monkeypatch.setenv("MY_SEED", "17")
    monkeypatch.setenv("MY_SEED_2", "behind a parameter")
    config = settings_of(
        "+objective.mine.thing=${oc.env:MY_KEY}", "+objective.mine.same=${objective.mine.thing}",
        "+objective.mine.url='s3://${oc.env:MY_KEY}@${seed}'", "seed='${oc.decode:${oc.env:MY_SEED}}'",
        "+objective.mine.other=${train.keep}", "+objective.mine.books='https://host/b?token=${oc.env:MY_SEED_2}'",
    )  # fmt: skip
    assert config.seed == 17 and config.objective.terms["mine"].make.arguments["same"] == KEY
    mine = config.written["objective"]["mine"]
    assert mine["thing"] == mine["same"] == "${oc.env:MY_KEY}" and mine["other"] == config.train.keep
    assert mine["url"] == "s3://***@${seed}" and config.written["seed"] == "${oc.decode:${oc.env:MY_SEED}}"
    assert KEY not in str(config.written) and KEY not in str(config.compared)
    assert redact("HTTP 403: behind a parameter") == "HTTP 403: ***"


def test_settings_from_the_environment_are_compared_by_what_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    def compared(value: str, setting: str) -> dict[str, Any]:
        monkeypatch.setenv("MINE", value)
        return flatten(settings_of(f"{setting}=${{oc.env:MINE}}").compared)

    for setting in ("+objective.mine.feature", "seed"):
        assert compared("1", setting) == compared("1", setting) != compared("2", setting)
        assert compared("1", setting)[setting.lstrip("+")].startswith("sha256 ")
    # A run goes on with a new key, where the old one has run out.
    assert compared("abcdef", "+objective.mine.api_key") == compared("ghijkl", "+objective.mine.api_key")


def test_the_command_line_of_a_stage_has_the_names_of_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", KEY)
    chain = composed_chain("+recipe=seeds", "chain.given.settings=['student.api_key=${oc.env:MY_KEY}']")
    assert chain is not None and chain.stages["run"].settings == ["student.api_key=${oc.env:MY_KEY}"]


OWN = ["student=custom", "student._target_=own_models.service", "student.layers=null", "objective=mlm"]
FROM_ENVIRONMENT = "+student.pat=${oc.env:MY_SECRET}"


def holding(folder: Path) -> list[Path]:
    """The files of a folder that hold the secret, or have it in their names."""
    found = [path for path in folder.rglob("*") if path.is_file()]
    assert found
    return [path for path in found if KEY.encode() in path.read_bytes() or KEY in str(path)]


@pytest.mark.parametrize("tracker", ["tensorboard", "wandb"])
def test_a_run_writes_its_secret_nowhere(shelf: Shelf, tracker: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip(tracker)
    monkeypatch.setenv("MY_SECRET", KEY)
    folder = shelf.root / f"secret_{tracker}"
    own = [*OWN, FROM_ENVIRONMENT, f"tracker={tracker}", "train.snapshots=[2]"]
    process = command(*shelf.arguments(folder, *own), path=Path(__file__).parent.parent)
    output = "".join(process.communicate(timeout=300))
    assert process.returncode == 0, output
    assert "connected with ***" in output and KEY not in output
    assert not holding(folder)
    assert yaml.safe_load((folder / "config.yaml").read_text())["student"]["pat"] == "${oc.env:MY_SECRET}"
    assert FROM_ENVIRONMENT in results(folder)["command"]
    assert (
        f"{FROM_ENVIRONMENT.lstrip('+').partition('=')[0].rpartition('.')[2]}: " in (folder / "report.md").read_text()
    )


@pytest.mark.slow
def test_no_rank_has_a_secret_on_its_command_line(
    shelf: Shelf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Looked at as any user of the machine can, while the ranks run."""
    monkeypatch.setenv("MY_SECRET", KEY)
    ranks = [*OWN, FROM_ENVIRONMENT, "backend=ddp", "backend.processes=2"]
    process = program(*shelf.arguments(tmp_path / "run", *ranks), path=Path(__file__).parent.parent)
    seen: set[str] = set()
    while process.poll() is None:
        for file in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                seen.add(file.read_bytes().replace(b"\0", b" ").decode(errors="replace"))
            except OSError:  # it has ended
                continue
        time.sleep(0.1)
    output = "".join(process.communicate(timeout=300))
    assert process.returncode == 0, output
    assert any(FROM_ENVIRONMENT in line for line in seen) and not any(KEY in line for line in seen)
    assert not holding(tmp_path / "run")


def test_a_secret_of_a_recipe_is_masked(tmp_path: Path) -> None:
    write_recipe(tmp_path, KEY)
    run = composed_line("--config-dir", str(tmp_path), "+recipe=mine")
    assert yaml.safe_load(run.resolved)["objective"]["mine"]["api_key"] == MASK and KEY not in str(run.config.written)
    assert redact(f"no such key: {KEY}") == "no such key: ***"


def write_recipe(folder: Path, key: str) -> None:
    (folder / "recipe").mkdir()
    recipe = "# @package _global_\ndefaults: [/recipe/smoke, _self_]\n"
    recipe += f"objective: {{mine: {{_target_: lab.Term, api_key: '{key}'}}}}\n"
    (folder / "recipe" / "mine.yaml").write_text(recipe)


@pytest.mark.parametrize("mode", ["-m", "hydra.mode=MULTIRUN"])
def test_a_sweep_of_a_recipe_with_a_secret_is_refused(
    mode: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Hydra would write it into a file of its own."""
    write_recipe(tmp_path, KEY)
    assert distill("--config-dir", str(tmp_path), "+recipe=mine", mode, f"hydra.sweep.dir={tmp_path / 'sweep'}") == 2
    line = capsys.readouterr().err
    assert "objective.mine.api_key is named like a secret" in line and "api_key: ${oc.env:NAME}" in line
    assert KEY not in line
    assert not (tmp_path / "sweep").exists()


def test_a_sweep_takes_its_secret_from_the_environment(
    shelf: Shelf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_SECRET", KEY)
    arguments = [each for each in shelf.arguments(tmp_path / "run", *OWN) if not each.startswith("hydra.run.dir")]
    process = command(
        *arguments, FROM_ENVIRONMENT, f"hydra.sweep.dir={tmp_path / 'sweep'}", "seed=0,1", "-m",
        path=Path(__file__).parent.parent,
    )  # fmt: skip
    output = "".join(process.communicate(timeout=300))
    assert process.returncode == 0, output
    assert "connected with ***" in output and KEY not in output
    assert {"multirun.yaml", "sweep.yaml"} <= {path.name for path in (tmp_path / "sweep").iterdir()}
    assert not holding(tmp_path / "sweep")
