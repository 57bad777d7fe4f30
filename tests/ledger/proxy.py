"""A TCP proxy between us and an MLflow server, which a test can make drop, hang or delay."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit


class Proxy:
    """Passes bytes on, as `mode` says: `pass`, `drop` (connections break), `hang` (nothing is answered), `delay`."""

    def __init__(self, address: str) -> None:
        parts = urlsplit(address)
        self._server = (str(parts.hostname), int(parts.port or 80))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.mode = "pass"
        self.delay_s = 0.0
        self.closed = False
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def port(self) -> int:
        return int(self._listener.getsockname()[1])

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def close(self) -> None:
        self.closed = True
        self._listener.close()

    def _accept(self) -> None:
        while not self.closed:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            if self.mode == "drop":
                client.close()
                continue
            server = socket.create_connection(self._server)
            for source, sink in ((client, server), (server, client)):
                threading.Thread(target=self._pass_on, args=(source, sink), daemon=True).start()

    def _pass_on(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError), source, sink:
            while data := source.recv(65536):
                if self.mode == "drop":
                    return
                while self.mode == "hang" and not self.closed:
                    time.sleep(0.05)
                if self.mode == "delay":
                    time.sleep(self.delay_s)
                sink.sendall(data)


@contextmanager
def proxy_to(address: str) -> Iterator[Proxy]:
    proxy = Proxy(address)
    try:
        yield proxy
    finally:
        proxy.close()
