"""Fault injection for the person's own run: a copy of it is started, hit by one fault after another, and looked at.

rows.py      the faults, and what must be seen of each
scene.py     one copy at work: launched, watched, hit, ended
copied.py    the settings of the copy (pure)
mailbox.py   the mail server that takes what people would get
verdict.py   what was seen, and whether it passes (pure)
play.py      all rows, and the place where they play
"""
