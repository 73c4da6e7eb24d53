"""`python -m moefp8`: the command line, as the console script `moefp8`."""

import sys

from .cli.main import main

if __name__ == "__main__":
    sys.exit(main())
