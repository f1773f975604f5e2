"""Looks at what a night depends on, before it: ``ftsupervise doctor``.

    sights.py        looks, each look with its bound, and judges nothing
    seen.py          what was seen, as values
    examinations.py  the table: from what was seen to ``Examined``, pure
    here.py          questions to this machine, asked here and by the job of ``--probe``
    trial.py         that job: submitted, waited for, taken away
    inside.py        what runs in it

What could not be seen is a word of its own: it is neither well nor wrong. A new examination is a function and a line in
``EXAMINATIONS``.
"""
