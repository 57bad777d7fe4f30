"""Embedded job, trace replay, baselines, drift experiments."""
