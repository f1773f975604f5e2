"""A crontab for clusters without crontab: drop a file into a folder and it runs at the next slot.

    place.py        the installed folder and what install decided (edge: files)
    schedule.py     slots on the wall clock, five-field lines, what is due and what was missed (pure)
    table.py        the crontab file (pure)
    parts.py        which files in a folder count, and why not (pure)
    successors.py   which jobs the chain lacks and which it has twice (pure)
    entries.py      what is to be run, found in the folder (edge: files)
    claims.py       slots, claimed by mkdir: whatever is submitted twice, no slot runs twice (edge: files)
    history.py      every run of every entry: output, exit code, lateness (edge: files)
    execute.py      run executables at the same time, each with a bound, children included (edge: processes)
    work.py         run what is due at one slot
    findings.py     what failed, as findings (pure); environment.py, render.py: what an entry sees, a slot's script
    handover.py     job scripts: submitted as jobs of their own, and followed
    chain.py        keep successors in the queue; ``ensure`` for those who start or find the chain dead
    mutual.py       what a running job does for the cron that watches it
    tick.py         one slot: claim, keep the chain, run what is due, tell what failed
    backends.py     scrontab and crontab, where a cluster has them
    install.py      decide, write down, start; and take away again
    byhand.py       one entry now, as a person asks
    report.py       what ``cron status`` shows

How the chain lives: every slot of the wall clock (a multiple of the period) has a job with ``--begin`` at the slot, and
the jobs of the next K slots are always in the queue. Each tick asks the queue once and submits what is missing, usually
one. Of two jobs for one slot the lower id stays. "Cannot tell" submits nothing: the others in the queue are the spare.
"""

from __future__ import annotations

from ftsupervise.crontab.chain import ensure, look_after
from ftsupervise.crontab.place import CronDir, default_directory

__all__ = ["CronDir", "default_directory", "ensure", "look_after"]
