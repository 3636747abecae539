"""State beside the parameters: running statistics, random streams, the optimizer's moments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import nnx_probes as probes
from nnx_probes.faults.catalogue.entry import Fault
from nnx_probes.faults.recipe import Batch, Loop, Recipe

__all__ = ["STATE"]


def _eval_mode(recipe: Recipe, model: Any) -> Any:
    model.eval()
    return nnx.Optimizer(model, recipe.transform, wrt=recipe.wrt)


def _eval_after(step: int) -> Callable[[Loop], None]:
    def after(loop: Loop) -> None:
        if loop.step == step:
            loop.model.eval()

    return after


def _params_only(recipe: Recipe) -> Callable[..., Any]:
    """A jax.jit step that returns parameters and optimizer, and forgets what else the model holds."""

    def train_step(model: Any, optimizer: Any, batch: Batch) -> jax.Array:
        graphdef, state = nnx.split((model, optimizer))
        new, loss = compiled(graphdef, state, batch)
        nnx.update(model, new[0])
        nnx.update(optimizer, new[1])
        out: jax.Array = loss
        return out

    def pure(graphdef: Any, state: Any, batch: Batch) -> Any:
        model, optimizer = nnx.merge(graphdef, state)
        loss, grads = nnx.value_and_grad(recipe.loss)(model, batch)
        optimizer.update(model, grads)
        return (nnx.state(model, nnx.Param), nnx.state(optimizer)), loss

    compiled = jax.jit(pure, static_argnums=0)
    return train_step


def _by_class(recipe: Recipe) -> Recipe:
    """The evaluation data are sorted by class."""

    def held_out() -> list[Batch]:
        (all_of_them,) = recipe.held_out()
        rows = [all_of_them["label"] == label for label in range(10)]
        return [{name: x[row] for name, x in all_of_them.items()} for row in rows]

    return recipe.but(held_out=held_out)


def _new_optimizer(recipe: Recipe) -> Recipe:
    """With a warm-up, as most have one: it starts over at each step."""
    warm_up = optax.scale_by_schedule(optax.linear_schedule(1e-3, 1.0, 30))
    transform = optax.chain(recipe.transform, warm_up)

    def after(loop: Loop) -> None:
        loop.optimizer = probes.watch(nnx.Optimizer(loop.model, transform, wrt=recipe.wrt), loop.model)

    return recipe.but(transform=transform, after=after)


def _reset_model(recipe: Recipe) -> Callable[[Loop], None]:
    """The model is built anew at each epoch, inside the loop."""

    def after(loop: Loop) -> None:
        if loop.step % 20 == 19:
            fresh = recipe.model(loop.seed)
            nnx.update(loop.model, jax.tree.map(jnp.copy, nnx.state(fresh)))

    return after


STATE = (
    Fault(
        "eval_mode_from_the_start",
        "model.eval() is called before training and never undone",
        ("stale_state",),
        ("eval_mode_left_on",),
        lambda r: r.but(make_optimizer=_eval_mode),
        ("conv",),
        within=5,
    ),
    Fault(
        "eval_mode_after_evaluation",
        "model.train() is forgotten after the first evaluation",
        ("stale_state",),
        ("eval_mode_left_on",),
        lambda r: r.but(after=_eval_after(30)),
        ("conv",),
        onset=31,
        within=5,
    ),
    Fault(
        "eval_mode_with_dropout",
        "model.eval() is called before training: dropout never acts",
        ("stale_state",),
        ("eval_mode_left_on",),
        lambda r: r.with_options(dropout=0.3).but(make_optimizer=_eval_mode),
        ("mlp", "recurrent"),
        within=5,
    ),
    Fault(
        "running_statistics_dropped",
        "the step returns nnx.Param only: BatchNorm's statistics are thrown away",
        ("stale_state",),
        ("state_dropped",),
        lambda r: r.but(make_step=_params_only),
        ("conv",),
        within=5,
    ),
    Fault(
        "dropout_key_dropped",
        "the step returns nnx.Param only: every step draws the same mask",
        ("stale_state",),
        ("rng_not_advancing", "state_dropped"),
        lambda r: r.with_options(dropout=0.3).but(make_step=_params_only),
        ("mlp", "recurrent"),
        within=5,
    ),
    Fault(
        "evaluation_in_training_mode",
        "the evaluation runs the model as it is, dropout and running statistics included, on data sorted by class",
        ("stale_state",),
        ("train_mode_in_eval",),
        lambda r: _by_class(r).but(evaluated=lambda model: model, evaluate_every=20),
        ("conv",),
        onset=19,
        within=2,
    ),
    Fault(
        "optimizer_made_in_the_loop",
        "nnx.Optimizer(...) stands inside the loop: the warm-up starts over, moments never get old",
        ("optimizer_reset",),
        ("optimizer_recreated",),
        _new_optimizer,
        ("mlp", "experts", "transformer"),
        within=8,
    ),
    Fault(
        "model_built_anew_each_epoch",
        "the model is initialised inside the epochs' loop",
        ("lost_update", "frozen_params", "optimizer_reset"),
        ("state_restored",),
        lambda r: r.but(after=_reset_model(r)),
        ("experts", "conv", "recurrent"),
        onset=19,
        within=60,
        kind="lost",
    ),
)
