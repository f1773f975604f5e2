"""The state of the last steps in the memory of the nodes: taken, copied to a neighbour, chosen, and kept when the job ends."""
