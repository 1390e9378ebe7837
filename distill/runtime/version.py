"""The version of this release, and the name under which it is published: the one place where they stand."""

__version__ = "0.1.0"

DISTRIBUTION = "distill-kd"  # as pyproject.toml has it; the import and the command are `distill`


def pip_install(extra: str) -> str:
    """The command that installs what an optional part needs, such as `s3`; the names are those of pyproject.toml."""
    return f"pip install '{DISTRIBUTION}[{extra}]'"
