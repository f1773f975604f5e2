"""Finds out why a run failed: the first failure among the lines of all ranks, the state of each rank in a hang, one verdict.

Everything is read after the event and asks nobody: the pages of an attempt, its output, the evidence that was written before it
was ended, and PyTorch's flight recorder where a rank has left its dump.
"""
