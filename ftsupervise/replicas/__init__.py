"""Replica groups: several copies of a training that agree on each step, so that one of them may fail and the others train on.

torchft does the work in the loop; this room holds what surrounds it, and never imports it.

    timeouts.py            how long each part may wait, derived from the slowest step, and what is wrong with other values
    lighthouse.py          the lighthouse, which all groups ask at each step who takes part: supervised, at one address
    lighthouse_process.py  one process that is the lighthouse
    lighthouse_server.py   the program of that process, in the Python that has torchft
    lighthouse_page.py     its status page, read into types
    lighthouse_health.py   is it to be ended?
    suspects.py            what the lighthouse believes of a group, and we know better
    stores.py              does the store of each group still answer?
    lighthouse_job.py      the lighthouse in a job of its own, and how groups in other jobs find it
    lighthouse_record.py   RUN/replicas/lighthouse.json, and whose turn it is
    torchft_python.py      which Python has torchft
    groups.py              the groups' names, nodes and table
    environment.py         what the ranks of each get
"""
