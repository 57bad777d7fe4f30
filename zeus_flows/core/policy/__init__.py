"""The policies: history in, decision out. `engine` is the front door; each policy has a short file of its own."""

from zeus_flows.core.policy.engine import advance, decide, fold, initial, is_control, pass_over, saved
from zeus_flows.core.policy.registry import POLICIES
from zeus_flows.core.policy.snapshot import from_json, is_whole, to_json
from zeus_flows.core.policy.state import State

__all__ = [
    "POLICIES",
    "State",
    "advance",
    "decide",
    "fold",
    "from_json",
    "initial",
    "is_control",
    "is_whole",
    "pass_over",
    "saved",
    "to_json",
]
