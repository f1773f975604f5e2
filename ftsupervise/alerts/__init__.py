"""The life of an alert, from a finding to "it is over": told once, never lost, and ended.

    step.py      who must hear what, and why (pure)
    mutes.py     what need not be told: explained by another trouble, or silenced (pure)
    routes.py    who hears it, and from when (pure)
    outbox.py    messages that wait, what was sent, how the receivers are (pure)
    journal.py   all of it in one atomic write; several writers, no lock (edge)
    wording.py   text that is harmless in every receiver; the templates
    receivers/   one file for each way to reach people (edges)
    tick.py      record what was found, announce what happened, deliver what waits (story)
    deliver.py   … the last of these: bounded in time, whoever hangs
    deadman.py   the ping to an outside service

The three a watch tick calls: ``record``, ``announce``, ``deliver`` in ``tick.py``.
"""
