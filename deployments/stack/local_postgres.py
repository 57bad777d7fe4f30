"""The PostgreSQL that the stack starts for itself: the machine's own, where one is installed, else the wheel's.

Prefect needs the extension pg_trgm, which a distribution's PostgreSQL has and the wheel's lacks.
"""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from sqlalchemy import Engine, NullPool, create_engine, text
from sqlalchemy.engine import make_url
from sqlalchemy.exc import OperationalError

#: Where Debian keeps what it does not put on the path.
_DEBIAN = Path("/usr/lib/postgresql")
#: Of a unix socket's path, the most that Linux takes.
_LONGEST = 100


@dataclass(frozen=True)
class MachinesPostgres:
    """A PostgreSQL of this machine, with data in a folder, that listens on a socket which only its user may reach.

    Attributes:
        programs: Where `initdb` and `postgres` are.
        folder: Where data and socket are.
        user: Who runs it; None: whoever we are. PostgreSQL refuses root.
    """

    programs: Path
    folder: Path
    user: str | None

    @property
    def address(self) -> str:
        """Where it answers."""
        return f"postgresql://zeus@/postgres?host={quote(str(self._socket))}"

    @property
    def command(self) -> list[str]:
        """What starts it."""
        return [str(self.programs / "postgres"), "-D", str(self._data), "-k", str(self._socket), "-h", ""]

    @property
    def _data(self) -> Path:
        return self.folder / "data"

    @property
    def _socket(self) -> Path:
        return self.folder / "socket"

    def prepare(self) -> None:
        """Make its folders and an empty cluster, where there is none.

        Raises:
            SystemExit: its user cannot reach the folder, or the socket's path is too long.
        """
        if len(str(self._socket)) > _LONGEST:
            raise SystemExit(f"{self.folder}: too long a path for a socket; choose a shorter --folder")
        for path in (self.folder, self._socket):
            path.mkdir(mode=0o700, exist_ok=True)
            if self.user is not None:
                shutil.chown(path, self.user)
        if self.user is not None and subprocess.run(["test", "-w", str(self.folder)], user=self.user).returncode:  # noqa: S603, S607
            raise SystemExit(
                f"{self.folder}: root may not run PostgreSQL, and the user {self.user} does not get there; choose a "
                "--folder that others may enter"
            )
        if not (self._data / "PG_VERSION").exists():
            words = ["-D", str(self._data), "-U", "zeus", "--auth=trust", "--encoding=UTF8", "--locale=C"]
            subprocess.run(  # noqa: S603
                [str(self.programs / "initdb"), *words],
                check=True,
                user=self.user,
                cwd=self.folder,
                stdout=subprocess.DEVNULL,
            )


def machines_postgres(folder: Path) -> MachinesPostgres | None:
    """Return this machine's PostgreSQL; None where none is installed."""
    on_path = shutil.which("postgres")
    installed = [] if on_path is None else [Path(on_path).resolve().parent]
    installed += sorted(_DEBIAN.glob("*/bin"), key=lambda path: path.parent.name.zfill(4), reverse=True)
    for programs in installed:
        if (programs / "initdb").exists() and (programs / "postgres").exists():
            return MachinesPostgres(programs, folder, None if os.geteuid() else _somebody())
    return None


def _somebody() -> str:
    """Return a user that root may run PostgreSQL as."""
    for name in ("postgres", "nobody"):
        try:
            return pwd.getpwnam(name).pw_name
        except KeyError:
            continue
    raise SystemExit("root may not run PostgreSQL, and there is no user postgres: start this as another user")


def _engine(address: str) -> Engine:
    """Return a way to a PostgreSQL that keeps no connection: one that is kept would hold up its end."""
    return create_engine(address, isolation_level="AUTOCOMMIT", poolclass=NullPool)


def accepts(address: str) -> bool:
    """Whether a PostgreSQL takes connections."""
    try:
        with _engine(address).connect():
            return True
    except OperationalError:
        return False


def database(server: str, name: str) -> str:
    """Return the address of a database, which is made where it is not there."""
    with _engine(server).connect() as connection:
        if not connection.execute(text("select 1 from pg_database where datname = :name"), {"name": name}).scalar():
            connection.execute(text(f"create database {name}"))
    return make_url(server).set(database=name).render_as_string(hide_password=False)


def takes_prefect(server: str) -> bool:
    """Whether a PostgreSQL has the extension that Prefect's tables need."""
    with _engine(server).connect() as connection:
        asked = text("select 1 from pg_available_extensions where name = 'pg_trgm'")
        return bool(connection.execute(asked).scalar())
