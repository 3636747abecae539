"""The numbers of one evaluation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax

__all__ = ["numbers"]


def numbers(loss: Any, metrics: Any, note: Callable[[str, Exception], None]) -> dict[str, float]:
    """Returns ``eval.loss`` and ``eval.<metric>`` (nested: ``eval.<outer>.<inner>``); waits for them.

    What is not one number (a confusion matrix, a text) is noted and left out, alone.
    """
    found: dict[str, float] = {}
    for name, value in _flat({"loss": loss, **(metrics or {})}, "eval"):
        try:
            found[name] = float(jax.device_get(value))
        except Exception as error:
            note(f"on_eval: {name}", error)
    return found


def _flat(values: Mapping[Any, Any], prefix: str) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for key, value in values.items():
        name = f"{prefix}.{key}"
        if isinstance(value, Mapping):
            found += _flat(value, name)
        elif value is not None:
            found.append((name, value))
    return found
