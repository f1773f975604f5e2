"""Warm start: a restart begins at the rendezvous instead of at the interpreter's start and its imports.

    restarts.py       the supervisor starts standbys, reads their reports, hands attempts to them and ends them
    sitecustomize.py  the hook in an interpreter that is started with the ranks' own command line, and waits
    standby.py        imports there the ranks' modules, listens, forks one child for each rank, and makes it the same as a
                      fresh process of that rank, if it fits
    client.py         is started by srun in place of the command: hands itself over, or starts the command cold

The standby never runs a line of the user's program. Its child continues where an interpreter continues after ``site``, so
``__main__``, ``sys.path``, tracebacks and exit codes are Python's own. A rank that does not fit is started cold.
In the ranks' Python it uses the standard library only: that need not have ftsupervise installed.
"""
