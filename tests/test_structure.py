"""The plan of the package holds where ruff and import-linter cannot say it: weights, and objects that are complete."""

import ast
import re
from collections.abc import Iterator

import pytest
from job import ROOT

PACKAGE = ROOT / "distill"
MODULES = sorted(PACKAGE.rglob("*.py"))
PYTHON = sorted(path for folder in ("distill", "tests", "benchmarks") for path in (ROOT / folder).rglob("*.py"))

# Lines of Python that a room may have. What a change adds leaves elsewhere: a commit explains a number that grows.
MOST_LINES = {
    "commands": 4066, "config": 3153, "data": 7475, "distributed": 2433, "evaluation": 2441, "models": 4739,
    "objective": 1985, "optim": 727, "report": 3159, "runs": 5741, "runtime": 1522, "tasks": 698, "teacher": 1624,
}  # fmt: skip


@pytest.mark.parametrize("name", MOST_LINES)
def test_a_room_keeps_its_weight(name: str) -> None:
    assert sum(len(path.read_text().splitlines()) for path in (PACKAGE / name).rglob("*.py")) <= MOST_LINES[name]


def test_the_package_has_few_rooms_and_few_dicts_whose_keys_no_type_names() -> None:
    """What is left of these are settings by name, data of the user's, and what torch, transformers or JSON give."""
    entries = {path.name for path in PACKAGE.iterdir()} - {"__pycache__", "py.typed", "__init__.pyi"}
    assert len(entries) <= 17, sorted(entries)
    assert sum(path.read_text().count("dict[str, Any]") for path in MODULES) < 200


def test_files_and_functions_are_short() -> None:
    for path in PYTHON:
        text = path.read_text()
        assert len(text.splitlines()) <= 600, path
        functions = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)]
        assert not [node.name for node in functions if (node.end_lineno or 0) - node.lineno >= 60], path


# What objects of other libraries are set up by, and the state of a module or a thread. Counters grow by +=.
ASSIGNED = {
    "torch": {
        "data", "grad", "weight", "bias", "forward", "register_parameter", "fill_uninitialized_memory", "allow_tf32",
        "recompile_limit",
    },
    "GPT-2's module": {"c_fc", "act"},
    "fully_shard": {"_mp_policy", "mp_policy", "all_gather_outputs"},
    "tokenizers": {"normalizer", "pre_tokenizer", "decoder", "post_processor", "encode_special_tokens"},
    "transformers": {
        "model_max_length", "_attn_implementation", "generation_config", "chat_template", "eos_token_id",
    },
    "datasets": {"HF_HUB_OFFLINE"},
    "torchmetrics": {"dist_sync_fn", "distributed_available_fn"},
    "onnxruntime": {"intra_op_num_threads", "inter_op_num_threads"},
    "hydra": {"hydra", "cfg"},
    "Python": {"stdout", "stderr", "filename", "propagate", "handlers"},
    "of a thread or of all": {"keys", "calls"},
}  # fmt: skip


def assigned_from_outside(function: ast.FunctionDef) -> Iterator[str]:
    """The attributes that a function assigns to objects other than `self` and those that it makes as copies."""
    assignments = [node for node in ast.walk(function) if isinstance(node, ast.Assign | ast.AnnAssign)]
    made = {"self"}
    for node in assignments:
        if node.value is not None and ast.unparse(node.value).startswith(("copy.copy(", "super().__new__(")):
            made |= {ast.unparse(target) for target in getattr(node, "targets", [])}
    for node in assignments:
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            for part in ast.walk(target):
                is_stored = isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store)
                if is_stored and ast.unparse(part.value) not in made:
                    yield part.attr


def test_objects_are_complete_when_they_are_made() -> None:
    """No attribute of an object of ours is assigned from outside."""
    foreign = set().union(*ASSIGNED.values())
    for path in MODULES:
        functions = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)]
        assigned = {attribute for function in functions for attribute in assigned_from_outside(function)}
        assert assigned <= foreign, f"{path} assigns {sorted(assigned - foreign)}"


def test_a_folder_on_the_shared_shelf_belongs_to_one_file() -> None:
    """Files that run in one process share the shelf: a run of another file in the folder would be resumed."""
    users: dict[str, set[str]] = {}
    for path in (ROOT / "tests").rglob("*.py"):
        for name in re.findall(r'shelf\.root / (f?"[^"]*")', path.read_text()):
            users.setdefault(name, set()).add(path.name)
    assert not {name: files for name, files in users.items() if len(files) > 1}
