"""The monitor: the one object a training loop talks to. It composes the floors and owns no loop."""

from __future__ import annotations

import atexit
import functools
import operator
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Literal

import jax
import numpy as np

from nnx_probes import callbacks as builtin_callbacks
from nnx_probes.as_callback import AsCallback
from nnx_probes.callbacks.base import Callback, Context
from nnx_probes.callbacks.plugged import Plugged
from nnx_probes.checks import (
    check_model,
    check_numbers,
    check_objective,
    check_optimizer,
    check_plugins,
    facts_of,
    paces_of,
    resolve,
    served,
)
from nnx_probes.evaluation import numbers
from nnx_probes.feed import Feed
from nnx_probes.header import header
from nnx_probes.host import rules as builtin_rules
from nnx_probes.host.alert import Alert, Level
from nnx_probes.host.judge import Judge
from nnx_probes.host.record import Record
from nnx_probes.host.rule import Rule
from nnx_probes.inflight import InFlight
from nnx_probes.meter import Meter
from nnx_probes.writers import Fanout

__all__ = ["DEFAULT", "Monitor"]

DEFAULT: Any = "default"
"""Stands for the built-in callbacks or rules."""

_BEFORE = -(2**62)
"""Before any step."""


class Monitor(AsCallback):
    """Watches a training loop from inside it: call it once after each step.

    ::

        with probes.Monitor("runs/a", model=model, optimizer=optimizer) as monitor:
            for step, batch in enumerate(batches):
                loss = train_step(model, optimizer, batch)
                monitor(step, loss=loss, batch=batch)

    Args:
      destination: a folder (TensorBoard events, ``probes.jsonl`` and the console), a `Writer`, a list of both, or None to
        keep results in memory only. With several processes only process 0 writes.
      model: the live Module, a State, any pytree of arrays, or a function without arguments that returns one (for loops
        that carry their state).
      optimizer: the live ``nnx.Optimizer`` (watched or not), an optax state, or a getter.
      every: probe whenever a multiple of this many steps is reached; ``"auto"`` keeps the cost under `budget` (with
        several processes, which have to probe together, it means 100).
      budget: with ``every="auto"``, the share of loop time that probing may take.
      callbacks: what to measure; the built-in set by default.
      rules: what to judge; the built-in set by default, those that the callbacks can serve.
      stop_on: sets `should_stop` at the first alert of at least this level. Nothing is ever raised into the loop.
      total_steps: planned length of the run, so that a schedule's start and end can be told from a standstill.
      objective: ``"adversarial"`` where the loss is not meant to fall steadily (GANs, reinforcement learning): the rules
        that judge its course (`Rule.descends`) are left out.
      sync: read each probe at once (waits for the device) instead of on a later call.

    Raises:
      ArgumentError, ArgumentTypeError, WriterError: at construction only; the text says what was seen, what was expected
        and what to do.

    Cost: see the callbacks for a due step; on any other step the call compares two numbers.
    """

    def __init__(
        self,
        destination: Any,
        *,
        model: Any = None,
        optimizer: Any = None,
        every: int | Literal["auto"] = 100,
        budget: float = 0.01,
        callbacks: Iterable[Callback] = DEFAULT,
        rules: Iterable[Rule] = DEFAULT,
        stop_on: Level | None = None,
        total_steps: int | None = None,
        sync: bool = False,
        objective: Literal["minimize", "adversarial"] = "minimize",
    ) -> None:
        check_objective(objective)
        check_numbers(every, budget, total_steps, stop_on)
        chosen, wanted = check_plugins(
            builtin_callbacks.default() if callbacks is DEFAULT else callbacks,
            None if rules is DEFAULT else rules,
        )
        if rules is DEFAULT:
            wanted = served(builtin_rules.default(), chosen)
        check_model(model)
        self._model, self._optimizer = model, optimizer
        model, optimizer = resolve(model), resolve(optimizer)
        check_optimizer(optimizer, model)
        self._judge = Judge(wanted, facts_of(model, optimizer, total_steps, objective))
        self._own, paces = paces_of(every, budget, chosen)
        self._plugged = Plugged(chosen, paces)
        self._meter = Meter()
        self._writing = jax.process_index() == 0
        self._out = Fanout.open(destination if self._writing else None)
        self._stop_on, self._sync = stop_on, bool(sync)
        self._alerts: list[Alert] = []
        self._feed: Feed | None = None
        self._pending: InFlight | None = None
        self._quiet_until = self._plugged.next_due
        self._last_step = _BEFORE
        self._stop = self._closed = False
        self._out.header(header(wanted, chosen, self._judge.history.facts, every=every, budget=budget))
        self._at_exit = functools.partial(_close_if_alive, weakref.ref(self))
        atexit.register(self._at_exit)
        self._plugged.prepare(_BEFORE, 1, model, optimizer)

    # --- the hook -----------------------------------------------------------------------------------------

    def __call__(
        self,
        step: Any,
        t: Any = None,
        /,
        *,
        loss: Any = None,
        batch: Any = None,
        grads: Any = None,
        updates: Any = None,
        metrics: Any = None,
        model: Any = None,
        optimizer: Any = None,
    ) -> bool:
        """Returns whether this step was probed. Call it once after each step, in the Python loop.

        Args:
          step: index of the step just completed. Steps may skip or repeat. A device array is fetched, which waits for it.
          t: ignored; some loops pass the time.
          loss: one number, as a device array or a float; fetched on due steps only.
          batch: what the step was trained on; may be left out with `batches`.
          grads: handed on to callbacks that read it.
          updates: likewise.
          metrics: any pytree of numbers.
          model: the model of this step, if it is not the one given at construction.
          optimizer: likewise.
        """
        began = time.perf_counter()
        try:
            self._meter.calls += 1
            self._meter.waiting_s = 0.0
            if isinstance(step, np.integer):
                step = int(step)
            ahead = type(step) is int and step > self._last_step
            if self._pending and (not ahead or step >= self._plugged.next_due or self._pending.ready()):
                self._settle()
            if ahead and step < self._quiet_until:
                self._last_step = step
                return False
            handed = dict(loss=loss, batch=batch, grads=grads, updates=updates, metrics=metrics)
            return self._probe(step, handed, model, optimizer)
        except Exception as error:
            self._plugged.note("a probe", error)
            return False
        finally:
            self._meter.ended(began)

    def _probe(self, step: Any, handed: dict[str, Any], model: Any, optimizer: Any) -> bool:
        began = time.perf_counter()
        if self._closed:
            return False
        try:
            step = operator.index(step)
        except TypeError:  # also what a tracer raises (jax.errors.TracerIntegerConversionError)
            self._judge_now(Record(max(self._last_step, -1), time.time(), {"loop.bad_step": _shown(step)}))
            return False
        ctx = Context(step, **handed, history=self._judge.history)
        if step < self._last_step:
            ctx.values["loop.backwards"] = self._last_step
            self._plugged.restart()
        stride = max(1, step - self._last_step) if self._last_step > _BEFORE else 1
        self._last_step = step
        due = self._plugged.due(step)
        model = resolve(self._model if model is None else model)
        optimizer = resolve(self._optimizer if optimizer is None else optimizer)
        if not self._meter.began_s:
            self._meter.begin(began)
            self._plugged.each("on_train_begin", Context(step, model=model, optimizer=optimizer))
        timed = self._plugged.timed(step, stride)
        if timed:
            self._meter.lap(ctx.loss, model, measured=self._plugged.prepared(due))
        if due:
            self._settle()  # a callback that asks for the next step may come before the last probe was read
            self._enqueue(ctx, due, model, optimizer, timed)
        self._quiet_until = self._plugged.prepare(step, stride, model, optimizer)
        if timed:
            self._meter.rest()
        return bool(due)

    def _enqueue(self, ctx: Context, due: list[int], model: Any, optimizer: Any, timed: bool) -> None:
        began = time.perf_counter()
        ctx.model, ctx.optimizer = model, optimizer
        if ctx.batch is None and self._feed is not None:
            ctx.batch = self._feed.last
        step_s = self._meter.step_s(began)
        self._plugged.step_end(due, ctx, self._meter.calls, timed=timed)
        waited_s = sum(later.waited_s for later in ctx.later)
        self._meter.waiting_s += waited_s
        ctx.loss = ctx.batch = ctx.metrics = ctx.grads = ctx.updates = ctx.model = ctx.optimizer = None
        self._pending = InFlight(ctx, time.time())
        if self._sync or timed or self._plugged.hurries():
            self._settle()
        if timed:
            rest_s = time.perf_counter() - began - waited_s - sum(self._plugged.costs_s.values())
            self._plugged.charge(rest_s, self._meter.extra_s, step_s)

    # --- from the device to the writers -------------------------------------------------------------------

    def _settle(self) -> None:
        """Reads the pending probe, if there is one, and judges it."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        try:
            record = pending.read(self._plugged.note)
            self._meter.waiting_s += pending.waited_s
            more = {"probes.overhead": self.overhead, "probes.every": self._own.every}
            self._judge_now(replace(record, values={**record.values, **more}))
        except Exception as error:  # it must not cost the present step its probe
            self._plugged.note("a record", error)
        if self._plugged.hurries():
            self._quiet_until = _BEFORE

    def _judge_now(self, record: Record) -> None:
        if self._judge.observe(record):
            more = self._plugged.explain(record, self._judge.history)
            record = replace(record, values={**more, **record.values})  # what was measured stays what it was
        self._out.record(record)
        for alert in self._judge.verdicts(record):
            self._alerts.append(alert)
            self._out.alert(alert)
            self._plugged.each("on_alert", alert)
            self._stop = self._stop or (self._stop_on is not None and alert.level >= self._stop_on)

    # --- around the loop ----------------------------------------------------------------------------------

    def batches(self, iterable: Iterable[Any]) -> Iterator[Any]:
        """Returns an iterator over the same items; times the waiting and remembers the batch for the hook."""
        self._feed = Feed(iterable)
        return self._feed

    def on_eval(self, step: int, *, loss: Any = None, metrics: Mapping[str, Any] | None = None) -> None:
        """Takes validation results: ``eval.loss`` and ``eval.<metric>``, numbers, may be nested; waits for them."""
        if self._closed:
            return
        try:
            self._settle()
            ctx = Context(step, loss=loss, metrics=metrics, history=self._judge.history)
            ctx.model, ctx.optimizer = resolve(self._model), resolve(self._optimizer)
            ctx.values.update(numbers(loss, metrics, self._plugged.note))
            self._plugged.each("on_eval_end", ctx)
            self._judge_now(Record(int(step), time.time(), ctx.values))
        except Exception as error:
            self._plugged.note("on_eval", error)

    def mark(self, step: int, name: str) -> None:
        """Notes a known event (learning-rate change, data switch, restore), so that it is not held against the run."""
        try:
            self._settle()
            self._judge.mark(int(step))
            if step < self._last_step:  # an announced restart: the next step is a first one
                self._last_step = self._quiet_until = _BEFORE
                self._plugged.restart()
            self._out.mark(int(step), str(name))
        except Exception as error:
            self._plugged.note("mark", error)

    def flush(self) -> None:
        """Reads what is pending and waits until everything is on disk."""
        self._settle()
        self._out.flush()

    def close(self) -> None:
        """Reads what is pending, writes everything, closes the writers it made. Safe to call twice."""
        if self._closed:
            return
        self._settle()
        self._plugged.each("on_train_end", Context(max(self._last_step, 0), history=self._judge.history))
        self._closed, self._feed = True, None
        atexit.unregister(self._at_exit)
        self._out.close()

    def __del__(self) -> None:  # a monitor that nobody kept and nobody closed
        try:  # noqa: SIM105 - late at the interpreter's exit contextlib may be gone
            self.close()
        except Exception:
            pass

    def __enter__(self) -> Monitor:
        return self

    def __exit__(self, *failure: object) -> None:
        self.close()

    # --- results ------------------------------------------------------------------------------------------

    @property
    def alerts(self) -> tuple[Alert, ...]:
        """All alerts so far, oldest first."""
        return tuple(self._alerts)

    @property
    def failures(self) -> dict[str, int]:
        """What failed inside the library, a callback or a writer -> how often; empty in a sound run."""
        return {**self._plugged.failures, **self._out.problems}

    @property
    def should_stop(self) -> bool:
        """Whether an alert of level `stop_on` was raised; never goes back to False."""
        return self._stop

    @property
    def overhead(self) -> float:
        """Host time spent in the library over the time since the first call, 0 before; waiting for a step is not counted."""
        return self._meter.share


def _close_if_alive(reference: weakref.ref[Monitor]) -> None:
    if monitor := reference():
        monitor.close()


def _shown(step: Any) -> str:
    return f"{step!r} ({type(step).__name__})"
