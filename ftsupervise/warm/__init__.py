"""Warm start: a restart begins at the rendezvous instead of at the interpreter's start and its imports.

    sitecustomize.py  the way into an interpreter: it is started with the very command line of the ranks, and waits
    standby.py        there: import what the ranks import, listen, fork one child for each rank
    rank_setup.py       what makes such a child the same as a fresh process of that rank
    client.py         what srun starts in place of the command: hands itself over, or starts the command cold

The standby never runs a line of the user's program. A child of it goes on where an interpreter goes on after ``site``, so
``__main__``, ``sys.path``, tracebacks and exit codes are Python's own doing. Whatever does not fit is started cold.
Standard library only, and nothing of ftsupervise: the ranks' Python need not have it installed.
"""
