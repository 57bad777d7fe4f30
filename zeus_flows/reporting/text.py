"""Quantities and beliefs as people read them."""

from __future__ import annotations

from zeus_flows.core.policy.base import joules
from zeus_flows.core.records import ArmBelief

__all__ = ["describe_arm", "joules", "seconds"]


def seconds(value: float) -> str:
    """Return a duration.

    >>> seconds(42.4), seconds(754.0), seconds(7290.0)
    ('42.4 s', '12.6 min', '2.02 h')
    """
    if abs(value) >= 7200:
        return f"{value / 3600:.3g} h"
    return f"{value:.3g} s" if abs(value) < 120 else f"{value / 60:.3g} min"


def describe_arm(arm: ArmBelief) -> str:
    """Return what is known of an arm in a few words.

    >>> describe_arm(ArmBelief(64, runs=3, expected_cost_j=10.0, spread=0.2, status="known"))
    'known, 3 runs, ± 20 %'
    """
    parts = [arm.status]
    if arm.runs:
        parts.append(f"{arm.runs} run{'s' if arm.runs > 1 else ''}")
    if arm.spread is not None:
        parts.append(f"± {100 * arm.spread:.0f} %")
    return ", ".join(parts)
