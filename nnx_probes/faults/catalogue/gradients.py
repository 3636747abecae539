"""Gradients that are cut off, die away, explode or point the wrong way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from nnx_probes.faults.catalogue.entry import Fault
from nnx_probes.faults.recipe import Batch, Loop, Recipe, cross_entropy

__all__ = ["GRADIENTS"]

_BLOWN = ("nonfinite", "diverging", "spike", "update_ratio")


def _stop_input(recipe: Recipe) -> Recipe:
    """Everything below the head is behind a stop_gradient."""

    def apply(model: Any, batch: Batch) -> jax.Array:
        logits = recipe.apply(model, batch)
        return jax.lax.stop_gradient(logits)

    return recipe.but(apply=apply)


def _frozen_copy(recipe: Recipe, part: str) -> Callable[..., Any]:
    """The loss sees one part through a stop_gradient."""

    def apply(model: Any, batch: Batch) -> jax.Array:
        state = nnx.state(model, nnx.Param)

        def cut(path: Any, x: Any) -> Any:
            return jax.lax.stop_gradient(x) if part in jax.tree_util.keystr(path) else x

        parts: Any = nnx.split(model, nnx.Param, nnx.Not(nnx.Param))
        graphdef, _, rest = parts
        return recipe.apply(nnx.merge(graphdef, jax.tree_util.tree_map_with_path(cut, state), rest), batch)

    return apply


def _argmax(logits: jax.Array, batch: Batch) -> jax.Array:
    classes = logits.shape[-1]
    guess = jax.nn.one_hot(jnp.argmax(logits, -1), classes)
    loss: jax.Array = jnp.mean((guess - jax.nn.one_hot(batch["label"], classes)) ** 2)
    return loss


def _unweighted(step: int, batch: Batch) -> Batch:
    return {**batch, "weight": batch["weight"] * 0}


def _masked_mean(logits: jax.Array, batch: Batch) -> jax.Array:
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
    total: jax.Array = jnp.sum(losses * batch["weight"]) / (jnp.sum(batch["weight"]) + 1e-6)
    return total


def _stale_gradients(recipe: Recipe) -> Callable[..., Any]:
    """Gradients are taken at the first parameters, for ever."""
    kept: dict[str, Any] = {}

    def train_step(model: Any, optimizer: Any, batch: Batch) -> jax.Array:
        loss, grads = nnx.value_and_grad(recipe.loss)(kept["first"], batch)
        optimizer.update(model, grads)
        out: jax.Array = loss
        return out

    compiled = recipe.compile(train_step)

    def step(model: Any, optimizer: Any, batch: Batch) -> Any:
        if not kept:
            kept["first"] = nnx.clone(model)
        return compiled(model, optimizer, batch)

    return step


def _masked_wrongly(recipe: Recipe) -> optax.GradientTransformation:
    """optax.masked lets what it leaves out through as raw gradients, added to the parameters with the wrong sign."""

    def mask(tree: Any) -> Any:
        return jax.tree_util.tree_map_with_path(lambda path, _: "head" in jax.tree_util.keystr(path), tree)

    return optax.masked(recipe.transform, mask)


def _sum_loss(logits: jax.Array, batch: Batch) -> jax.Array:
    return cross_entropy(logits, batch) * batch["label"].size


def _accumulate_without_reset(recipe: Recipe) -> Callable[..., Any]:
    """Gradients are summed up over all steps and never set back to 0."""

    def train_step(model: Any, optimizer: Any, total: Any, batch: Batch) -> tuple[jax.Array, Any]:
        loss, grads = nnx.value_and_grad(recipe.loss)(model, batch)
        total = jax.tree.map(jnp.add, total, grads)
        optimizer.update(model, total)
        return loss, total

    compiled = recipe.compile(train_step)
    kept: dict[str, Any] = {}

    def step(model: Any, optimizer: Any, batch: Batch) -> Any:
        if not kept:
            kept["total"] = jax.tree.map(jnp.zeros_like, nnx.state(model, recipe.wrt))
        loss, kept["total"] = compiled(model, optimizer, kept["total"], batch)
        return loss

    return step


def _doubling(loop: Loop) -> None:
    """A rate that grows by 5 % a step: decay written as growth."""
    loop.optimizer.opt_state.hyperparams["learning_rate"][...] = 1e-3 * 1.08**loop.step


GRADIENTS = (
    Fault(
        "stop_gradient_on_logits",
        "stop_gradient around the whole model",
        ("zero_gradients", "frozen_params"),
        ("gradient_cut", "weight_decay_only"),
        _stop_input,
        ("mlp", "transformer", "recurrent"),
        within=4,
        kind="frozen",
    ),
    Fault(
        "stop_gradient_below_head",
        "stop_gradient in front of the head, left over from fine-tuning",
        ("zero_gradients", "frozen_params"),
        ("gradient_cut", "weight_decay_only"),
        lambda r: r.but(apply=_frozen_copy(r.but(apply=_frozen_copy(r, "hidden")), "first")),
        ("experts", "transformer", "recurrent"),
        within=16,
        leaf={"experts": "first.kernel", "transformer": "first.embedding", "recurrent": "first.kernel"},
    ),
    Fault(
        "stop_gradient_one_layer",
        "one layer is read through a stop_gradient",
        ("zero_gradients", "frozen_params"),
        ("gradient_cut", "weight_decay_only"),
        lambda r: r.but(apply=_frozen_copy(r, "head")),
        ("mlp", "conv"),
        within=16,
        leaf={"*": "head.kernel"},
    ),
    Fault(
        "argmax_before_loss",
        "the loss compares argmax(logits) with the labels",
        ("zero_gradients", "frozen_params"),
        ("gradient_cut", "weight_decay_only"),
        lambda r: r.but(criterion=_argmax),
        ("mlp", "conv"),
        within=4,
        kind="frozen",
    ),
    Fault(
        "clipped_loss",
        "jnp.clip(loss, 0, 1), and the loss begins above 1",
        ("zero_gradients", "frozen_params"),
        ("gradient_cut", "weight_decay_only"),
        lambda r: r.but(criterion=lambda z, b: jnp.clip(r.criterion(z, b), 0, 1)),
        ("experts", "transformer"),
        within=4,
        kind="frozen",
    ),
    Fault(
        "all_labels_masked",
        "the mask is inverted: every label has weight 0",
        ("zero_gradients", "frozen_params"),
        ("gradient_cut", "weight_decay_only", "converged"),
        lambda r: r.but(criterion=_masked_mean).edit_batches(_unweighted),
        ("mlp", "transformer"),
        within=4,
        kind="frozen",
    ),
    Fault(
        "dead_relu",
        "biases of the first layer begin at -20",
        ("zero_gradients", "dead_units", "frozen_params"),
        ("dead_relu",),
        lambda r: r.with_options(bias=-20.0),
        ("mlp", "experts"),
        within=16,
        leaf={"*": "first.kernel"},
    ),
    Fault(
        "dead_relu_in_convolution",
        "biases begin at -20 and there is no BatchNorm to lift them",
        ("zero_gradients", "dead_units", "frozen_params"),
        ("dead_relu",),
        lambda r: r.with_options(bias=-20.0, norm=False),
        ("conv",),
        within=16,
        leaf={"*": "first.kernel"},
    ),
    Fault(
        "all_weights_zero",
        "kernels are initialised with zeros, all of them",
        ("zero_gradients", "frozen_params"),
        ("bad_initialization", "dead_relu"),
        lambda r: r.with_options(kernel_init=nnx.initializers.zeros_init()),
        ("mlp", "experts"),
        within=16,
    ),
    Fault(
        "deep_sigmoids",
        "twelve sigmoid layers and plain SGD",
        ("vanishing_gradients", "chance_level", "stalled_loss"),
        ("saturated_activations",),
        lambda r: r.with_options(depth=12, activation=nnx.sigmoid).but(transform=optax.sgd(0.1)),
        ("mlp",),
        within=64,
        leaf={"mlp": "first.kernel"},
    ),
    Fault(
        "weights_too_small",
        "eight layers initialised with a standard deviation of 0.01, and plain SGD",
        ("vanishing_gradients", "chance_level", "stalled_loss"),
        ("bad_initialization",),
        lambda r: r.with_options(depth=8, kernel_init=nnx.initializers.normal(0.01)).but(transform=optax.sgd(0.1)),
        ("mlp",),
        within=64,
        leaf={"mlp": "first.kernel"},
    ),
    Fault(
        "rate_too_high_sgd",
        "SGD with momentum at a rate of 30",
        _BLOWN,
        ("learning_rate_too_high",),
        lambda r: r.but(transform=optax.sgd(30.0, momentum=0.9)),
        ("mlp", "transformer", "recurrent"),
        within=80,
    ),
    Fault(
        "rate_too_high_adam",
        "Adam at a rate of 3",
        (*_BLOWN, "chance_level", "stalled_loss"),
        ("learning_rate_too_high",),
        lambda r: r.but(transform=optax.adam(3.0)),
        ("experts", "conv", "recurrent"),
        steps=640,
        within=600,
    ),
    Fault(
        "rate_grows",
        "the decay factor is above 1: the rate grows by 8 % a step",
        _BLOWN,
        ("learning_rate_too_high",),
        lambda r: r.but(transform=optax.inject_hyperparams(optax.adam)(learning_rate=1e-3), after=_doubling),
        ("mlp", "transformer"),
        onset=40,
        within=110,
    ),
    Fault(
        "momentum_one",
        "momentum of 1.0: velocity never decays",
        _BLOWN,
        ("learning_rate_too_high",),
        lambda r: r.but(transform=optax.sgd(0.5, momentum=1.0)),
        ("experts", "recurrent"),
        steps=240,
        within=160,
    ),
    Fault(
        "loss_summed",
        "the loss is a sum over the batch, the rate is that of a mean",
        (*_BLOWN, "zero_gradients"),
        ("learning_rate_too_high", "dead_relu"),
        lambda r: r.but(transform=optax.sgd(0.5, momentum=0.9), criterion=_sum_loss),
        ("mlp", "transformer"),
        within=80,
    ),
    Fault(
        "ascent",
        "the sign of the loss is wrong",
        ("diverging", "nonfinite", "spike"),
        ("ascent",),
        lambda r: r.but(transform=optax.chain(r.transform, optax.scale(-1.0))),
        ("mlp", "conv", "recurrent"),
        within=100,
    ),
    Fault(
        "masked_lets_gradients_through",
        "optax.masked was meant to freeze: raw gradients are added to what it leaves out",
        ("diverging", "nonfinite", "spike"),
        ("ascent",),
        lambda r: r.but(transform=_masked_wrongly(r)),
        ("experts", "recurrent"),
        within=120,
    ),
    Fault(
        "gradients_never_reset",
        "accumulated gradients are not set back to 0 after the update",
        (*_BLOWN, "chance_level", "stalled_loss"),
        ("learning_rate_too_high",),
        lambda r: r.but(transform=optax.sgd(0.5), make_step=_accumulate_without_reset),
        ("mlp", "recurrent"),
        steps=640,
        within=600,
    ),
    Fault(
        "gradients_of_a_stale_copy",
        "the loss is taken of a copy of the model made before training",
        ("diverging", "chance_level", "stalled_loss", "lost_update", "update_ratio"),
        ("stale_view", "other_copy_trained"),
        lambda r: r.but(make_step=_stale_gradients),
        ("mlp", "transformer"),
        steps=700,
        within=640,
    ),
)
