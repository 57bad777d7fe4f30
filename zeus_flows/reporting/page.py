"""A page of headings, paragraphs, tables and figures, written once as Markdown and as one self-contained HTML file."""

from __future__ import annotations

import base64
import html
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

_STYLE = """
body{margin:0;background:#fcfcfb;color:#0b0b0b;font:16px/1.55 system-ui,-apple-system,"Segoe UI",sans-serif}
main{max-width:60rem;margin:0 auto;padding:2rem 1.25rem 4rem}
h1{font-size:1.7rem;line-height:1.25;margin:0 0 .5rem}
h2{font-size:1.2rem;margin:2.4rem 0 .6rem}
p,li{max-width:46rem}
figure{margin:1.2rem 0;background:#fff;border:1px solid #e4e3df;border-radius:6px;overflow-x:auto}
figure svg{display:block;width:100%;height:auto;min-width:36rem}
figcaption{color:#52514e;font-size:.9rem;padding:.2rem 1rem .8rem}
.table{overflow-x:auto;margin:1rem 0}
table{border-collapse:collapse;font-size:.9rem;font-variant-numeric:tabular-nums}
th,td{padding:.35rem .7rem;text-align:right;border-bottom:1px solid #e4e3df;white-space:nowrap}
th:first-child,td:first-child{text-align:left}
th{color:#52514e;font-weight:600;vertical-align:bottom}
.note{background:#fff6e0;border-left:3px solid #eda100;padding:.6rem 1rem;max-width:46rem}
code{background:#f1f0ec;padding:.1em .3em;border-radius:3px}
"""


@dataclass(slots=True)
class ReportPage:
    """Collects a page part by part; text may use `code` and **bold**."""

    title: str
    _markdown: list[str] = field(default_factory=list)
    _html: list[str] = field(default_factory=list)

    def heading(self, text: str) -> None:
        """Begin a section."""
        self._add(f"## {text}", f"<h2>{_inline(text)}</h2>")

    def text(self, text: str) -> None:
        """Add a paragraph."""
        self._add(text, f"<p>{_inline(text)}</p>")

    def note(self, text: str) -> None:
        """Add a paragraph that must not be overlooked."""
        self._add(f"> {text}", f'<p class="note">{_inline(text)}</p>')

    def points(self, items: Sequence[str]) -> None:
        """Add a list."""
        listed = "".join(f"<li>{_inline(item)}</li>" for item in items)
        self._add("\n".join(f"- {item}" for item in items), f"<ul>{listed}</ul>")

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Add a table."""
        lines = ["| " + " | ".join(columns) + " |", "|" + " --- |" * len(columns)]
        lines += ["| " + " | ".join(row) + " |" for row in rows]
        head = "".join(f"<th>{_inline(c)}</th>" for c in columns)
        body = "".join("<tr>" + "".join(f"<td>{_inline(c)}</td>" for c in row) + "</tr>" for row in rows)
        table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
        self._add("\n".join(lines), f'<div class="table">{table}</div>')

    def figure(self, svg: Path, caption: str) -> None:
        """Add a figure from its SVG file; the HTML carries it inside, the Markdown beside."""
        drawn = svg.read_text(encoding="utf-8")
        drawn = _own_ids(drawn[drawn.index("<svg") :], svg.stem)
        picture = f'<figure role="img" aria-label="{html.escape(caption)}">{drawn}'
        self._add(f"![{caption}]({svg.name})", f"{picture}<figcaption>{_inline(caption)}</figcaption></figure>")

    def markdown(self, *, embed: Path | None = None) -> str:
        """Return the page as Markdown; `embed` is a folder whose SVG files are put inside, as data."""
        text = f"# {self.title}\n\n" + "\n\n".join(self._markdown) + "\n"
        if embed is None:
            return text

        def inside(match: re.Match[str]) -> str:
            data = base64.b64encode((embed / match[2]).read_bytes()).decode()
            return f"![{match[1]}](data:image/svg+xml;base64,{data})"

        return re.sub(r"!\[([^\]]*)\]\(([\w.-]+\.svg)\)", inside, text)

    def html(self) -> str:
        """Return the page as HTML that needs nothing else."""
        title = html.escape(self.title)
        return (
            f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
            '<meta name="viewport" content="width=device-width, initial-scale=1">'
            f"<style>{_STYLE}</style></head><body><main><h1>{title}</h1>\n"
            + "\n".join(self._html)
            + "\n</main></body></html>\n"
        )

    def _add(self, markdown: str, page: str) -> None:
        self._markdown.append(markdown)
        self._html.append(page)


def _inline(text: str) -> str:
    escaped = html.escape(text, quote=False)
    escaped = re.sub(r"`([^`]+)`", r"<code>\1</code>", escaped)
    return re.sub(r"\*\*([^*]+)\*\*", r"<b>\1</b>", escaped)


def _own_ids(svg: str, prefix: str) -> str:
    """Make the ids of one figure its own: several share a page."""
    ids = set(re.findall(r'\bid="([^"]+)"', svg))
    svg = re.sub(r'\bid="([^"]+)"', rf'id="{prefix}-\1"', svg)
    svg = re.sub(r'(xlink:href|href)="#([^"]+)"', rf'\1="#{prefix}-\2"', svg)
    return re.sub(r"url\(#([^)]+)\)", lambda m: f"url(#{prefix}-{m[1]})" if m[1] in ids else m[0], svg)
