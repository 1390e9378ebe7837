"""The command `python -m distill.predict model=RUN text=...`; from Python it is the function `distill.predict`."""

import sys

from distill.commands.prediction.command import main

if __name__ == "__main__":
    sys.exit(main())
