"""A crontab for clusters without crontab: drop a file into a folder and it runs at the next slot.

    installation.py  the installed folder, what install decided, whose files are believed there (files)
    install.py       decide, write down, start; and take away again; the scripts that come with ftsupervise
    entries.py       what is to be run, and when: slots on the wall clock, dropped files, lines of the crontab file
    chain.py         the jobs of the next slots: which are missing, which are there twice; the jobs of dropped job scripts
    keepalive.py     is the cron alive, and if not, bring it back; our lines in the tables of scrontab and crontab
    history.py       every slot and every run of every entry, claimed by mkdir (files)
    tick.py          one slot: claim it, keep the chain, run what is due, notify of what failed
    dispatch.py      run what is due at one slot, or one entry by hand
    execute.py       run executables at the same time, each with a bound, children included (processes)
    status.py        what ``cron status`` shows, and what failed as findings

How the chain lives: every slot of the wall clock (a multiple of the period) has a job with ``--begin`` at the slot, and
the jobs of the next K slots are always in the queue. Each tick asks the queue once and submits what is missing, usually
one. Of two jobs for one slot the lower id stays. "Cannot tell" submits nothing: the others in the queue are the spare.
"""

ENV_SLOT = "FTSUPERVISE_CRON_SLOT"  # in the environment of an entry: the slot's time, ISO, UTC
ENV_ENTRY = "FTSUPERVISE_CRON_ENTRY"
ENV_DIR = "FTSUPERVISE_CRON_DIR"
