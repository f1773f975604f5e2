"""This machine: file ownership, safe creation and reading of files, processes, and the start of our interpreters."""
