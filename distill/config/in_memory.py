"""Objects of a program that stand in place of an import path: what makes them, and what is written down of them."""

from collections.abc import Callable
from typing import Any

from distill.runtime.errors import SettingError

IN_MEMORY = " in memory"  # behind what the report calls such an object
PREFIX = "in memory: "  # of what config.yaml has of such an object


class InMemory:
    """An object that `distill.distill` was called with, as settings hold it in place of `_target_`.

    Attributes:
        name: of its class or function, for people.
        digest: of what it is: weights, texts, or code and values. A resumed run has to have the same; "" for observers.
        make: gives it; the settings beside it are the arguments.
        tokenizer: of a model.
        code: a digest of the user's code behind it that `digest` has no part of; None where that is not known.
    """

    # OmegaConf, which holds it for a while, would make settings of a dataclass.
    def __init__(
        self, name: str, digest: str, make: Callable[..., Any], tokenizer: Any = None, code: str | None = None
    ) -> None:
        self.name, self.digest, self.make, self.tokenizer, self.code = name, digest, make, tokenizer, code

    def __str__(self) -> str:
        return f"{PREFIX}{self.name}" + (f", digest {self.digest[:16]}" if self.digest else "")


def refuse_text_of_object(setting: str, path: str) -> None:
    """Raises SettingError for what config.yaml has of an object, which no command line brings back."""
    if path.startswith(PREFIX):
        raise SettingError(
            "was an object of the program that started the run",
            setting=f"{setting}._target_",
            value=path,
            cure="call distill.distill() with it again, or name a folder or an import path",
        )
