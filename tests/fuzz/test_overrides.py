"""Any value for any setting: it is taken, or refused in one line; never a traceback."""

from collections.abc import Iterator
from typing import Any

import pytest
from hydra import compose
from hydra.errors import HydraException
from hypothesis import given
from hypothesis import strategies as st
from job import built, check_words, hydra_set_up
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from distill.config.base import flatten
from distill.config.errors import explain
from distill.runs.check import check
from distill.runtime.errors import SettingError


@pytest.fixture(scope="module", autouse=True)
def hydra() -> Iterator[None]:
    with hydra_set_up():
        yield


def names() -> list[str]:
    """Every setting of the default job, and the groups."""
    with hydra_set_up():
        settings: Any = OmegaConf.to_container(compose("config"), resolve=False)
    return sorted({*flatten(settings), *settings, "hydra.run.dir", "teacher.members", "evaluate.measures.x"})


NAMES = names()
WORDS = ["null", "true", "false", "nan", "inf", "-inf", "0", "-1", "1", "0.5", "1e9", "1e30", "1e-30", "1" + 19 * "0"]
WORDS += ["[]", "[1]", "[0.9]", "[1,2,3]", "{}", "{a:1}", "x", "''", "auto", "none", "all", "${seed}", "${nope}"]
WORDS += ["../x", "/dev/null", "é", "1,2"]
VALUES = st.sampled_from(WORDS) | st.text(max_size=12) | st.integers().map(str) | st.floats().map(str)


@given(
    settings=st.lists(
        st.tuples(st.sampled_from(NAMES), st.sampled_from(["", "+", "~", "++"]), VALUES), min_size=1, max_size=3
    )
)
def test_any_value_is_taken_or_refused(settings: list[tuple[str, str, str]]) -> None:
    overrides = [f"{sign}{name}" if sign == "~" else f"{sign}{name}={value}" for name, sign, value in settings]
    try:
        check_words(*overrides)
        check(built(*overrides))
    except SettingError as error:
        assert len(str(error).splitlines()) == 1, overrides
    except (HydraException, OmegaConfBaseException) as error:
        assert len(str(explain(error)).splitlines()) == 1, overrides
