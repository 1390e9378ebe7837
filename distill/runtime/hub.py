"""The Hugging Face Hub: whether it answers, which is asked once, and the line that helps where it does not."""

import os
from contextlib import suppress
from functools import cache
from threading import Thread


def seconds_to_wait() -> float:
    """How long the Hub has for an answer; libraries read HF_HUB_ETAG_TIMEOUT too, and wait longer without it."""
    return float(os.environ.get("HF_HUB_ETAG_TIMEOUT", "2"))


@cache
def is_hub_reached() -> bool:
    """Whether the Hub answers one request; transformers and datasets repeat a request for 20 seconds and more.

    It is not where HF_HUB_OFFLINE=1 forbids requests.
    """
    from huggingface_hub import constants, get_session

    answers = list[int]()

    def ask() -> None:
        with suppress(Exception):  # of whichever client huggingface_hub is built on
            answers.append(get_session().head(constants.ENDPOINT, timeout=seconds_to_wait()).status_code)

    if not constants.HF_HUB_OFFLINE:  # in a thread, as the look-up of a name in the network has no limit of time
        asking = Thread(target=ask, daemon=True)
        asking.start()
        asking.join(seconds_to_wait())
    return bool(answers)


def why_not_reached() -> str:
    """Why there is no answer, with what changes that."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE=1 forbids requests to the Hub: unset it"
    return (
        f"{constants.ENDPOINT} does not answer within {seconds_to_wait():g} s (HF_HUB_ETAG_TIMEOUT): check the network"
    )


def how_to_do_without(name: str, kind: str = "model") -> str:
    """For a name of a `model` or `dataset` that is in no cache while the Hub is not reached: why not, and the cure."""
    download = f"hf download {name} --local-dir FOLDER" + " --repo-type dataset" * (kind == "dataset")
    return (
        f"it is not in the cache of the Hub, and {why_not_reached()}; or run `{download}` on a machine "
        "that reaches the Hub and give FOLDER, or copy the cache of that machine (HF_HOME)"
    )


def is_unreachable(error: BaseException) -> bool:
    """Whether transformers or datasets has failed since the Hub does not answer, or may not be asked."""
    reasons = ("couldn't connect", "couldn't reach", "offline mode", "connection error", "cannot reach")
    return any(words in str(error).lower() for words in reasons)
