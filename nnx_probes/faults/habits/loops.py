"""Habits of the training loop."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from nnx_probes.faults.habits.entry import Habit
from nnx_probes.faults.recipe import Batch, Loop, Recipe

__all__ = ["LOOPS"]


def _eager(function: Any) -> Any:
    return function


def _average(loop: Loop) -> None:
    """An average of the parameters is kept beside the model."""
    now = nnx.state(loop.model, nnx.Param)
    kept = loop.memory.get("average")
    loop.memory["average"] = now if kept is None else jax.tree.map(lambda a, b: 0.9 * a + 0.1 * b, kept, now)


def _round_trip(loop: Loop) -> None:
    """Every 50 steps the state is saved and loaded again."""
    if loop.step % 50 == 49:
        state = jax.tree.map(jnp.copy, nnx.state(loop.model))
        nnx.update(loop.model, state)


def _pure(recipe: Recipe) -> Any:
    """jax.jit over split state, written back as it should be."""

    def pure(graphdef: Any, state: Any, batch: Batch) -> Any:
        model, optimizer = nnx.merge(graphdef, state)
        loss, grads = nnx.value_and_grad(recipe.loss)(model, batch)
        optimizer.update(model, grads)
        return nnx.state((model, optimizer)), loss

    compiled = jax.jit(pure, static_argnums=0)

    def train_step(model: Any, optimizer: Any, batch: Batch) -> Any:
        graphdef, state = nnx.split((model, optimizer))
        new, loss = compiled(graphdef, state, batch)
        nnx.update((model, optimizer), new)
        return loss

    return train_step


def _by_hand(recipe: Recipe) -> Any:
    """Gradients of four batches are added up by hand."""

    @nnx.jit
    def gradients(model: Any, batch: Batch) -> Any:
        return nnx.value_and_grad(recipe.loss)(model, batch)

    @nnx.jit
    def apply(model: Any, optimizer: Any, grads: Any) -> None:
        optimizer.update(model, grads)

    kept: list[Any] = []

    def train_step(model: Any, optimizer: Any, batch: Batch) -> Any:
        loss, grads = gradients(model, batch)
        kept.append(grads)
        if len(kept) == 4:
            total = jax.tree.map(lambda *g: sum(g) / 4, *kept)
            kept.clear()
            apply(model, optimizer, total)
        return loss

    return train_step


class _Pair(nnx.Module):
    """A generator and a discriminator of 8 by 8 pictures."""

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.generator = nnx.Sequential(
            nnx.Linear(8, 32, rngs=rngs), nnx.relu, nnx.Linear(32, 64, rngs=rngs), nnx.sigmoid
        )
        self.discriminator = nnx.Sequential(nnx.Linear(64, 32, rngs=rngs), nnx.relu, nnx.Linear(32, 1, rngs=rngs))
        self.noise = nnx.Rngs(noise=0)


def _adversarial(recipe: Recipe) -> Recipe:
    def make(recipe: Recipe) -> Any:
        @nnx.jit
        def train_step(model: Any, optimizer: Any, batch: Batch) -> Any:
            def loss(model: Any) -> jax.Array:
                fake = model.generator(model.noise.noise.normal((len(batch["input"]), 8)))
                graphdef, state = nnx.split(model.discriminator)
                fixed = nnx.merge(graphdef, jax.lax.stop_gradient(state))
                real_score = model.discriminator(batch["input"])
                fake_score = model.discriminator(jax.lax.stop_gradient(fake))
                judge = jnp.mean(jax.nn.softplus(-real_score)) + jnp.mean(jax.nn.softplus(fake_score))
                return judge + jnp.mean(jax.nn.softplus(-fixed(fake)))

            value, grads = nnx.value_and_grad(loss)(model)
            optimizer.update(model, grads)
            return value

        return train_step

    return recipe.but(
        build=lambda rngs: _Pair(rngs=rngs),
        make_step=make,
        transform=optax.adam(2e-3, b1=0.5),
        objective="adversarial",
        apply=lambda model, batch: jnp.zeros((len(batch["label"]), 10)),
    )


LOOPS = (
    Habit("eager", "no compilation at all", "mlp", lambda r: r.but(compile=_eager, steps=120)),
    Habit("split_and_merge", "jax.jit over split state, written back", "conv", lambda r: r.but(make_step=_pure)),
    Habit("accumulated_by_hand", "gradients of four batches are added up", "mlp", lambda r: r.but(make_step=_by_hand)),
    Habit("moving_average", "an average of the parameters is kept", "mlp", lambda r: r.but(after=_average)),
    Habit("saved_and_loaded", "the state is loaded as it was saved", "experts", lambda r: r.but(after=_round_trip)),
    Habit(
        "evaluated_often",
        "an evaluation every 20 steps, in evaluation mode",
        "conv",
        lambda r: r.but(evaluate_every=20),
    ),
    Habit(
        "length_unknown", "the monitor is not told how long the run is", "transformer", lambda r: r.but(planned=False)
    ),
    Habit("long", "1200 steps, far beyond the point where all is learnt", "mlp", lambda r: r.but(steps=1200)),
    Habit("long_text", "800 steps of text", "transformer", lambda r: r.but(steps=800)),
    Habit("adversarial", "a generator against a discriminator", "mlp", _adversarial),
)
