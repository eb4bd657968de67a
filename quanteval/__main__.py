"""`python -m quanteval` is `quanteval`."""

import sys

from quanteval.cli import main

if __name__ == "__main__":
    sys.exit(main())
