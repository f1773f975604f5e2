"""Checkpoints one can trust: what belongs to one, whether it is whole, which is the newest, where its copies lie."""
