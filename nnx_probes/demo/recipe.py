"""What a demo run is made of, and the defaults that train well."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from nnx_probes.demo.model import LanguageModel
from nnx_probes.demo.text import Batch

__all__ = ["Recipe", "Step"]

Step = Callable[[LanguageModel, nnx.Optimizer[LanguageModel], Batch], jax.Array]
"""A train step: changes the model and the optimizer in place and returns the loss, float32[]."""

# The best of 1e-3, 3e-3 and 1e-2 after 150 steps of Adam.
LEARNING_RATE = 3e-3


def _as_it_is(step: int, batch: Batch) -> Batch:
    return batch


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """The ingredients of a run; a fault replaces one or two of them.

    Attributes:
      transform: what the optimizer does with the gradients.
      wrt: which Variables the optimizer changes.
      compile: what wraps the train step.
      dtype: what the parameters are cast to after they were drawn.
      edit_batch: maps a step and its batch to the batch that is trained on.
    """

    transform: optax.GradientTransformation = field(default_factory=lambda: optax.adam(LEARNING_RATE))
    wrt: Any = nnx.Param
    compile: Callable[[Step], Step] = nnx.jit
    dtype: jax.typing.DTypeLike = jnp.float32
    edit_batch: Callable[[int, Batch], Batch] = _as_it_is

    def model(self, n_tokens: int, *, seed: int = 0) -> LanguageModel:
        """Returns a new model for a vocabulary of `n_tokens`, the same one for the same seed."""
        model = LanguageModel(n_tokens, rngs=nnx.Rngs(seed))
        params = nnx.state(model, nnx.Param)
        nnx.update(model, jax.tree.map(lambda array: array.astype(self.dtype), params))
        return model
