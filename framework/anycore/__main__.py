"""`python -m anycore` is the command `anycore`."""

import sys

from anycore.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
