"""`python -m jaxattn` is the `jaxattn` command."""

import sys

from jaxattn.cli import main

if __name__ == "__main__":
    sys.exit(main())
