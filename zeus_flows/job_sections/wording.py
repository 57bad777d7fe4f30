"""Texts in a job file: names, functions, patterns, and words with placeholders."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping

NAME_PATTERN = r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}"
FUNCTION_PATTERN = r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$"
#: What a command's words may have in braces.
PLACEHOLDERS = (
    "accumulation_steps",
    "attempt",
    "batch_size",
    "batch_size_per_gpu",
    "checkpoint_folder",
    "gpus",
    "learning_rate",
    "max_epochs",
    "micro_batch_size",
    "micro_batch_size_per_gpu",
    "recurrence",
    "seed",
    "target",
)


def filled(text: str, values: Mapping[str, object]) -> str:
    """Return a text with `{name}` replaced; two braces stand for one.

    >>> filled("--lr={learning_rate}", {"learning_rate": 0.1}), filled("{{}}", {})
    ('--lr=0.1', '{}')

    Raises:
        ValueError: a name in braces is not known; the text says what is.
    """

    def value(match: re.Match[str]) -> str:
        whole = match.group()
        if whole in ("{{", "}}"):
            return whole[0]
        name = match["name"]
        if name not in values:
            close = difflib.get_close_matches(name, values, n=1)
            hint = f"did you mean '{{{close[0]}}}'?" if close else f"there are {', '.join(sorted(values))}"
            raise ValueError(f"{{{name}}} is no placeholder; {hint} (write {{{{ for a brace)")
        return str(values[name])

    return re.sub(r"\{\{|\}\}|\{(?P<name>[A-Za-z_]+)\}", value, text)


def a_pattern(text: str, *, groups: tuple[int, ...]) -> str:
    """Return a regular expression that can be used and has so many groups.

    Raises:
        ValueError: it cannot, or it has another number of groups.
    """
    try:
        found = re.compile(text).groups
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"is no regular expression: {error}") from None
    if found not in groups:
        raise ValueError(f"must have one group, around the number, such as 'val_acc=([0-9.]+)'; it has {found}")
    return text


def plain_name(value: str) -> str:
    """Return a name that reaches queries and paths as it is.

    Raises:
        ValueError: it has something else than letters, digits, `_`, `.` and `-`.
    """
    if not re.fullmatch(NAME_PATTERN, value):
        raise ValueError("must be 1 to 64 letters, digits, '_', '.' or '-', and start with a letter or digit")
    return value
