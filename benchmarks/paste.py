"""Puts what a benchmark printed where README shows it."""

from __future__ import annotations

import re
from pathlib import Path

README = Path(__file__).parent.parent / "README.md"


def paste(command: str, text: str) -> None:
    """Puts `text` between ``<!-- pasted by: command -->`` and the next ``<!-- end -->``.

    Raises:
      SystemExit: README has no such place.
    """
    begin, end = f"<!-- pasted by: {command} -->", "<!-- end -->"
    page = README.read_text()
    found = re.compile(re.escape(begin) + ".*?" + re.escape(end), re.DOTALL)
    if not found.search(page):
        raise SystemExit(f"README.md has no {begin} ... {end}")
    README.write_text(found.sub(lambda _: f"{begin}\n{text}\n{end}", page, count=1))
