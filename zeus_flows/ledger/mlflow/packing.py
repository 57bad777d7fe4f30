"""Text that is too long for MLflow as it stands, compressed: zlib, then base 85, whose characters need no escapes."""

from __future__ import annotations

import base64
import zlib
from typing import Final

#: Characters that packed text may come to. More was not written by this package: it would fill the memory.
_MOST: Final = 50_000_000


def pack(text: str) -> str:
    """Return a text in fewer characters. Another machine's zlib may return others that say the same.

    >>> unpack(pack("[250,200,100]," * 100)) == "[250,200,100]," * 100
    True
    """
    return base64.b85encode(zlib.compress(text.encode(), 6)).decode()


def unpack(packed: str) -> str:
    """Return what `pack` packed.

    Raises:
        ValueError: it is something else, or comes to more than can be meant.
    """
    reader = zlib.decompressobj()
    try:
        data = reader.decompress(base64.b85decode(packed), _MOST)
    except zlib.error as error:
        raise ValueError(f"it cannot be unpacked: {error}") from None
    if not reader.eof:
        raise ValueError("it was cut, or comes to more than can be meant")
    return data.decode()
