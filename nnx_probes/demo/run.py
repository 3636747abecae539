"""The demo's run: a training loop like your own, and a summary of what the library said about it."""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import jax
from flax import nnx
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import nnx_probes as probes
from nnx_probes.demo.faults import FAULTS
from nnx_probes.demo.model import LanguageModel, loss_fn
from nnx_probes.demo.recipe import Recipe
from nnx_probes.demo.text import Batch, Text, batches, load

__all__ = ["Outcome", "fresh_logdir", "run", "train"]

N_LAST_LOSSES = 10  # one batch's loss is noise of a few percent; their mean is what the summary shows


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run came to.

    Attributes:
      loss: mean loss of the last steps, nats a character.
      alerts: all that the monitor raised, in order.
    """

    loss: float
    alerts: tuple[probes.Alert, ...]


def train(recipe: Recipe, text: Text, *, steps: int, every: int, logdir: Path, console: Console) -> Outcome:
    """Trains a new model by `recipe` and returns what came of it.

    Args:
      recipe: what to train and how.
      text: what to train on.
      steps: number of batches.
      every: steps between two probes.
      logdir: folder for the monitor's files.
      console: where the progress bar goes.
    """
    model = recipe.model(len(text.vocabulary))
    optimizer = probes.watch(nnx.Optimizer(model, recipe.transform, wrt=recipe.wrt), model)

    @recipe.compile
    def train_step(model: LanguageModel, optimizer: nnx.Optimizer[LanguageModel], batch: Batch) -> jax.Array:
        loss: jax.Array
        loss, grads = nnx.value_and_grad(loss_fn)(model, batch)
        optimizer.update(model, grads)
        return loss

    last_losses: deque[jax.Array] = deque(maxlen=N_LAST_LOSSES)
    with (
        _progress(console) as progress,
        probes.Monitor(logdir, model=model, optimizer=optimizer, every=every) as monitor,
    ):
        bar = progress.add_task("training", total=steps, loss="–")
        for step, batch in enumerate(batches(text, steps=steps)):
            batch = recipe.edit_batch(step, batch)
            loss = train_step(model, optimizer, batch)
            monitor(step, loss=loss, batch=batch)

            last_losses.append(loss)
            progress.advance(bar)
            if step % every == 0:  # reading a loss waits for the device: not on every step
                progress.update(bar, loss=f"{float(loss):.3f}")
        final_loss = sum(map(float, last_losses)) / len(last_losses)
        progress.update(bar, loss=f"{final_loss:.3f}")
    return Outcome(final_loss, monitor.alerts)


def run(*, fault: str | None, steps: int, every: int, logdir: str | None) -> int:
    """Runs the demo and prints a summary.

    Args:
      fault: a name in `FAULTS`, or None for a healthy run.
      steps: number of training steps.
      every: steps between two probes.
      logdir: folder for the files; by default a fresh one under ``runs/``.

    Returns:
      0 when nothing was found, 1 when an alert of level WARN or ERROR was raised.
    """
    name = fault or "healthy"
    folder = Path(logdir) if logdir is not None else fresh_logdir(Path("runs"), f"demo-{name}")
    text = load()
    recipe = Recipe()
    console = Console(highlight=False)
    if fault is not None:
        recipe = FAULTS[fault].apply(recipe, steps)
        console.print(f"fault {name}: {FAULTS[fault].description}", markup=False, soft_wrap=True)
    outcome = train(recipe, text, steps=steps, every=every, logdir=folder, console=console)
    for line in summary(outcome, text, folder):
        console.print(line, markup=False, soft_wrap=True)
    return int(any(alert.level >= probes.Level.WARN for alert in outcome.alerts))


def summary(outcome: Outcome, text: Text, logdir: Path) -> Sequence[str]:
    """Returns the lines shown at the end of a run."""
    n_tokens = len(text.vocabulary)
    lines = [
        f"loss {outcome.loss:.3f} nats a character (guessing among {n_tokens} characters: "
        f"{math.log(n_tokens):.3f}; knowing how often each occurs: {text.unigram_entropy():.3f})"
    ]
    lines.extend(_alert_line(alert) for alert in outcome.alerts)
    if not outcome.alerts:
        lines.append("no alerts")
    lines.append(f"files in {logdir}; to look at them: tensorboard --logdir {logdir}")
    return lines


def fresh_logdir(parent: Path, name: str) -> Path:
    """Returns ``parent/name``, or the first of ``parent/name-2``, ``-3``, … that does not exist yet."""
    numbered = (parent / f"{name}-{number}" for number in itertools.count(2))
    return next(folder for folder in itertools.chain([parent / name], numbered) if not folder.exists())


def _alert_line(alert: probes.Alert) -> str:
    line = f"{alert.level.name} at step {alert.step}: {alert.title} [{alert.rule}]"
    return f"{line}; most likely: {alert.causes[0].title}" if alert.causes else line


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]}"),
        TimeElapsedColumn(),
        console=console,
    )
