"""``python -m logitless``."""

import sys

from logitless.lab.cli import main

sys.excepthook = sys.__excepthook__  # set by the package during import

if __name__ == "__main__":
    raise SystemExit(main())
