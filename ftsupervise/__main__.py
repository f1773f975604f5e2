"""The program. Nothing that a start makes is garbage, and to look for some takes a tenth of the time: not before a command."""

import gc

gc.disable()

from ftsupervise.cli import main  # noqa: E402

__all__ = ["main"]

if __name__ == "__main__":
    main()
