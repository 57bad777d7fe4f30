"""Writes docs/reference/cli.md and job-file.md: `make docs`. A test keeps them true."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import click

from zeus_flows.cli import main

REFERENCE = Path(__file__).parent / "reference"
PAGE = REFERENCE / "cli.md"
JOB_FILE_PAGE = REFERENCE / "job-file.md"
TEMPLATE = Path(__file__).parents[1] / "zeus_flows" / "templates" / "job.yaml"
HEAD = """# The command line

Made by `make docs` from the commands' own help texts.
"""

JOB_FILE_HEAD = """# The job file

Every key, with what it means and its default: `zeus-flows init` writes this file. Where a key is commented out, the
line shows the default. A wrong file is refused with the line and what would be right, before anything runs.
Made by `make docs` from the template.
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


def job_file_reference() -> str:
    """Return the page of the job file."""
    return f"{JOB_FILE_HEAD}\n```yaml\n{TEMPLATE.read_text(encoding='utf-8')}```\n"


if __name__ == "__main__":
    PAGE.write_text(reference(), encoding="utf-8")
    JOB_FILE_PAGE.write_text(job_file_reference(), encoding="utf-8")
