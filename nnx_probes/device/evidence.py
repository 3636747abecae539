"""What Python saw of a watched optimizer: how its ``update`` is run, and who wants it measured."""

from __future__ import annotations

import sys
import types
import weakref
from typing import Any

import jax
from flax import nnx

from nnx_probes.device.flow import Layout
from nnx_probes.device.whence import AHEAD, whence

__all__ = ["Evidence"]

_BRANCHES = "conditionals.py"
"""Name of the source file of jax's ``cond`` and ``switch``."""


class Evidence:
    """What Python itself saw of ``update``: no array, and the same object in every trace and copy.

    Attributes:
      layout: rows of the measurement.
      model: class of the model.
      inside: whether measuring is part of every step.
      hashing: whether the parameters' fingerprints at entry and exit of ``update`` are taken as well.
      traced: how often ``update`` ran under a transformation.
      conditional: how often that was inside a branch of the compiled step, which may not run every time.
      eager: how often it ran on concrete arrays.
      whence: where the newest trace took place, `LIVE` if a Variable added to the live optimizer comes back.
      blind: whether the newest update that was to be measured could not be followed.
      wanted: who asked for the next update to be measured.
      interval: with `inside`, measure one update in so many,
      remainder: namely that whose count leaves this remainder.
      newest: the newest measurement of an ``update`` outside any compiled step, or one that was taken off the optimizer.
      taken: how many there were.
      hung: the blank array hung on the optimizer last; while it is still there nothing was written.
      ahead: whether a step was ever compiled ahead of time: it would refuse an optimizer that has a Variable more.
    """

    def __init__(self, layout: Layout, model: type, *, inside: bool = False, hashing: bool = False) -> None:
        self.layout = layout
        self.model = model
        self.inside = inside
        self.hashing = hashing
        self.traced = 0
        self.conditional = 0
        self.eager = 0
        self.whence = ""
        self.blind = False
        self.interval = 1
        self.remainder = 0
        self.wanted: set[int] = set()
        self.newest: jax.Array | None = None
        self.hung: Any = None
        self.taken = 0
        self.ahead = False
        self._live: Any = None

    def anew(self, optimizer: Any) -> Evidence:
        """Returns the evidence of a copy, `optimizer`, that is to train apart from the original."""
        fresh = Evidence(self.layout, self.model, inside=self.inside, hashing=self.hashing)
        fresh.belongs_to(optimizer)
        return fresh

    def note(self, inner: Any, traced: bool) -> None:
        """Counts one run of ``update`` by the optimizer `inner`."""
        if not traced:
            self.eager += 1
            return
        if _in_control_flow():
            self.conditional += 1
        else:
            self.traced += 1
        try:
            self.whence = whence(inner, self.live())
            self.ahead = self.ahead or self.whence.startswith(AHEAD)
        except Exception as error:  # flax's inside looks different: then nothing is added to the optimizer
            self.whence = f"this version of flax is not known ({type(error).__name__})"

    def swapped(self, args: tuple[Any, ...]) -> bool:
        """Whether ``update(grads, model)`` was called for ``update(model, grads)``: then there is no gradient to measure."""
        if len(args) != 2 or issubclass(self.model, nnx.State):
            return False
        return isinstance(args[1], self.model) and not isinstance(args[0], self.model)

    def live(self) -> Any:
        """Returns the optimizer that ``watch`` returned, None if it is gone."""
        return None if self._live is None else self._live()

    def belongs_to(self, optimizer: Any) -> None:
        """Remembers (weakly) the live optimizer."""
        self._live = weakref.ref(optimizer)

    def keep(self, words: jax.Array) -> None:
        """Keeps a measurement until somebody reads it."""
        self.newest = words
        self.taken += 1


def _in_control_flow() -> bool:
    """Whether a ``cond`` or ``switch`` is being traced right now: looked up in the call stack, at trace time only."""
    frame: types.FrameType | None = sys._getframe()
    while frame is not None:
        name = frame.f_code.co_filename
        if name.endswith(_BRANCHES) and "jax" in name:
            return True
        frame = frame.f_back
    return False
