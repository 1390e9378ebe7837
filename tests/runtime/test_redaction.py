"""Secrets: which variables hold them, and that a run writes and shows none."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from job import Shelf, command, composed, composed_chain, program, results
from own_models import KEY

from distill.config.flat_settings import flatten
from distill.config.settings import Config
from distill.runtime import redaction
from distill.runtime.redaction import is_secret, redact, redacted, remember


@pytest.fixture(autouse=True)
def nothing_remembered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What one test makes known stays out of the others."""
    monkeypatch.setattr(redaction, "_secrets", set())
    yield


@pytest.mark.parametrize(
    ("names", "expected"),
    [("HF_TOKEN WANDB_API_KEY AWS_SECRET_ACCESS_KEY DB_PASSWORD MY_PAT DB_PWD MY_KEY_2 access_token sig", True),
     ("PWD OLDPWD HOME TOKENIZERS_PARALLELISM MASK_TOKENIZER BOOKS SECRETARY AUTHOR rows", False)],
)  # fmt: skip
def test_variables_that_hold_secrets(names: str, expected: bool) -> None:
    assert [name for name in names.split() if is_secret(name) is not expected] == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("hf_" + "a1B2" * 6 + " is refused", "*** is refused"),
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
    monkeypatch.setenv("MY_TOKEN", "behind a parameter")
    config = settings_of(
        "+objective.mine.thing=${oc.env:MY_KEY}", "+objective.mine.same=${objective.mine.thing}",
        "+objective.mine.url='s3://${oc.env:MY_KEY}@${seed}'", "seed='${oc.decode:${oc.env:MY_SEED}}'",
        "+objective.mine.other=${train.keep}", "+objective.mine.books='https://host/b?token=${oc.env:MY_TOKEN}'",
        "+evaluate.sources.secret={kind: text, path: books}",
    )  # fmt: skip
    assert config.seed == 17 and config.objective.component("mine").arguments["same"] == KEY
    mine = config.written["objective"]["mine"]
    assert mine["thing"] == mine["same"] == "${oc.env:MY_KEY}" and mine["other"] == config.train.keep
    assert mine["url"] == "s3://***@${seed}" and config.written["seed"] == "${oc.decode:${oc.env:MY_SEED}}"
    assert KEY not in str(config.written) and KEY not in str(config.compared)
    assert mine["books"] == "https://host/b?token=${oc.env:MY_TOKEN}"
    assert redact("HTTP 403: behind a parameter") == "HTTP 403: ***"
    assert config.written["evaluate"]["sources"]["secret"]["path"] == "books", "a name of the user's is no secret"


def test_settings_from_the_environment_are_compared_by_what_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    def compared(value: str, setting: str, variable: str = "MINE") -> dict[str, Any]:
        monkeypatch.setenv(variable, value)
        return flatten(settings_of(f"{setting}=${{oc.env:{variable}}}").compared)

    for setting in ("+objective.mine.feature", "seed"):
        assert compared("1", setting) == compared("1", setting) != compared("2", setting)
        assert compared("1", setting)[setting.lstrip("+")].startswith("sha256 ")
    # A run goes on with a new key, where the old one has run out.
    key = "+objective.mine.api_key"
    assert compared("abcdef", key, "MY_KEY") == compared("ghijkl", key, "MY_KEY")


def test_the_command_line_of_a_stage_has_the_names_of_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", KEY)
    chain = composed_chain("+recipe=albert_chain", "chain.stages.teacher.settings=['student.api_key=${oc.env:MY_KEY}']")
    assert chain is not None and chain.stages["teacher"].settings == ["student.api_key=${oc.env:MY_KEY}"]


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
    assert (tmp_path / "sweep" / "multirun.yaml").is_file()
    assert not holding(tmp_path / "sweep")
