"""Habits of the model and of the loss."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from nnx_probes.faults.habits.entry import Habit
from nnx_probes.faults.recipe import Batch, Recipe, cross_entropy

__all__ = ["MODELS"]


def _options(**options: Any) -> Any:
    return lambda recipe: recipe.with_options(**options)


def _smooth(logits: jax.Array, batch: Batch) -> jax.Array:
    hot = optax.smooth_labels(jax.nn.one_hot(batch["label"], logits.shape[-1]), 0.1)
    return jnp.mean(optax.softmax_cross_entropy(logits, hot))


def _squares(logits: jax.Array, batch: Batch) -> jax.Array:
    return jnp.mean((logits - jax.nn.one_hot(batch["label"], logits.shape[-1])) ** 2)


def _focal(logits: jax.Array, batch: Batch) -> jax.Array:
    hot = jax.nn.one_hot(batch["label"], logits.shape[-1])
    return jnp.mean(jnp.sum(optax.sigmoid_focal_loss(logits, hot), -1))


def _sum(logits: jax.Array, batch: Batch) -> jax.Array:
    return cross_entropy(logits, batch) * batch["label"].size


def _scaled(logits: jax.Array, batch: Batch) -> jax.Array:
    return cross_entropy(logits, batch) * 2.0**12


def _lora(recipe: Recipe) -> Recipe:
    def build(*, rngs: nnx.Rngs, **options: Any) -> Any:
        model = recipe.build(rngs=rngs, **options)
        model.first = nnx.LoRA(64, 4, 48, base_module=model.first, rngs=rngs)
        return model

    def make(recipe: Recipe) -> Any:
        @recipe.compile
        def train_step(model: Any, optimizer: Any, batch: Any) -> Any:
            of = nnx.DiffState(0, nnx.LoRAParam)
            loss, grads = nnx.value_and_grad(recipe.loss, argnums=of)(model, batch)
            optimizer.update(model, grads)
            return loss

        return train_step

    return recipe.but(build=build, wrt=nnx.LoRAParam, make_step=make, transform=optax.adam(1e-2))


class _Gated(nnx.Module):
    """A module beside a gate that begins at 0."""

    def __init__(self, inner: Any, rngs: nnx.Rngs) -> None:
        self.inner = inner
        self.side = nnx.Linear(64, 10, rngs=rngs)
        self.gate = nnx.Param(jnp.zeros(()))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.inner(x) + self.gate[...] * self.side(x)


def _zero_gate(recipe: Recipe) -> Recipe:
    def build(*, rngs: nnx.Rngs, **options: Any) -> Any:
        return _Gated(recipe.build(rngs=rngs, **options), rngs)

    return recipe.but(build=build)


def _zero_head(recipe: Recipe) -> Recipe:
    def build(*, rngs: nnx.Rngs, **options: Any) -> Any:
        model = recipe.build(rngs=rngs, **options)
        model.head.kernel[...] = jnp.zeros_like(model.head.kernel[...])
        return model

    return recipe.but(build=build)


def _sparse(x: jax.Array) -> jax.Array:
    """A ReLU that most units rarely pass."""
    return nnx.relu(x - 0.6)


def _remat(recipe: Recipe) -> Recipe:
    return recipe.but(apply=lambda model, batch: nnx.remat(lambda m, x: m(x))(model, batch["input"]))


def _stochastic_depth(recipe: Recipe) -> Recipe:
    """A layer is left out at every other step."""

    def apply(model: Any, batch: Batch) -> jax.Array:
        used = jnp.sum(batch["label"]) % 2
        x = model.activation(model.first(batch["input"]))
        for layer in model.hidden:
            x = x + used * model.activation(layer(x))
        logits: jax.Array = model.head(x)
        return logits

    return recipe.but(apply=apply)


MODELS = (
    Habit("bfloat16_compute", "float32 parameters, bfloat16 arithmetic", "conv", _options(dtype=jnp.bfloat16)),
    Habit(
        "bfloat16_parameters",
        "bfloat16 parameters and a rate that suits them",
        "mlp",
        lambda r: r.but(dtype=jnp.bfloat16, transform=optax.adam(5e-3)),
    ),
    Habit(
        "loss_scale",
        "the loss is scaled up and gradients down",
        "mlp",
        lambda r: r.but(criterion=_scaled, transform=optax.chain(optax.scale(2.0**-12), optax.adam(3e-3))),
    ),
    Habit("sum_loss", "a sum over the batch, with Adam", "mlp", lambda r: r.but(criterion=_sum)),
    Habit("label_smoothing", "smoothed labels: the loss stays high", "conv", lambda r: r.but(criterion=_smooth)),
    Habit("mean_squares", "mean squared error on one-hot labels", "mlp", lambda r: r.but(criterion=_squares)),
    Habit("focal_loss", "a loss that ignores easy examples", "experts", lambda r: r.but(criterion=_focal)),
    Habit("lora", "LoRA: B begins at 0, the base is frozen", "mlp", _lora),
    Habit("zero_gate", "a branch behind a gate that begins at 0", "mlp", _zero_gate),
    Habit("zero_head", "the head begins at 0", "mlp", _zero_head),
    Habit("tied_embedding", "the head is the embedding", "transformer", _options(tied=True)),
    Habit("sparse_relu", "units that are rarely active", "mlp", _options(activation=_sparse, width=96)),
    Habit("saturating_gates", "tanh units that saturate", "mlp", _options(activation=lambda x: jnp.tanh(3 * x))),
    Habit("sigmoid_units", "two sigmoid layers with Adam", "mlp", _options(activation=nnx.sigmoid)),
    Habit("deep_residual", "twelve layers with residual connections", "mlp", _options(depth=12, residual=True)),
    Habit("dropout", "half the units are dropped", "recurrent", _options(dropout=0.5)),
    Habit("remat", "activations are recomputed", "mlp", _remat),
    Habit("stochastic_depth", "layers are left out at random", "mlp", _stochastic_depth),
    Habit("many_experts", "16 experts, two used at a time", "experts", _options(count=16, top=2)),
    Habit("slow_statistics", "BatchNorm with a momentum of 0.99", "conv", _options(momentum=0.99)),
)
