"""The program. Nothing that a start makes is garbage, and to look for some takes a tenth of the time: not before a command."""

import gc

gc.disable()

from ftsupervise.start import leave_out_the_current_directory, step_behind  # noqa: E402

leave_out_the_current_directory()
step_behind()

from ftsupervise.cli import main  # noqa: E402

__all__ = ["main"]

if __name__ == "__main__":
    main()
