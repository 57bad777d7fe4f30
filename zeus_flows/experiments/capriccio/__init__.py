"""The drift experiment: contenders over slices of a drifting dataset, as in the paper's section 6.4."""
