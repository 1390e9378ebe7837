"""The Hugging Face Hub: whether it answers, which is asked once, and the line that helps where it does not."""

import os
from contextlib import suppress
from functools import cache
from threading import Thread

WAIT = 2.0  # seconds for its answer, where HF_HUB_ETAG_TIMEOUT sets no others


def seconds_to_wait() -> float:
    """How long the Hub has for an answer; as huggingface_hub, this reads HF_HUB_ETAG_TIMEOUT."""
    try:
        return float(os.environ["HF_HUB_ETAG_TIMEOUT"])
    except (KeyError, ValueError):
        return WAIT


@cache
def is_hub_reached() -> bool:
    """Whether the Hub answers one request; transformers and datasets repeat a request for 20 seconds and more.

    It is not where HF_HUB_OFFLINE=1 forbids requests.
    """
    from huggingface_hub import constants, get_session

    if constants.HF_HUB_OFFLINE:
        return False
    answers = list[int]()

    def ask() -> None:
        with suppress(Exception):  # of whichever client huggingface_hub is built on
            answers.append(get_session().head(constants.ENDPOINT, timeout=seconds_to_wait()).status_code)

    # In a thread, as the look-up of a name in the network has no limit of time.
    asking = Thread(target=ask, daemon=True)
    asking.start()
    asking.join(seconds_to_wait())
    return bool(answers)


def why_not_reached() -> str:
    """Why there is no answer, with what changes that."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE=1 forbids requests to the Hub: unset it"
    chosen = ", and HF_ENDPOINT, which names it" if os.environ.get("HF_ENDPOINT") else ""
    waited = f"{seconds_to_wait():g} s (HF_HUB_ETAG_TIMEOUT)"
    return f"{constants.ENDPOINT} does not answer within {waited}: check the network{chosen}"


def how_to_do_without(name: str, kind: str = "model") -> str:
    """For a name that is in no cache while the Hub is not reached: why it is not, and what helps.

    Args:
        kind: what has the name, `model` or `dataset`.
    """
    download = f"hf download {name} --local-dir FOLDER" + " --repo-type dataset" * (kind == "dataset")
    return (
        f"it is not in the cache of the Hub, and {why_not_reached()}; or run `{download}` on a machine "
        "that reaches the Hub and give FOLDER, or copy the cache of that machine (HF_HOME)"
    )


def is_unreachable(error: BaseException) -> bool:
    """Whether transformers or datasets has failed since the Hub does not answer, or may not be asked."""
    text = str(error).lower()
    reasons = ("couldn't connect", "couldn't reach", "offline mode", "connection error", "cannot reach")
    return any(words in text for words in reasons)
