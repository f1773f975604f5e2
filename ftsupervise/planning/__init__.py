"""Plans a run: the formulas of the literature, an event simulation, and the values that lose least to failures."""
