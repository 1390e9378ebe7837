"""The command `distill`, also `python -m distill`: the main job, or the command that the first argument names."""

import os
import re
import resource
import sys
from importlib import import_module

from distill.runtime.host import limit_spinning

# By name, the module with its `HELP` and `run`, and what it does. A line here is all that a further one needs.
COMMANDS = {
    "evaluate": ("distill.commands.evaluate", "score models on evaluation sets, without training"),
    "compare": ("distill.commands.compare", "compare runs: the settings in which they differ, and their results"),
    "predict": ("distill.commands.predict", "predict with a trained model: texts, files and pipes"),
    "prepare": ("distill.commands.prepare", "tokenize and pack the sequences of a corpus, without training"),
    "profile": ("distill.commands.profile", "train the first steps of a run and name the bottleneck"),
    "export": ("distill.commands.export", "write a student in the format of another engine (ONNX)"),
    "push": ("distill.commands.push", "upload the student of a run to the Hugging Face Hub, with its card and report"),
    "report": ("distill.commands.report", "write the report of a finished run again"),
    "settings": ("distill.commands.settings", "show every setting with its unit, its meaning and who set it"),
}


MIN_ADDRESSES = 1_200_000_000  # bytes: torch and transformers alone take 1 GB


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 0 done, 2 bad input, 3 diverged, 4 another rank lost, 74 storage, 128 + a signal; else a bug."""
    try:
        return _main(arguments)
    except MemoryError:  # not even the import that its line needs has succeeded
        print("distill: not enough memory: raise `ulimit -v` or the limit of the container", file=sys.stderr)
        return 2


def _main(arguments: list[str] | None) -> int:
    if arguments is None:
        arguments = sys.argv[1:]
    wants_help = bool({"-h", "--help"} & set(arguments))
    if arguments and re.fullmatch(r"[a-z]\w*", arguments[0]):
        return run_command(arguments[0], arguments[1:], wants_help)
    if wants_help:
        from distill.commands.help import main_help

        print(main_help({name: text for name, (_, text) in COMMANDS.items()}, config_dir(arguments)))
        return 0
    if arguments == ["--version"]:
        from distill.runtime.version import __version__

        print(__version__)
        return 0
    if arguments == ["--schema"]:
        from distill.config.schema import print_schema

        return print_schema()
    if _has_little_memory():
        return 2
    from distill.commands.main_job import main as run_job

    return run_job(arguments)


def _has_little_memory() -> bool:
    """Whether the limit on addresses is too low to import torch, after a line about it: C libraries would abort."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit == resource.RLIM_INFINITY or limit >= MIN_ADDRESSES:
        return False
    from distill.commands.ending import report_problem

    report_problem(
        f"not enough memory: `ulimit -v` is {limit // 1024} kB, and torch alone takes {MIN_ADDRESSES // 1024} kB: "
        "raise it, or set it to unlimited"
    )
    return True


def run_command(name: str, arguments: list[str], wants_help: bool = False) -> int:
    """The exit status of a command; of one that there is not, after a line that names the nearest.

    Args:
        wants_help: prints its help, and does nothing.
    """
    from distill.commands.ending import report_problem, status_of
    from distill.config.command_line import options_of
    from distill.runtime.errors import SettingError, did_you_mean

    if name not in COMMANDS:
        if name in options_of("recipe", config_dir(arguments)):
            report_problem(f"{name} is a recipe and not a command: give +recipe={name}")
            return SettingError.status
        report_problem(
            f"{name} is not a command{did_you_mean(name, COMMANDS)}: give one of {', '.join(COMMANDS)}, or NAME=VALUE"
        )
        return SettingError.status
    if not wants_help and _has_little_memory():
        return 2
    command = import_module(COMMANDS[name][0])
    if wants_help:
        print(command.HELP.strip())
        return 0
    limit_spinning()
    return status_of(lambda: command.run(arguments))


def config_dir(arguments: list[str]) -> str | None:
    """The folder of options of the user's that a command line names, if it names one."""
    for argument, following in zip(arguments, [*arguments[1:], ""], strict=False):
        name, separator, value = argument.partition("=")
        if name in ("--config-dir", "-cd"):
            return os.path.expanduser(value if separator else following)
    return None
