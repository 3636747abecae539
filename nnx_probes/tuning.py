"""What each interval would cost in a user's own loop: measured there, on copies."""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from nnx_probes.callbacks.base import Callback
from nnx_probes.device.tap import is_watched
from nnx_probes.errors import ArgumentError, ArgumentTypeError, closest
from nnx_probes.host.pace import LADDER
from nnx_probes.monitor import DEFAULT, Monitor
from nnx_probes.writers import JsonlWriter

__all__ = ["Cost", "Tuning", "load", "tune"]

_EVERY = 3
"""Two plain steps for each measured one: the first lets the device run dry, the second is timed."""
_WARM = 2
"""The first probes compile; they are not counted."""
_KEPT = 4
"""So many batches are taken from the iterable, and used in turn."""


@dataclass(frozen=True)
class Cost:
    """What one callback costs.

    Attributes:
      name: its class.
      probe_s: median seconds a probe: host and device, and the time by which the measured step is longer.
      every: the smallest interval at which it alone stays within its share of the budget; None where none does.
    """

    name: str
    probe_s: float
    every: int | None


@dataclass(frozen=True)
class Tuning:
    """What `tune` found.

    Attributes:
      step_s: median seconds of a step without any probe.
      budget: the share of loop time that probing may take.
      callbacks: what each costs.
      rest_s: seconds a probe of rules and writers.
    """

    step_s: float
    budget: float
    callbacks: tuple[Cost, ...]
    rest_s: float

    @property
    def probe_s(self) -> float:
        """Seconds of a whole probe."""
        return self.rest_s + sum(cost.probe_s for cost in self.callbacks)

    def overhead(self, every: int) -> float:
        """Returns the share that probing adds to the loop's time at an interval."""
        return self.probe_s / (every * self.step_s)

    @property
    def every(self) -> int | None:
        """The smallest interval within the budget, None where none of the usual ones is."""
        return next((every for every in LADDER if self.overhead(every) <= self.budget), None)

    def as_json(self) -> dict[str, Any]:
        """Returns it as plain values; times in seconds."""
        rows = [
            {"every": n, "overhead": self.overhead(n), "delay_steps": n, "delay_s": n * self.step_s} for n in LADDER
        ]
        return {**asdict(self), "probe_s": self.probe_s, "every": self.every, "intervals": rows}

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        yield f"a step takes {_time(self.step_s)}, a probe {_time(self.probe_s)}"
        yield ""
        yield f"{'callback':24} {'a probe':>10}  within its share of {self.budget:.3g} at"
        for cost in self.callbacks:
            yield f"{cost.name:24} {_time(cost.probe_s):>10}  {_interval(cost.every)}"
        yield f"{'(rules and writers)':24} {_time(self.rest_s):>10}"
        yield ""
        yield f"{'every':>6}  {'overhead':>8}  a fault is seen after at most"
        for every in LADDER:
            mark = "  <- recommended" if every == self.every else ""
            steps = "1 step" if every == 1 else f"{every} steps"
            yield f"{every:>6}  {self.overhead(every):>8.2%}  {steps:>10} ({_time(every * self.step_s)}){mark}"
        yield ""
        if self.every is None:
            yield f"No interval up to {LADDER[-1]} keeps to the budget: leave out the dearest callback, or raise the budget."
        else:
            yield f"Monitor(..., every={self.every}), or every='auto' with budget={self.budget:g}"


def tune(
    train_step: Callable[..., Any],
    model: Any,
    optimizer: Any,
    batches: Iterable[Any],
    *,
    callbacks: Iterable[Callback] = DEFAULT,
    budget: float = 0.01,
    probes: int = 7,
) -> Tuning:
    """Measures what probing costs in this loop, and what follows for the interval.

    Args:
      train_step: called as ``train_step(model, optimizer, batch)``; returns the loss, or a dict with ``"loss"`` and metrics.
      model: an ``nnx.Module``. It and the optimizer are copied: yours stay as they are.
      optimizer: its ``nnx.Optimizer``, watched or not.
      batches: the first 4 are used, in turn.
      callbacks: what to measure; the built-in set by default.
      budget: the share of loop time that probing may take.
      probes: how many are timed; the medians count.

    Raises:
      ArgumentError, ArgumentTypeError: an argument cannot work. What `train_step` raises passes through.

    Cost: ``3 * (probes + 2)`` steps, the step's compilation (twice with a watched optimizer), and a copy of all state.
    """
    if not callable(train_step):
        raise ArgumentTypeError(f"tune(train_step={train_step!r}): expected a function of model, optimizer and batch.")
    if not isinstance(model, nnx.Pytree) or not isinstance(optimizer, nnx.Optimizer):
        raise ArgumentTypeError(
            f"tune() got a {type(model).__name__} and a {type(optimizer).__name__}: expected an nnx.Module and the "
            "nnx.Optimizer that trains it. A step that carries its state needs a small function around it."
        )
    if isinstance(probes, bool) or not isinstance(probes, int) or probes < 1:
        raise ArgumentError(f"tune(probes={probes!r}): expected a whole number, at least 1.")
    kept = list(itertools.islice(batches, _KEPT))
    if not kept:
        raise ArgumentError("tune(batches=...): there is no batch in it.")
    model, optimizer = _copies(model, optimizer)
    with (
        tempfile.TemporaryDirectory(prefix="nnx-probes-tune-") as folder,
        Monitor(
            JsonlWriter(folder), model=model, optimizer=optimizer, every=_EVERY, callbacks=callbacks, budget=budget
        ) as monitor,
    ):
        bills = list(_bills(monitor, train_step, model, optimizer, kept, probes))
    return _tuning(bills, budget)


def _copies(model: Any, optimizer: Any) -> tuple[Any, Any]:
    """Both with arrays of their own, since the step may donate them."""
    model, optimizer = nnx.clone((model, optimizer))
    nnx.update((model, optimizer), jax.tree.map(jnp.copy, nnx.state((model, optimizer))))
    if is_watched(optimizer):  # what is seen of the copy's step must not be taken for the user's
        optimizer.evidence = optimizer.evidence.anew(optimizer)
    return model, optimizer


@dataclass(frozen=True)
class _Bill:
    """One timed probe: seconds of the step before it, of each callback, and of the rest."""

    step_s: float
    callbacks_s: dict[str, float]
    rest_s: float


def _bills(
    monitor: Monitor, train_step: Callable[..., Any], model: Any, optimizer: Any, batches: list[Any], probes: int
) -> Iterator[_Bill]:
    plugged, meter = monitor._plugged, monitor._meter
    plugged.time_all(_EVERY)
    for step in range(_EVERY * (probes + _WARM)):
        batch = batches[step % len(batches)]
        out = train_step(model, optimizer, batch)
        loss, metrics = (out.get("loss"), out) if isinstance(out, dict) else (out, None)
        due = monitor(step, loss=loss, batch=batch, metrics=metrics)
        if monitor.failures:
            what, times = next(iter(monitor.failures.items()))
            raise ArgumentError(f"tune(): {what} failed ({times} times): its cost cannot be told. The log says why.")
        if due and step >= _EVERY * _WARM:
            yield _Bill(meter.plain_s, plugged.bill(), plugged.rest_s)


def _tuning(bills: list[_Bill], budget: float) -> Tuning:
    step_s = statistics.median(bill.step_s for bill in bills)
    names = list(dict.fromkeys(name for bill in bills for name in bill.callbacks_s))
    costs = []
    for name in names:
        cost_s = statistics.median(bill.callbacks_s[name] for bill in bills if name in bill.callbacks_s)
        part = budget / len(names)
        costs.append(Cost(name, cost_s, next((n for n in LADDER if cost_s <= n * step_s * part), None)))
    return Tuning(step_s, budget, tuple(costs), statistics.median(bill.rest_s for bill in bills))


def load(target: str) -> Callable[[], Any]:
    """Returns the function that ``FILE.py:function`` or ``package.module:function`` names.

    Raises:
      ArgumentError: there is no such file, module or function. What the module itself raises passes through.
    """
    place, separator, name = target.rpartition(":")
    if not separator or not place or not name:
        raise ArgumentError(f"{target!r}: expected FILE.py:function or package.module:function.")
    module = _module(place)
    if not hasattr(module, name):
        raise ArgumentError(f"{place} has no function {name!r}.{closest(name, vars(module))}")
    found = getattr(module, name)
    if not callable(found):
        raise ArgumentError(f"{target}: {name} is a {type(found).__name__}, expected a function without arguments.")
    function: Callable[[], Any] = found
    return function


def _module(place: str) -> Any:
    sys.path.insert(0, os.getcwd())  # as python -m does
    if place.endswith(".py"):
        path = Path(place).resolve()
        if not path.is_file():
            raise ArgumentError(f"{place}: there is no such file.")
        sys.path.insert(0, str(path.parent))  # as python FILE does
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[path.stem] = module
        spec.loader.exec_module(module)
        return module
    try:
        return importlib.import_module(place)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{place}.".startswith(f"{error.name}."):
            raise ArgumentError(f"{place}: there is no module of that name. A file is named FILE.py.") from error
        raise


def _time(seconds: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.3g} µs"


def _interval(every: int | None) -> str:
    return "no interval" if every is None else f"every={every}"
