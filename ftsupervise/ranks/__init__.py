"""The node agent: one small process per node that reports the state of the node's ranks to the supervisor.

    pages in /dev/shm -> observe.py -> agent.py -> datagrams (protocol.py) -> sources.py, rank_table.py on the batch host

It reads the ranks' heartbeat pages, checks their processes, and reports about once a second; a death at once. It answers a
few questions (``rpc.py``), and ends when the supervisor has gone.

Standard library only, and little of it: it runs beside every rank of a run, on every node.
"""
