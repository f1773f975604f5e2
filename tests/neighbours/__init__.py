"""Test tools: servers that stand in for the outside world and have moods (slow, down, rude). No part of ftsupervise.

``smtp.py`` takes mail, ``slack.py`` speaks as much of Slack's API as we use, ``proxy.py`` is a bad network in front of
either. Each of these runs by itself, too (``python -m tests.neighbours.smtp``), and prints what arrives. ``supervised.py``
starts runs and ends whatever they started, ``patience.py`` waits for a state, ``queue.py`` is a Slurm of a few words.
"""
