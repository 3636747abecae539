"""A training program as replaceable parts: a fault, like a healthy habit, changes one or two of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

__all__ = ["Batch", "Loop", "Recipe", "cross_entropy", "default_optimizer", "plain_step"]

Batch = dict[str, Any]
"""``input``, ``label`` (integers) and ``weight`` (float32, what each label counts); arrays with a common first axis."""


def cross_entropy(logits: jax.Array, batch: Batch) -> jax.Array:
    """Returns the weighted mean of the cross-entropy, in nats."""
    losses = optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), batch["label"])
    total: jax.Array = jnp.sum(losses * batch["weight"]) / jnp.sum(batch["weight"])
    return total


def plain_step(recipe: Recipe) -> Callable[..., Any]:
    """Returns the step everybody writes: gradients of the loss, then the optimizer."""

    def train_step(model: Any, optimizer: Any, batch: Batch) -> jax.Array:
        loss, grads = nnx.value_and_grad(recipe.loss)(model, batch)
        optimizer.update(model, grads)
        out: jax.Array = loss
        return out

    return recipe.compile(train_step)


def default_optimizer(recipe: Recipe, model: Any) -> Any:
    """Returns an ``nnx.Optimizer`` of the model."""
    return nnx.Optimizer(model, recipe.transform, wrt=recipe.wrt)


@dataclass
class Loop:
    """The loop's own variables, which a part may replace between two steps.

    Attributes:
      model, optimizer: what the next step is called with.
      step: index of the next step.
      seed: of this run.
      memory: for whatever a part wants to keep.
    """

    model: Any
    optimizer: Any
    step: int = 0
    seed: int = 0
    memory: dict[str, Any] = field(default_factory=dict)


def _nothing(loop: Loop) -> None:
    return None


@dataclass(frozen=True)
class Recipe:
    """A program.

    Attributes:
      name: of the program.
      build: maps options and a seed to a model; call it through `model`.
      apply: model and batch to logits.
      data: maps a seed to an endless iterator of batches.
      held_out: batches for the final score, never trained on.
      transform: what the optimizer does with the gradients.
      options: keywords of `build`.
      criterion: logits and batch to a loss.
      wrt: which Variables the optimizer changes.
      compile: what wraps the step.
      make_optimizer, make_step: build the optimizer and the step.
      after: called after each step, before the next.
      steps: length of the run.
      evaluate_every: interval of evaluations that are handed to ``monitor.on_eval``, 0 for none.
      evaluated: puts the model into the form it is evaluated in.
      dtype: what parameters are cast to.
      objective: of the monitor.
      full_batch: whether the batch is declared to be always the same.
      marks: step -> name of an event that is announced.
      planned: whether the monitor is told `steps`.
    """

    name: str
    build: Callable[..., Any]
    apply: Callable[[Any, Batch], jax.Array]
    data: Callable[[int], Iterator[Batch]]
    held_out: Callable[[], list[Batch]]
    transform: optax.GradientTransformation
    options: Mapping[str, Any] = field(default_factory=dict)
    criterion: Callable[[jax.Array, Batch], jax.Array] = cross_entropy
    wrt: Any = nnx.Param
    compile: Callable[..., Any] = nnx.jit
    make_optimizer: Callable[[Recipe, Any], Any] = default_optimizer
    make_step: Callable[[Recipe], Callable[..., Any]] = plain_step
    after: Callable[[Loop], None] = _nothing
    steps: int = 160
    evaluate_every: int = 0
    evaluated: Callable[[Any], Any] = lambda model: nnx.view(
        model, deterministic=True, use_running_average=True, raise_if_not_found=False
    )
    dtype: Any = jnp.float32
    objective: str = "minimize"
    full_batch: bool = False
    marks: Mapping[int, str] = field(default_factory=dict)
    planned: bool = True

    def model(self, seed: int) -> Any:
        """Returns a new model, the same one for the same seed."""
        model = self.build(rngs=nnx.Rngs(seed), **self.options)
        if self.dtype != jnp.float32:
            state = nnx.state(model, nnx.Param)
            nnx.update(model, jax.tree.map(lambda x: x.astype(self.dtype), state))
        return model

    def loss(self, model: Any, batch: Batch) -> jax.Array:
        """Returns the loss of one batch."""
        return self.criterion(self.apply(model, batch), batch)

    def score(self, model: Any) -> float:
        """Returns the mean cross-entropy of the model on held-out batches; NaN where it is not finite."""

        @nnx.jit
        def one(model: Any, batch: Batch) -> jax.Array:
            return cross_entropy(self.apply(model, batch), batch)

        ready = self.evaluated(model)
        return float(np.mean([float(one(ready, batch)) for batch in self.held_out()]))

    def but(self, **changes: Any) -> Recipe:
        """Returns a copy with some parts replaced."""
        return replace(self, **changes)

    def with_options(self, **options: Any) -> Recipe:
        """Returns a copy whose model is built with further options."""
        return replace(self, options={**self.options, **options})

    def edit_batches(self, edit: Callable[[int, Batch], Batch]) -> Recipe:
        """Returns a copy that trains on ``edit(step, batch)``."""

        def data(seed: int) -> Iterator[Batch]:
            for step, batch in enumerate(self.data(seed)):
                yield edit(step, batch)

        return replace(self, data=data)
