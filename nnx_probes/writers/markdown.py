"""Markdown of alerts and tables, safe to show whatever the names in it are.

Leaf paths and messages come from the user's program: they are escaped so that neither Markdown nor HTML
in them has an effect. Characters with a meaning in both Python-Markdown (TensorBoard) and CommonMark
become entities, because the two disagree on which of them a backslash escapes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

from nnx_probes.host.alert import MAX_PATHS, Alert, Cause

__all__ = ["MAX_ROWS", "alert_markdown", "alert_table", "chart_link", "code", "escape", "table"]

MAX_ROWS = 200
"""Rows of the cumulative table of alerts. TensorBoard renders it whole each time it is opened."""

MAX_CELL = 500
"""Characters of one table cell; more makes a table nobody reads."""

_ENTITIES = {c: f"&#{ord(c)};" for c in "`|~\\*_[]{}"} | {"&": "&amp;", "<": "&lt;", ">": "&gt;"}
_LINE_START = re.compile(r"(?m)^(?:(?P<mark>[-+=#:])|(?P<number>\d+)(?P<dot>[.)])(?=\s|$))")
_PLAIN = re.compile(r"[^`|\\<>&~]+")


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() or c == "\n" else f"\\u{ord(c):04x}" for c in text)


def _quote_line_start(match: re.Match[str]) -> str:
    if match["mark"]:
        return f"&#{ord(match['mark'])};"
    return f"{match['number']}&#{ord(match['dot'])};"


def escape(text: str, *, one_line: bool = False) -> str:
    r"""Returns Markdown that shows `text` literally.

    Args:
      text: anything, HTML and control characters included (these are shown as ``\u001b``).
      one_line: join the lines with spaces (table cells, list items, headings).
    """
    lines = [line.strip() for line in _printable(text.replace("\r\n", "\n")).split("\n")]
    shown = "".join(_ENTITIES.get(c, c) for c in "\n".join(line for line in lines if line))
    shown = _LINE_START.sub(_quote_line_start, shown)
    return shown.replace("\n", " " if one_line else "  \n")


def code(text: str) -> str:
    """Returns `text` as a code span, or escaped where a code span cannot hold it."""
    safe = _PLAIN.fullmatch(text) and text == text.strip() and text.isprintable()
    return f"`{text}`" if safe else escape(text, one_line=True)


def chart_link(tag: str) -> str:
    """Returns the address, relative to TensorBoard's page, of the unsmoothed chart of `tag`."""
    return f"?smoothing=0&tagFilter={quote(re.escape(tag), safe='')}#timeseries"


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns a Markdown table; cells are Markdown already."""
    lines = [f"| {' | '.join(columns)} |", f"|{' --- |' * len(columns)}"]
    lines += [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join(lines)


def settings_table(settings: Mapping[str, Any]) -> str:
    """Returns a two-column table of (nested) settings, names joined by dots."""
    rows = []
    for name, value in flatten(settings).items():
        shown = str(value)
        if len(shown) > MAX_CELL:
            shown = f"{shown[:MAX_CELL]}… ({len(shown)} characters)"
        rows.append((code(name), escape(shown, one_line=True)))
    return table(("name", "value"), rows)


def flatten(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns one flat mapping: ``{"a": {"b": 1}}`` becomes ``{"a.b": 1}``."""
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, Mapping) and value:
            flat.update(flatten(value, f"{prefix}{name}."))
        else:
            flat[f"{prefix}{name}"] = value
    return flat


def _cause_lines(rank: int, cause: Cause) -> list[str]:
    why = f" – {escape(cause.why, one_line=True)}" if cause.why else ""
    lines = [f"{rank}. **{escape(cause.title, one_line=True)}** ({code(cause.slug)}){why}"]
    # Four spaces: Python-Markdown takes less for the end of the list.
    if cause.fix:
        lines.append(f"    - Fix: {escape(cause.fix, one_line=True)}")
    if cause.check:
        lines.append(f"    - Check: {escape(cause.check, one_line=True)}")
    return lines


def alert_markdown(alert: Alert, *, chart: str = "loss") -> str:
    """Returns one alert as Markdown: what, where, why, what to do, and a link to a chart.

    Args:
      alert: the finding.
      chart: tag of the chart to link to.
    """
    head = f"{alert.level.name} {code(alert.rule)} at step {alert.step}"
    parts = [f"### {head}", f"**{escape(alert.title, one_line=True)}**"]
    if alert.message:
        parts.append(escape(alert.message))
    if alert.paths:
        shown = [f"- {code(path)}" for path in alert.paths[:MAX_PATHS]]
        if len(alert.paths) > MAX_PATHS:
            shown.append(f"- and {len(alert.paths) - MAX_PATHS} more")
        parts += ["Where:", "\n".join(shown)]
    if alert.causes:
        lines = [line for i, cause in enumerate(alert.causes, 1) for line in _cause_lines(i, cause)]
        parts += ["Likely causes, most likely first:", "\n".join(lines)]
    parts.append(f"[Show the chart of {escape(chart, one_line=True)}]({chart_link(chart)})")
    return "\n\n".join(parts) + "\n"


def alert_table(alerts: Sequence[Alert], *, total: int | None = None) -> str:
    """Returns one table of the last `MAX_ROWS` alerts, oldest first.

    Args:
      alerts: the alerts so far, or the last ones of them.
      total: how many there were; ``len(alerts)`` if not given. The table says how many it leaves out.
    """
    shown = alerts[-MAX_ROWS:]
    left_out = (len(alerts) if total is None else total) - len(shown)
    rows = []
    for alert in shown:
        cause = alert.causes[0] if alert.causes else None
        likely = escape(cause.title, one_line=True) if cause else ""
        fix = escape(cause.fix, one_line=True) if cause else ""
        title = escape(alert.title, one_line=True)
        rows.append((str(alert.step), alert.level.name, code(alert.rule), title, likely, fix))
    text = table(("step", "level", "rule", "what", "most likely cause", "fix"), rows)
    if left_out > 0:
        text = f"{left_out} earlier alerts are left out here; `probes.jsonl` has all of them.\n\n{text}"
    return text + "\n"
