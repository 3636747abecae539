"""From where ``update`` is being run: whether a Variable added to the live optimizer would come back with a measurement.

Looked up in Python's call stack, at trace time only. What is asked of flax is little: that the function compiled by
``nnx.jit`` is called by ``JitFn`` or ``SimpleJitFn``, and those by ``JitWrapped`` or ``SimpleJitWrapped``. Where that
does not hold the answer is "elsewhere", and nothing is added.
"""

from __future__ import annotations

import sys
import types
from typing import Any

import jax

from nnx_probes.device.leaves import reaches

__all__ = ["AHEAD", "ELSEWHERE", "LIVE", "whence"]

LIVE = "live"
"""The live optimizer itself was passed to an ``nnx.jit`` function, which writes back what it changes."""
AHEAD = "the step is compiled ahead of time"
ELSEWHERE = "update does not run in an nnx.jit function that gets the live optimizer"

_COMPILATION = "compilation.py"
_INNER = ("JitFn.__call__", "SimpleJitFn.__call__")
_OUTER = ("JitWrapped.__call__", "SimpleJitWrapped.__call__")


def whence(inner: Any, live: Any) -> str:
    """Returns `LIVE`, or in words why not.

    Args:
      inner: the optimizer whose ``update`` runs now.
      live: the optimizer that ``watch`` returned, None if it is gone.
    """
    frame: types.FrameType | None = sys._getframe(1)
    entered = False
    while frame is not None:
        code = frame.f_code
        if code.co_filename.endswith(_COMPILATION) and "flax" in code.co_filename:
            if not entered and code.co_qualname in _INNER:
                if not _holds(frame, inner):
                    return "the optimizer is taken apart or passed to another transformation inside the step"
                entered = True
            elif entered and code.co_qualname in _OUTER:
                return _outer(frame, live)
            elif entered:
                return f"{AHEAD} ({code.co_qualname.rpartition('.')[2]})"
        frame = frame.f_back
    return ELSEWHERE


def _outer(frame: types.FrameType, live: Any) -> str:
    arguments = (frame.f_locals.get("args"), frame.f_locals.get("kwargs"))
    jitted = frame.f_locals.get("self")
    if getattr(jitted, "in_shardings", None) is not None:
        return "the step names its in_shardings"
    if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(arguments)):
        return "nnx.jit runs inside another transformation"
    written_back = frame.f_locals.get("variables")  # SimpleJitWrapped: path -> the Variables it will update
    if live is not None and (reaches(arguments, live) or any(v is live.step for v in (written_back or {}).values())):
        return LIVE
    return "the step gets a copy of the optimizer (nnx.cached_partial, nnx.merge)"


def _holds(frame: types.FrameType, target: Any) -> bool:
    return reaches((frame.f_locals.get("args"), frame.f_locals.get("kwargs")), target)
