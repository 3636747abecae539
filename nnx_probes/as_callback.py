"""A monitor is a callback too: it can hang in another loop's list of callbacks."""

from __future__ import annotations

from collections.abc import Callable

from nnx_probes.callbacks.base import Callback, Context

__all__ = ["AsCallback"]

_HANDED = ("loss", "batch", "grads", "updates", "metrics", "model", "optimizer")


class AsCallback(Callback):
    """Turns what a loop tells its callbacks into the calls of a monitor's own loop."""

    __call__: Callable[..., bool]
    on_eval: Callable[..., None]
    close: Callable[[], None]

    def on_step_end(self, ctx: Context) -> None:
        """Takes a step."""
        self(ctx.step, **{name: getattr(ctx, name) for name in _HANDED})

    def on_eval_end(self, ctx: Context) -> None:
        """Takes an evaluation."""
        self.on_eval(ctx.step, loss=ctx.loss, metrics=ctx.metrics)

    def on_train_end(self, ctx: Context) -> None:
        """Closes the monitor when the loop ends."""
        self.close()
