"""`fit`: a plain training loop, for those who have none."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from nnx_probes.callbacks.base import Callback, Context
from nnx_probes.errors import ArgumentError, ArgumentTypeError
from nnx_probes.monitor import Monitor

__all__ = ["fit"]


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
      callbacks: monitors and other callbacks, called after each step (those with ``every`` at multiples of it).
      eval_step: ``eval_step(model, batch)`` returns a loss; averaged over `eval_batches` every `eval_every` steps.
      eval_batches: a sequence, or a function that returns a fresh iterable.
      eval_every: interval of evaluations in steps.

    Raises:
      ArgumentError, ArgumentTypeError: before the first step, when an argument cannot work. What `train_step` raises
        passes through, after all callbacks were closed.
    """
    _check(steps, callbacks, eval_step, eval_batches, eval_every)
    monitors = [c for c in callbacks if isinstance(c, Monitor)]
    feed = monitors[0].batches(batches) if monitors else iter(batches)
    done = 0
    ctx = Context(0, model=model, optimizer=optimizer)
    try:
        for callback in callbacks:
            callback.on_train_begin(ctx)
        with _progress(steps) as advance:
            for step in range(steps):
                try:
                    batch = next(feed)
                except StopIteration:
                    break
                out = train_step(model, optimizer, batch)
                loss, metrics = _split(out)
                ctx = Context(step, loss=loss, batch=batch, metrics=metrics, model=model, optimizer=optimizer)
                for callback in callbacks:
                    if isinstance(callback, Monitor) or step % _interval(callback) == 0:
                        callback.on_step_end(ctx)
                done = step + 1
                if eval_step is not None and eval_batches is not None and eval_every and done % eval_every == 0:
                    fresh = eval_batches() if callable(eval_batches) else eval_batches
                    losses = [float(eval_step(model, b)) for b in fresh]
                    mean = sum(losses) / max(1, len(losses))
                    for callback in callbacks:
                        if isinstance(callback, Monitor):
                            callback.on_eval(step, loss=mean)
                        else:
                            callback.on_eval_end(Context(step, loss=mean, model=model, optimizer=optimizer))
                advance(done)
                if any(monitor.should_stop for monitor in monitors):
                    break
    finally:
        for callback in callbacks:
            callback.on_train_end(ctx)
    return done


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
    if isinstance(steps, bool) or not isinstance(steps, int):
        raise ArgumentTypeError(f"fit(steps={steps!r}): expected a whole number, got {type(steps).__name__}.")
    if steps < 1:
        raise ArgumentError(f"fit(steps={steps}): expected at least 1.")
    for callback in callbacks:
        if not isinstance(callback, Callback):
            raise ArgumentTypeError(f"fit(callbacks=...): {callback!r} is no Callback.")
        if callback.every == "auto":
            raise ArgumentError(
                f"fit(callbacks=...): {type(callback).__name__}(every='auto') keeps to a monitor's budget: pass "
                "Monitor(..., callbacks=[...])."
            )
    given = [eval_step is not None, eval_batches is not None, eval_every is not None]
    if any(given) and not all(given):
        raise ArgumentError("fit(): eval_step, eval_batches and eval_every go together; give all three or none.")
