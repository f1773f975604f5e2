"""Replica groups: several copies of a training that agree on each step, so that one of them may fail and the others train on.

torchft does the work in the loop; this room holds what surrounds it, and never imports it.

    table.py               the groups' names, nodes and table
    bounds.py              how long each part may wait, derived from the slowest step; what the ranks of each group get
    options.py             what a launch says about the groups; the page that each group's supervisor reads
    job.py                 follows all groups, wherever they are, and writes what people and the watch read of them; all in one
                           job: a supervisor for each, and the lighthouse
    apart.py               a job for each group, and one for the lighthouse
    process.py             one group's supervisor as a process: started, heard, ended where it hangs
    disk.py                what lies in the group's run directory, read beside the loop
    member.py              what a group's own supervisor asks of the others
    lighthouse.py          the lighthouse, which all groups ask at each step who takes part: supervised, at one address
    lighthouse_server.py   its program, in the Python that has torchft
    record.py              RUN/replicas/lighthouse.json, and whose turn it is
    members.py             its status page, read into types; what it believes of a group, and we know better
    stalls.py              how long the groups stood, and for which of them
    torchft_python.py      which Python has torchft
"""
