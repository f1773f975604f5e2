"""The life of an alert, from a finding to "it is over": sent once, never lost, and ended.

    step.py          who must be notified, why, through which receivers and from when; what is muted (pure)
    outbox.py        messages that wait, notices of a run that go as one, what was sent, how the receivers are (pure)
    journal.py       all of it in one atomic write; several writers, no lock
    wording.py       text that is harmless in every receiver; the templates
    receivers/       one file for each way to reach people
    record.py        write down findings, announce events
    deliver.py       send what waits, messages about several runs as one: bounded in time, whichever receiver hangs
    self_monitor.py  troubles of the receivers and of the journal

A watch tick calls three: ``record``, ``announce`` and ``deliver``.
"""
