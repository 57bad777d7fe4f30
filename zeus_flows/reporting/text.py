"""Quantities and beliefs as people read them."""

from __future__ import annotations

from zeus_flows.core.reasons import ArmBelief
from zeus_flows.core.text import cost_text, joules, seconds, setting_text

__all__ = ["cost_text", "describe_arm", "joules", "seconds", "setting_text"]


def describe_arm(arm: ArmBelief) -> str:
    """Return what is known of an arm in a few words.

    >>> from zeus_flows.core.reasons import ArmStatus
    >>> describe_arm(ArmBelief(64, runs=3, expected_cost_j=10.0, spread=0.2, status=ArmStatus.KNOWN))
    'known, 3 runs, ± 20 %'
    """
    parts: list[str] = [arm.status]
    if arm.runs:
        parts.append(f"{arm.runs} run{'s' if arm.runs > 1 else ''}")
    if arm.stopped:
        parts.append(f"{arm.stopped} stopped")
    if arm.spread is not None:
        parts.append(f"± {100 * arm.spread:.0f} %")
    return ", ".join(parts)
