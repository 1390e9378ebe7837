"""The version of this release; the one place where it stands."""

__version__ = "0.1.0"
