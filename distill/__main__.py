"""The command `python -m distill`."""

import sys

from distill.commands.cli import main

if __name__ == "__main__":
    sys.exit(main())
