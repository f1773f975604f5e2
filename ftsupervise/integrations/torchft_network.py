"""The network between the groups: where the lighthouse is, and by which address of this host the others reach it.

A host name is no answer: on Debian it leads to 127.0.1.1, and on a cluster with several networks to the slow one as often as
not (meta-pytorch/torchft #329: a recovery took 948 s instead of 20). The kernel knows the address from which this host
reaches the lighthouse; a person who has named an interface for gloo or NCCL means that one.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable, Mapping
from importlib import import_module
from ipaddress import ip_address
from urllib.parse import urlsplit

from ftsupervise.host.addresses import LOOPBACK, own_address, resolve
from ftsupervise.replicas.lighthouse_page import LighthousePage, PageNotSeen, Unseen
from ftsupervise.replicas.lighthouse_page import look as look_at

ENV_GLOO, ENV_NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"


class GroupNetwork:
    """``lighthouse``: its address, "http://host:port". ``host``: the address of this host for the other groups, in numbers.
    ``interface``: that has it, "" where none is found."""

    def __init__(self, lighthouse: str, env: Mapping[str, str]) -> None:
        try:
            parts = urlsplit(lighthouse)
            told, self._port = parts.hostname or "", parts.port or 80
        except ValueError:
            told, self._port = "", 0
        self._lighthouse = resolve(told) if told else ""
        addresses = _addresses()
        named = next((addresses[name][0] for name in _named(env, addresses) if addresses[name]), "")
        self.host = named or own_address([self._lighthouse] if self._lighthouse else ())
        if not named and self.host == LOOPBACK and not _is_loopback(told):
            self.host = own_address(())  # the name of this host, which leads to itself here, and to this host elsewhere
        self.interface = next((name for name, found in addresses.items() if self.host in found), "")

    @property
    def host_in_url(self) -> str:
        return f"[{self.host}]" if ":" in self.host else self.host

    def look(self, within: float) -> LighthousePage | PageNotSeen:
        """The lighthouse's page, at most ``within`` seconds from now."""
        if not self._lighthouse:
            return PageNotSeen(Unseen.CUT, "its address is not known")
        return look_at(self._lighthouse, self._port, within)


def _named(env: Mapping[str, str], interfaces: Iterable[str]) -> list[str]:
    """The ``interfaces`` that a person has named. NCCL takes what a name begins with, "=eth0" for that one alone, and "^docker"
    for all others, which names none."""
    gloo, nccl = env.get(ENV_GLOO, "").split(","), env.get(ENV_NCCL, "")
    exact, excludes = nccl.startswith("="), nccl.startswith("^")
    begins = [] if excludes else [name for name in nccl.removeprefix("=").split(",") if name]
    found = [name for name in gloo if name in interfaces]
    return found + [one for name in begins for one in interfaces if one == name or (not exact and one.startswith(name))]


def _is_loopback(host: str) -> bool:
    """A person has said this host, and means it: all groups are here."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host in ("", "localhost")


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
