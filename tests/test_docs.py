"""The manual: its code compiles, its commands have settings that exist, links resolve, the reference is whole."""

import ast
import json
import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import record_page
import yaml
from hydra.errors import HydraException
from job import ROOT, check_line, check_words, default_settings
from settings_page import SettingsPage

import distill
from distill.commands.arguments import parse, split
from distill.commands.cli import COMMANDS
from distill.commands.export import ExportArguments
from distill.commands.generate import Request as GenerateRequest
from distill.commands.generation import GenerateOptions
from distill.commands.predict import Request as PredictRequest
from distill.commands.prediction import PredictOptions
from distill.commands.prepare import PrepareArguments
from distill.commands.push import PushArguments
from distill.commands.small import CompareArguments, EvaluateArguments, ProfileArguments, ReportArguments
from distill.runs import facts
from distill.runs.record import Record
from distill.runtime import errors

DOCS = ROOT / "docs"
PAGES = sorted(path for path in DOCS.rglob("*.md") if path != DOCS / "changelog.md")
NAV = re.findall(r"^ +- (?:.+: )?([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.M)
STARTS = (["distill"], ["python", "-m", "distill"])
ARGUMENTS = {"compare": CompareArguments, "export": ExportArguments, "push": PushArguments, "report": ReportArguments}


def blocks(page: Path, *languages: str) -> list[str]:
    """The fenced blocks of these languages, without the indentation of a list that they are in."""
    found = re.findall(r"^( *)```(\w+)[^\n]*\n(.*?)^\1```$", page.read_text(), re.S | re.M)
    return [re.sub(rf"^{space}", "", code, flags=re.M) for space, language, code in found if language in languages]


def commands(page: Path) -> Iterator[list[str]]:
    """The words of every command of this package in the shell blocks of a page, in whatever program starts it."""
    for block in blocks(page, "sh", "bash", "console"):
        for line in block.replace("\\\n", " ").splitlines():
            lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;<>")
            lexer.whitespace_split, lexer.commenters = True, "#"
            words = [*lexer, ";"]
            while ";" in words:
                end = next(n for n, word in enumerate(words) if set(word) <= set("|&;<>"))
                command, words = words[:end], words[end + 1 :]
                for start in STARTS:
                    if command[: len(start)] == start:
                        yield command[len(start) :]


@cache
def check(words: tuple[str, ...]) -> None:
    """Raises SettingError for a command that could not begin, whatever files there are."""
    name = words[0] if words and re.fullmatch(r"[a-z]\w*", words[0]) else ""
    rest = [word for word in words[bool(name) :] if not word.startswith("$")]  # what a variable holds is not known
    if name:
        assert name in COMMANDS, words
    if "--help" in rest or rest in (["--schema"], ["--version"]):
        return
    if name in ARGUMENTS:
        parse(ARGUMENTS[name], rest, name)
    elif name == "predict":
        parse(PredictOptions, split(PredictRequest, rest, name)[1], name, besides=PredictRequest)
    elif name == "generate":
        check_settings(split(GenerateOptions, split(GenerateRequest, rest, name)[1], name)[1])
    elif name == "evaluate":
        settings = split(EvaluateArguments, rest, name)[1]
        check_settings(["teacher=pretrained" if word.startswith("teacher=") else word for word in settings])
    elif name == "settings":
        check_settings([word for word in rest if "=" in word or word.startswith("-")])
    else:
        requests: dict[str, type] = {"profile": ProfileArguments, "prepare": PrepareArguments}
        check_settings(split(requests[name], rest, name)[1] if name in requests else rest)


def check_settings(words: list[str]) -> None:
    """Compose and check the settings of a run; those of recipes and code of the user's as far as they are known."""
    words = ["+recipe=smoke" if word == "+recipe=NAME" else word for word in words]
    line = [word for word in words if not word.startswith(("--config-dir", "my_"))]
    if any(word.startswith("--config-dir") for word in words):
        check_words(*line)
    else:
        check_line(*line)


@pytest.mark.parametrize("page", [*PAGES, ROOT / "README.md"], ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page(page: Path) -> None:
    """Its Python compiles and names what there is, its YAML and JSON can be read, its commands could begin."""
    for code in blocks(page, "python"):
        _check_python(ast.parse(code))
    for code in blocks(page, "yaml"):
        list(yaml.safe_load_all(code))
    for code in blocks(page, "json"):
        [json.loads(line) for line in code.splitlines()] if code.count("\n{") else json.loads(code)
    for words in commands(page):
        try:
            check(tuple(words))
        except (errors.SettingError, HydraException) as error:
            pytest.fail(f"{shlex.join(['distill', *words])}: {error}")


def _check_python(tree: ast.Module) -> None:
    """What pages use of the package is public, so that it stays with every release."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "distill":
            assert node.attr in distill.__all__, node.attr
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "distill":
            assert node.module == "distill" and {alias.name for alias in node.names} <= {*distill.__all__}


@pytest.mark.parametrize("page", [*PAGES, ROOT / "README.md"], ids=lambda page: str(page.relative_to(ROOT)))
def test_links_resolve(page: Path) -> None:
    """Those to files; `make docs` looks at what is behind a #, too."""
    text = re.sub(r"^( *)```.*?^\1```$|`[^`\n]*`", "", page.read_text(), flags=re.S | re.M)
    for target in re.findall(r"\]\(([^)\s#]+)[^)]*\)|(?:src|href)=\"([^\"#]+)", text):
        link = target[0] or target[1]
        # Beside the files of a repository lie its workflows' pages, whatever its address is.
        if "://" not in link and not link.startswith(("mailto:", "../../actions/workflows/")):
            assert (page.parent / link).exists(), f"{page}: {link}"


def test_every_page_is_in_the_navigation_and_none_has_the_marks_of_a_merge() -> None:
    assert sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")) == sorted(NAV)
    marks = re.compile(r"^(<{7}|>{7}) ", re.M)
    assert not [path.name for path in [*ROOT.glob("*.md"), *DOCS.rglob("*.md")] if marks.search(path.read_text())]


def test_the_reference_has_every_setting() -> None:
    """With a sentence."""
    page = SettingsPage()
    text = page.text()
    groups = {"student.config", "evaluate.sources", "evaluate.measures", "evaluate.by_set", "corpus.sources"}
    groups |= {"teacher.members", "schedule"}
    missing = [name for name in default_settings() if f"{{ #{name} }}" not in text and name not in groups]
    assert not missing
    assert len(page.entries) > 180
    for entry in page.entries:
        assert entry.node["description"].endswith("."), entry.name


def test_the_reference_has_every_key_of_the_record() -> None:
    """With its type and a sentence, in the part that holds it."""
    titles, *parts = re.split(r"^## .* \{ #(\w+) \}$", record_page.text(), flags=re.M)
    pages = dict(zip(parts[::2], parts[1::2], strict=True))
    assert not titles and len(pages) > 30
    for name, page in pages.items():
        part = getattr(facts, name, Record)
        keys = [info.alias or key for key, info in part.model_fields.items()]
        keys += ["MEASURE"] * issubclass(part, facts.Scored)
        rows = re.findall(r"^\| `(\w+)` \| [^|]+ \| (?:[^|]|\\\|)+\. \|$", page, re.M)
        assert rows == keys, name


def test_the_reference_has_every_exit_status_and_public_name() -> None:
    text = (DOCS / "reference" / "commands.md").read_text()
    kinds = [errors.SettingError, errors.Diverged, errors.RankLost, errors.StorageFailed]
    assert all(re.search(rf"^\| {kind.status} \|", text, re.M) for kind in kinds)
    text = (DOCS / "reference" / "python.md").read_text()
    assert not [name for name in distill.__all__ if name != "__version__" and f"\n::: distill.{name}\n" not in text]


def test_scripts_that_pages_name_exist() -> None:
    folder = ROOT / "benchmarks"
    for page in [*PAGES, ROOT / "README.md", ROOT / "SECURITY.md", folder / "README.md"]:
        for name in re.findall(r"\bbenchmarks/[a-z_/]+(?:\.py|\.yaml|\.c)\b", page.read_text()):
            assert (ROOT / name).is_file(), f"{page.name} names {name}"
        for name in re.findall(r"\bbenchmarks\.([a-z_]+)", page.read_text()):
            found = [*folder.glob(f"{name}.py"), *folder.glob(f"{name}/__main__.py")]
            assert found or name == "md", f"{page.name} names {name}"
