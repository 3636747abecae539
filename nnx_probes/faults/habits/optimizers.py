"""Habits of the optimizer."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from optax import contrib

from nnx_probes.faults.habits.entry import Habit
from nnx_probes.faults.recipe import Recipe

__all__ = ["OPTIMIZERS"]


def _with(transform: optax.GradientTransformation) -> Any:
    return lambda recipe: recipe.but(transform=transform)


def _freeze(part: str) -> Any:
    def apply(recipe: Recipe) -> Recipe:
        def labels(tree: Any) -> Any:
            return jax.tree_util.tree_map_with_path(
                lambda path, _: "frozen" if part in jax.tree_util.keystr(path) else "trained", tree
            )

        parts = {"trained": recipe.transform, "frozen": optax.set_to_zero()}
        return recipe.but(transform=optax.multi_transform(parts, labels))

    return apply


def _skip_spikes(transform: optax.GradientTransformation) -> optax.GradientTransformation:
    """Leaves out every update whose gradient is far above the running mean of its norm, about one in fifty."""

    def init(params: Any) -> Any:
        return (jnp.zeros(()), transform.init(params))

    def update(grads: Any, state: Any, params: Any = None) -> Any:
        mean, inner = state
        norm = optax.global_norm(grads)
        skip = (mean > 0) & (norm > 2.5 * mean)
        updates, new = transform.update(grads, inner, params)
        updates = jax.tree.map(lambda u: jnp.where(skip, 0.0, u), updates)
        new = jax.tree.map(lambda a, b: jnp.where(skip, b, a), new, inner)
        return updates, (jnp.where(mean > 0, 0.95 * mean + 0.05 * norm, norm), new)

    return optax.GradientTransformation(init, update)


_WARM = optax.warmup_cosine_decay_schedule(0.0, 5e-3, 40, 300)

OPTIMIZERS = (
    Habit("sgd", "plain SGD", "mlp", _with(optax.sgd(0.1))),
    Habit("momentum", "SGD with Nesterov momentum", "conv", _with(optax.sgd(0.05, momentum=0.9, nesterov=True))),
    Habit("lion", "sign updates (Lion)", "transformer", _with(optax.lion(3e-4))),
    Habit("muon", "orthogonal updates (Muon)", "mlp", _with(contrib.muon(5e-3))),
    Habit("adafactor", "factored second moments", "transformer", _with(optax.adafactor(3e-3))),
    Habit("rmsprop", "RMSProp", "recurrent", _with(optax.rmsprop(1e-3))),
    Habit("warm_up_and_tail", "warm-up from 0, cosine to 0", "transformer", _with(optax.adamw(_WARM))),
    Habit(
        "restarts",
        "the rate is restarted every 75 steps",
        "conv",
        _with(
            optax.adam(
                optax.sgdr_schedule([dict(init_value=1e-4, peak_value=5e-3, warmup_steps=10, decay_steps=75)] * 4)
            )
        ),
    ),
    Habit("accumulation", "MultiSteps over 4 batches", "mlp", _with(optax.MultiSteps(optax.adam(5e-3), 4))),
    Habit(
        "tight_clip",
        "every gradient is clipped",
        "recurrent",
        _with(optax.chain(optax.clip_by_global_norm(0.05), optax.adam(3e-3))),
    ),
    Habit(
        "adaptive_clip",
        "gradients are clipped leaf by leaf",
        "conv",
        _with(optax.chain(optax.adaptive_grad_clip(0.02), optax.adam(3e-3))),
    ),
    Habit("skips_spikes", "updates with a large gradient are left out", "mlp", _with(_skip_spikes(optax.adam(3e-3)))),
    Habit("guarded", "apply_if_finite, never needed", "experts", _with(optax.apply_if_finite(optax.adam(3e-3), 5))),
    Habit(
        "injected_rate", "inject_hyperparams", "mlp", _with(optax.inject_hyperparams(optax.adam)(learning_rate=3e-3))
    ),
    Habit("strong_decay", "AdamW with a weight decay of 0.1", "experts", _with(optax.adamw(3e-3, weight_decay=0.1))),
    Habit(
        "noisy_gradients",
        "noise is added to gradients",
        "mlp",
        _with(optax.chain(optax.add_noise(0.01, 0.55, 0), optax.adam(3e-3))),
    ),
    Habit("frozen_backbone", "the first layer is frozen by multi_transform", "conv", _freeze("first")),
    Habit(
        "frozen_by_wrt",
        "only the head is trained: wrt is a path",
        "transformer",
        lambda r: r.but(wrt=nnx.All(nnx.Param, nnx.PathContains("head")), make_step=_step_of(r)),
    ),
    Habit(
        "plateau",
        "reduce_on_plateau scales the rate",
        "recurrent",
        lambda r: r.but(
            transform=optax.chain(optax.adam(3e-3), contrib.reduce_on_plateau(patience=50)), make_step=_step_with_value
        ),
    ),
    Habit("gentle", "a small rate: the loss comes down slowly", "mlp", _with(optax.adam(1e-4))),
    Habit("lookahead_free", "schedule-free Adam", "mlp", _with(contrib.schedule_free_adamw(3e-3, warmup_steps=20))),
)


def _step_of(recipe: Recipe) -> Any:
    wrt = nnx.All(nnx.Param, nnx.PathContains("head"))

    def make(recipe: Recipe) -> Any:
        @recipe.compile
        def train_step(model: Any, optimizer: Any, batch: Any) -> Any:
            loss, grads = nnx.value_and_grad(recipe.loss, argnums=nnx.DiffState(0, wrt))(model, batch)
            optimizer.update(model, grads)
            return loss

        return train_step

    return make


def _step_with_value(recipe: Recipe) -> Any:
    @recipe.compile
    def train_step(model: Any, optimizer: Any, batch: Any) -> Any:
        loss, grads = nnx.value_and_grad(recipe.loss)(model, batch)
        optimizer.update(model, grads, value=loss)
        return loss

    return train_step
