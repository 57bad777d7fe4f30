"""One switch for a whole fleet: a Prefect variable that lowers every job's mode at decision time."""

from __future__ import annotations

import logging

from prefect.variables import Variable

from zeus_flows.core.job import Job, Mode
from zeus_flows.core.rollout import lowered

log = logging.getLogger(__name__)

#: `prefect variable set zeus_flows_mode off` rolls a fleet back; `prefect variable unset ...` lets it go on.
VARIABLE = "zeus_flows_mode"


def in_fleet(job: Job) -> Job:
    """Return the job in the mode that the fleet's variable says, where that changes less than the job's own."""
    return lowered(job, fleet_mode(), f"the Prefect variable {VARIABLE}")


def fleet_mode() -> Mode | None:
    """Return the mode that the fleet's variable says; None where it says none.

    A value that is no mode is reported and changes nothing: a typing error must not stop a fleet.
    """
    stated: object = Variable.get(VARIABLE, default=None)
    if stated is None:
        return None
    try:
        return Mode(str(stated).strip().lower())
    except ValueError:
        log.warning("the Prefect variable %s is %r, which is none of %s", VARIABLE, stated, ", ".join(Mode))
        return None
