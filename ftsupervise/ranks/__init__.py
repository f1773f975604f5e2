"""The node agent: one small process per node that tells the job ring how the node's ranks are.

    pages in /dev/shm  ->  observe.py  ->  agent.py  ->  datagrams (protocol.py)  ->  ``ranks/rank_table.py`` on the batch host

It reads the pages that the ranks write, looks at their processes, and sends what it sees about once a second; a death at
once. It answers a few questions (``rpc.py``), may hold one child (``--child``), and ends when the ring is gone.

Standard library only, and little of it: it runs beside every rank of a run, on every node.
"""
