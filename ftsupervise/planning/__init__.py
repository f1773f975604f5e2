"""What a run will cost and what would help it: the formulas of the literature, an event simulation, and the plan of one run."""
