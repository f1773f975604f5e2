"""Decides which nodes a run uses and which it avoids: incidents, selection, placement, exclusions, health."""
