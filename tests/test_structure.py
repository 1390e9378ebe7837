"""The plan of the package holds: no circle between modules or rooms, short files and functions, the field's words."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from job import ROOT

PACKAGE = ROOT / "distill"
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(PACKAGE.rglob("*.py"))
}
PYTHON = sorted(path for folder in ("distill", "tests", "benchmarks") for path in (ROOT / folder).rglob("*.py"))
TEXTS = [path for folder in ("distill", "conf", "recipes", "benchmarks") for path in sorted((ROOT / folder).rglob("*"))]
TEXTS += [ROOT / "README.md", ROOT / "Makefile"]
SUFFIXES = (".py", ".md", ".yaml", ".yml", ".sh", "")
# Words that only those who wrote this would understand, or that once meant several things.
PRIVATE_WORDS = ("taught", "told", "riders?", "ours", "theirs", "judge[sd]?", "asker", "draw_less", "casts_kept")


def imports(path: Path) -> Iterator[str]:
    """The modules of the package that a module imports, wherever in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (name if name in MODULES else node.module for name in names)
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


MODULE_GRAPH = {name: {other for other in imports(path) if other in MODULES} for name, path in MODULES.items()}


def room(module: str) -> str:
    """The folder of a module, or the module itself where it lies at the top."""
    return ".".join(module.split(".")[:2])


ROOM_GRAPH = {
    each: {room(other) for name in MODULES if room(name) == each for other in MODULE_GRAPH[name]} - {each, "distill"}
    for each in {room(name) for name in MODULES}
}


@pytest.mark.parametrize("graph", [MODULE_GRAPH, ROOM_GRAPH], ids=["modules", "rooms"])
def test_nothing_imports_upwards(graph: dict[str, set[str]]) -> None:
    """Floors can be numbered so that everything imports from floors below its own alone; so there is no circle."""
    left = {name: others - {name} for name, others in graph.items()}
    while lowest := {name for name, others in left.items() if not others & left.keys()}:
        left = {name: others for name, others in left.items() if name not in lowest}
    assert not left, f"a circle among {sorted(left)}"


# How a run and a training are put together is known to two files of the tests alone, which others go through.
INNER = {"distill.train", "distill.job"}
INNER |= {f"distill.config.{name}" for name in ("compose", "command_line")}
ADAPTERS = {"tiny.py", "job.py"}


def test_runs_and_trainings_are_put_together_in_two_files() -> None:
    """Tests of the command line's own modules, in tests/config, import these as any test imports what it tests."""
    found = {}
    for path in (ROOT / "tests").rglob("*.py"):
        if path.name not in ADAPTERS and path.parent.name != "config":
            patched = re.findall(r'"(distill[.\w]*)\.\w+"', path.read_text())
            found[str(path)] = INNER & {*imports(path), *patched}
    assert not {path: names for path, names in found.items() if names}, "go through tiny.py or job.py"


SELDOM = {"wandb", "datasets", "matplotlib"}  # packages that many runs do without, and that take long to import


def imported_at_once(path: Path) -> set[str]:
    """The packages that a module imports as soon as it is imported itself."""
    nodes = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.Import | ast.ImportFrom)]
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
    return {name.partition(".")[0] for name in names}


def test_what_is_seldom_used_is_imported_where_it_is_used() -> None:
    """The last part is imported by `RunResults.plot` alone."""
    eager = {name: SELDOM & imported_at_once(path) for name, path in MODULES.items()}
    assert {name for name, packages in eager.items() if packages} == {"distill.report.chart"}
    importers = [
        name for name, path in MODULES.items() if re.search(r"^from distill.report.chart ", path.read_text(), re.M)
    ]
    assert not importers


def test_the_package_has_few_rooms() -> None:
    entries = {path.name for path in PACKAGE.iterdir()} - {"__pycache__", "py.typed", "__init__.pyi"}
    assert len(entries) <= 17, sorted(entries)


# Lines of Python that a room may have. What a change adds leaves elsewhere: these numbers only become smaller.
MOST_LINES = {
    "commands": 3650, "config": 2940, "data": 7470, "distributed": 2570, "evaluation": 2450, "models": 3980,
    "objective": 2090, "optim": 730, "report": 3250, "runs": 5150, "runtime": 1340, "tasks": 710, "teacher": 1160,
}  # fmt: skip


@pytest.mark.parametrize("name", MOST_LINES)
def test_a_room_keeps_its_weight(name: str) -> None:
    assert sum(len(path.read_text().splitlines()) for path in (PACKAGE / name).rglob("*.py")) <= MOST_LINES[name]


def test_only_the_door_knows_hydra() -> None:
    doors = {"compose.py", "override_text.py", "sweep.py"}
    known = {path.name for path in MODULES.values() if re.search(r"^\s*(import|from) hydra", path.read_text(), re.M)}
    assert known == doors


@pytest.mark.parametrize("path", PYTHON, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_and_functions_are_short_and_begin_with_their_job(path: Path) -> None:
    text = path.read_text()
    tree = ast.parse(text)
    assert len(text.splitlines()) <= 600
    first = (ast.get_docstring(tree) or "").partition("\n")[0]
    assert first.endswith((".", ":")) and len(first) > 15, first
    assert "util" not in path.name
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            assert node.end_lineno is not None and node.end_lineno - node.lineno < 60, node.name
            named = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            assert len([each for each in named if each.arg not in ("self", "cls")]) <= 7, node.name


# What objects of other libraries are set up by, and the state of a module or a thread. Counters grow by +=.
ASSIGNED = {
    "torch": {"data", "grad", "weight", "bias", "forward", "register_parameter"},
    "GPT-2's module": {"c_fc", "act"},
    "fully_shard": {"_mp_policy", "mp_policy", "all_gather_outputs"},
    "tokenizers": {"normalizer", "pre_tokenizer", "decoder", "post_processor", "encode_special_tokens"},
    "transformers": {
        "model_max_length", "_attn_implementation", "generation_config", "chat_template", "eos_token_id",
    },
    "datasets": {"HF_HUB_OFFLINE"},
    "torchmetrics": {"dist_sync_fn", "distributed_available_fn"},
    "onnxruntime": {
        "intra_op_num_threads", "inter_op_num_threads",
    },
    "hydra": {"hydra", "cfg"},
    "Python": {"stdout", "stderr", "filename", "propagate", "handlers"},
    "of a thread or of all": {"keys", "calls"},
}  # fmt: skip


def assigned_from_outside(function: ast.FunctionDef) -> Iterator[str]:
    """The attributes that a function assigns to objects other than `self` and those that it makes as copies."""
    made = {"self"}
    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and ast.unparse(node.value).startswith(("copy.copy(", "super().__new__(")):
            made |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    for node in ast.walk(function):
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in (part for whole in targets for part in ast.walk(whole)):
                is_stored = isinstance(target, ast.Attribute) and isinstance(target.ctx, ast.Store)
                if is_stored and ast.unparse(target.value) not in made:
                    yield target.attr


def test_objects_are_complete_when_they_are_made() -> None:
    """No attribute of an object of ours is assigned from outside."""
    foreign = set().union(*ASSIGNED.values())
    seen: set[str] = set()
    for name, path in MODULES.items():
        functions = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)]
        assigned = {attribute for function in functions for attribute in assigned_from_outside(function)}
        assert assigned <= foreign, f"{name} assigns {sorted(assigned - foreign)}"
        seen |= assigned
    assert seen == foreign, f"nothing assigns {sorted(foreign - seen)} any more: shorten the list"


def test_few_dicts_have_keys_that_no_type_names() -> None:
    """What is left are settings by name, data of the user's, and what torch, transformers or JSON give."""
    assert sum(path.read_text().count("dict[str, Any]") for path in MODULES.values()) < 200


def test_no_private_words() -> None:
    words = re.compile(rf"\b({'|'.join(PRIVATE_WORDS)})\b", re.I)
    for path in [*TEXTS, *PYTHON]:
        if path.is_file() and path.suffix in SUFFIXES and path != Path(__file__):
            found = [line for line in path.read_text().splitlines() if words.search(line)]
            assert not found, f"{path}: {found[:3]}"


def test_tests_lie_beside_what_they_test() -> None:
    """Every folder of tests is named like a room; but for fuzz, which feeds anything to all of them."""
    folders = {path.name for path in (ROOT / "tests").iterdir() if path.is_dir()} - {"__pycache__", "fuzz"}
    assert folders and folders <= {path.name for path in PACKAGE.iterdir() if path.is_dir()}


def test_a_folder_on_the_shared_shelf_belongs_to_one_file() -> None:
    """Files that run in one process share the shelf: a run of another file in the folder would be gone on with."""
    users: dict[str, set[str]] = {}
    for path in (ROOT / "tests").rglob("*.py"):
        for name in re.findall(r'shelf\.root / (f?"[^"]*")', path.read_text()):
            users.setdefault(name, set()).add(path.name)
    assert len(users) > 50
    assert not {name: files for name, files in users.items() if len(files) > 1}
