"""The network between the groups: where the lighthouse is, and by which address of this host the others reach it.

A host name is no answer: on Debian it leads to 127.0.1.1, and on a cluster with several networks to the slow one as often as
not (meta-pytorch/torchft #329: a recovery took 948 s instead of 20). The kernel knows the address from which this host
reaches the lighthouse; a person who has named an interface for gloo or NCCL means that one.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from importlib import import_module
from urllib.parse import urlsplit

from ftsupervise.host.addresses import own_address, resolve
from ftsupervise.replicas.lighthouse_page import LighthousePage, PageNotSeen, Unseen
from ftsupervise.replicas.lighthouse_page import look as look_at

ENV_GLOO, ENV_NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"


class GroupNetwork:
    """``lighthouse``: its address, "http://host:port". ``host``: the address of this host for the other groups, in numbers.
    ``interface``: that has it, "" where none is found."""

    def __init__(self, lighthouse: str, env: Mapping[str, str]) -> None:
        try:
            parts = urlsplit(lighthouse)
            self._lighthouse, self._port = resolve(parts.hostname or ""), parts.port or 80
        except ValueError:
            self._lighthouse, self._port = "", 0
        addresses = _addresses()
        named = next((one for name in _named(env) for one in addresses.get(name, ())), "")
        self.host = named or own_address([self._lighthouse] if self._lighthouse else ())
        self.interface = next((name for name, found in addresses.items() if self.host in found), "")

    @property
    def host_in_url(self) -> str:
        return f"[{self.host}]" if ":" in self.host else self.host

    def look(self, within: float) -> LighthousePage | PageNotSeen:
        """The lighthouse's page, at most ``within`` seconds from now."""
        if not self._lighthouse:
            return PageNotSeen(Unseen.CUT, "its address is not known")
        return look_at(self._lighthouse, self._port, within)


def _named(env: Mapping[str, str]) -> list[str]:
    """The interfaces that a person has named. NCCL's prefixes and exclusions ("^docker") are none."""
    names = ",".join((env.get(ENV_GLOO, ""), env.get(ENV_NCCL, "").removeprefix("=")))
    return [name for name in names.split(",") if name]


def _addresses() -> dict[str, list[str]]:
    """The addresses of each interface, IPv4 first. Those that hold on one link alone are left out."""
    found = import_module("psutil").net_if_addrs()
    return {
        name: [
            one.address
            for family in (socket.AF_INET, socket.AF_INET6)
            for one in of
            if one.family == family and "%" not in one.address and not one.address.startswith("fe80:")
        ]
        for name, of in found.items()
    }
