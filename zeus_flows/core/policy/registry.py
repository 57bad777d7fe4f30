"""The policies by name, and what in a job their fold depends on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import Any

from zeus_flows.core.job import Job, WindowOf
from zeus_flows.core.json import jsonable
from zeus_flows.core.policy.base import Policy
from zeus_flows.core.policy.baselines import Default, Power
from zeus_flows.core.policy.grid import Grid
from zeus_flows.core.policy.lookahead import Lookahead
from zeus_flows.core.policy.thompson import Thompson
from zeus_flows.core.policy.zeus import Zeus
from zeus_flows.core.policy.zeus_paper import ZeusPaper
from zeus_flows.errors import ConfigError

POLICIES: Mapping[str, Policy[Any]] = MappingProxyType(
    {
        "thompson": Thompson(),
        "lookahead": Lookahead(),
        "zeus": Zeus(),
        "zeus-paper": ZeusPaper(),
        "zeus-paper-unpruned": ZeusPaper(prunes=False),
        "power": Power(),
        "default": Default(),
        "grid": Grid(),
    }
)


#: What is added where a policy's belief no longer means what it did: then snapshots of before are folded anew.
_FORMS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "zeus": ("stopped runs apart",),
        "thompson": ("learning curves", "looks dated"),
        "lookahead": ("learning curves", "looks dated"),
    }
)


def policy_of(job: Job) -> Policy[Any]:
    """Return the policy that a job names.

    Raises:
        ConfigError: there is no such policy.
    """
    try:
        return POLICIES[job.policy]
    except KeyError:
        raise ConfigError(f"there is no policy {job.policy!r}; there are {', '.join(POLICIES)}") from None


@lru_cache(maxsize=64)
def settings_of(job: Job) -> str:
    """Return a hash of everything in the job that the fold depends on."""
    parts = (
        *(job.policy, job.batch_sizes, job.default_batch_size, job.max_epochs, job.fingerprint),
        *(job.objective_eta, job.selector, job.slowdown, job.beta, job.window, job.drift),
        *((job.host_power_w,) if job.host_power_w != 0.0 else ()),  # nothing where it is as it always was
        *(("seconds",) if job.in_seconds else ()),
        *((job.window_of,) if job.window_of is not WindowOf.ARM else ()),
        *_FORMS.get(job.policy, ()),
    )
    return hashlib.sha256(json.dumps(jsonable(parts)).encode()).hexdigest()[:16]
