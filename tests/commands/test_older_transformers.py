"""A student's folder means the same to transformers 4.57: logits, token ids and a pipeline's answers.

python -m venv OLDER && OLDER/bin/pip install 'transformers==4.57.*' torch
DISTILL_OLDER_PYTHON=OLDER/bin/python python -m pytest -m older_transformers
"""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import elsewhere
import pytest
import torch
from elsewhere import look
from families import FAMILIES, make_family, tokenizer_of

from distill.models.export_folder import export

pytestmark = pytest.mark.older_transformers
OLDER = os.environ.get("DISTILL_OLDER_PYTHON")
UNTIED = ("bert", "roberta", "albert", "deberta-v2")  # their heads have a bias beside the output embedding's
STUDENTS: dict[str, tuple[str, dict[str, Any]]] = {family: (family, {}) for family in FAMILIES}
STUDENTS |= {f"{family}-untied": (family, {"tie_word_embeddings": False}) for family in UNTIED}
SCRIPT = Path(elsewhere.__file__)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for every student, with what the older version saw in it."""
    if OLDER is None:
        pytest.skip("DISTILL_OLDER_PYTHON names no Python")
    root = tmp_path_factory.mktemp("students")
    for name, (family, fields) in STUDENTS.items():
        export(make_family(family, **fields), tokenizer_of(family), root / name, "")
    apart = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    command = [OLDER, str(SCRIPT), *(str(root / name) for name in STUDENTS)]
    subprocess.run(command, check=True, env=apart, capture_output=True, timeout=500)
    return root


@pytest.mark.parametrize("name", STUDENTS)
def test_both_see_the_same(folders: Path, name: str) -> None:
    here, there = look(folders / name), json.loads((folders / name / "seen.json").read_text())
    assert "error" not in there, there["error"]
    for logits in ("logits", "batch_logits"):
        torch.testing.assert_close(torch.tensor(there.pop(logits)), torch.tensor(here.pop(logits)), rtol=0, atol=1e-5)
    assert there == here
