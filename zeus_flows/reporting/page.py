"""A page of headings, paragraphs, tables and figures, written once as Markdown and as one self-contained HTML file."""

from __future__ import annotations

import base64
import html
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

_STYLE = """
:root{color-scheme:light dark;--page:#fcfcfb;--card:#fff;--ink:#0b0b0b;--muted:#52514e;--line:#e4e3df;--code:#f1f0ec;
--note:#fff6e0;--good:#1a8f63;--bad:#c22f2f;--strong:#2a78d6;--whole:#8d8c86}
@media (prefers-color-scheme:dark){:root{--page:#16171a;--card:#1e2024;--ink:#ececea;--muted:#a9a8a2;--line:#34363b;
--code:#2a2c31;--note:#3a3018;--good:#35c48d;--bad:#f07070;--strong:#6aa9f2;--whole:#77767a}}
body{margin:0;background:var(--page);color:var(--ink);font:16px/1.55 system-ui,-apple-system,"Segoe UI",sans-serif}
main{max-width:60rem;margin:0 auto;padding:2rem 1.25rem 4rem}
h1{font-size:1.7rem;line-height:1.25;margin:0 0 .5rem}
h2{font-size:1.2rem;margin:2.4rem 0 .6rem}
p,li{max-width:46rem}
figure{margin:1.2rem 0;background:#fff;border:1px solid var(--line);border-radius:6px;overflow-x:auto}
figure svg{display:block;width:100%;height:auto;min-width:36rem}
figcaption{color:#52514e;font-size:.9rem;padding:.2rem 1rem .8rem}
.table{overflow-x:auto;margin:1rem 0}
table{border-collapse:collapse;font-size:.9rem;font-variant-numeric:tabular-nums}
th,td{padding:.35rem .7rem;text-align:right;border-bottom:1px solid var(--line);white-space:nowrap}
th:first-child,td:first-child,.words{text-align:left}
th{color:var(--muted);font-weight:600;vertical-align:bottom}
.note{background:var(--note);border-left:3px solid #eda100;padding:.6rem 1rem;max-width:46rem}
code{background:var(--code);padding:.1em .3em;border-radius:3px}
figure.chart{background:var(--card)}
.chart figcaption{color:var(--muted)}
.chart text{font-size:12px}
.chart .ink{fill:var(--ink)} .chart .muted{fill:var(--muted)} .chart .bad{fill:var(--bad);text-anchor:middle}
.chart .mid{text-anchor:middle} .chart .end{text-anchor:end}
.chart .grid{stroke:var(--line)} .chart .whisker{stroke:var(--ink);stroke-width:1.4}
.chart .front{fill:none;stroke:var(--muted);stroke-width:1.6;stroke-dasharray:5 4}
.chart .compare{stroke:var(--ink);stroke-width:1.4;stroke-dasharray:6 4}
.chart .drift{stroke:var(--bad);stroke-dasharray:3 3}
.chart .ring{fill:none;stroke:var(--ink);stroke-width:1.6}
.chart .whole{fill:var(--whole)} .chart .good{fill:var(--good)} .chart .worse{fill:var(--bad)}
.chart .range{stroke-width:3;stroke-linecap:round}
.chart .range.plain{stroke:var(--whole)} .chart .range.strong{stroke:var(--strong)}
.chart circle.plain{fill:var(--whole)} .chart circle.strong{fill:var(--strong)}
.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(11rem,1fr));gap:.8rem;margin:1rem 0}
.card{background:var(--card);border:1px solid var(--line);border-radius:6px;padding:.8rem 1rem}
.card div{color:var(--muted);font-size:.85rem} .card b{font-size:1.7rem;line-height:1.3;font-weight:650}
.card b,.card b+span{white-space:nowrap} .card b+span{color:var(--muted);margin-left:.4rem}
@media print{figure,.card{break-inside:avoid}}
"""


@dataclass(frozen=True, slots=True)
class Card:
    """A number that a hurried reader takes away: what it is, how much, how sure, against what."""

    name: str
    amount: str
    doubt: str
    detail: str


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

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[str]], *, words: Sequence[str] = ()) -> None:
        """Add a table; `words` are the columns, beside the first, that hold words rather than numbers."""
        lines = ["| " + " | ".join(columns) + " |", "|" + " --- |" * len(columns)]
        lines += ["| " + " | ".join(row) + " |" for row in rows]
        kinds = [' class="words"' if column in words else "" for column in columns]
        head = "".join(f"<th{kind}>{_inline(c)}</th>" for c, kind in zip(columns, kinds, strict=True))
        cells = ("".join(f"<td{kind}>{_inline(c)}</td>" for c, kind in zip(row, kinds, strict=True)) for row in rows)
        body = "".join(f"<tr>{row}</tr>" for row in cells)
        table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
        self._add("\n".join(lines), f'<div class="table">{table}</div>')

    def figure(self, svg: Path, caption: str) -> None:
        """Add a figure from its SVG file; the HTML carries it inside, the Markdown beside."""
        drawn = svg.read_text(encoding="utf-8")
        drawn = _own_ids(drawn[drawn.index("<svg") :], svg.stem)
        picture = f'<figure role="img" aria-label="{html.escape(caption)}">{drawn}'
        self._add(f"![{caption}]({svg.name})", f"{picture}<figcaption>{_inline(caption)}</figcaption></figure>")

    def chart(self, svg: str, caption: str) -> None:
        """Add a chart that takes the page's colours, from its SVG text; the Markdown has its caption alone."""
        figure = f'<figure class="chart">{svg}<figcaption>{_inline(caption)}</figcaption></figure>'
        self._add(f"*{caption}*", figure)

    def cards(self, cards: Sequence[Card]) -> None:
        """Add a row of numbers."""
        drawn = "".join(
            f'<div class="card"><div>{_inline(c.name)}</div><b>{_inline(c.amount)}</b><span>{_inline(c.doubt)}</span>'
            f"<div>{_inline(c.detail)}</div></div>"
            for c in cards
        )
        listed = "\n".join(f"- {c.name}: **{c.amount}** {c.doubt} {c.detail}".rstrip() for c in cards)
        self._add(listed, f'<div class="cards">{drawn}</div>')

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
