"""One run of one program: the user's loop, three lines of ours, and what was said."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import jax

import nnx_probes as probes
from nnx_probes.callbacks.batch import BatchProbe
from nnx_probes.faults.recipe import Loop, Recipe
from nnx_probes.report import replay

__all__ = ["Found", "Outcome", "run"]


@dataclass(frozen=True)
class Found:
    """An alert, as far as it counts."""

    step: int
    rule: str
    level: str
    title: str
    paths: tuple[str, ...]
    causes: tuple[str, ...]

    @classmethod
    def of(cls, alert: probes.Alert) -> Found:
        """Returns it from an alert."""
        causes = tuple(cause.slug for cause in alert.causes)
        return cls(alert.step, alert.rule, alert.level.name, alert.title, alert.paths, causes)


@dataclass(frozen=True)
class Outcome:
    """What a run came to.

    Attributes:
      score: held-out loss of the final model, NaN where it is not finite.
      alerts: in order.
      error: what the run itself raised, empty in most.
      last_loss: of the last step.
    """

    score: float
    alerts: tuple[Found, ...]
    error: str
    last_loss: float

    def as_json(self) -> dict[str, Any]:
        """Returns it as plain values."""
        return asdict(self)


def run(recipe: Recipe, *, seed: int, every: int = 1, watch: bool = True, folder: Path | None = None) -> Outcome:
    """Trains `recipe` from a fresh model under a default monitor and returns what was said.

    Args:
      recipe: the program.
      seed: of the model and of the order of the data.
      every: the monitor's interval.
      watch: whether the optimizer is wrapped.
      folder: where to store the run. It is then judged again from the file, and that the alerts differ counts as an error.
    """
    if folder is None:
        return _run(recipe, None, seed=seed, every=every, watch=watch)
    outcome = _run(recipe, probes.writers.JsonlWriter(folder), seed=seed, every=every, watch=watch)
    (repeated,) = replay(folder).runs
    if repeated.differences:
        what = ", ".join(f"{d.kind} {d.alert.rule}@{d.alert.step}" for d in repeated.differences[:3])
        return replace(outcome, error=f"inside the library: judged again, the alerts differ: {what}")
    return outcome


def _run(recipe: Recipe, destination: Any, *, seed: int, every: int, watch: bool) -> Outcome:
    model = recipe.model(seed)
    optimizer = recipe.make_optimizer(recipe, model)
    if watch:
        optimizer = probes.watch(optimizer, model)
    loop = Loop(model, optimizer, seed=seed)
    step_fn = recipe.make_step(recipe)
    evaluate = _evaluation(recipe) if recipe.evaluate_every else None
    monitor = probes.Monitor(
        destination,
        model=lambda: loop.model,
        optimizer=lambda: loop.optimizer,
        every=every,
        total_steps=recipe.steps if recipe.planned else None,
        objective=recipe.objective,  # type: ignore[arg-type]
        callbacks=_callbacks(recipe),
    )
    error, loss = "", math.nan
    try:
        for step, batch in zip(range(recipe.steps), monitor.batches(recipe.data(seed)), strict=False):
            loop.step = step
            if step in recipe.marks:
                monitor.mark(step - 1, recipe.marks[step])
            loss = step_fn(loop.model, loop.optimizer, batch)
            monitor(step, loss=loss, batch=batch)
            if evaluate is not None and (step + 1) % recipe.evaluate_every == 0:
                monitor.on_eval(step, loss=evaluate(recipe.evaluated(loop.model)))
            recipe.after(loop)
        score = recipe.score(loop.model)
    except Exception as raised:  # a fault may end the run; what was said before counts
        error, score = f"{type(raised).__name__}: {raised}"[:200], math.nan
    monitor.close()
    if destination is not None:
        destination.close()
    found = [Found.of(alert) for alert in monitor.alerts]
    if monitor.failures:
        error = error or f"inside the library: {monitor.failures}"
    return Outcome(score, tuple(found), error, float(loss))


def _callbacks(recipe: Recipe) -> list[probes.Callback]:
    chosen = list(probes.callbacks.default())
    if recipe.full_batch:
        chosen = [BatchProbe(full_batch=True) if isinstance(c, BatchProbe) else c for c in chosen]
    return chosen


def _evaluation(recipe: Recipe) -> Callable[[Any], float]:
    from flax import nnx

    held_out = recipe.held_out()[0]

    @nnx.jit
    def one(model: Any) -> jax.Array:
        return recipe.criterion(recipe.apply(model, held_out), held_out)

    return lambda model: float(one(model))
