"""`--json`: one document on standard output and nothing else, whatever a train function or a library prints."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TextIO, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any])

_KEY = "zeus_flows.documents"


def json_option(text: str = "Print one JSON document.") -> Callable[[F], F]:
    """Return the option `--json`, as the parameter `as_json`.

    With it whatever else is printed goes to standard error from then on: by this process, by threads, by children.
    `print_document` prints to where standard output was.
    """

    def aside(ctx: click.Context, _parameter: click.Parameter, value: bool) -> bool:
        if value and not ctx.resilient_parsing and _KEY not in ctx.meta:
            _turn_aside(ctx)
        return value

    return click.option("--json", "as_json", is_flag=True, help=text, callback=aside)


def print_document(document: object) -> None:
    """Print a JSON document."""
    ctx = click.get_current_context(silent=True)
    out: TextIO | None = None if ctx is None else ctx.meta.get(_KEY)
    print(json.dumps(document, indent=2), file=out or sys.stdout, flush=True)


def _turn_aside(ctx: click.Context) -> None:
    """Let standard output be standard error until the command is over, and keep what it was."""
    was = sys.stdout
    was.flush()
    number = None
    with suppress(OSError, ValueError):  # a stream that is no file has no number, as in a test
        number = was.fileno()
    if number != 1:
        ctx.meta[_KEY], sys.stdout = was, sys.stderr
        ctx.call_on_close(lambda: setattr(sys, "stdout", was))
        return
    kept = os.dup(1)
    out = os.fdopen(os.dup(kept), "w", encoding="utf-8")
    os.dup2(2, 1)
    ctx.meta[_KEY], sys.stdout = out, sys.stderr

    def back() -> None:
        out.close()
        os.dup2(kept, 1)
        os.close(kept)
        sys.stdout = was

    ctx.call_on_close(back)
