"""``ftsupervise run -- COMMAND``: supervise the command inside the job's allocation.

Each attempt passes the gate, is recorded in the ledger, receives Slurm's signals and ends in bounded time. Restarts in place
are a loop of attempts (``supervisor.py``). The exit code is that of the last attempt's command.
"""
