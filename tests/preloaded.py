"""What forked processes have imported before they begin; no threads and no connections are left open by it."""

from __future__ import annotations

import zeus_flows.cli
import zeus_flows.experiments.capriccio.contenders
import zeus_flows.experiments.flights.training
import zeus_flows.ledger.open_ledger
import zeus_flows.orchestration.fleet
import zeus_flows.orchestration.recurrence_flow  # noqa: F401
