"""Alerts for the person who watches the terminal."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import IO, TYPE_CHECKING, Any

from nnx_probes.errors import ArgumentTypeError
from nnx_probes.host.alert import MAX_PATHS, Alert, Level
from nnx_probes.host.record import Record
from nnx_probes.writers import tags

if TYPE_CHECKING:
    from rich.panel import Panel
    from rich.text import Text

__all__ = ["ConsoleWriter", "printable", "write_text"]

MAX_WIDTH = 100
"""Columns of a panel; also the width where the output is no terminal."""

_STYLES = {Level.INFO: "cyan", Level.WARN: "yellow", Level.ERROR: "bold red"}


class ConsoleWriter:
    """Prints each alert as a panel: what was seen, the most likely cause, its fix, how to check.

    Plain text without colours where the output is no terminal; characters the output's encoding lacks
    are shown as escapes. It writes through ``sys.stderr`` as it is at that moment, so that a running rich
    progress bar stays below the panel.

    Cost: some milliseconds an alert, nothing for the rest.

    Args:
      file: where to print; standard error if not given.
      level: the least level that is printed.
      scalars: print a line for each `write_scalars` too.
    """

    def __init__(self, file: IO[str] | None = None, level: Level = Level.WARN, *, scalars: bool = False) -> None:
        if file is not None and not callable(getattr(file, "write", None)):
            raise ArgumentTypeError(
                f"ConsoleWriter: the file has the wrong type: got {type(file).__name__} {file!r:.80}, expected "
                "an open text file or None for standard error. Pass open(path, 'w') to print into a file."
            )
        if not isinstance(level, Level):
            raise ArgumentTypeError(
                f"ConsoleWriter: the level has the wrong type: got {type(level).__name__} {level!r}, expected "
                "a Level. Pass Level.INFO, Level.WARN or Level.ERROR."
            )
        self._file, self._level, self._scalars = file, level, scalars

    def write_summaries(self, step: int, values: Mapping[str, Any], metadata: Mapping[str, Any] | None = None) -> None:
        """Prints nothing."""

    def write_scalars(self, step: int, scalars: Mapping[str, Any]) -> None:
        if self._scalars:
            shown = ", ".join(f"{tag}={tags.number(value, tag):.6g}" for tag, value in scalars.items())
            self._print(f"[{step}] {shown}\n")

    def write_images(self, step: int, images: Mapping[str, Any]) -> None:
        """Prints nothing."""

    def write_videos(self, step: int, videos: Mapping[str, Any]) -> None:
        """Prints nothing."""

    def write_audios(self, step: int, audios: Mapping[str, Any], *, sample_rate: int) -> None:
        """Prints nothing."""

    def write_texts(self, step: int, texts: Mapping[str, str]) -> None:
        """Prints nothing."""

    def write_histograms(
        self, step: int, arrays: Mapping[str, Any], num_buckets: Mapping[str, int] | None = None
    ) -> None:
        """Prints nothing."""

    def write_hparams(self, hparams: Mapping[str, Any]) -> None:
        """Prints nothing."""

    def write_header(self, header: Mapping[str, Any]) -> None:
        """Prints nothing."""

    def write_record(self, record: Record) -> None:
        if self._scalars:
            self.write_scalars(record.step, tags.scalars(record))

    def write_alert(self, alert: Alert) -> None:
        if alert.level < self._level:
            return
        from rich.console import Console

        output = self._output()
        console = Console(file=output)
        if console.is_terminal:
            width = min(console.width, MAX_WIDTH)
        else:
            width = MAX_WIDTH
            console = Console(file=output, width=width)
        with console.capture() as capture:
            console.print(alert_panel(alert, width))
        self._print(capture.get())

    def write_mark(self, step: int, name: str) -> None:
        """Prints nothing."""

    def flush(self) -> None:
        flush = getattr(self._output(), "flush", None)
        if flush is not None:
            flush()

    def close(self) -> None:
        """Flushes; the file stays open, it is the caller's."""
        self.flush()

    def _output(self) -> IO[str]:
        return sys.stderr if self._file is None else self._file

    def _print(self, text: str) -> None:
        write_text(self._output(), text)
        self.flush()


def write_text(output: IO[str], text: str) -> None:
    """Writes `text`; characters the output's encoding lacks become escapes."""
    encoding = getattr(output, "encoding", None) or "utf-8"
    output.write(text.encode(encoding, "backslashreplace").decode(encoding))


def printable(text: str) -> str:
    """Returns `text` with escapes in place of control characters."""
    return "".join(c if c.isprintable() or c == "\n" else f"\\u{ord(c):04x}" for c in text)


def alert_panel(alert: Alert, width: int = MAX_WIDTH) -> Panel:
    """Returns the panel that shows `alert`, `width` columns wide."""
    from rich.panel import Panel

    style = _STYLES[alert.level]
    title = _text(f"{alert.level.name} {alert.rule} at step {alert.step}", style)
    return Panel(_body(alert), title=title, title_align="left", border_style=style, width=width)


def _text(text: str, style: str = "") -> Text:
    """Text without markup or control characters."""
    from rich.text import Text

    return Text(printable(text), style=style)


def _body(alert: Alert) -> Text:
    from rich.text import Text

    lines = [_text(alert.title, "bold")]
    if alert.message:
        lines.append(_text(alert.message))
    if alert.paths:
        more = len(alert.paths) - MAX_PATHS
        shown = ", ".join(alert.paths[:MAX_PATHS]) + (f" and {more} more" if more > 0 else "")
        lines.append(_labelled("where", shown))
    if alert.causes:
        best, *others = alert.causes
        why = f" – {best.why}" if best.why else ""
        lines.append(_labelled("likely cause", f"{best.title}{why}"))
        lines += [_labelled("fix", best.fix)] if best.fix else []
        lines += [_labelled("check", best.check)] if best.check else []
        lines += [_labelled("or", "; ".join(cause.title for cause in others))] if others else []
    return Text("\n").join(lines)


def _labelled(label: str, text: str) -> Text:
    return _text(f"{label}: ", "bold").append_text(_text(text, "not bold"))
