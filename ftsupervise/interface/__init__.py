"""Runs from Python: for notebooks, schedulers and tests. It stands beside the command line, and neither prints nor exits."""
