"""The exceptions a user can see, each also a builtin so that a plain ``except ValueError`` works.

They are raised while things are being *built* (a monitor, a probe, a writer). Once a loop runs, the
library reports through alerts and never raises into it.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = ["ArgumentError", "ArgumentTypeError", "ProbesError", "WriterError", "closest"]


class ProbesError(Exception):
    """Root of every exception this library raises on purpose."""


class ArgumentError(ProbesError, ValueError):
    """An argument has a value that cannot work."""


class ArgumentTypeError(ProbesError, TypeError):
    """An argument is of a type that cannot work."""


class WriterError(ProbesError, OSError):
    """A destination cannot be written to."""


def closest(name: str, valid: Iterable[str]) -> str:
    """Returns ``" Did you mean 'x'?"`` for the valid name nearest to `name`, or an empty string."""
    near = difflib.get_close_matches(name, list(valid), n=1)
    return f" Did you mean {near[0]!r}?" if near else ""
