"""Devices behind one Protocol, the energy meter and the power guard."""
