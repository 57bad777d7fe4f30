"""Writes docs/reference/cli.md from the commands' own help texts: `make docs`. A test keeps it true."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import click

from zeus_flows.cli import main

PAGE = Path(__file__).parent / "reference" / "cli.md"
HEAD = """# The command line

Made by `make docs` from the commands' own help texts.
"""


def commands(command: click.Command, path: tuple[str, ...] = ("zeus-flows",)) -> Iterator[tuple[str, str]]:
    """Yield every command with its help text, as it is typed."""
    context = click.Context(command, info_name=" ".join(path), terminal_width=100, max_content_width=100)
    yield " ".join(path), command.get_help(context)
    if isinstance(command, click.Group):
        for name in sorted(command.commands):
            yield from commands(command.commands[name], (*path, name))


def reference() -> str:
    """Return the page."""
    parts = [f"\n## {name}\n\n```text\n{text}\n```\n" for name, text in commands(main)]
    return HEAD + "".join(parts)


if __name__ == "__main__":
    PAGE.write_text(reference(), encoding="utf-8")
