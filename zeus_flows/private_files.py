"""Files of the state directory: nobody else reads or writes them, and a link that somebody planted is not followed."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import Final

from zeus_flows.settings import trusted_users

#: What is in a state directory.
OURS: Final = frozenset({"checkpoints", "experiments", "models", "power"})


def state_folder(folder: Path) -> None:
    """Make the state directory, or make one private that is nothing else: somebody may have named `/` or a home.

    Raises:
        OSError: it cannot be made, or belongs to somebody else.
    """
    known = not folder.is_dir() or all(p.name in OURS or p.name.startswith("outbox.db") for p in folder.iterdir())
    private_folder(folder, may_be_link=True, tighten=known)


def private_folder(folder: Path, *, may_be_link: bool = False, tighten: bool = True) -> None:
    """Make a folder that only its owner may look into, or make one so.

    Args:
        folder: Which; parents that are missing are made like it.
        may_be_link: Whether a link that we or root made is followed, as for the state directory itself.
        tighten: Whether to take from others what they may do in a folder that is there.

    Raises:
        OSError: it cannot be made, is a link, or belongs to somebody else.
    """
    missing = [place for place in (folder, *folder.parents) if not os.path.lexists(place)]
    for place in reversed(missing):
        place.mkdir(mode=0o700, exist_ok=True)
    link = os.lstat(folder)
    if stat.S_ISLNK(link.st_mode) and not (may_be_link and _is_trusted(link)):
        raise _refused("is a link, which is not followed", folder)
    found = folder.stat()
    if not stat.S_ISDIR(found.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder))
    if not _is_trusted(found):
        raise _refused(f"belongs to another user ({found.st_uid})", folder)
    others = stat.S_IMODE(found.st_mode) & 0o077
    if tighten and others and found.st_uid == os.geteuid() and not found.st_mode & stat.S_ISVTX:
        folder.chmod(0o700)


def open_private(path: Path, flags: int) -> int:
    """Open a file that only its owner may read and write; return its descriptor.

    Raises:
        OSError: it cannot be opened, is a link or no file at all, or belongs to somebody else.
    """
    try:
        descriptor = os.open(path, (flags & ~os.O_TRUNC) | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise _refused("is a link, which is not followed", path) from None
        raise
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_nlink > 1:
            raise _refused("is no file of its own", path)
        if not _is_trusted(found):
            raise _refused(f"belongs to another user ({found.st_uid})", path)
        if found.st_uid == os.geteuid() and stat.S_IMODE(found.st_mode) & 0o077:
            os.fchmod(descriptor, 0o600)
        if flags & os.O_TRUNC:  # not before it is known whose file it is
            os.ftruncate(descriptor, 0)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def read_private(path: Path, most: int = 65_536) -> str:
    """Return the text of such a file, so many bytes of it at most.

    Raises:
        OSError: see `open_private`.
        UnicodeDecodeError: it is no text.
    """
    with os.fdopen(open_private(path, os.O_RDONLY), "rb") as file:
        return file.read(most).decode()


def _is_trusted(found: os.stat_result) -> bool:
    return found.st_uid in trusted_users()


def _refused(why: str, path: Path) -> OSError:
    return PermissionError(errno.EPERM, why, str(path))
