"""Updates that never arrive, or arrive and change nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from nnx_probes.faults.catalogue.entry import Fault
from nnx_probes.faults.recipe import Batch, Loop, Recipe

__all__ = ["UPDATES"]

_STILL = ("frozen_params", "lost_update")


def _loss_only(recipe: Recipe) -> Callable[..., Any]:
    def train_step(model: Any, optimizer: Any, batch: Batch) -> jax.Array:
        loss, _ = nnx.value_and_grad(recipe.loss)(model, batch)
        out: jax.Array = loss
        return out

    return recipe.compile(train_step)


def _split_step(recipe: Recipe) -> Callable[..., Any]:
    """A pure function over split state whose result is not written back."""

    def train_step(model: Any, optimizer: Any, batch: Batch) -> jax.Array:
        graphdef, state = nnx.split((model, optimizer))

        @jax.jit
        def pure(state: Any, batch: Batch) -> tuple[Any, jax.Array]:
            model, optimizer = nnx.merge(graphdef, state)
            loss, grads = nnx.value_and_grad(recipe.loss)(model, batch)
            optimizer.update(model, grads)
            return nnx.state((model, optimizer)), loss

        loss: jax.Array = pure(state, batch)[1]
        return loss

    return train_step


def _other_model(recipe: Recipe, model: Any) -> Any:
    return nnx.ModelAndOptimizer(nnx.clone(model), recipe.transform, wrt=recipe.wrt)


def _one_argument(recipe: Recipe) -> Callable[..., Any]:
    def train_step(model: Any, optimizer: Any, batch: Batch) -> jax.Array:
        loss, grads = nnx.value_and_grad(recipe.loss)(model, batch)
        optimizer.update(grads)
        out: jax.Array = loss
        return out

    return recipe.compile(train_step)


def _clone_in_step(recipe: Recipe) -> Callable[..., Any]:
    """The step trains a copy that it forgets."""

    def train_step(model: Any, optimizer: Any, batch: Batch) -> jax.Array:
        copy = nnx.clone(model)
        loss, grads = nnx.value_and_grad(recipe.loss)(copy, batch)
        optimizer.update(copy, grads)
        out: jax.Array = loss
        return out

    return recipe.compile(train_step)


def _restore(interval: int) -> Callable[[Loop], None]:
    """Every few steps the loop loads its first checkpoint again, as a best-model logic with a wrong sign does."""

    def after(loop: Loop) -> None:
        if loop.step == 0:
            loop.memory["first"] = jax.tree.map(jnp.copy, nnx.state(loop.model, nnx.Param))
        elif loop.step % interval == 0:
            nnx.update(loop.model, jax.tree.map(jnp.copy, loop.memory["first"]))

    return after


UPDATES = (
    Fault(
        "jax_jit",
        "the step is compiled by jax.jit instead of nnx.jit and works on copies",
        _STILL,
        ("state_dropped",),
        lambda r: r.but(compile=jax.jit),
        ("mlp", "transformer", "recurrent"),
        within=3,
        kind="lost",
    ),
    Fault(
        "split_not_written_back",
        "the step splits model and optimizer, trains the parts in jax.jit and drops the result",
        _STILL,
        ("state_dropped",),
        lambda r: r.but(make_step=_split_step),
        ("experts", "conv"),
        within=3,
        kind="lost",
    ),
    Fault(
        "update_not_called",
        "gradients are computed and optimizer.update is never called",
        _STILL,
        ("update_not_called", "state_dropped"),
        lambda r: r.but(make_step=_loss_only),
        ("mlp", "conv", "transformer"),
        within=3,
        kind="frozen",
    ),
    Fault(
        "wrt_selects_nothing",
        "wrt=nnx.LoRAParam, and the model has none",
        _STILL,
        ("wrt_selects_nothing",),
        lambda r: r.but(wrt=nnx.LoRAParam, make_step=_grad_of_params),
        ("mlp", "transformer"),
        within=3,
        kind="frozen",
    ),
    Fault(
        "optimizer_of_another_model",
        "nnx.ModelAndOptimizer was given a clone; the loop evaluates the original",
        _STILL,
        ("other_copy_trained",),
        lambda r: r.but(make_optimizer=_other_model, make_step=_one_argument),
        ("mlp", "recurrent"),
        within=3,
        kind="frozen",
    ),
    Fault(
        "copy_trained_in_step",
        "the step clones the model, trains the clone and forgets it",
        _STILL,
        ("other_copy_trained",),
        lambda r: r.but(make_step=_clone_in_step),
        ("experts", "conv"),
        within=3,
        kind="frozen",
    ),
    Fault(
        "rate_zero",
        "the learning rate is read as 0 from the configuration",
        _STILL,
        ("learning_rate_zero",),
        lambda r: r.but(transform=optax.adam(0.0)),
        ("mlp", "conv"),
        within=24,
        kind="frozen",
    ),
    Fault(
        "schedule_ran_out",
        "the decay's horizon is a tenth of the run, as when it is counted in epochs",
        _STILL,
        ("learning_rate_zero",),
        lambda r: r.but(transform=optax.adam(optax.linear_schedule(3e-4, 0.0, r.steps // 10))),
        ("experts", "transformer"),
        onset=16,
        within=4,
        kind="frozen",
    ),
    Fault(
        "injected_rate_zero",
        "inject_hyperparams holds learning_rate 0, a plateau scheduler has multiplied it away",
        _STILL,
        ("learning_rate_zero",),
        lambda r: r.but(transform=optax.inject_hyperparams(optax.adam)(learning_rate=0.0)),
        ("mlp", "recurrent"),
        within=24,
        kind="frozen",
    ),
    Fault(
        "set_to_zero_for_all",
        "the freezing transform was applied to every parameter",
        _STILL,
        ("transform_zeroes_updates", "learning_rate_zero"),
        lambda r: r.but(transform=optax.chain(r.transform, optax.set_to_zero())),
        ("experts", "conv"),
        within=4,
        kind="frozen",
    ),
    Fault(
        "absorbed_by_bfloat16",
        "parameters are bfloat16 and the rate is that of float32",
        ("absorbed_updates", "frozen_params"),
        ("absorbed_by_dtype",),
        lambda r: r.but(dtype=jnp.bfloat16, transform=optax.adam(1e-6)),
        ("mlp", "transformer"),
        within=24,
    ),
    Fault(
        "rate_far_too_low",
        "the learning rate is 1e-11: a unit was mistaken",
        ("frozen_params", "absorbed_updates", "update_ratio"),
        ("learning_rate_too_low",),
        lambda r: r.but(transform=optax.adam(1e-11)),
        ("experts", "recurrent"),
        within=40,
    ),
    Fault(
        "epsilon_too_large",
        "Adam's eps is 1e4: steps are proportional to tiny gradients",
        ("frozen_params", "absorbed_updates", "update_ratio", "stalled_loss"),
        ("learning_rate_too_low",),
        lambda r: r.but(transform=optax.adam(1e-3, eps=1e4)),
        ("mlp", "conv"),
        within=40,
    ),
    Fault(
        "warm_up_counted_in_examples",
        "the warm-up is a billion steps long",
        ("frozen_params", "absorbed_updates", "update_ratio", "stalled_loss"),
        ("learning_rate_too_low", "learning_rate_zero"),
        lambda r: r.but(transform=optax.adam(optax.linear_schedule(0.0, 3e-3, 10**9))),
        ("experts", "transformer"),
        within=80,
    ),
    Fault(
        "loss_divided_twice",
        "the loss is divided by the batch and again by the number of its elements, and SGD has no rescue",
        ("update_ratio", "absorbed_updates", "stalled_loss", "frozen_params"),
        ("learning_rate_too_low",),
        lambda r: r.but(transform=optax.sgd(0.1), criterion=lambda z, b: r.criterion(z, b) / 1e7),
        ("mlp", "recurrent"),
        within=64,
    ),
    Fault(
        "state_restored",
        "every 5 steps the loop loads its first checkpoint again",
        ("lost_update", "frozen_params", "optimizer_reset"),
        ("state_restored",),
        lambda r: r.but(after=_restore(5)),
        ("mlp", "conv"),
        onset=5,
        within=16,
        kind="lost",
    ),
    Fault(
        "accumulates_forever",
        "MultiSteps waits for ten times more batches than the run has",
        ("frozen_params",),
        ("learning_rate_zero", "transform_zeroes_updates", "never_applied"),
        lambda r: r.but(transform=optax.MultiSteps(r.transform, every_k_schedule=10 * r.steps)),
        ("experts", "transformer"),
        within=140,
        kind="frozen",
    ),
)


def _grad_of_params(recipe: Recipe) -> Callable[..., Any]:
    def train_step(model: Any, optimizer: Any, batch: Batch) -> jax.Array:
        of = nnx.DiffState(0, recipe.wrt)
        loss, grads = nnx.value_and_grad(recipe.loss, argnums=of)(model, batch)
        optimizer.update(model, grads)
        out: jax.Array = loss
        return out

    return recipe.compile(train_step)
