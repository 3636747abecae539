"""`watch`: an optimizer that measures its own updates, inside the compiled step, when it is asked to."""

from __future__ import annotations

import functools
import sys
import types
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.nnx.training.optimizer import OptState
from jax import lax
from jax.extend.core import get_opaque_trace_state

from nnx_probes.device.flow import Layout
from nnx_probes.device.slots import slots_of
from nnx_probes.device.whence import LIVE, whence
from nnx_probes.errors import ArgumentError, ArgumentTypeError, closest

__all__ = ["NEVER", "Evidence", "ProbeState", "Tap", "is_watched", "unpack", "watch"]

_WHEN = ("armed", "inside")
_BRANCHES = "conditionals"
"""Name of the source file of jax's ``cond`` and ``switch``."""

NEVER = 2**32 - 1
"""Stands in the first word of a `ProbeState` that no update has written yet."""
_HEAD = 2
"""Words before the measurement: ``optimizer.step`` of the measured update, and the interval (0: always)."""


class ProbeState(OptState):
    """The Variable that carries a measurement out of the compiled step: uint32[words].

    With ``when="armed"`` it hangs on the optimizer only around a step that is measured, with ``when="inside"`` always.
    Leave it out of checkpoints: ``nnx.state(optimizer, nnx.Not(ProbeState))``.
    """


class Evidence:
    """What Python itself saw of ``update``: no array, and the same object in every trace and copy.

    Attributes:
      layout: rows of the measurement.
      model: class of the model.
      inside: whether measuring is part of every step.
      traced: how often ``update`` ran under a transformation.
      conditional: how often that was inside a branch or a loop of the compiled step, which may not run every time.
      eager: how often it ran on concrete arrays.
      whence: where the newest trace took place, `LIVE` if a Variable added to the live optimizer comes back.
      wanted: who asked for the next update to be measured.
      newest: the newest measurement of an ``update`` outside any compiled step, or one that was taken off the optimizer.
      taken: how many there were.
    """

    def __init__(self, layout: Layout, model: type, *, inside: bool = False) -> None:
        self.layout = layout
        self.model = model
        self.inside = inside
        self.traced = 0
        self.conditional = 0
        self.eager = 0
        self.whence = ""
        self.wanted: set[int] = set()
        self.newest: jax.Array | None = None
        self.taken = 0
        self._live: Any = None

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
        except Exception as error:  # flax's inside looks different: then nothing is added to the optimizer
            self.whence = f"this version of flax is not known ({type(error).__name__})"

    def swapped(self, args: tuple[Any, ...]) -> bool:
        """Whether ``update(grads, model)`` was called for ``update(model, grads)``: then there is no gradient to measure."""
        return len(args) == 2 and isinstance(args[1], self.model) and not isinstance(args[0], self.model)

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


class Tap:
    """Mixed into the class of a watched optimizer; measures ``update`` when asked to."""

    evidence: Evidence
    step: nnx.Variable[Any]
    tx: Any

    def update(self, *args: Any, **kwargs: Any) -> Any:
        """Updates the model as the optimizer's own ``update`` does."""
        traced = isinstance(self.step.get_raw_value(), jax.core.Tracer)
        self.evidence.note(self, traced)
        state = vars(self).get("probe_state")
        if (state is None and (traced or not self.evidence.wanted)) or self.evidence.swapped(args):
            return super().update(*args, **kwargs)  # type: ignore[misc]
        count = jnp.asarray(self.step.get_value())
        with _spying(self) as seen:
            result = super().update(*args, **kwargs)  # type: ignore[misc]
        if seen.usable(self.evidence.layout):
            if state is None or not traced:
                self.evidence.keep(_eagerly(self.evidence.layout, count, seen.grads, seen.params, seen.updates))
            else:
                state.set_value(_words(self.evidence, state.get_value(), count, seen))
        return result

    # --- used by the callbacks, outside the step ------------------------------------------------------------

    def arm(self, who: int) -> bool:
        """Asks for the next update to be measured. Returns whether that can work, as far as is known."""
        if self.evidence.inside:
            return True
        if self.evidence.whence == LIVE:
            if "probe_state" not in vars(self):
                blank = np.zeros(_HEAD + self.evidence.layout.words, np.uint32)
                blank[0] = NEVER
                vars_of: Any = self
                vars_of.probe_state = ProbeState(jax.device_put(blank))  # explicit: loops run under transfer guards
        elif not self.evidence.eager:
            return False
        self.evidence.wanted.add(who)
        return True

    def disarm(self, who: int) -> None:
        """Takes the request back, and the measurement, if there is one, off the optimizer."""
        self.evidence.wanted.discard(who)
        if not self.evidence.inside and "probe_state" in vars(self):
            words = vars(self)["probe_state"].get_value()
            del self.probe_state  # type: ignore[attr-defined]
            if not isinstance(words, jax.core.Tracer):
                self.evidence.keep(words)

    def read(self) -> jax.Array | None:
        """Returns the newest measurement (uint32, to be handed to `unpack`), None if there is none."""
        state = vars(self).get("probe_state")
        if state is None:
            return self.evidence.newest
        words = state.get_value()
        return words if isinstance(words, jax.core.Tracer) or words.is_deleted() else jnp.copy(words)

    def set_interval(self, every: int) -> None:
        """With ``when="inside"``: measures one update in `every`."""
        state = vars(self).get("probe_state")
        if state is not None and self.evidence.inside:
            words = np.array(jax.device_get(state.get_value()))
            words[1] = every
            state.set_value(jax.device_put(words))


def unpack(words: np.ndarray) -> tuple[int | None, np.ndarray]:
    """Returns (``optimizer.step`` before the measured update, None if nothing was measured; the words of the layout)."""
    return (None if words[0] == NEVER else int(words[0])), words[_HEAD:]


def watch(
    optimizer: nnx.Optimizer[Any], model: Any, *, when: Literal["armed", "inside"] = "armed"
) -> nnx.Optimizer[Any]:
    """Returns `optimizer` as a watched optimizer: same Variables, same numbers, and its updates can be measured.

    The result is an instance of a subclass of the optimizer's own class, shares ``step``, ``opt_state``, ``tx`` and
    ``wrt`` with the original, and goes wherever that went. A monitor that gets it measures, on due steps, every gradient
    and update inside the compiled step: norms, zeros, non-finite elements, the update's size against the parameter's,
    and the share of elements that rounding leaves as they were. ``optimizer.step`` is the device's own count of updates:
    one that stands still although ``update`` was traced proves that the step's new state is thrown away.

    Args:
      optimizer: an ``nnx.Optimizer`` or a subclass.
      model: the model it trains.
      when: ``"armed"``: the monitor hangs a `ProbeState` on the optimizer before a due step and takes it off after it.
        ``nnx.jit`` compiles a second variant of the step for that, once; all other steps are as without us. It works
        where the live optimizer is passed to an ``nnx.jit`` function (or ``update`` runs eagerly); elsewhere the monitor
        says so. ``"inside"``: for all other loops (``nnx.cached_partial``, ``jax.jit`` over split state, a ``scan`` over
        several steps). The `ProbeState` stays on the optimizer, so call ``watch`` before ``nnx.split``; measuring is a
        branch of every step, taken once in the monitor's ``every`` updates where the monitor can tell it so, else always.

    Raises:
      ArgumentTypeError: `optimizer` is no ``nnx.Optimizer``, `model` is no Module or State.
      ArgumentError: it is watched already, `when` is unknown, or `model` has other parameters than the optimizer's.

    Warns:
      UserWarning: ``wrt`` selects no parameter of `model`.

    Cost: armed, nothing on steps that are not due and 11 passes over the parameters' bytes on those that are; inside, the
    same, and on the CPU backend XLA's branch makes every small step slower (by 40 % in a 4-layer perceptron).
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
    layout = Layout(slots_of(model, optimizer))
    watched: Any = object.__new__(_watched_class(type(optimizer)))
    for name, value in vars(optimizer).items():  # flax keeps a table of attributes; each object needs its own
        vars(watched)[name] = dict(value) if name.startswith("_pytree") and isinstance(value, dict) else value
    watched.evidence = Evidence(layout, type(model), inside=when == "inside")
    watched.evidence.belongs_to(watched)
    if when == "inside":
        blank = np.zeros(_HEAD + layout.words, np.uint32)
        blank[:_HEAD] = NEVER, 1
        watched.probe_state = ProbeState(jax.device_put(blank))
    result: nnx.Optimizer[Any] = watched
    return result


def is_watched(optimizer: Any) -> TypeGuard[Tap]:
    """Whether `optimizer` came from `watch`."""
    return isinstance(optimizer, Tap)


class _Seen:
    """What the transformation was given and what it returned."""

    def __init__(self) -> None:
        self.grads: list[Any] | None = None
        self.params: list[Any] | None = None
        self.updates: list[Any] | None = None
        self._where: Any = get_opaque_trace_state()

    def note(self, grads: Any, params: Any, updates: Any) -> None:
        """Takes note of one call, unless it runs deeper inside (a branch of the optimizer's own): its arrays stay there."""
        if self._where == get_opaque_trace_state():
            self.grads, self.updates = jax.tree.leaves(grads), jax.tree.leaves(updates)
            self.params = None if params is None else jax.tree.leaves(params)

    def usable(self, layout: Layout) -> bool:
        """Whether all of it fits the parameters that were there at `watch`."""
        return all(xs is not None and layout.fits(xs) for xs in (self.grads, self.params, self.updates))


class _Spy:
    """Stands in for the transformation during one ``update``."""

    def __init__(self, tx: Any, seen: _Seen) -> None:
        self._tx = tx
        self._seen = seen

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tx, name)

    def update(self, updates: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        result = self._tx.update(updates, state, params, **extra)
        self._seen.note(updates, params, result[0])
        return result


@contextmanager
def _spying(optimizer: Tap) -> Iterator[_Seen]:
    attributes, seen = vars(optimizer), _Seen()
    original = attributes["tx"]
    attributes["tx"] = _Spy(original, seen)
    try:
        yield seen
    finally:
        attributes["tx"] = original


def _words(evidence: Evidence, before: jax.Array, count: jax.Array, seen: _Seen) -> jax.Array:
    layout = evidence.layout
    if before.shape != (_HEAD + layout.words,):
        return before

    def measured() -> jax.Array:
        head = jnp.stack([count.astype(jnp.uint32), before[1]])
        return jnp.concatenate([head, layout.measure(seen.grads, seen.params, seen.updates)])

    if not evidence.inside:
        return measured()
    due = count.astype(jnp.uint32) % jnp.maximum(before[1], 1) == 0
    return jnp.asarray(lax.cond(due, measured, lambda: before))


@functools.partial(jax.jit, static_argnums=0)
def _eagerly(layout: Layout, count: Any, grads: Any, params: Any, updates: Any) -> jax.Array:
    head = jnp.stack([count.astype(jnp.uint32), jnp.uint32(0)])
    return jnp.concatenate([head, layout.measure(grads, params, updates)])


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
