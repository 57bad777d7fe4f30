"""One switch for a whole fleet: a Prefect variable that overrides every job's mode at decision time."""

from __future__ import annotations

import logging

from prefect.variables import Variable

from zeus_flows.core.job import Mode
from zeus_flows.job_file import JobFile

log = logging.getLogger(__name__)

#: `prefect variable set zeus_flows_mode off` rolls a fleet back; `prefect variable unset ...` lets it go on.
VARIABLE = "zeus_flows_mode"


def with_fleet_mode(job_file: JobFile) -> JobFile:
    """Return the job in the mode that the fleet's variable says, if it says one.

    A value that is no mode is reported and changes nothing: a typing error must not stop a fleet.
    """
    stated: object = Variable.get(VARIABLE, default=None)
    if stated is None:
        return job_file
    try:
        mode = Mode(str(stated).strip().lower())
    except ValueError:
        log.warning("the Prefect variable %s is %r, which is none of %s", VARIABLE, stated, ", ".join(Mode))
        return job_file
    return job_file.model_copy(update={"mode": mode})
