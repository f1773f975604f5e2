"""The status of a run, gathered from its directory and the queue."""
