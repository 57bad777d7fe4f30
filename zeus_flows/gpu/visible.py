"""Which GPUs a job has: CUDA_VISIBLE_DEVICES, in CUDA's order, as the driver numbers them."""

from __future__ import annotations

import re
from collections.abc import Sequence

from zeus_flows.errors import ConfigError, NoDevice


def visible_gpus(visible: str | None, uuids: Sequence[str]) -> tuple[int, ...]:
    """Return positions in `uuids` of the GPUs that CUDA_VISIBLE_DEVICES names, in its order.

    As CUDA does, it takes indices, UUIDs and unambiguous beginnings of UUIDs, and stops at an index that does not exist
    (so `-1` hides every GPU). MIG slices are not GPUs of their own; the caller turns them into their parents.

    >>> visible_gpus("1,GPU-aa", ["GPU-aa11", "GPU-bb22"])
    (1, 0)
    >>> visible_gpus(None, ["GPU-aa11", "GPU-bb22"])
    (0, 1)

    Raises:
        NoDevice: it hides every GPU.
        ConfigError: it names a UUID that is not here, or one twice, or cannot be read.
    """
    if visible is None:
        return tuple(range(len(uuids)))
    found: list[int] = []
    for token in (part.strip() for part in visible.split(",")):
        position = _position(token, visible, uuids)
        if position is None:
            break
        if position in found:
            raise ConfigError(f"CUDA_VISIBLE_DEVICES={visible} names {uuids[position]} twice")
        found.append(position)
    if not found:
        raise NoDevice(
            f"CUDA_VISIBLE_DEVICES={visible!r} hides every GPU of this machine: unset it, or name a GPU "
            f"(0 to {len(uuids) - 1}, or a UUID from `nvidia-smi -L`)"
        )
    return tuple(found)


def _position(token: str, visible: str, uuids: Sequence[str]) -> int | None:
    """Return the position a token names; None where CUDA would stop reading the list."""
    if re.fullmatch(r"-?\d+", token):
        return int(token) if 0 <= int(token) < len(uuids) else None
    if not token:
        return None
    matches = [i for i, uuid in enumerate(uuids) if uuid.lower().startswith(token.lower())]
    if len(matches) == 1:
        return matches[0]
    problem = "fits several GPUs" if matches else "is not a GPU of this machine"
    raise ConfigError(f"{token!r} of CUDA_VISIBLE_DEVICES={visible} {problem}: `nvidia-smi -L` lists their UUIDs")
