"""The command line: one module per group of commands, each parsing and printing only."""

from zeus_flows.cli.commands import main

__all__ = ["main"]
