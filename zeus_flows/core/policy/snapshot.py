"""A state as plain JSON values and back: what a ledger keeps so that decisions stay flat in cost."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zeus_flows.core import savings
from zeus_flows.core.bandit import Runs
from zeus_flows.core.job import Job
from zeus_flows.core.json import from_plain, jsonable
from zeus_flows.core.overheads import Overheads
from zeus_flows.core.policy.registry import policy_of, settings_of
from zeus_flows.core.policy.state import Rate, Shortage, Spent, State, sample_costs
from zeus_flows.core.power_profile import Gpu, Part, PowerProfile

VERSION = 4
_READABLE = (2, 3, 4)  # snapshots that can be decided on; older ones lack sums that the runs still have


def to_json(state: State) -> dict[str, Any]:
    """Return the state as plain JSON values; its size does not grow with the history unless a window does."""
    return {
        "version": VERSION,
        "settings": state.settings,
        "observations": state.observations,
        "order": list(state.order),
        "newest_model": jsonable(state.newest_model),
        "profiles": [jsonable(p) for p in state.profiles.values()],
        "shelf": [jsonable(p) for p in state.shelf.values()],
        "shortages": jsonable(state.shortages),
        "spent": jsonable(state.spent),
        "current": list(state.current),
        "gpu": jsonable(state.gpu),
        "samples_per_epoch": state.samples_per_epoch,
        "rates": [[b, key, jsonable(rate)] for (b, key), rate in state.rates.items()],
        "max_power_w": dict(state.max_power_w),
        "default_epochs": jsonable(state.default_epochs),
        "overheads": [[b, key, jsonable(known)] for (b, key), known in state.overheads.items()],
        "host": jsonable(state.host),
        "settings_before": dict(state.settings_before),
        "account": jsonable(state.account),
        "belief": jsonable(state.belief),
    }


def from_json(job: Job, data: Mapping[str, Any]) -> State | None:
    """Return the state that `to_json` wrote, or None where it was written for other settings: then fold anew.

    One of an earlier version (see `is_whole`) does for a decision.
    """
    if data.get("version") not in _READABLE or data.get("settings") != settings_of(job):
        return None
    read = [from_plain(PowerProfile, p) for p in data["profiles"]]
    profiles = {(p.batch_size, p.gpu.key): p for p in read}
    before = data.get("settings_before") or data.get("limits_before_w", {})  # its name before there were clocks
    return State(
        settings=settings_of(job),
        belief=from_plain(policy_of(job).belief_type, data["belief"]),
        observations=int(data["observations"]),
        order=from_plain(tuple[int, int], data["order"]),
        newest_model=_newest(data["newest_model"]),
        profiles=profiles,
        shelf={
            (p.batch_size, p.micro, p.gpu.key): p for p in (from_plain(PowerProfile, p) for p in data.get("shelf", ()))
        },
        shortages=_shortages(data),
        spent={k: from_plain(Spent, v) for k, v in data["spent"].items()},
        current=from_plain(tuple[int, float, float], data["current"]),
        gpu=None if data["gpu"] is None else from_plain(Gpu, data["gpu"]),
        samples_per_epoch=data["samples_per_epoch"],
        rates={(int(b), str(key)): from_plain(Rate, rate) for b, key, rate in data["rates"]},
        max_power_w={k: float(v) for k, v in data["max_power_w"].items()},
        sample_costs=sample_costs(job, profiles),
        default_epochs=from_plain(Runs, data["default_epochs"]),
        overheads={(int(b), str(key)): from_plain(Overheads, known) for b, key, known in data.get("overheads", ())},
        host=from_plain(Part, data.get("host", {})),
        settings_before={k: float(v) for k, v in before.items()},
        account=from_plain(savings.Account, data.get("account") or {}),
    )


def is_whole(data: Mapping[str, Any]) -> bool:
    """Return whether `to_json` of this version wrote it; otherwise sums are missing, and it should be folded anew."""
    return data.get("version") == VERSION


def _shortages(data: Mapping[str, Any]) -> dict[str, tuple[Shortage, ...]]:
    if "shortages" in data:
        return {k: from_plain(tuple[Shortage, ...], v) for k, v in data["shortages"].items()}
    return {k: tuple(Shortage(int(b), 1, 0, ran=False) for b in v) for k, v in data["infeasible"].items()}


def _newest(data: Any) -> tuple[int, int, int] | None:
    return None if data is None else from_plain(tuple[int, int, int], data)
