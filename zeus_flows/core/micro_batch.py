"""Gradient accumulation as an answer to too little memory: the batch size stays, fewer samples go through at once."""

from __future__ import annotations


def halved(micro: int, gpus: int = 1) -> int | None:
    """Return half of a micro-batch; None where that cannot be shared out over the GPUs evenly.

    >>> halved(96), halved(6, gpus=2), halved(3)
    (48, None, None)
    """
    return None if micro % (2 * gpus) else micro // 2


def least(batch_size: int, gpus: int = 1) -> int:
    """Return the smallest micro-batch of a batch size.

    >>> least(96), least(96, gpus=2)
    (3, 6)
    """
    half = halved(batch_size, gpus)
    return batch_size if half is None else least(half, gpus)


def micro_batch(batch_size: int, *, too_large: int | None, gpus: int = 1, accumulate: bool = True) -> int | None:
    """Return the most samples of a batch that may go through the GPUs at once; None where none may.

    Args:
        batch_size: The arm.
        too_large: What is known not to fit, over all GPUs; None: nothing is.
        gpus: How many share it.
        accumulate: Whether a batch may be taken in parts.

    >>> micro_batch(512, too_large=256), micro_batch(512, too_large=256, accumulate=False)
    (128, None)
    """
    micro: int | None = batch_size
    while micro is not None and too_large is not None and micro >= too_large:
        micro = halved(micro, gpus) if accumulate else None
    return micro
