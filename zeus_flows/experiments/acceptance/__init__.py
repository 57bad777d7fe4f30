"""The acceptance test on a real GPU: `zeus-flows doctor --measure`."""
