"""`fit`: a plain training loop, for those who have none."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax

from nnx_probes import callbacks as builtin_callbacks
from nnx_probes.callbacks.base import Callback, Context
from nnx_probes.errors import ArgumentError, ArgumentTypeError
from nnx_probes.monitor import Monitor

__all__ = ["fit"]

_PROBES: tuple[type[Callback], ...] = tuple(
    kind
    for kind in vars(builtin_callbacks).values()
    if isinstance(kind, type) and issubclass(kind, Callback) and kind is not Callback
)


def fit(
    train_step: Callable[[Any, Any, Any], Any],
    model: Any,
    optimizer: Any,
    batches: Iterable[Any],
    *,
    steps: int,
    callbacks: Sequence[Callback] = (),
    eval_step: Callable[[Any, Any], Any] | None = None,
    eval_batches: Callable[[], Iterable[Any]] | Sequence[Any] | None = None,
    eval_every: int | None = None,
) -> int:
    """Runs ``train_step(model, optimizer, batch)`` `steps` times. Returns the number of steps that were run.

    Args:
      train_step: returns the loss, or a dict with ``"loss"`` and further metrics.
      model: handed to `train_step` as it is.
      optimizer: likewise.
      batches: an iterable; the loop ends early when it does.
      steps: at most this many steps.
      callbacks: monitors and other callbacks, called after each step (those with ``every`` at multiples of it). The built-in
        probes belong into a monitor. ``on_train_end`` is called for all of them, and gets step, model and optimizer only.
      eval_step: ``eval_step(model, batch)`` returns a loss; averaged over `eval_batches` every `eval_every` steps.
      eval_batches: a sequence, or a function that returns a fresh iterable. An evaluation without a batch is none.
      eval_every: interval of evaluations in steps.

    Raises:
      ArgumentError, ArgumentTypeError: before the first step, when an argument cannot work. What `train_step` raises
        passes through, after all callbacks were closed; so does what one of them raises when it is closed.
    """
    callbacks = tuple(callbacks)
    _check(steps, callbacks, eval_step, eval_batches, eval_every)
    monitors = [c for c in callbacks if isinstance(c, Monitor)]
    feed = monitors[0].batches(batches) if monitors else iter(batches)
    done = 0
    last = Context(0, model=model, optimizer=optimizer)
    with contextlib.ExitStack() as closing, _progress(steps) as advance:
        for callback in reversed(callbacks):
            closing.callback(callback.on_train_end, last)
        for callback in callbacks:
            callback.on_train_begin(last)
        for step in range(steps):
            ctx = Context(step, model=model, optimizer=optimizer)
            try:
                ctx.batch = next(feed)
            except StopIteration:
                break
            ctx.loss, ctx.metrics = _split(train_step(model, optimizer, ctx.batch))
            last.step, done = step, step + 1
            for callback in callbacks:
                if isinstance(callback, Monitor) or step % _interval(callback) == 0:
                    callback.on_step_end(ctx)
            del ctx  # the next step needs the memory of this one's batch
            if eval_step is not None and eval_every and done % eval_every == 0:
                loss = _mean_loss(eval_step, model, eval_batches)
                if loss is not None:
                    _tell(callbacks, Context(step, loss=loss, model=model, optimizer=optimizer))
            advance(done)
            if any(monitor.should_stop for monitor in monitors):
                break
    return done


def _mean_loss(eval_step: Callable[[Any, Any], Any], model: Any, eval_batches: Any) -> float | None:
    """The mean over the batches; None where there is none (a function that returns the same iterator each time)."""
    fresh = eval_batches() if callable(eval_batches) else eval_batches
    losses = [float(jax.device_get(eval_step(model, batch))) for batch in fresh]
    return sum(losses) / len(losses) if losses else None


def _tell(callbacks: Sequence[Callback], ctx: Context) -> None:
    for callback in callbacks:
        if isinstance(callback, Monitor):
            callback.on_eval(ctx.step, loss=ctx.loss)
        else:
            callback.on_eval_end(ctx)


def _split(out: Any) -> tuple[Any, Any]:
    if isinstance(out, dict):
        return out.get("loss"), {k: v for k, v in out.items() if k != "loss"} or None
    return out, None


class _progress:
    """A progress bar on a terminal, nothing elsewhere."""

    def __init__(self, total: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn("training"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        console = Console(stderr=True)
        self._bar = Progress(*columns, console=console, disable=not console.is_terminal)
        self._task = self._bar.add_task("training", total=total)

    def __enter__(self) -> Callable[[int], None]:
        self._bar.start()
        return lambda done: self._bar.update(self._task, completed=done)

    def __exit__(self, *_: object) -> None:
        self._bar.stop()


def _interval(callback: Callback) -> int:
    return callback.every if isinstance(callback.every, int) else 1


def _check(steps: Any, callbacks: Any, eval_step: Any, eval_batches: Any, eval_every: Any) -> None:
    _check_count(steps, "steps")
    for callback in callbacks:
        _check_callback(callback)
    given = [eval_step is not None, eval_batches is not None, eval_every is not None]
    if any(given) and not all(given):
        raise ArgumentError("fit(): eval_step, eval_batches and eval_every go together; give all three or none.")
    if not any(given):
        return
    _check_count(eval_every, "eval_every")
    if not (callable(eval_batches) or isinstance(eval_batches, Sequence)) or isinstance(eval_batches, (str, bytes)):
        raise ArgumentTypeError(
            f"fit(eval_batches={type(eval_batches).__name__}): expected a sequence of batches, since each evaluation goes "
            "through all of them, or a function that returns a fresh iterable, for example lambda: iter(loader)."
        )


def _check_count(value: Any, name: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ArgumentTypeError(f"fit({name}={value!r}): expected a whole number, got {type(value).__name__}.")
    if value < 1:
        raise ArgumentError(f"fit({name}={value}): expected at least 1.")


def _check_callback(callback: Any) -> None:
    if not isinstance(callback, Callback):
        raise ArgumentTypeError(f"fit(callbacks=...): {callback!r} is no Callback.")
    if isinstance(callback, Monitor):
        return
    name = type(callback).__name__
    if callback.every == "auto":
        raise ArgumentError(
            f"fit(callbacks=...): {name}(every='auto') keeps to a monitor's budget: pass Monitor(..., callbacks=[...])."
        )
    if isinstance(callback, _PROBES) or type(callback).before_due is not Callback.before_due:
        raise ArgumentError(
            f"fit(callbacks=...): {name} measures for a monitor, which prepares the step and reads the result: pass "
            f"Monitor(..., callbacks=[*callbacks.default(), {name}(...)])."
        )
