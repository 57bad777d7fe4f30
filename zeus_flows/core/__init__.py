"""Pure decisions: numpy, scipy.special and the standard library; no I/O, no clock, no global random state."""
