"""A crontab for clusters without crontab: drop a file into a folder and it runs at the next slot.

    installation.py  the installed folder, the decisions of install, the accounts whose files are run (files)
    install.py       install and remove; the scripts that come with ftsupervise
    entries.py       the entries and their times: slots on the wall clock, dropped files, lines of the crontab file
    chain.py         the jobs of the next slots, missing or there twice; the jobs of dropped job scripts
    keepalive.py     check that the cron is alive, revive it; our lines in the tables of scrontab and crontab
    history.py       every slot and every run of every entry, claimed by mkdir (files)
    tick.py          one slot: claim it, keep the chain, run the entries that are due, notify people of failures
    dispatch.py      run the entries that are due at one slot, or one entry by hand
    status.py        the state of a cron, for ``cron status`` and as findings

How the chain lives: every slot of the wall clock (a multiple of the period) has a job with ``--begin`` at the slot, and
the jobs of the next K slots are always in the queue. Each tick asks the queue once and submits what is missing, usually
one. Of two jobs for one slot the lower id stays. "Cannot tell" submits nothing: the others in the queue are the spare.
"""

ENV_SLOT = "FTSUPERVISE_CRON_SLOT"  # in the environment of an entry: the slot's time, ISO, UTC
ENV_ENTRY = "FTSUPERVISE_CRON_ENTRY"
ENV_DIR = "FTSUPERVISE_CRON_DIR"
