"""Devices behind one Protocol, the energy meter and the power guard."""

from zeus_flows.gpu.group import Gpus
from zeus_flows.gpu.meter import Mark, Span
from zeus_flows.gpu.open import open_gpus
from zeus_flows.gpu.simulated import Workload

__all__ = ["Gpus", "Mark", "Span", "Workload", "open_gpus"]
