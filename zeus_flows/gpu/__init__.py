"""Devices behind one Protocol, the energy meter and the power guard.

`open_gpus.open_gpus` is the way in: it returns `group.Gpus`, which a training session measures and controls. Nothing is
imported here, so that the command line answers at once.
"""
