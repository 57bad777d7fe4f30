"""Where the Zeus daemon is."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True)
class ZeusdAddress:
    """Where the Zeus daemon listens: at `host:port` if that is stated, else at the socket."""

    socket_path: Path = Path("/run/zeusd/zeusd.sock")
    host_port: str | None = None
    token: str | None = field(default=None, repr=False)

    def __str__(self) -> str:
        return self.host_port or str(self.socket_path)

    def likely(self) -> bool:
        """Return whether a daemon probably listens there."""
        try:
            return self.host_port is not None or self.socket_path.is_socket()
        except PermissionError:
            return False
