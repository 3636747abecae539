"""`watch`: an optimizer that measures its own updates, inside the compiled step, when it is asked to."""

from __future__ import annotations

import contextlib
import functools
import logging
from dataclasses import dataclass
from typing import Any, Literal, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.nnx.training.optimizer import OptState
from jax import lax

from nnx_probes.device.evidence import Evidence
from nnx_probes.device.flow import Layout
from nnx_probes.device.mix64 import mix64, mix64_text
from nnx_probes.device.reduce import on_one_device
from nnx_probes.device.rows import aside
from nnx_probes.device.slots import slots_of
from nnx_probes.device.spy import Seen, add_note, handed, spying
from nnx_probes.device.whence import LIVE
from nnx_probes.errors import ArgumentError, ArgumentTypeError, closest

__all__ = ["NEVER", "ProbeState", "Reading", "Tap", "is_watched", "unpack", "watch"]

_WHEN = ("armed", "inside")
_log = logging.getLogger("nnx_probes")

NEVER = 2**32 - 1
"""Stands in the first word of a `ProbeState` that no update has written yet."""
_LANES = 4
"""Words a parameter for two fingerprints."""
_HEAD = 3
"""Words before the measurement: ``optimizer.step`` of the measured update; interval and remainder of those to measure."""


class ProbeState(OptState):
    """The Variable that carries a measurement out of the compiled step: uint32[words].

    With ``when="armed"`` it hangs on the optimizer only around a step that is measured, with ``when="inside"`` always.
    Leave it out of checkpoints: ``nnx.state(optimizer, nnx.Not(ProbeState))``.
    """


class Tap:
    """Mixed into the class of a watched optimizer; measures ``update`` when asked to."""

    evidence: Evidence
    step: nnx.Variable[Any]
    tx: Any

    def update(self, *args: Any, **kwargs: Any) -> Any:
        """Updates the model as the optimizer's own ``update`` does."""
        traced = isinstance(self.step.get_raw_value(), jax.core.Tracer)
        self.evidence.note(self, traced)
        asked = "probe_state" in vars(self) or (self.evidence.wanted and not traced)
        if not asked or "tx" not in vars(self) or self.evidence.swapped(args):
            return self._update(args, kwargs)
        count, before = self.step.get_value(), Seen()
        with contextlib.suppress(Exception):  # gradients of another structure: flax will say so
            before = handed(self, args, kwargs)
        with spying(self) as seen:
            result = self._update(args, kwargs)
        try:
            after = handed(self, args, kwargs).params if self.evidence.hashing else None
            self._measure(jnp.asarray(count), seen, before, after)
        except Exception as error:  # whatever it is, the user's step is worth more
            if not self.evidence.blind:  # said once
                _log.warning("a gradient was not measured: %s: %s", type(error).__name__, error, exc_info=error)
            self.evidence.blind = True
        return result

    def _update(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            return super().update(*args, **kwargs)  # type: ignore[misc]
        except (TypeError, ValueError) as error:
            with contextlib.suppress(Exception):
                add_note(error, self, args, kwargs)
            raise

    def _measure(self, count: jax.Array, seen: Seen, before: Seen, after: list[Any] | None) -> None:
        evidence, state = self.evidence, vars(self).get("probe_state")
        seen = seen if seen.usable(evidence.layout) else before
        evidence.blind = not seen.usable(evidence.layout)
        if evidence.blind:
            return
        lanes = (before.params, after) if evidence.hashing and after is not None else None
        if state is None or not isinstance(count, jax.core.Tracer):
            which = jnp.asarray([1, 0], jnp.uint32) if state is None else state.get_value()[1:_HEAD]
            words = _eagerly(evidence.layout, count, which, seen.grads, seen.params, seen.updates, lanes)
            if evidence.inside and state is not None:
                state.set_value(words)
            else:
                evidence.keep(words)
        else:
            state.set_value(_words(evidence, state.get_value(), count, seen, lanes))

    # --- used by the callbacks, outside the step ------------------------------------------------------------

    def arm(self, who: int) -> bool:
        """Asks for the next update to be measured. Returns whether that can work, as far as is known."""
        if self.evidence.inside:
            return True
        if self.evidence.live() is not self:  # a clone or a deep copy is what trains now
            self.evidence.belongs_to(self)
            if self.evidence.whence != LIVE:  # a step that is compiled already is not traced again for the copy
                self.evidence.whence = ""
        if self.evidence.ahead:
            return False
        if self.evidence.whence == LIVE:
            if "probe_state" not in vars(self):
                attributes: Any = self
                # An explicit transfer: loops run under transfer guards.
                self.evidence.hung = jax.device_put(_blank(self.evidence))
                attributes.probe_state = ProbeState(self.evidence.hung)
        elif not self.evidence.eager:
            return False
        self.evidence.wanted.add(who)
        return True

    def disarm(self, who: int) -> None:
        """Takes the request back, and the measurement, if there is one, off the optimizer."""
        self.evidence.wanted.discard(who)
        if not self.evidence.inside and "probe_state" in vars(self):
            words = vars(self)["probe_state"].get_raw_value()
            unwritten = words is self.evidence.hung
            if unwritten and self.evidence.wanted:  # another monitor hung it up, for the next step
                return
            del self.probe_state  # type: ignore[attr-defined]
            if not unwritten and not isinstance(words, jax.core.Tracer):
                self.evidence.keep(words)

    def hangs(self) -> bool:
        """Whether a `ProbeState` hangs on the optimizer that no update has written yet."""
        state = vars(self).get("probe_state")
        return state is not None and not self.evidence.inside and state.get_raw_value() is self.evidence.hung

    def read(self) -> jax.Array | None:
        """Returns the newest measurement (uint32, to be handed to `unpack`), None if there is none."""
        state = vars(self).get("probe_state")
        if state is None or state.get_raw_value() is self.evidence.hung:
            return self.evidence.newest
        words = state.get_value()
        return words if isinstance(words, jax.core.Tracer) or words.is_deleted() else jnp.copy(words)

    def set_interval(self, every: int, remainder: int = 0) -> None:
        """With ``when="inside"``: measures the updates for which ``optimizer.step % every == remainder``."""
        state, evidence = vars(self).get("probe_state"), self.evidence
        if state is not None and evidence.inside and (every, remainder) != (evidence.interval, evidence.remainder):
            words = np.array(jax.device_get(state.get_value()))
            words[1:_HEAD] = every, remainder
            state.set_value(jax.device_put(words))
            evidence.interval, evidence.remainder = every, remainder


@dataclass(frozen=True, slots=True)
class Reading:
    """What a `ProbeState` held.

    Attributes:
      count: ``optimizer.step`` before the measured update, None if none was measured.
      words: of the layout.
      entry, leaving: one ``"mix64:…"`` a parameter, before and after the update; empty without fingerprints.
    """

    count: int | None
    words: np.ndarray
    entry: tuple[str, ...] = ()
    leaving: tuple[str, ...] = ()


def unpack(layout: Layout, words: np.ndarray) -> Reading:
    """Returns what is in the vector that `Tap.read` returned."""
    end = _HEAD + layout.words
    texts = tuple(mix64_text(lanes) for lanes in words[end:].reshape(-1, 2))
    half = len(texts) // 2
    return Reading(None if words[0] == NEVER else int(words[0]), words[_HEAD:end], texts[:half], texts[half:])


def watch(
    optimizer: nnx.Optimizer[Any],
    model: Any,
    *,
    when: Literal["armed", "inside"] = "armed",
    fingerprints: bool | None = None,
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
      fingerprints: also take every parameter's `mix64` fingerprint as it enters and as it leaves the update, which shows
        that a step's result did not arrive. None: where hashing is cheap, that is not on the CPU backend.

    A step that is compiled ahead of time (``lower().compile()``) after ``nnx.jit`` has already run it cannot be told from
    one that is not: use ``"inside"`` there.

    Raises:
      ArgumentTypeError: `optimizer` is no ``nnx.Optimizer``, `model` is no Module or State.
      ArgumentError: it is watched already, `when` is unknown, or `model` has other parameters than the optimizer's.

    Warns:
      UserWarning: ``wrt`` selects no parameter of `model`.

    Numbers: on one device, losses, parameters and optimizer state stay bit-equal to those of the unwatched run (tested, 9
    optimizers, float32 and bfloat16, 8 kinds of layers). XLA may contract the multiply-adds of a measured step in another
    way, which can change a last bit: seen with a convolution's kernel under Muon, and where parameters are spread over
    several devices. `GradientProbe` with a loss function never touches the step.

    Cost: armed, nothing on steps that are not due and 12 passes over the parameters' bytes on those that are; inside, the
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
    held = jax.tree.leaves(nnx.as_pure(nnx.state(model) if isinstance(model, nnx.Pytree) else model))
    layout = Layout(slots_of(model, optimizer), together=on_one_device(held))
    watched: Any = object.__new__(_watched_class(type(optimizer)))
    for name, value in vars(optimizer).items():  # flax keeps a table of attributes; each object needs its own
        vars(watched)[name] = dict(value) if name.startswith("_pytree") and isinstance(value, dict) else value
    hashing = jax.default_backend() != "cpu" if fingerprints is None else bool(fingerprints)
    watched.evidence = Evidence(layout, type(model), inside=when == "inside", hashing=hashing)
    watched.evidence.belongs_to(watched)
    if when == "inside":
        watched.probe_state = ProbeState(jax.device_put(_blank(watched.evidence)))
    result: nnx.Optimizer[Any] = watched
    return result


def is_watched(optimizer: Any) -> TypeGuard[Tap]:
    """Whether `optimizer` came from `watch`."""
    return isinstance(optimizer, Tap)


def _blank(evidence: Evidence) -> np.ndarray:
    hashes = _LANES * len(evidence.layout.slots) if evidence.hashing else 0
    words = np.zeros(_HEAD + evidence.layout.words + hashes, np.uint32)
    words[:_HEAD] = NEVER, evidence.interval, evidence.remainder
    return words


def _words(evidence: Evidence, before: jax.Array, count: jax.Array, seen: Seen, lanes: Any) -> jax.Array:
    grads, params, updates = aside(seen.grads), aside(seen.params), aside(seen.updates)

    def measured() -> jax.Array:
        return _packed(evidence.layout, count, before[1:_HEAD], grads, params, updates, lanes)

    if before.shape != _blank(evidence).shape:
        return before
    if not evidence.inside:
        return measured()
    due = count.astype(jnp.uint32) % jnp.maximum(before[1], 1) == before[2]
    return jnp.asarray(lax.cond(due, measured, lambda: before))


def _packed(layout: Layout, count: Any, which: Any, grads: Any, params: Any, updates: Any, lanes: Any) -> jax.Array:
    parts = [jnp.asarray(count).astype(jnp.uint32)[None], which, layout.measure(grads, params, updates)]
    if lanes is not None:
        parts += [mix64(x) for side in lanes for x in side]
    return jnp.concatenate(parts)


@functools.partial(jax.jit, static_argnums=0)
def _eagerly(layout: Layout, count: Any, which: Any, grads: Any, params: Any, updates: Any, lanes: Any) -> jax.Array:
    return _packed(layout, count, which, grads, params, updates, lanes)


@functools.cache
def _watched_class(base: type) -> type:
    return type(f"Watched{base.__name__}", (Tap, base), {"__doc__": base.__doc__, "__module__": base.__module__})
