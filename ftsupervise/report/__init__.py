"""What a person wants to know about a run, gathered from its directory and the queue."""
