"""Checkpoints one can trust: the files of each one, whether it is whole, which is the newest, and where its copies lie."""
