"""``python -m logitless``."""

from logitless.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
