"""`watch`: an optimizer that leaves evidence of its own updates."""

from __future__ import annotations

import functools
import sys
import types
from typing import Any, Literal, TypeGuard

import jax
from flax import nnx

from nnx_probes.errors import ArgumentError, ArgumentTypeError, closest

__all__ = ["Evidence", "Tap", "is_watched", "watch"]

_WHEN = ("armed", "inside")
_BRANCHES = "conditionals"
"""Name of the source file of jax's ``cond`` and ``switch``."""


class Evidence:
    """What Python itself saw of ``update``: no array, and the same object in every trace and copy.

    Attributes:
      traced: how often ``update`` ran under a transformation.
      conditional: how often that was inside a branch or a loop of the compiled step, which may not run every time.
      eager: how often it ran on concrete arrays.
    """

    def __init__(self) -> None:
        self.traced = 0
        self.conditional = 0
        self.eager = 0

    def note(self, traced: bool) -> None:
        """Counts one run of ``update``."""
        if not traced:
            self.eager += 1
        elif _in_control_flow():
            self.conditional += 1
        else:
            self.traced += 1


class Tap:
    """Mixed into the class of a watched optimizer; notes how ``update`` is run."""

    evidence: Evidence
    step: nnx.Variable[Any]

    def update(self, *args: Any, **kwargs: Any) -> Any:
        """Updates the model as the optimizer's own ``update`` does."""
        self.evidence.note(isinstance(self.step.get_raw_value(), jax.core.Tracer))
        return super().update(*args, **kwargs)  # type: ignore[misc]


def watch(
    optimizer: nnx.Optimizer[Any], model: Any, *, when: Literal["armed", "inside"] = "armed"
) -> nnx.Optimizer[Any]:
    """Returns `optimizer` as a watched optimizer: same Variables, same numbers, plus evidence of each update.

    The result is an instance of a subclass of the optimizer's own class, shares ``step``, ``opt_state``, ``tx`` and
    ``wrt`` with the original, and goes wherever that went; checkpoints do not change. It notes when ``update`` is
    traced into a compiled step. ``optimizer.step`` is the device's own count of updates: one that stands still although
    ``update`` was traced proves that the step's new state is thrown away.

    Args:
      optimizer: an ``nnx.Optimizer`` or a subclass.
      model: the model it trains.
      when: ``"armed"`` or ``"inside"``, how gradients and updates are to be measured inside the step. This version does
        not measure them yet, and both do the same.

    Raises:
      ArgumentTypeError: `optimizer` is no ``nnx.Optimizer``, `model` is no Module or State.
      ArgumentError: it is watched already, or `when` is unknown.

    Cost: nothing in the compiled step.
    """
    if when not in _WHEN:
        raise ArgumentError(f"when={when!r}: expected one of {_WHEN}.{closest(str(when), _WHEN)}")
    if not isinstance(optimizer, nnx.Optimizer):
        raise ArgumentTypeError(
            f"watch() got a {type(optimizer).__name__} as optimizer: expected an nnx.Optimizer. For optax alone, hand the "
            "monitor the optimizer state instead."
        )
    if not isinstance(model, (nnx.Pytree, nnx.State)):
        raise ArgumentTypeError(f"watch() got a {type(model).__name__} as model: expected the nnx.Module it trains.")
    if is_watched(optimizer):
        raise ArgumentError("this optimizer is watched already: call watch() once, and use what it returned.")
    watched: Any = object.__new__(_watched_class(type(optimizer)))
    vars(watched).update(vars(optimizer))
    watched.evidence = Evidence()
    result: nnx.Optimizer[Any] = watched
    return result


def is_watched(optimizer: Any) -> TypeGuard[Tap]:
    """Whether `optimizer` came from `watch`."""
    return isinstance(optimizer, Tap)


def _in_control_flow() -> bool:
    """Whether a ``cond`` or ``switch`` is being traced right now: looked up in the call stack, at trace time only."""
    frame: types.FrameType | None = sys._getframe()
    while frame is not None:
        if _BRANCHES in frame.f_code.co_filename:
            return True
        frame = frame.f_back
    return False


@functools.cache
def _watched_class(base: type) -> type:
    return type(f"Watched{base.__name__}", (Tap, base), {"__doc__": base.__doc__, "__module__": base.__module__})
