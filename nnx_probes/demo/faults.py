"""The faults the demo can be run with: mistakes that end no run and print nothing by themselves.

jax is imported inside the functions only, so that ``nnx-probes demo --help`` can list the faults at once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nnx_probes.demo.recipe import Recipe
    from nnx_probes.demo.text import Batch

__all__ = ["FAULTS", "Fault"]


@dataclasses.dataclass(frozen=True, slots=True)
class Fault:
    """One mistake.

    Attributes:
      name: as given on the command line.
      description: what it is and how it shows, on one line.
      apply: maps the healthy recipe and the number of steps to the faulty recipe.
    """

    name: str
    description: str
    apply: Callable[[Recipe, int], Recipe]


def _jax_jit(recipe: Recipe, steps: int) -> Recipe:
    import jax

    return dataclasses.replace(recipe, compile=jax.jit)


def _frozen(recipe: Recipe, steps: int) -> Recipe:
    from flax import nnx

    return dataclasses.replace(recipe, wrt=nnx.LoRAParam)


def _nan_batch(recipe: Recipe, steps: int) -> Recipe:
    bad_step = steps // 3

    def edit_batch(step: int, batch: Batch) -> Batch:
        if step != bad_step:
            return batch
        weights = batch["weights"].copy()
        weights[0, 0] = float("nan")
        return {**batch, "weights": weights}

    return dataclasses.replace(recipe, edit_batch=edit_batch)


def _lr_too_high(recipe: Recipe, steps: int) -> Recipe:
    import optax

    # The loss first falls, then explodes; it is NaN after 20 to 100 steps, which differs between versions of jax.
    return dataclasses.replace(recipe, transform=optax.sgd(1.0, momentum=0.9))


def _bf16(recipe: Recipe, steps: int) -> Recipe:
    import jax.numpy as jnp
    import optax

    # bfloat16 keeps 8 bits: a sum never differs from p when the update is below |p| / 512. Weights here
    # are about 0.1, Adam's updates about the rate, so all but a few in ten thousand stay as they are.
    return dataclasses.replace(recipe, transform=optax.adam(1e-7), dtype=jnp.bfloat16)


FAULTS: Mapping[str, Fault] = MappingProxyType(
    {
        fault.name: fault
        for fault in (
            Fault(
                "jax-jit",
                "the step is compiled by jax.jit, not nnx.jit, and updates copies: the loss never falls",
                _jax_jit,
            ),
            Fault(
                "frozen",
                "the optimizer is wrt=nnx.LoRAParam, and the model has none: the loss never falls",
                _frozen,
            ),
            Fault(
                "nan-batch",
                "one loss weight is NaN in one batch a third into the run: the loss is NaN from there on",
                _nan_batch,
            ),
            Fault(
                "lr-too-high",
                "SGD with momentum at learning rate 1: the loss falls, jumps, and grows beyond all bounds",
                _lr_too_high,
            ),
            Fault(
                "bf16",
                "bfloat16 weights at learning rate 1e-7: updates are rounded away, the loss hardly moves",
                _bf16,
            ),
        )
    }
)
"""Name -> fault, in the order in which ``--help`` shows them."""
