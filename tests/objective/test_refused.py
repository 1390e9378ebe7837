"""What no objective can be made of: one line that names the setting, its value and a cure."""

import math
from typing import Any

import pytest
from families import make
from tiny import make_model, make_objective, named_terms

from distill.config.settings import PrecisionConfig
from distill.objective.terms.soft_classes import SoftClasses
from distill.runtime.errors import SettingError

NARROW, HOT = {"hidden_size": 20, "num_attention_heads": 5}, {"start": 4.0, "end": 1.0}
PROJECTED = {"_target_": "own_parts.ProjectedHidden", "student_layer": 1, "teacher_layer": 2}
# The loss, its settings, and what the line holds.
REFUSED: list[tuple[str, Any, list[str]]] = [
    ("jsd", {"beta": 1.5}, ["beta=1.5", "from 0 to 1"]),
    ("jsd", {"temperature": 0.0}, ["temperature=0.0", "from 0.01"]),
    ("reverse_kl", {"positions": "some"}, ["positions", "some"]),
    ("logit_mse", {"temperature": 2.0}, ["temperature: no setting"]),
    ("soft", {"cutoff": 1.0}, ["cutoff=1.0", "below 1"]),
    ("soft", {"temperature": {"start": 0.0, "end": 1.0}}, ["temperature.start=0.0", "from 0.01"]),
    ("soft_span", {"temperature": -2}, ["temperature=-2.0", "from 0.01"]),
    ("mlm", {"weight": "heavy"}, ["weight=heavy", "number"]),
    ("mlm", {"weight": {"start": 1.0}}, ["weight.end", "missing"]),
    ("mlm", {"weight": {"start": 1.0, "end": -1.0}}, ["weight.end=-1.0", "from 0"]),
    ("mlm", {"weight": {"start": 1.0, "end": 0.0, "shape": "wave"}}, ["weight", "wave", "cosine"]),
    ("hidden_mse", {"pairs": [[1]]}, ["pairs=[[1]]", "[student layer, teacher layer]"]),
    ("hidden_mse", {"pairs": []}, ["pairs=[]"]),
    ("hidden_mse", {"pairs": [[3, 1]]}, ["pairs", "layer 3 of the student", "0 to 2"]),
    ("hidden_cosine", {"pairs": [[1, -2]]}, ["pairs", "layer -2 of the teacher"]),
    ("patient", NARROW, ["weight", "32 and 20", "objective.hidden_mse"]),
    ("patient", {"num_hidden_layers": 1}, ["pairs=null", "1 blocks"]),
    ("cosine", NARROW, ["weight", "32 and 20", "set it to 0"]),
    ("pooled", {"pooling": "min"}, ["pooling", "min", "mean"]),
    ("attention_scores", {"pairs": [[0, 1]]}, ["pairs", "layer 0", "1 to 2"]),
    ("attention_scores", {"num_attention_heads": 2}, ["weight", "4 attention heads", "student 2", "relations"]),
    ("relations", {}, ["relation_heads=12", "32", "divisor of 32"]),
    ("relations", {"relation_heads": 8, "hidden_size": 20}, ["relation_heads=8", "20", "32", "divisor of 4"]),
    ("relations", {"relation_heads": 0}, ["relation_heads=0", "1 or more"]),
    ("relations", {"teacher_layer": 5}, ["teacher_layer=5", "1 to 3"]),
    ("relations", {"student_layer": 0}, ["student_layer=0", "1 to 2"]),
    ("relations", {"query": -1.0}, ["query=-1.0", "0 or more"]),
    ("relations", {"query": 0.0, "key": 0.0, "value": 0.0}, ["query=0", "nothing to compare"]),
    ("mine", 3, ["objective.mine=3", "neither"]),
    ("mine", {"weight": 1}, ["objective.mine: no such loss", "cosine", "_target_"]),
    ("mine", {"_target_": "pathlib.Path"}, ["_target_=pathlib.Path", "no loss term"]),
    ("mine", {"_target_": "own_parts.ProjectedHidden"}, ["student_layer: missing"]),
    ("mine", {**PROJECTED, "wait": 3.0}, ["wait: no setting", "student_layer"]),
    ("mine", {"_target_": "own_parts.Tempered", "temperature": HOT}, ["own_parts.Tempered", "self.temperature"]),
    ("hidden-3", PROJECTED, ["objective.hidden-3", "letters"]),
]
OF_STUDENT = {*NARROW, "num_hidden_layers"}


def refusal(name: str, settings: Any, teacher: Any, **more: Any) -> str:
    fields = {key: value for key, value in settings.items() if key in OF_STUDENT} if isinstance(settings, dict) else {}
    given = {key: value for key, value in settings.items() if key not in fields} if fields else settings
    with pytest.raises(SettingError) as error:
        make_objective(named_terms(**{name: given}), make_model("bert", 2, **fields), teacher, **more)
    return str(error.value)


@pytest.mark.parametrize(("name", "settings", "words"), REFUSED)
def test_the_line_names_the_setting(name: str, settings: Any, words: list[str]) -> None:
    line = refusal(name, settings, make("bert"))
    assert "\n" not in line and all(word in line for word in [f"objective.{name}", *words]), line


@pytest.mark.parametrize(("name", "settings"), [("attention_scores", {}), ("relations", {"relation_heads": 4})])
def test_attention_that_does_not_show_is_refused(name: str, settings: dict[str, Any]) -> None:
    assert "does not show" in refusal(name, settings, make("mpnet"))
    line = refusal(name, settings, make("bert"), precision=PrecisionConfig(compile=True))
    assert "precision.compile=true" in line and f"objective.{name}" in line


@pytest.mark.parametrize("temperature", [0.0, -2.0, math.inf, math.nan])
def test_a_temperature_has_to_divide_logits(temperature: float) -> None:
    with pytest.raises(ValueError, match=f"^temperature={temperature} "):
        SoftClasses(temperature)
