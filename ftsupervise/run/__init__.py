"""The job ring: ``ftsupervise run -- COMMAND`` inside the allocation.

Gate, one attempt in the ledger, Slurm's signals passed on, a bounded end, and the command's exit code. Restarting in place
comes here too: it is a loop round ``one_attempt``.
"""
