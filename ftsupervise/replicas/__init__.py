"""Replica groups: several copies of a training that agree on each step, so that one of them may fail and the others train on.

torchft does the work in the loop; this room holds what surrounds it.

    timeouts.py         how long each part may wait, derived from the slowest step, and what is wrong with other values
"""
