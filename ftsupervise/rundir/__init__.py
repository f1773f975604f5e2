"""The run directory, the interface of a run: its paths, and who writes which record in it."""
