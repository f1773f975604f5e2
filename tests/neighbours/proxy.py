"""A bad network in front of a server: a TCP proxy with moods. A test tool.

mood "ok"            passes everything on
mood "refuse"        closes what connects at once, with a reset
mood "delay S"       waits S seconds before each piece
mood "reset"         passes requests on and resets when the server answers
mood "reset N"       resets after N bytes from the client
mood "half-open"     takes everything and answers nothing, for ever
"""

from __future__ import annotations

import socket
import threading
import time

_RST = b"\x01\x00\x00\x00\x00\x00\x00\x00"


class Proxy:
    """``with Proxy(port) as proxy:`` listens on ``proxy.port`` and passes on to ``port`` of this machine."""

    def __init__(self, target: int) -> None:
        self.mood = "ok"
        self.target = target
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._socket.getsockname()[1]
        self._open: set[socket.socket] = set()
        self._closing = False
        self._thread = threading.Thread(target=self._accept, daemon=True)

    def __enter__(self) -> Proxy:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing = True
        self._socket.close()
        for one in list(self._open):
            _close(one)

    def _accept(self) -> None:
        while not self._closing:
            try:
                client, _ = self._socket.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        mood = self.mood
        self._open.add(client)
        if mood == "refuse":
            return _close(client, reset=True)
        if mood == "half-open":
            try:
                while client.recv(65536):
                    pass
            except OSError:
                pass
            return _close(client)
        try:
            server = socket.create_connection(("127.0.0.1", self.target), 5)
        except OSError:
            return _close(client, reset=True)
        self._open.add(server)
        back = threading.Thread(target=self._pump, args=(server, client, mood, False), daemon=True)
        back.start()
        self._pump(client, server, mood, True)
        back.join(10)
        _close(client)
        _close(server)
        self._open -= {client, server}
        return None

    def _pump(self, source: socket.socket, sink: socket.socket, mood: str, forward: bool) -> None:
        word, _, number = mood.partition(" ")
        passed = 0
        try:
            while piece := source.recv(65536):
                if word == "delay":
                    time.sleep(float(number))
                passed += len(piece)
                if word == "reset" and ((number and forward and passed > int(number)) or (not number and not forward)):
                    _close(sink, reset=True)
                    _close(source, reset=True)
                    return
                sink.sendall(piece)
            sink.shutdown(socket.SHUT_WR)
        except OSError:
            pass


def _close(one: socket.socket, *, reset: bool = False) -> None:
    try:
        if reset:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RST)
        one.close()
    except OSError:
        pass
