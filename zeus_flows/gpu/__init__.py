"""Devices behind one Protocol, the energy meter and the power guard.

`open_gpus` is the way in: it returns `Gpus`, which a training session measures and controls.
"""

from zeus_flows.gpu.address import ZeusdAddress
from zeus_flows.gpu.group import Gpus
from zeus_flows.gpu.guard import restore_power
from zeus_flows.gpu.meter import Mark, Span
from zeus_flows.gpu.open import open_gpus
from zeus_flows.gpu.simulated import Workload

__all__ = ["Gpus", "Mark", "Span", "Workload", "ZeusdAddress", "open_gpus", "restore_power"]
