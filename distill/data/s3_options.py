"""How s3fs is set up: every failure comes back at once, since the caller tries again, unless the user set otherwise.

Left to themselves botocore tries up to 5 times, s3fs up to 5 times around that, and some of its calls 5 times more:
storage that is out of order would be waited for by the hour, and no line would be logged.
"""

import os
from typing import Any

PROTOCOLS = ("s3", "s3a")
CHOICES = ("max_attempts", "retry_mode")  # variables of botocore


def s3_options(protocol: str) -> dict[str, Any]:
    """Arguments for the file system of a protocol; none for other protocols, and where the user has chosen retries.

    A choice is `max_attempts` or `retry_mode` in the environment (AWS_MAX_ATTEMPTS, AWS_RETRY_MODE) or in the files of
    AWS, or `config_kwargs` with `retries` in the settings of fsspec, whose other settings stay.
    """
    if protocol not in PROTOCOLS:
        return {}
    from fsspec.config import conf

    config: dict[str, Any] = {}
    for name in PROTOCOLS:
        config |= conf.get(name, {}).get("config_kwargs", {})
    if "retries" in config or any(map(_is_chosen, CHOICES)):
        return {}
    return {"config_kwargs": {**config, "retries": {"max_attempts": 0}}}


def _is_chosen(name: str) -> bool:
    """Whether the environment or a file of AWS sets this variable of botocore, which has a default for some."""
    from botocore.exceptions import BotoCoreError
    from botocore.session import get_session

    if os.environ.get(f"AWS_{name.upper()}"):
        return True
    try:
        return name in get_session().get_scoped_config()
    except BotoCoreError:  # of a profile that does not exist, which is reported when storage is reached
        return False
