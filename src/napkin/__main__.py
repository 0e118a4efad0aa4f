"""`python -m napkin` is `napkin`."""

import sys

from napkin.cli import main

if __name__ == "__main__":
    sys.exit(main())
