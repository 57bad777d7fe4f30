"""MLflow's search filters, which have no escapes."""

from __future__ import annotations

import re
from collections.abc import Mapping

from zeus_flows.errors import StoreError


def having(tags: Mapping[str, str]) -> str:
    """Return the filter for runs that have all these tags; names and values must be plain words.

    >>> having({"zf.kind": "drift-window"})
    "tags.`zf.kind` = 'drift-window'"

    Raises:
        StoreError: a name or value could change the query.
    """
    for word in (*tags, *tags.values()):
        if not re.fullmatch(r"[A-Za-z0-9_.-]+", word):
            raise StoreError(f"{word!r} cannot be searched for")
    return " and ".join(f"tags.`{name}` = '{value}'" for name, value in tags.items())
