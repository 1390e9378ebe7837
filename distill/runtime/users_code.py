"""What went wrong in a class or function of the user's, in one line: which line of which file, and what there is."""

import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from distill.runtime.errors import SettingError
from distill.runtime.host import is_out_of_memory

# What code raises that takes something for what it is not; memory, storage and signals are none of these.
MISTAKES = (
    AttributeError,
    TypeError,
    LookupError,
    NameError,
    ValueError,
    AssertionError,
    NotImplementedError,
    ImportError,
)


def is_users(module: str) -> bool:
    """Whether a module of this name is none of this package."""
    return module.partition(".")[0] != "distill"


def find_modules_here(path: str) -> None:
    """Let settings name modules of the working folder from the console script too, as from `python -m distill`.

    Not before one names a module that is none of this package, and not before torch is imported, which runs what
    packages on `sys.path` announce: the working folder may be that of a model which somebody else made.
    """
    if not is_users(path):
        return
    import torch  # noqa: F401

    here = os.getcwd()
    if not sys.flags.safe_path and here not in sys.path and "" not in sys.path:
        sys.path.append(here)  # last, so that no file there hides a package


@contextmanager
def naming_mistakes(what: str, owner: object) -> Iterator[None]:
    """Raises SettingError, which says that `what` fails and in which line, for a mistake in the class of `owner`.

    That is a class of the user's: errors in those of this package stay as they are. So do a lack of memory, and errors
    that end a run on purpose.
    """
    try:
        yield
    except SettingError:
        raise
    except (*MISTAKES, FileNotFoundError, RuntimeError) as error:
        # A shape that does not fit is a RuntimeError of torch; a lost rank and the like are classes of their own.
        ends_the_run = not isinstance(error, (*MISTAKES, FileNotFoundError)) and type(error) is not RuntimeError
        if ends_the_run or is_out_of_memory(error) or not is_users(type(owner).__module__):
            raise
        raise SettingError(f"{what} fails: {mistake(error)}") from error


def mistake(error: BaseException) -> str:
    """The error with the last line of the user's in its traceback, and the attributes of an object of this package."""
    here, site = str(Path(__file__).parents[1]), "site-packages"
    lines = [
        f" ({Path(frame.filename).name}, line {frame.lineno}: {frame.line})"
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith((here, "<")) and site not in frame.filename
    ]
    text = f"{type(error).__name__}: {' '.join(str(error).split())}{lines[-1] if lines else ''}"
    owner = error.obj if isinstance(error, AttributeError) else None
    if owner is None or is_users(type(owner).__module__):
        return text
    names = [name for name in dir(owner) if not name.startswith("_") and not callable(getattr(owner, name, None))]
    return f"{text}; a {type(owner).__name__} has {', '.join(names)}"
