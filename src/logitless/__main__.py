"""``python -m logitless``."""

import sys

from logitless.lab.cli import main

sys.excepthook = sys.__excepthook__  # what the package has set while it was imported

if __name__ == "__main__":
    raise SystemExit(main())
