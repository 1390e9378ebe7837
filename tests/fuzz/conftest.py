"""How long the fuzz tests look: the same cases every time, and few of them, unless DISTILL_FUZZ says how many."""

import os

from hypothesis import HealthCheck, Phase, settings

CASES = int(os.environ.get("DISTILL_FUZZ", "0"))

settings.register_profile(
    "distill",
    max_examples=CASES or 60,
    derandomize=not CASES,
    deadline=None,
    database=None,
    phases=(Phase.explicit, Phase.generate, Phase.shrink),
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("distill")
