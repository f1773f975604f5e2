"""Finds the address, in numbers, at which another host reaches this one.

A host name is no answer: on Debian it leads to 127.0.1.1, and on a cluster with several networks to the slow one as
often as not. The kernel knows from which address it would send to another node. Nothing is sent to find that out.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable
from ipaddress import ip_address

from ftsupervise.host.in_time import in_time

LOOPBACK = "127.0.0.1"
_ELSEWHERE = "192.0.2.1"  # a host that is nowhere (RFC 5737): it has the route of all that have none of their own
_RESOLVE = 2.0  # seconds for a name


def own_address(nodes: Iterable[str]) -> str:
    """Return the address of this host at which ``nodes`` (names or addresses) reach it: 127.0.0.1 where all of them are
    this host.

    Where no name of them can be resolved, it is the address by which this host reaches the outside.
    """
    found = ""
    for node in nodes:
        there = resolve(node)
        here = _towards(there) if there else ""
        if here and not ip_address(here).is_loopback:
            return here
        found = here or found
    if found:
        return LOOPBACK
    here = _towards(_ELSEWHERE) or resolve(socket.gethostname())
    return here or LOOPBACK


def resolve(name: str) -> str:
    """Return the first address of ``name``, IPv4 if it has one; "" where it has none, or the name server does not
    answer in time.
    """
    try:
        return str(ip_address(name))
    except ValueError:
        pass
    try:
        answer = in_time(lambda: socket.getaddrinfo(name, None, type=socket.SOCK_STREAM), _RESOLVE)
    except (OSError, UnicodeError):
        return ""
    found = sorted((str(one[4][0]) for one in answer or ()), key=lambda one: ":" in one)
    return found[0].partition("%")[0] if found else ""


def _towards(address: str) -> str:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as one:
            one.connect((address, 9))
            return str(one.getsockname()[0])
    except OSError:
        return ""
