"""`python -m slattn`: the same as the console script."""

import sys

from slattn.cli import main

if __name__ == "__main__":
    sys.exit(main())
