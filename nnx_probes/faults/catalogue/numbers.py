"""NaN and Inf, by all the ways they get in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from nnx_probes.faults.catalogue.entry import Fault
from nnx_probes.faults.recipe import Batch, Recipe, cross_entropy

__all__ = ["NUMBERS"]

_BAD = ("nonfinite",)
_AT = 60


def _spoil(value: float) -> Callable[[int, Batch], Batch]:
    def edit(step: int, batch: Batch) -> Batch:
        if step != _AT:
            return batch
        weight = batch["weight"].copy()
        weight[0] = value
        return {**batch, "weight": weight}

    return edit


def _spoil_input(step: int, batch: Batch) -> Batch:
    if step != _AT:
        return batch
    images = batch["input"].copy()
    images[3, 20:30] = np.nan
    return {**batch, "input": images}


def _label_too_large(step: int, batch: Batch) -> Batch:
    labels = batch["label"].copy()
    if step >= _AT:
        labels.reshape(-1)[0] = 1000
    return {**batch, "label": labels}


def _token_too_large(step: int, batch: Batch) -> Batch:
    tokens = batch["input"].copy()
    if step >= _AT:
        tokens[0, 0] = 100_000
    return {**batch, "input": tokens}


def _empty_mask(step: int, batch: Batch) -> Batch:
    return {**batch, "weight": batch["weight"] * (step != _AT)}


def _with_norm(logits: jax.Array, batch: Batch) -> jax.Array:
    """A penalty on the norm of a vector that is exactly 0: the gradient of a root at 0."""
    return cross_entropy(logits, batch) + 1e-3 * jnp.linalg.norm(logits - logits)


def _guarded_root(logits: jax.Array, batch: Batch) -> jax.Array:
    """The guard is around the result, not around the root."""
    below = jnp.maximum(-logits, 0.0)
    return cross_entropy(logits, batch) + 1e-3 * jnp.mean(jnp.where(below > 0, jnp.sqrt(below), 0.0))


def _log_of_softmax(scale: float) -> Callable[[jax.Array, Batch], jax.Array]:
    """Logarithm of a softmax by hand, on logits scaled until a share underflows to 0."""

    def criterion(logits: jax.Array, batch: Batch) -> jax.Array:
        shares = jax.nn.softmax(logits * scale)
        hot = jax.nn.one_hot(batch["label"], logits.shape[-1])
        return -jnp.mean(jnp.sum(hot * jnp.log(shares), -1))

    return criterion


def _exp_by_hand(logits: jax.Array, batch: Batch) -> jax.Array:
    """exp(x) / sum(exp(x)) without subtracting the maximum, at a low temperature."""
    powers = jnp.exp(logits * 100)
    shares = powers / jnp.sum(powers, -1, keepdims=True)
    hot = jax.nn.one_hot(batch["label"], logits.shape[-1])
    return -jnp.mean(jnp.log(jnp.sum(hot * shares, -1) + 1e-9))


def _half_loss(logits: jax.Array, batch: Batch) -> jax.Array:
    """Everything in float16, and a sum of squares in it."""
    logits = logits.astype(jnp.float16)
    return cross_entropy(logits, batch) + (1e-6 * jnp.sum((logits * 300) ** 2)).astype(jnp.float32)


def _bad_initial_value(part: str) -> Callable[[Recipe, Any], Any]:
    def make(recipe: Recipe, model: Any) -> Any:
        kernel = getattr(model, part).kernel
        kernel[...] = kernel[...].at[0, 0].set(jnp.nan)
        return nnx.Optimizer(model, recipe.transform, wrt=recipe.wrt)

    return make


@jax.custom_vjp
def _inf_backward(x: jax.Array) -> jax.Array:
    return x


def _forward(x: jax.Array) -> tuple[jax.Array, None]:
    return x, None


def _backward(_: None, g: jax.Array) -> tuple[jax.Array]:
    return (g.at[0].set(jnp.inf),)


_inf_backward.defvjp(_forward, _backward)


def _inf_in_bias(recipe: Recipe) -> Callable[..., jax.Array]:
    """The gradient of the head's bias is infinite in one element."""

    def apply(model: Any, batch: Batch) -> jax.Array:
        parts: Any = nnx.split(model, nnx.Param, nnx.Not(nnx.Param))
        graphdef, params, rest = parts

        def through(path: Any, x: Any) -> Any:
            text = jax.tree_util.keystr(path)
            return _inf_backward(x) if "head" in text and "bias" in text else x

        return recipe.apply(nnx.merge(graphdef, jax.tree_util.tree_map_with_path(through, params), rest), batch)

    return apply


def _variance(logits: jax.Array, batch: Batch) -> jax.Array:
    """Normalises logits whose spread is exactly 0, without an epsilon."""
    flat = logits * 0
    return cross_entropy(logits, batch) + 1e-6 * jnp.sum((flat - flat.mean()) / flat.std() * 0)


def _masked_softmax(recipe: Recipe) -> Callable[..., jax.Array]:
    """From step 0 on one example attends to nothing: a softmax over -inf alone, hidden from the loss by its weight."""

    def apply(model: Any, batch: Batch) -> jax.Array:
        logits = recipe.apply(model, batch)
        empty = jnp.arange(len(logits)) == 0
        scores = jnp.where(empty.reshape(-1, *[1] * (logits.ndim - 1)), -jnp.inf, logits)
        return logits + jax.nn.softmax(scores) * 0.01

    return apply


NUMBERS = (
    Fault(
        "nan_weight_in_one_batch",
        "one loss weight of one batch is NaN",
        _BAD,
        ("nonfinite_batch",),
        lambda r: r.edit_batches(_spoil(np.nan)),
        ("mlp", "transformer", "recurrent"),
        onset=_AT,
        within=1,
        leaf={"*": "batch.weight"},
        kind="nonfinite",
    ),
    Fault(
        "inf_weight_in_one_batch",
        "one loss weight of one batch is infinite",
        _BAD,
        ("nonfinite_batch",),
        lambda r: r.edit_batches(_spoil(np.inf)),
        ("experts", "conv"),
        onset=_AT,
        within=1,
        leaf={"*": "batch.weight"},
        kind="nonfinite",
    ),
    Fault(
        "nan_pixels",
        "some pixels of one picture are NaN",
        _BAD,
        ("nonfinite_batch",),
        lambda r: r.edit_batches(_spoil_input),
        ("mlp", "conv", "recurrent"),
        onset=_AT,
        within=1,
        leaf={"*": "batch.input"},
        kind="nonfinite",
    ),
    Fault(
        "label_out_of_range",
        "a label is larger than the number of classes",
        _BAD,
        ("label_out_of_range",),
        lambda r: r.edit_batches(_label_too_large),
        ("mlp", "conv", "transformer"),
        onset=_AT,
        within=1,
        kind="nonfinite",
    ),
    Fault(
        "token_out_of_vocabulary",
        "a token id is larger than the embedding",
        _BAD,
        ("token_out_of_vocabulary", "label_out_of_range"),
        lambda r: r.edit_batches(_token_too_large),
        ("transformer",),
        onset=_AT,
        within=1,
        kind="nonfinite",
    ),
    Fault(
        "empty_mask",
        "one batch is padding only: the mean over no label",
        _BAD,
        ("nonfinite_in_forward",),
        lambda r: r.edit_batches(_empty_mask),
        ("experts", "transformer"),
        onset=_AT,
        within=1,
        kind="nonfinite",
    ),
    Fault(
        "norm_at_zero",
        "a penalty takes the norm of a difference that is exactly 0",
        _BAD,
        ("nan_gradient_op",),
        lambda r: r.but(criterion=_with_norm),
        ("mlp", "recurrent"),
        within=1,
        kind="nonfinite",
    ),
    Fault(
        "where_around_root",
        "where(x > 0, sqrt(x), 0) guards the result, and the gradient is NaN",
        _BAD,
        ("nan_gradient_op",),
        lambda r: r.but(criterion=_guarded_root),
        ("experts", "conv", "transformer"),
        within=1,
        kind="nonfinite",
    ),
    Fault(
        "log_of_softmax",
        "log(softmax(x)) by hand on large logits",
        _BAD,
        ("nonfinite_in_forward",),
        lambda r: r.but(criterion=_log_of_softmax(200.0)),
        ("mlp", "recurrent"),
        within=40,
        kind="nonfinite",
    ),
    Fault(
        "exp_overflows",
        "a softmax by hand does not subtract the maximum",
        _BAD,
        ("nonfinite_in_forward", "nan_gradient_op"),
        lambda r: r.but(criterion=_exp_by_hand),
        ("experts", "conv"),
        within=150,
        kind="nonfinite",
    ),
    Fault(
        "division_by_zero_spread",
        "a penalty divides by a standard deviation of exactly 0",
        _BAD,
        ("nonfinite_in_forward",),
        lambda r: r.but(criterion=_variance),
        ("mlp", "transformer"),
        within=1,
        kind="nonfinite",
    ),
    Fault(
        "softmax_over_nothing",
        "one example attends to nothing: softmax over -inf alone",
        _BAD,
        ("nonfinite_in_forward",),
        lambda r: r.but(apply=_masked_softmax(r)),
        ("conv", "transformer"),
        within=1,
        kind="nonfinite",
    ),
    Fault(
        "nan_parameter",
        "one element of a loaded checkpoint is NaN",
        _BAD,
        ("nonfinite_in_forward", "nonfinite_parameters"),
        lambda r: r.but(make_optimizer=_bad_initial_value("head")),
        ("mlp", "conv", "transformer"),
        within=1,
        kind="nonfinite",
    ),
    Fault(
        "float16_overflows",
        "a sum of squares is taken in float16",
        _BAD,
        ("overflow_low_precision",),
        lambda r: r.but(criterion=_half_loss, dtype=jnp.float16, transform=optax.sgd(0.05)),
        ("mlp", "recurrent"),
        within=160,
        kind="nonfinite",
    ),
    Fault(
        "epsilon_underflows_in_float16",
        "float16 parameters under Adam, whose eps of 1e-8 is 0 there",
        _BAD,
        ("eps_underflow",),
        lambda r: r.but(dtype=jnp.float16),
        ("mlp", "experts", "conv"),
        within=4,
        kind="nonfinite",
    ),
    Fault(
        "one_infinite_gradient_and_a_clip",
        "one element of one gradient is infinite, and clip_by_global_norm spreads it",
        ("nonfinite", "zero_gradients", "frozen_params"),
        ("clip_spread_inf", "nan_gradient_op"),
        lambda r: r.but(apply=_inf_in_bias(r), transform=optax.chain(optax.clip_by_global_norm(1.0), r.transform)),
        ("mlp", "transformer"),
        within=2,
        leaf={"*": "head.bias"},
        kind="nonfinite",
    ),
    Fault(
        "every_update_skipped",
        "apply_if_finite skips every update, since the loss is NaN at every step",
        ("skipped_updates", "nonfinite"),
        ("nan_gradient_op", "nonfinite_in_forward"),
        lambda r: r.but(criterion=_with_norm, transform=optax.apply_if_finite(r.transform, 1000)),
        ("experts", "recurrent"),
        within=16,
        kind="nonfinite",
    ),
    Fault(
        "skips_run_out",
        "apply_if_finite gives up after 5 skips and lets the NaN in",
        ("skipped_updates", "nonfinite"),
        ("nan_accepted_after_skips", "nan_gradient_op", "nonfinite_in_forward"),
        lambda r: r.but(criterion=_guarded_root, transform=optax.apply_if_finite(r.transform, 5)),
        ("mlp", "conv"),
        within=8,
        kind="nonfinite",
    ),
)
