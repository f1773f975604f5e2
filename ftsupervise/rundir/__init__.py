"""The run directory, the interface of a run: its paths, its records, and the writer of each."""
