"""`python -m servelite`."""

from __future__ import annotations

import sys

from servelite.cli import main

if __name__ == "__main__":
    sys.exit(main())
